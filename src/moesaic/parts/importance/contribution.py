"""Contribution energy: how much of the output a neuron makes."""

import numpy as np
from numpy.typing import NDArray

from moesaic.calibration.statistics import Profile
from moesaic.families import DenseFFN


def contribution(
    profile: Profile, ffn: DenseFFN, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Mean over tokens of ||h_i w_i||^2, w_i the neuron's column of the down projection. O(D F)."""
    norm2_F = ffn.down_DF.float().square().sum(0).cpu().double().numpy()
    energy_F: NDArray[np.float64] = profile.energy_F / profile.tokens * norm2_F
    return energy_F
