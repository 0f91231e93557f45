"""A linear router in closed form: scores that predict the log of each expert's energy.

Shape suffixes: T tokens, P features of a token, R routed experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 1e-2  # of the Gram matrix's mean diagonal
FLOOR = 0.1  # of the mean energy, added before the log: an expert that does nothing is not -inf
STEPS = 4  # of scoring towards the expected energy
MOST = 10.0  # the largest relative residual of one token

Blocks = Callable[[], Iterable[Tensor]]


@dataclass(frozen=True)
class Ridge:
    """Ridge regression on features phi (T, P): one Gram matrix and factor, many targets."""

    mean_P: Tensor | None  # None: features as they are
    factor_PP: Tensor

    @classmethod
    def of(cls, blocks: Blocks, centre: bool, ridge: float = RIDGE) -> Ridge:
        """Streams the Gram matrix in float32, factorises it in float64: 2 T P^2 + P^3 / 3 FLOPs.

        The mean comes off first: taken off the Gram matrix, a large one would leave rounding only.
        """
        mean_P = mean_of(blocks) if centre else None
        gram_PP: Tensor | float = 0.0
        energy: Tensor | float = 0.0
        for phi_TP in blocks():
            centred_TP = phi_TP if mean_P is None else phi_TP - mean_P
            gram_PP = gram_PP + centred_TP.T @ centred_TP
            energy += torch.linalg.vector_norm(phi_TP).double().square()
        assert isinstance(gram_PP, Tensor)
        gram_PP = gram_PP.double()
        # Where nothing varies, no less than rounding makes of it.
        least = max(1e-10 * float(energy) / len(gram_PP), 1e-30)
        gram_PP.diagonal().add_(
            (ridge * gram_PP.diagonal().mean()).clamp(min=least)
        )
        return cls(mean_P, torch.linalg.cholesky(gram_PP))

    def solve(self, blocks: Blocks, target_TR: Tensor) -> Tensor:
        """Coefficients (P, R) of the least squares fit to a target; 2 T P R FLOPs."""
        cross_PR: Tensor | float = 0.0
        start = 0
        for phi_TP in blocks():
            part_TR = target_TR[start : start + len(phi_TP)]
            cross_PR = cross_PR + self._centred(phi_TP).T @ part_TR
            start += len(phi_TP)
        assert isinstance(cross_PR, Tensor)
        return torch.cholesky_solve(cross_PR.double(), self.factor_PP).float()

    def scores(self, blocks: Blocks, weight_PR: Tensor) -> Tensor:
        return torch.cat(
            [self._centred(phi_TP) @ weight_PR for phi_TP in blocks()]
        )

    def _centred(self, phi_TP: Tensor) -> Tensor:
        return phi_TP if self.mean_P is None else phi_TP - self.mean_P


def mean_of(blocks: Blocks) -> Tensor:
    """Mean of the features over tokens (P,), summed in float64."""
    sum_P: Tensor | float = 0.0
    tokens = 0
    for phi_TP in blocks():
        sum_P = sum_P + phi_TP.sum(0, dtype=torch.float64)
        tokens += len(phi_TP)
    assert isinstance(sum_P, Tensor)
    return (sum_P / tokens).float()


def log_energy(energy_TR: Tensor, dim: int) -> Tensor:
    """log(e + floor), centred over tokens (dim 0) or over the experts of a token (dim 1)."""
    floor = (FLOOR * energy_TR.mean()).clamp(min=1e-30)
    target_TR = torch.log(energy_TR + floor)
    return target_TR - target_TR.mean(dim, keepdim=True)


@torch.no_grad()
def fit_linear_router(
    blocks: Blocks, energy_TR: Tensor, absolute: bool, centred: bool = False
) -> Tensor:
    """Weights (R, P) of scores V phi(x) that rise with each expert's expected energy.

    `energy_TR` holds e_tj = ||E_j(x_t)||^2. Starts from ridge regression on log e and takes a few
    scoring steps of the gamma regression with log link, whose mean is the expected energy and not
    the expected logarithm: V += (Phi^T Phi + ridge)^-1 Phi^T (e / exp(s) - 1), the same factor
    every time, until its deviance no longer falls.

    Top-k compares the experts of one token only, so the router needs no bias: phi is not centred,
    and what all experts of a token have in common is taken out of targets and residuals. A
    threshold compares tokens (`absolute`): phi is centred (unless it is already), and an expert's
    mean is taken out.
    Cost: the Gram matrix, then about 4 T P R FLOPs a step; holds about six matrices (T, R).
    """
    dim = 0 if absolute else 1
    ridge = Ridge.of(blocks, centre=absolute and not centred)
    weight_PR = ridge.solve(blocks, log_energy(energy_TR, dim))
    best, best_PR = float("inf"), weight_PR
    for step in range(STEPS + 1):
        score_TR = ridge.scores(blocks, weight_PR)
        ratio_TR, deviance = _gamma(energy_TR, score_TR, dim)
        if not deviance < best:
            break
        best, best_PR = deviance, weight_PR
        if step < STEPS:
            ratio_TR -= ratio_TR.mean(dim, keepdim=True)
            weight_PR = weight_PR + ridge.solve(blocks, ratio_TR)
    return best_PR.T.contiguous()


def _gamma(
    energy_TR: Tensor, score_TR: Tensor, dim: int
) -> tuple[Tensor, float]:
    """e / mu, at most MOST, and the deviance mean(e / mu + log mu).

    mu = exp(score + c), with c per expert (dim 0) or per token (dim 1) such that the sums of e
    and mu over `dim` agree.
    """
    score_TR = score_TR - score_TR.amax(dim, keepdim=True)
    level = energy_TR.sum(dim, keepdim=True) / score_TR.exp().sum(
        dim, keepdim=True
    )
    # Where there is no energy at all, nothing is to be learned: e / mu is 0 for all.
    log_mu_TR = score_TR + level.clamp(min=1e-30).log()
    ratio_TR = energy_TR * (-log_mu_TR).clamp(max=80.0).exp()
    deviance = float((ratio_TR + log_mu_TR).mean(dtype=torch.float64))
    return ratio_TR.clamp_(max=MOST), deviance
