"""Random importance: the reference that any criterion has to beat."""

import numpy as np
from numpy.typing import NDArray

from moesaic.calibration.statistics import Profile
from moesaic.families import DenseFFN


def shuffled(
    profile: Profile, ffn: DenseFFN, generator: np.random.Generator
) -> NDArray[np.float64]:
    """A random order of the neurons."""
    return generator.permutation(ffn.intermediate_size).astype(np.float64)
