"""Random grouping: the reference that any clustering has to beat."""

import numpy as np
from numpy.typing import NDArray

from moesaic.calibration.statistics import Profile
from moesaic.families import DenseFFN


def shuffled(
    profile: Profile,
    ffn: DenseFFN,
    candidates_N: NDArray[np.int64],
    num_routed: int,
    rounds: int,
    generator: np.random.Generator,
) -> NDArray[np.int64]:
    """Neurons of each expert (R, M), drawn at random."""
    return np.sort(generator.permutation(candidates_N).reshape(num_routed, -1), axis=1)


def single_neurons(
    profile: Profile,
    ffn: DenseFFN,
    candidates_N: NDArray[np.int64],
    num_routed: int,
    rounds: int,
    generator: np.random.Generator,
) -> NDArray[np.int64]:
    """Every neuron an expert of its own (N, 1): the finest grouping there is."""
    return candidates_N[:, None]
