"""Least squares repair: all output vectors refitted jointly.

Shape suffixes: D hidden_size, N neurons that are kept.
"""

from __future__ import annotations

import torch

from moesaic.parts.repair.mean import Candidate
from moesaic.parts.repair.moments import Residual

RIDGES = (3e-3, 3e-2, 3e-1)  # of the Gram matrix's mean diagonal
TOKENS_PER_NEURON = 2  # fewer tokens than this: mean compensation instead


@torch.no_grad()
def least_squares(sums: Residual, intercept: bool) -> list[Candidate]:
    """Corrections D of the output vectors, one per ridge.

    The ridge is towards the originals: argmin ||H D - r||^2 + ridge * dbar ||D||^2 =
    (H^T H + ridge dbar I)^-1 H^T r, dbar the mean diagonal of H^T H. With `intercept`
    H and r are centred first, and b = mean(r) - mean(H) D. Solved in float64 with one
    Cholesky factor per ridge: N^3 / 3 + 2 N^2 D FLOPs each. A ridge for which the
    matrix is singular is left out; none is left where every neuron is dead.
    """
    gram_NN = sums.gram_NN.clone()
    cross_ND = sums.cross_ND
    if intercept:
        mean_N = sums.mean_N
        gram_NN -= sums.tokens * torch.outer(mean_N, mean_N)
        cross_ND = cross_ND - sums.tokens * torch.outer(mean_N, sums.mean_D)
    diagonal_N = gram_NN.diagonal().clone()
    mean_diagonal = diagonal_N.mean()
    candidates = []
    for ridge in RIDGES:
        gram_NN.diagonal().copy_(diagonal_N + ridge * mean_diagonal)
        factor_NN, failed = torch.linalg.cholesky_ex(gram_NN)
        if failed:
            continue
        delta_ND = torch.cholesky_solve(cross_ND, factor_NN)
        if not torch.isfinite(delta_ND).all():
            continue
        intercept_D = None
        if intercept:
            intercept_D = sums.mean_D - sums.mean_N @ delta_ND
            intercept_D = intercept_D.float()
        name = f"least squares, ridge {ridge:g}"
        candidates.append(Candidate(name, delta_ND.float(), intercept_D))
    return candidates
