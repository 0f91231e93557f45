"""Contribution variance: what static pruning with a mean bias would lose."""

import numpy as np
from numpy.typing import NDArray

from moesaic.calibration.statistics import Profile
from moesaic.families import DenseFFN


def variance(
    profile: Profile, ffn: DenseFFN, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Variance over tokens of h_i, times ||w_i||^2 (the criterion of FLAP). O(D F)."""
    norm2_F = ffn.down_DF.float().square().sum(0).cpu().double().numpy()
    mean_F = profile.sum_F / profile.tokens
    variance_F = np.maximum(profile.energy_F / profile.tokens - mean_F**2, 0.0)
    scores_F: NDArray[np.float64] = variance_F * norm2_F
    return scores_F
