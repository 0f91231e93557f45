"""Experts for kinds of text, and one router that knows the token alone.

Cai et al., Read-ME, NeurIPS 2024, https://arxiv.org/abs/2410.19123, and the released
code.

Shape suffixes: T tokens, D hidden_size, F neurons, R domains (and experts), M neurons of
one.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from moesaic.parts.importance import by_importance

SHARPNESS = 10.0  # of the router's targets, as in the released code
RIDGE = 1e-3  # of the router: tokens that the text lacks are like those it has
STEPS = 50  # of L-BFGS, at most


def domain_sums(h_TF: Tensor, domain_T: Tensor, domains: int) -> Tensor:
    """The sum of abs(h_i) over each domain's tokens (R, F)."""
    one_hot_TR = one_hot(domain_T, domains).float()
    return one_hot_TR.T @ h_TF.float().abs()


def domain_experts(
    activity_RF: NDArray[np.float64], size: int
) -> NDArray[np.int64]:
    """The `size` most active neurons of every domain (R, M), ascending.

    A neuron may stand in several; one that no domain wants is in none.
    """
    experts = [
        np.sort(by_importance(activity_F)[:size]) for activity_F in activity_RF
    ]
    return np.stack(experts)


def overlap_targets(h_TF: Tensor, experts_RM: NDArray[np.int64]) -> Tensor:
    """How well each expert fits a token (T, R): rows sum to 1.

    The share of the token's M largest abs(h) that the expert holds, less the mean of
    all such shares, times SHARPNESS, through a softmax.
    """
    size = experts_RM.shape[1]
    largest_TM = h_TF.abs().topk(size, dim=1, sorted=False).indices
    marks_TF = torch.zeros_like(h_TF, dtype=torch.float32)
    marks_TF.scatter_(1, largest_TM, 1.0)
    index_RM = torch.from_numpy(experts_RM).to(h_TF.device)
    share_TR = marks_TF[:, index_RM].mean(-1)
    share_TR = SHARPNESS * (share_TR - share_TR.mean())
    return share_TR.softmax(-1)


def fit_token_router(e_TD: Tensor, target_TR: Tensor) -> tuple[Tensor, Tensor]:
    """W (R, D) and b (R,): softmax(W e + b) is nearest the targets.

    Least cross-entropy, with a small ridge on W for inputs of mean length 1: one
    optimum, whatever the start. Costs 6 T D R FLOPs a step of L-BFGS.
    """
    with torch.inference_mode(False), torch.enable_grad():
        e_TD = e_TD.float().clone()
        target_TR = target_TR.float().clone()
        # Rows of an embedding may be short: steps are taken in units of their length.
        length = torch.linalg.vector_norm(e_TD, dim=1).mean().clamp(min=1e-20)
        e_TD = e_TD / length
        domains = target_TR.shape[1]
        weight_RD = e_TD.new_zeros(domains, e_TD.shape[1], requires_grad=True)
        bias_R = e_TD.new_zeros(domains, requires_grad=True)
        solver = torch.optim.LBFGS(
            [weight_RD, bias_R],
            max_iter=STEPS,
            line_search_fn="strong_wolfe",
        )

        def loss() -> Tensor:
            solver.zero_grad()
            score_TR = e_TD @ weight_RD.T + bias_R
            value = cross_entropy(score_TR, target_TR)
            value = value + RIDGE * weight_RD.square().sum()
            value.backward()
            return value

        solver.step(loss)
    weight_RD = weight_RD.detach() / length
    return weight_RD, bias_R.detach()
