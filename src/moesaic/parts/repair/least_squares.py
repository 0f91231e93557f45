"""Least squares repair: all output vectors refitted jointly.

Shape suffixes: D hidden_size, N neurons that are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.parts.repair.mean import Candidate
from moesaic.parts.repair.moments import Moments

RIDGES = (3e-3, 3e-2, 3e-1)  # of the Gram matrix's mean diagonal
TOKENS_PER_NEURON = 2  # fewer tokens than this: mean compensation instead


@torch.no_grad()
def least_squares(
    moments: Moments, down_ND: Tensor, intercept: bool
) -> list[Candidate]:
    """Corrections D of the output vectors W, one per ridge.

    The ridge is towards the originals: argmin ||H (W + D) - Y||^2 + lambda ||D||^2, so
    that W + D = (H^T H + lambda I)^-1 (H^T Y + lambda W), which needs no H^T H W;
    lambda is the ridge times the mean diagonal of H^T H. With `intercept` H and Y are
    centred first, and b = mean(Y) - mean(H) (W + D). Solved in float64 with one Cholesky
    factor per ridge: N^3 / 3 + 2 N^2 D FLOPs each. A ridge for which the matrix is
    singular is left out; none is left where every neuron is dead.
    """
    down_ND = down_ND.double()
    gram_NN = moments.gram_NN
    cross_ND = moments.cross_ND.double()
    mean_N = moments.mean_N
    if intercept:
        gram_NN -= moments.tokens * torch.outer(mean_N, mean_N)
        cross_ND -= moments.tokens * torch.outer(mean_N, moments.mean_D)
    diagonal_N = gram_NN.diagonal().clone()
    mean_diagonal = diagonal_N.mean()
    candidates = []
    for ridge in RIDGES:
        penalty = ridge * mean_diagonal
        gram_NN.diagonal().copy_(diagonal_N + penalty)
        factor_NN, failed = torch.linalg.cholesky_ex(gram_NN)
        if failed:
            continue
        target_ND = cross_ND + penalty * down_ND
        fitted_ND = torch.cholesky_solve(target_ND, factor_NN)
        if not torch.isfinite(fitted_ND).all():
            continue
        intercept_D = None
        if intercept:
            intercept_D = moments.mean_D - mean_N @ fitted_ND
            intercept_D = intercept_D.float()
        delta_ND = (fitted_ND - down_ND).float()
        name = f"least squares, ridge {ridge:g}"
        candidates.append(Candidate(name, delta_ND, intercept_D))
    return candidates
