"""Balanced k-means on contribution columns: neurons that are large for the same tokens.

Shape suffixes: S tokens of the sample, N neurons to group, R routed experts, M = N / R.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic.calibration.statistics import Profile
from moesaic.families import DenseFFN
from moesaic.parts.assignment import balanced_assignment
from moesaic.parts.importance import contribution


@torch.no_grad()
def contribution_kmeans(
    profile: Profile,
    ffn: DenseFFN,
    candidates_N: NDArray[np.int64],
    num_routed: int,
    rounds: int,
    generator: np.random.Generator,
) -> NDArray[np.int64]:
    """Neurons of each expert (R, M): squared-L2 k-means whose every round is an exact assignment.

    Clusters c_i = abs(h_i) ||w_i|| over the sample's tokens, scaled to unit length, so that
    ||w_i|| drops out. Seeds are the R candidates of largest contribution energy; stops when an
    assignment repeats, after `rounds` at the latest. As in `balanced_kmeans`, -c_i.S_j with S_j
    the sum of the expert's columns gives the same assignment as the squared distances.

    Cost per round: 2 S N R FLOPs, then one N x R transportation problem; memory 4 S N bytes.
    """
    assert profile.sample_h_SF is not None
    candidates = torch.from_numpy(candidates_N).to(profile.sample_h_SF.device)
    columns_SN = profile.sample_h_SF[:, candidates].abs()
    columns_SN /= torch.linalg.vector_norm(columns_SN, dim=0).clamp(min=1e-20)
    energy_N = contribution(profile, ffn, generator)[candidates_N]
    seeds_R = np.argsort(-energy_N, kind="stable")[:num_routed]
    sums_SR = columns_SN[:, torch.from_numpy(seeds_R).to(candidates.device)]
    expert_N = np.full(len(candidates_N), -1)
    for _ in range(rounds):
        previous_N = expert_N
        expert_N = balanced_assignment(-(columns_SN.T @ sums_SR).cpu().double().numpy())
        if np.array_equal(expert_N, previous_N):
            break
        sums_SR = columns_SN @ one_hot(expert_N, num_routed, candidates.device)
    return members(candidates_N, expert_N, num_routed)


def one_hot(
    expert_N: NDArray[np.int64], num_routed: int, device: torch.device
) -> torch.Tensor:
    """1.0 where a neuron belongs to an expert (N, R): sums as a product, the same on every run."""
    index_N = torch.from_numpy(expert_N).to(device)
    return torch.nn.functional.one_hot(index_N, num_routed).float()


def members(
    candidates_N: NDArray[np.int64], expert_N: NDArray[np.int64], num_routed: int
) -> NDArray[np.int64]:
    """The neurons of each expert (R, M) from the expert of each candidate."""
    order_N = np.argsort(expert_N, kind="stable")
    return candidates_N[order_N].reshape(num_routed, -1)
