"""Observability: what of a neuron's contribution the other neurons cannot stand in for."""

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic.calibration.statistics import Profile
from moesaic.families import DenseFFN

RIDGE = (
    1e-3  # of the mean diagonal: keeps dead and duplicate neurons from dividing by zero
)


def observability(
    profile: Profile, ffn: DenseFFN, generator: np.random.Generator
) -> NDArray[np.float64]:
    """||w_i||^2 / [(G / q + ridge)^-1]_ii with G the Gram matrix of hidden states.

    The increase of the output's squared error when neuron i is removed and the others are refit
    (the saliency of Optimal Brain Surgeon, Hassibi and Stork 1992). Costs 2 q F^2 for the Gram
    matrix and F^3 FLOPs in float64.
    """
    assert profile.gram_FF is not None
    gram_FF = profile.gram_FF.double() / profile.tokens
    ridge = max(float(gram_FF.diagonal().mean()) * RIDGE, 1e-30)
    gram_FF.diagonal().add_(ridge)
    inverse_F = torch.cholesky_inverse(torch.linalg.cholesky(gram_FF)).diagonal()
    norm2_F = ffn.down_DF.double().square().sum(0)
    scores_F: NDArray[np.float64] = (norm2_F / inverse_F).cpu().numpy()
    return scores_F
