"""Slow, obvious twins of what the package computes fast: loops, dense float64, textbook solvers.

Shape suffixes: T tokens, D hidden_size, F neurons, N neurons to group, R routed experts,
K routed experts run per token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch.nn.functional import silu

Matrices = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]  # gate (F, D), up, down (D, F)
Activation = Callable[[torch.Tensor], torch.Tensor]


# --- Section 4.1: activation profiling ---------------------------------------------------------


def hidden(
    x_TD: torch.Tensor, gate_FD: torch.Tensor | None, up_FD: torch.Tensor, act: Activation = silu
) -> NDArray[np.float64]:
    """h (T, F), one token and one neuron at a time, in float64."""
    h_TF = np.zeros((len(x_TD), len(up_FD)))
    for t, x_D in enumerate(x_TD.double()):
        for i, up_D in enumerate(up_FD.double()):
            up = up_D @ x_D
            value = act(up) if gate_FD is None else act(gate_FD[i].double() @ x_D) * up
            h_TF[t, i] = float(value)
    return h_TF


def marks(h_TF: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    """The paper's A (T, F): ones at the k largest abs(h) of each token."""
    a_TF = np.zeros(h_TF.shape, dtype=np.int64)
    for t, h_F in enumerate(h_TF):
        for i in sorted(range(len(h_F)), key=lambda i: -abs(h_F[i]))[:k]:
            a_TF[t, i] = 1
    return a_TF


# --- Appendix A.3: balanced clustering ---------------------------------------------------------


def cost_of(cost_NR: NDArray[Any], expert_N: NDArray[np.int64]) -> float:
    return sum(cost_NR[i, expert] for i, expert in enumerate(expert_N))


def balanced_assignment(cost_NR: NDArray[Any]) -> NDArray[np.int64]:
    """Every column repeated N / R times, then a square assignment, as the paper does it."""
    n, r = cost_NR.shape
    _, column_N = linear_sum_assignment(np.repeat(cost_NR, n // r, axis=1))
    return column_N // (n // r)


def all_balanced_assignments(n: int, r: int) -> Iterator[tuple[int, ...]]:
    for expert_N in itertools.product(range(r), repeat=n):
        if all(expert_N.count(expert) == n // r for expert in range(r)):
            yield expert_N


def is_only_optimum(cost_NR: NDArray[Any], expert_N: NDArray[np.int64]) -> bool:
    """Whether every cyclic exchange of neurons between experts makes this optimum worse."""
    r = cost_NR.shape[1]
    move = {
        (a, b): min(cost_NR[i, b] - cost_NR[i, a] for i in np.flatnonzero(expert_N == a))
        for a, b in itertools.permutations(range(r), 2)
    }
    cycles = (c for size in range(2, r + 1) for c in itertools.permutations(range(r), size))
    return all(sum(move[a, b] for a, b in zip(c, c[1:] + c[:1], strict=True)) > 0 for c in cycles)


def squared_distances(a_TN: NDArray[Any], centroid_TR: NDArray[np.float64]) -> NDArray[np.float64]:
    """Squared L2 from each column to each centroid (N, R)."""
    difference_TNR = a_TN[:, :, None].astype(np.float64) - centroid_TR[:, None, :]
    return (difference_TNR**2).sum(axis=0)


def absolute_distances(a_TN: NDArray[Any], centroid_TR: NDArray[np.float64]) -> NDArray[np.float64]:
    """L1 from each column to each centroid (N, R)."""
    return np.abs(a_TN[:, :, None].astype(np.float64) - centroid_TR[:, None, :]).sum(axis=0)


def seeds(a_TN: NDArray[Any], r: int) -> list[int]:
    """The r most active columns; of equally active ones those of lowest index."""
    return sorted(range(a_TN.shape[1]), key=lambda i: (-a_TN[:, i].sum(), i))[:r]


def centroids(a_TN: NDArray[Any], expert_N: NDArray[np.int64], r: int) -> NDArray[np.float64]:
    """Mean column of each expert (T, R)."""
    return np.stack([a_TN[:, expert_N == j].mean(axis=1) for j in range(r)], axis=1)


def balanced_kmeans(
    a_TN: NDArray[Any], r: int, rounds: int
) -> list[tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """(costs, assignment) of every round; ends with the first assignment that repeats."""
    history: list[tuple[NDArray[np.float64], NDArray[np.int64]]] = []
    centroid_TR = a_TN[:, seeds(a_TN, r)].astype(np.float64)
    for _ in range(rounds):
        cost_NR = squared_distances(a_TN, centroid_TR)
        expert_N = balanced_assignment(cost_NR)
        repeats = bool(history) and np.array_equal(expert_N, history[-1][1])
        history.append((cost_NR, expert_N))
        if repeats:
            break
        centroid_TR = centroids(a_TN, expert_N, r)
    return history


def representative(a_TF: NDArray[Any], members_M: Sequence[int]) -> int:
    """The member whose column is nearest the mean column (eq. 7); ties to the first.

    Float64 is exact here where the number of members is a power of two.
    """
    centroid_T = np.mean([a_TF[:, i] for i in members_M], axis=0)
    distance_M = [np.linalg.norm(a_TF[:, i] - centroid_T) for i in members_M]
    return members_M[int(np.argmin(distance_M))]


# --- the MoE layer -----------------------------------------------------------------------------


def ffn_forward(x_TD: torch.Tensor, ffn: Matrices, act: Activation = silu) -> torch.Tensor:
    """down (act(gate x) * (up x)), or down act(up x) where there is no gate."""
    gate_FD, up_FD, down_DF = ffn
    up_TF = x_TD @ up_FD.T
    h_TF = act(up_TF) if gate_FD is None else act(x_TD @ gate_FD.T) * up_TF
    return h_TF @ down_DF.T


def moe_forward(
    x_TD: torch.Tensor,
    shared: Matrices | None,
    experts: Sequence[Matrices],
    index_TK: torch.Tensor,
    gate_TK: torch.Tensor,
    act: Activation = silu,
) -> torch.Tensor:
    """shared(x) + sum over the chosen experts of gate * expert(x), one token at a time.

    Differentiable in the inputs, the gates and every matrix.
    """
    rows = []
    for t in range(len(x_TD)):
        x_1D = x_TD[t : t + 1]
        y_1D = torch.zeros_like(x_1D) if shared is None else ffn_forward(x_1D, shared, act)
        for slot, expert in enumerate(index_TK[t].tolist()):
            y_1D = y_1D + gate_TK[t, slot] * ffn_forward(x_1D, experts[expert], act)
        rows.append(y_1D)
    return torch.cat(rows)


# --- evaluation --------------------------------------------------------------------------------


@torch.no_grad()
def perplexity(model: Any, ids: torch.Tensor, sequence_length: int) -> tuple[float, int]:
    """exp(mean loss of all predicted tokens), one window and one token at a time."""
    losses: list[float] = []
    for start in range(0, len(ids), sequence_length):
        window_L = ids[start : start + sequence_length]
        logits_LV = model(input_ids=window_L[None], use_cache=False).logits[0].double()
        losses += [
            -float(logits_LV[t].log_softmax(-1)[window_L[t + 1]]) for t in range(len(window_L) - 1)
        ]
    return math.exp(math.fsum(losses) / len(losses)), len(losses)
