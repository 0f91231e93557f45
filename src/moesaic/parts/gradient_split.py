"""Neurons to experts by how important each is to each cluster of tokens.

Qu et al., LLaMA-MoE v2, https://arxiv.org/abs/2411.15708, and the released code: a
residual expert of what most clusters have in common, the others by one greedy pass.

Shape suffixes: F neurons, R experts (and clusters), M neurons of one, S neurons of the
residual expert, N neurons that are left.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def residual_neurons(
    importance_RF: NDArray[np.float64], residual: int, expert: int
) -> NDArray[np.int64]:
    """So many neurons (S,), ascending, that stand highest in most clusters.

    In every round each cluster names its `expert` most important neurons that are left;
    those that most clusters name go to the residual expert, the lowest index first.
    """
    left_RF = importance_RF.copy()
    taken: list[int] = []
    while len(taken) < residual:
        named_RM = np.argsort(-left_RF, axis=1, kind="stable")[:, :expert]
        neurons = left_RF.shape[1]
        votes_F = np.bincount(named_RM.reshape(-1), minlength=neurons)
        votes_F[taken] = 0
        most = votes_F.max()
        if most == 0:  # clusters have named all that they can tell apart
            votes_F = np.ones(neurons, dtype=np.int64)
            votes_F[taken] = 0
            most = 1
        elected = np.flatnonzero(votes_F == most)
        missing = residual - len(taken)
        taken += elected[:missing].tolist()
        left_RF[:, taken] = -np.inf
    return np.sort(np.array(taken, dtype=np.int64))


def greedy_split(
    importance_RF: NDArray[np.float64], others_N: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Neurons of each expert (R, M), ascending.

    Pairs of a cluster and a neuron in order of falling importance: the neuron joins
    that cluster's expert if it has none and the expert has room. O(R N log(R N)).
    """
    experts = len(importance_RF)
    size = len(others_N) // experts
    score_RN = importance_RF[:, others_N]
    order = np.argsort(-score_RN, axis=None, kind="stable")
    expert_N = np.full(len(others_N), -1)
    load_R = np.zeros(experts, dtype=np.int64)
    for pair in order.tolist():
        expert, neuron = divmod(pair, len(others_N))
        if expert_N[neuron] < 0 and load_R[expert] < size:
            expert_N[neuron] = expert
            load_R[expert] += 1
    order_N = np.argsort(expert_N, kind="stable")
    return others_N[order_N].reshape(experts, size)
