"""Importance of neurons: who is shared, who is kept. Higher is more important.

Shape suffixes: T tokens, D hidden_size, F neurons, R clusters of tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.calibration.statistics import Statistics
from moesaic.families import DenseFFN

# Of the mean diagonal: keeps dead and duplicate neurons from dividing by zero.
RIDGE = 1e-3


def activation_rate(statistics: Statistics) -> NDArray[np.float64]:
    """How often a neuron is among the most active ones (paper, Section 4.1, eq. 15).

    The paper's mu times the number of tokens: whole numbers, exact ties. O(q K).
    """
    return statistics.count_F.astype(np.float64)


def contribution(statistics: Statistics, ffn: DenseFFN) -> NDArray[np.float64]:
    """How much of the output a neuron makes: the mean over tokens of ||h_i w_i||^2.

    w_i is the neuron's column of the down projection. O(D F).
    """
    square_F = statistics.energy_F / statistics.tokens
    energy_F: NDArray[np.float64] = square_F * output_norms(ffn)
    return energy_F


def variance(statistics: Statistics, ffn: DenseFFN) -> NDArray[np.float64]:
    """What static pruning with a mean bias would lose (the criterion of FLAP).

    The variance over tokens of h_i, times ||w_i||^2. O(D F).
    """
    mean_F = statistics.sum_F / statistics.tokens
    square_F = statistics.energy_F / statistics.tokens
    variance_F = np.maximum(square_F - mean_F**2, 0.0)
    scores_F: NDArray[np.float64] = variance_F * output_norms(ffn)
    return scores_F


def observability(statistics: Statistics, ffn: DenseFFN) -> NDArray[np.float64]:
    """What of a neuron's contribution the other neurons cannot stand in for.

    ||w_i||^2 / [(G / q + ridge)^-1]_ii with G the Gram matrix of hidden states: the
    increase of the output's squared error when neuron i is removed and the others are
    refitted (the saliency of Optimal Brain Surgeon, Hassibi and Stork 1992). Costs
    2 q F^2 for the Gram matrix and F^3 FLOPs in float64.
    """
    assert statistics.gram_FF is not None
    gram_FF = statistics.gram_FF.double() / statistics.tokens
    mean_diagonal = float(gram_FF.diagonal().mean())
    ridge = max(mean_diagonal * RIDGE, 1e-30)
    gram_FF.diagonal().add_(ridge)
    factor_FF = torch.linalg.cholesky(gram_FF)
    inverse_FF = torch.cholesky_inverse(factor_FF)
    norm2_F = ffn.down_DF.double().square().sum(0)
    saliency_F = norm2_F / inverse_FF.diagonal()
    scores_F: NDArray[np.float64] = saliency_F.cpu().numpy()
    return scores_F


@torch.no_grad()
def cluster_importance(
    ffn: DenseFFN,
    x_TD: Tensor,
    gradient_TD: Tensor,
    cluster_T: Tensor,
    clusters: int,
) -> Tensor:
    """The sum over a cluster's tokens of abs(h_i dL/dh_i) (R, F).

    What LLaMA-MoE v2 splits neurons by (Qu et al., 2024): to first order, how much the
    loss moves where neuron i is taken away from a token. Costs 4 T D F FLOPs, or 6.
    """
    h_TF = ffn.hidden(x_TD).float()
    slope_TF = gradient_TD @ ffn.down_DF.float()
    moved_TF = (h_TF * slope_TF).abs()
    one_hot_TR = torch.nn.functional.one_hot(cluster_T, clusters).float()
    return one_hot_TR.T @ moved_TF


def weight_importance(
    ffn: DenseFFN, x_TD: Tensor, gradient_TD: Tensor
) -> Tensor:
    """w_i . dL/dw_i, summed over all weights w_i of a neuron, in and out (F,).

    What MoEBERT calls importance, before it takes the absolute value (Zuo et al., NAACL
    2022). It is the slope of L in one factor on all weights of the neuron, which is how
    it is computed; biases are no weights.
    """
    gradient_TD = gradient_TD.clone()
    with torch.enable_grad():
        factor_F = torch.ones(
            ffn.intermediate_size, device=x_TD.device, requires_grad=True
        )
        up_FD = ffn.up_FD.float() * factor_F[:, None]
        gate_FD = ffn.gate_FD
        if gate_FD is not None:
            gate_FD = gate_FD.float() * factor_F[:, None]
        scaled = replace(
            ffn,
            up_FD=up_FD,
            gate_FD=gate_FD,
            up_bias_F=_float(ffn.up_bias_F),
            gate_bias_F=_float(ffn.gate_bias_F),
        )
        h_TF = scaled.hidden(x_TD.float()) * factor_F
        slope_TF = gradient_TD @ ffn.down_DF.float()
        (slope_F,) = torch.autograd.grad((h_TF * slope_TF).sum(), factor_F)
    return slope_F


def _float(bias_F: Tensor | None) -> Tensor | None:
    return None if bias_F is None else bias_F.float()


def output_norms(ffn: DenseFFN) -> NDArray[np.float64]:
    """||w_i||^2 of every neuron's output vector (F,)."""
    sum_F = ffn.down_DF.float().square().sum(0)
    norm2_F: NDArray[np.float64] = sum_F.cpu().double().numpy()
    return norm2_F


def by_importance(score_F: NDArray[np.float64]) -> NDArray[np.int64]:
    """Neurons in order of falling importance; ties go to the lowest index."""
    return np.argsort(-score_F, kind="stable")


def split_shared(
    importance_F: NDArray[np.float64], shared: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The `shared` most important neurons, and the others, both in ascending order."""
    order_F = by_importance(importance_F)
    shared_S = np.sort(order_F[:shared])
    others_N = np.sort(order_F[shared:])
    return shared_S, others_N
