"""Grouping of neurons into routed experts of equal size.

Shape suffixes: T tokens, S tokens of the sample, F neurons, N those to group,
R routed experts, M = N / R neurons of one, K experts that a token runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.calibration.statistics import Statistics
from moesaic.families import DenseFFN
from moesaic.modeling import Sizes
from moesaic.parts.assignment import balanced_assignment
from moesaic.parts.importance import (
    activation_rate,
    by_importance,
    contribution,
    split_shared,
)
from moesaic.parts.partition import Partition

PATIENCE = 3  # rounds of re-assignment without gain after which it stops


def balanced_kmeans(
    statistics: Statistics,
    candidates_N: NDArray[np.int64],
    num_routed: int,
    rounds: int,
) -> NDArray[np.int64]:
    """Neurons of each expert (R, M), by binary activation columns (paper, Section 4.1).

    Squared-L2 k-means whose every round is an exact assignment. Seeds are the R most
    active candidates; stops when an assignment repeats, after `rounds` at the latest.
    The squared distance of column c_i to the centroid S_j / M, S_j the sum of the
    expert's M columns, is |c_i|^2 - 2 c_i.S_j / M + |S_j / M|^2. Where every neuron is
    assigned once and every expert gets M neurons, a term of the row, a term of the
    column and a positive factor leave the best assignment as it is, so -c_i.S_j
    serves: whole numbers, which neither rounding nor the order of tokens can change.

    Cost per round: O(q K R) for the sparse products, then one N x R transportation
    problem.
    """
    assert statistics.active is not None
    active_TF = statistics.active.astype(np.int64)
    columns_TN = active_TF[:, candidates_N].tocsr()
    rows_NT = columns_TN.T.tocsr()
    rate_N = activation_rate(statistics)[candidates_N]
    seeds_R = by_importance(rate_N)[:num_routed]
    sums_TR = columns_TN[:, seeds_R].toarray()
    one_hot_RR = np.eye(num_routed, dtype=np.int64)
    expert_N = np.full(len(candidates_N), -1)
    for _ in range(rounds):
        previous_N = expert_N
        similarity_NR = (rows_NT @ sums_TR).astype(np.float64)
        expert_N = balanced_assignment(-similarity_NR)
        if np.array_equal(expert_N, previous_N):
            break
        sums_TR = columns_TN @ one_hot_RR[expert_N]
    return members(candidates_N, expert_N, num_routed)


@torch.no_grad()
def contribution_kmeans(
    statistics: Statistics,
    ffn: DenseFFN,
    candidates_N: NDArray[np.int64],
    num_routed: int,
    rounds: int,
) -> NDArray[np.int64]:
    """Neurons of each expert (R, M): those that are large for the same tokens.

    Balanced k-means on c_i = abs(h_i) ||w_i|| over the sample's tokens, scaled to unit
    length, so that ||w_i|| drops out. Seeds are the R candidates of largest
    contribution; stops when an assignment repeats, after `rounds` at the latest. As in
    `balanced_kmeans`, -c_i.S_j gives the same assignment as the squared distances.

    Cost per round: 2 S N R FLOPs, then one N x R transportation problem; memory 4 S N
    bytes.
    """
    assert statistics.sample_h_SF is not None
    device = statistics.sample_h_SF.device
    candidates = torch.from_numpy(candidates_N).to(device)
    columns_SN = statistics.sample_h_SF[:, candidates].abs()
    length_N = torch.linalg.vector_norm(columns_SN, dim=0)
    columns_SN /= length_N.clamp(min=1e-20)
    energy_N = contribution(statistics, ffn)[candidates_N]
    seeds_R = by_importance(energy_N)[:num_routed]
    seed_index_R = torch.from_numpy(seeds_R).to(device)
    sums_SR = columns_SN[:, seed_index_R]
    expert_N = np.full(len(candidates_N), -1)
    for _ in range(rounds):
        previous_N = expert_N
        product_NR = columns_SN.T @ sums_SR
        similarity_NR = product_NR.cpu().double().numpy()
        expert_N = balanced_assignment(-similarity_NR)
        if np.array_equal(expert_N, previous_N):
            break
        sums_SR = columns_SN @ one_hot(expert_N, num_routed, device)
    return members(candidates_N, expert_N, num_routed)


@torch.no_grad()
def alike_rows(
    row_FD: Tensor,
    statistics: Statistics,
    ffn: DenseFFN,
    sizes: Sizes,
    rounds: int,
    generator: np.random.Generator,
) -> Partition:
    """Experts of neurons whose rows are alike; shared are the neurons that add most."""
    contribution_F = contribution(statistics, ffn)
    shared_S, others_N = split_shared(contribution_F, sizes.shared)
    index_N = torch.from_numpy(others_N).to(row_FD.device)
    experts_RM = rows_kmeans(
        row_FD[index_N], others_N, sizes.num_routed, rounds, generator
    )
    return Partition(shared_S, experts_RM)


@torch.no_grad()
def rows_kmeans(
    row_ND: Tensor,
    candidates_N: NDArray[np.int64],
    num_routed: int,
    rounds: int,
    generator: np.random.Generator,
) -> NDArray[np.int64]:
    """Neurons of each expert (R, M), by rows (N, D): of a weight matrix, or profiles.

    Squared-L2 k-means whose every round is an exact balanced assignment, from R random
    rows. As in `balanced_kmeans`, the product with the centroid gives the same
    assignment as the distance. Stops when an assignment repeats, after `rounds` at the
    latest. Cost per round: 2 N D R FLOPs, then one N x R transportation problem.
    """
    seeds_R = generator.choice(len(row_ND), num_routed, replace=False)
    centroid_RD = row_ND[torch.from_numpy(np.sort(seeds_R)).to(row_ND.device)]
    size = len(row_ND) // num_routed
    expert_N = np.full(len(candidates_N), -1)
    for _ in range(rounds):
        previous_N = expert_N
        product_NR = row_ND @ centroid_RD.T
        similarity_NR = product_NR.cpu().double().numpy()
        expert_N = balanced_assignment(-similarity_NR)
        if np.array_equal(expert_N, previous_N):
            break
        member_NR = one_hot(expert_N, num_routed, row_ND.device)
        centroid_RD = member_NR.T @ row_ND / size
    return members(candidates_N, expert_N, num_routed)


@torch.no_grad()
def reassign(
    statistics: Statistics,
    ffn: DenseFFN,
    experts_RM: NDArray[np.int64],
    rounds: int,
    route: Callable[[Tensor], Tensor],
) -> tuple[NDArray[np.int64], list[float]]:
    """Neurons move to the experts that the router picks when they are needed.

    Alternates between fitting a router and assigning neurons under its choices. With
    contribution energies E_ti = (h_ti ||w_i||)^2: `route` fits a router to the experts'
    energies (S, R) and gives G (S, R), whose ones are what it runs; neuron i gains
    sum_t E_ti G_tj in expert j; all neurons are assigned again, exactly balanced, at
    the largest total gain. (With the oracle's choices instead of the router's, k-means
    is already a fixed point.)

    Returns the partition that keeps the most energy, and the kept share (0 to 1) of
    the best so far after every round, the start first: it never falls. Cost per round:
    4 S N R FLOPs, the fit and one N x R transportation problem; memory 4 S N bytes.
    """
    assert statistics.sample_h_SF is not None
    device = statistics.sample_h_SF.device
    num_routed = len(experts_RM)
    neurons_N = np.sort(experts_RM.reshape(-1))
    index_N = torch.from_numpy(neurons_N).to(device)
    norm2_F = ffn.down_DF.float().square().sum(0)
    energy_SN = statistics.sample_h_SF[:, index_N].square_()
    energy_SN *= norm2_F[index_N]
    energy_S = energy_SN.sum(1).double()
    total_energy = max(float(energy_S.sum()), 1e-30)

    place_RM = np.searchsorted(neurons_N, experts_RM)
    label_R = np.arange(num_routed)
    expert_N = np.empty(len(neurons_N), dtype=np.int64)
    expert_N[place_RM] = label_R[:, None]

    kept_shares: list[float] = []
    best_share = -math.inf
    best_RM = experts_RM
    rounds_without_gain = 0
    for remaining in range(rounds, -1, -1):
        energy_SR = energy_SN @ one_hot(expert_N, num_routed, device)
        chosen_SR = route(energy_SR)
        chosen_energy_SR = chosen_SR * energy_SR
        kept_energy = float(chosen_energy_SR.sum(dtype=torch.float64))
        kept_share = kept_energy / total_energy
        if kept_share > best_share:
            best_share = kept_share
            best_RM = members(neurons_N, expert_N, num_routed)
            rounds_without_gain = 0
        else:
            rounds_without_gain += 1
        kept_shares.append(best_share)
        if remaining == 0 or rounds_without_gain == PATIENCE:
            break

        gain_NR = (energy_SN.T @ chosen_SR).cpu().double().numpy()
        largest_gain = max(gain_NR.max(), 1e-30)
        assigned_N = balanced_assignment(-gain_NR / largest_gain)
        if np.array_equal(assigned_N, expert_N):
            break
        expert_N = assigned_N
    return best_RM, kept_shares


def best_of_tokens(score_SR: Tensor, num_active: int) -> Tensor:
    """1.0 where an expert is among the best so many of a token (S, R)."""
    best_SK = score_SR.topk(num_active, dim=1, sorted=False).indices
    return torch.zeros_like(score_SR).scatter_(1, best_SK, 1.0)


def largest_of_all(score_SR: Tensor, num_active: int) -> Tensor:
    """1.0 at the largest scores of all (S, R), so many for a token on average.

    What one threshold for all experts and tokens chooses.
    """
    all_scores = score_SR.flatten()
    largest = all_scores.topk(len(score_SR) * num_active, sorted=False).indices
    chosen = torch.zeros_like(all_scores).scatter_(0, largest, 1.0)
    return chosen.view_as(score_SR)


def random_groups(
    candidates_N: NDArray[np.int64],
    num_routed: int,
    generator: np.random.Generator,
) -> NDArray[np.int64]:
    """Neurons of each expert (R, M), drawn at random.

    What any clustering has to beat.
    """
    shuffled_N = generator.permutation(candidates_N)
    experts_RM = shuffled_N.reshape(num_routed, -1)
    return np.sort(experts_RM, axis=1)


def one_hot(
    expert_N: NDArray[np.int64],
    num_routed: int,
    device: torch.device,
) -> Tensor:
    """1.0 where a neuron belongs to an expert (N, R).

    Sums become products with it, which are the same on every run.
    """
    index_N = torch.from_numpy(expert_N).to(device)
    return torch.nn.functional.one_hot(index_N, num_routed).float()


def members(
    candidates_N: NDArray[np.int64],
    expert_N: NDArray[np.int64],
    num_routed: int,
) -> NDArray[np.int64]:
    """The neurons of each expert (R, M), ascending, from the expert of each one."""
    order_N = np.argsort(expert_N, kind="stable")
    by_expert_N = candidates_N[order_N]
    return by_expert_N.reshape(num_routed, -1)
