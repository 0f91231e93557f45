"""Least squares repair: all output vectors refitted jointly to what the gates let through.

Shape suffixes: D hidden_size, N neurons that are kept, C ridges.
"""

from __future__ import annotations

import torch

from moesaic.parts.repair.mean import Candidate
from moesaic.parts.repair.moments import Residual

RIDGES = (3e-3, 3e-2, 3e-1)  # of the Gram matrix's mean diagonal
TOKENS_PER_NEURON = 2  # fewer tokens than this: mean compensation instead


@torch.no_grad()
def least_squares(sums: Residual, intercept: bool) -> list[Candidate]:
    """Corrections D of the output vectors, one per ridge: the ridge is towards the originals.

    argmin ||H D - r||^2 + ridge * dbar ||D||^2 = (H^T H + ridge dbar I)^-1 H^T r, dbar the mean
    diagonal of H^T H. With `intercept` H and r are centred first, and b = mean(r) - mean(H) D.
    Solved in float64 with one Cholesky factor per ridge: N^3 / 3 + 2 N^2 D FLOPs each. A ridge
    for which the matrix is singular is left out; none is left where every neuron is dead.
    """
    gram_NN, cross_ND = sums.gram_NN.clone(), sums.cross_ND
    if intercept:
        gram_NN -= sums.tokens * torch.outer(sums.mean_N, sums.mean_N)
        cross_ND = cross_ND - sums.tokens * torch.outer(
            sums.mean_N, sums.mean_D
        )
    diagonal_N = gram_NN.diagonal().clone()
    candidates = []
    for ridge in RIDGES:
        gram_NN.diagonal().copy_(diagonal_N + ridge * diagonal_N.mean())
        factor_NN, failed = torch.linalg.cholesky_ex(gram_NN)
        if failed:
            continue
        delta_ND = torch.cholesky_solve(cross_ND, factor_NN)
        if not torch.isfinite(delta_ND).all():
            continue
        b_D = (
            (sums.mean_D - sums.mean_N @ delta_ND).float()
            if intercept
            else None
        )
        candidates.append(
            Candidate(f"least squares, ridge {ridge:g}", delta_ND.float(), b_D)
        )
    return candidates
