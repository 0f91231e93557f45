"""A linear router in closed form: scores predict the log of experts' energies.

Shape suffixes: T tokens, P features of a token, R routed experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.calibration.share import Rows
from moesaic.parts.products import products_of

RIDGE = 1e-2  # of the Gram matrix's mean diagonal
# Of the mean energy, added before the log: an expert that does nothing is not -inf.
FLOOR = 0.1
STEPS = 4  # of scoring towards the expected energy
MOST = 10.0  # the largest relative residual of one token


@dataclass(frozen=True)
class Ridge:
    """Ridge regression on features phi (T, P): one factor, many targets.

    Several processes share the features. Targets and predictions are of all tokens, on
    each of them: that sends 4 P (P + R) bytes of sums, and 4 T R of predictions.
    """

    mean_P: Tensor | None  # None: features as they are
    factor_PP: Tensor

    @classmethod
    def of(
        cls,
        rows: Rows,
        centre: bool,
        ridge: float = RIDGE,
        dtype: torch.dtype = torch.float32,
    ) -> Ridge:
        """Streams the Gram matrix in float32, factorises it in float64.

        The mean comes off first: taken off the Gram matrix, a large one would leave
        rounding only. `dtype` holds the features as they are. 2 T P^2 + P^3 / 3 FLOPs.
        """
        mean_P = mean_of(rows) if centre else None
        factors = torch.float32 if centre else dtype
        gram_PP: Tensor | float = 0.0
        energy: Tensor | float = 0.0
        for phi_TP in rows.blocks():
            centred_TP = _centred(phi_TP, mean_P)
            with products_of(factors):
                gram_PP = gram_PP + centred_TP.T @ centred_TP
            norm = torch.linalg.vector_norm(phi_TP)
            energy += norm.double().square()
        gram_PP = rows.share.total_of(gram_PP)
        energy = rows.share.total(float(energy))

        gram_PP = gram_PP.double()
        diagonal_P = gram_PP.diagonal()
        # Where nothing varies, no less than rounding makes of it.
        rounding = 1e-10 * energy / len(gram_PP)
        least = max(rounding, 1e-30)
        penalty = (ridge * diagonal_P.mean()).clamp(min=least)
        diagonal_P.add_(penalty)
        return cls(mean_P, torch.linalg.cholesky(gram_PP))

    def solve(self, rows: Rows, target_TR: Tensor) -> Tensor:
        """Coefficients (P, R) of the least squares fit; 2 T P R FLOPs."""
        cross_PR: Tensor | float = 0.0
        start = rows.first
        for phi_TP in rows.blocks():
            centred_TP = _centred(phi_TP, self.mean_P)
            end = start + len(phi_TP)
            block_TR = target_TR[start:end]
            cross_PR = cross_PR + centred_TP.T @ block_TR
            start = end
        cross_PR = rows.share.total_of(cross_PR)
        weight_PR = torch.cholesky_solve(cross_PR.double(), self.factor_PP)
        return weight_PR.float()

    def scores(self, rows: Rows, weight_PR: Tensor) -> Tensor:
        """Predictions (T, R) of the fit."""
        score_blocks = []
        for phi_TP in rows.blocks():
            centred_TP = _centred(phi_TP, self.mean_P)
            score_blocks.append(centred_TP @ weight_PR)
        return rows.share.gathered(score_blocks)


def _centred(phi_TP: Tensor, mean_P: Tensor | None) -> Tensor:
    return phi_TP if mean_P is None else phi_TP - mean_P


def mean_of(rows: Rows) -> Tensor:
    """Mean of the features over tokens (P,), summed in float64."""
    sum_P: Tensor | float = 0.0
    tokens = 0
    for phi_TP in rows.blocks():
        sum_P = sum_P + phi_TP.sum(0, dtype=torch.float64)
        tokens += len(phi_TP)
    mean_P = rows.share.total_of(sum_P) / rows.share.total(tokens)
    return mean_P.float()


def log_energy(energy_TR: Tensor) -> Tensor:
    """log(e + floor)."""
    floor = (FLOOR * energy_TR.mean()).clamp(min=1e-30)
    return torch.log(energy_TR + floor)


@torch.no_grad()
def fit_linear_router(
    rows: Rows,
    energy_TR: Tensor,
    absolute: bool,
    centred: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weights (R, P) of scores V phi(x) that rise with each expert's expected energy.

    `energy_TR` holds e_tj = ||E_j(x_t)||^2. Starts from ridge regression on log e and
    takes a few scoring steps of the gamma regression with log link, whose mean is the
    expected energy and not the expected logarithm: V += (Phi^T Phi + ridge)^-1 Phi^T
    (e / exp(s) - 1), the same factor every time, until its deviance no longer falls.

    Top-k compares the experts of one token only, so the router needs no bias: phi is
    not centred, and what all experts of a token have in common is taken out of targets
    and residuals. A threshold compares tokens (`absolute`): phi is centred (unless it
    is already), and an expert's mean is taken out. `dtype` holds the features as they
    are.
    Cost: the Gram matrix, then about 4 T P R FLOPs a step; holds about six matrices
    (T, R).
    """
    dim = 0 if absolute else 1
    ridge = Ridge.of(rows, centre=absolute and not centred, dtype=dtype)
    log_TR = log_energy(energy_TR)
    mean = log_TR.mean(dim, keepdim=True)
    weight_PR = ridge.solve(rows, log_TR - mean)
    best_PR = weight_PR
    best_deviance = float("inf")
    for step in range(STEPS + 1):
        score_TR = ridge.scores(rows, weight_PR)
        ratio_TR, deviance = _gamma(energy_TR, score_TR, dim)
        # Processes must take as many steps: they exchange sums in each.
        deviance = rows.share.agreed(deviance)
        if not deviance < best_deviance:
            break
        best_PR = weight_PR
        best_deviance = deviance
        if step < STEPS:
            ratio_TR -= ratio_TR.mean(dim, keepdim=True)
            weight_PR = weight_PR + ridge.solve(rows, ratio_TR)
    return best_PR.T.contiguous()


def _gamma(
    energy_TR: Tensor,
    score_TR: Tensor,
    dim: int,
) -> tuple[Tensor, float]:
    """e / mu, at most MOST, and the deviance mean(e / mu + log mu).

    mu = exp(score + c), with c per expert (dim 0) or per token (dim 1) such that the
    sums of e and mu over `dim` agree.
    """
    score_TR = score_TR - score_TR.amax(dim, keepdim=True)
    energy = energy_TR.sum(dim, keepdim=True)
    exp_sum = score_TR.exp().sum(dim, keepdim=True)
    level = energy / exp_sum
    # Where there is no energy at all, nothing is to be learned: e / mu is 0 for all.
    log_mu_TR = score_TR + level.clamp(min=1e-30).log()
    ratio_TR = energy_TR * (-log_mu_TR).clamp(max=80.0).exp()
    deviance_TR = ratio_TR + log_mu_TR
    deviance = float(deviance_TR.mean(dtype=torch.float64))
    return ratio_TR.clamp_(max=MOST), deviance
