"""Activation rate: how often a neuron is among the most active (paper, Section 4.1)."""

import numpy as np
from numpy.typing import NDArray

from moesaic.calibration.statistics import Profile
from moesaic.families import DenseFFN


def rate(
    profile: Profile, ffn: DenseFFN, generator: np.random.Generator
) -> NDArray[np.float64]:
    """The paper's mu times the number of tokens (eq. 15): whole numbers, exact ties. O(q K)."""
    return profile.count_F.astype(np.float64)
