"""Re-assignment: neurons move to the experts that the router picks when they are needed.

Shape suffixes: S tokens of the sample, D hidden_size, N routed neurons, R routed experts,
M = N / R.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic.calibration.statistics import Profile
from moesaic.families import DenseFFN
from moesaic.parts.assignment import balanced_assignment
from moesaic.parts.grouping.contribution_kmeans import members, one_hot

PATIENCE = 3  # rounds without gain after which it stops


@torch.no_grad()
def reassign(
    profile: Profile,
    ffn: DenseFFN,
    experts_RM: NDArray[np.int64],
    num_active: int,
    rounds: int,
    fit: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[NDArray[np.int64], list[float]]:
    """Alternates between fitting a router and assigning neurons under its choices.

    With contribution energies E_ti = (h_ti ||w_i||)^2: `fit` maps the experts' energies (S, R) to
    a router's scores (S, R); G_tj marks the top `num_active`; neuron i gains sum_t E_ti G_tj in
    expert j; all neurons are assigned again, exactly balanced, at the largest total gain. (With
    the oracle's choices instead of the router's, k-means is already a fixed point.)

    Returns the partition that keeps the most energy, and the kept share (0 to 1) of the best so
    far after every round, the start first: it never falls. Cost per round: 4 S N R FLOPs, the fit
    and one N x R transportation problem; memory 4 S N bytes.
    """
    assert profile.sample_h_SF is not None
    device = profile.sample_h_SF.device
    num_routed = len(experts_RM)
    neurons_N = np.sort(experts_RM.reshape(-1))
    index_N = torch.from_numpy(neurons_N).to(device)
    norm2_N = ffn.down_DF.float().square().sum(0)[index_N]
    energy_SN = profile.sample_h_SF[:, index_N].square_() * norm2_N
    total = float(energy_SN.sum(1).double().sum())
    expert_N = np.empty(len(neurons_N), dtype=np.int64)
    expert_N[np.searchsorted(neurons_N, experts_RM)] = np.arange(num_routed)[:, None]

    kept_shares: list[float] = []
    best_RM, since_best = experts_RM, 0
    for remaining in range(rounds, -1, -1):
        energy_SR = energy_SN @ one_hot(expert_N, num_routed, device)
        chosen_SK = fit(energy_SR).topk(num_active, dim=1, sorted=False).indices
        chosen_SR = torch.zeros_like(energy_SR).scatter_(1, chosen_SK, 1.0)
        kept = float((chosen_SR * energy_SR).sum(dtype=torch.float64)) / max(
            total, 1e-30
        )
        if not kept_shares or kept > kept_shares[-1]:
            best_RM, since_best = members(neurons_N, expert_N, num_routed), 0
        else:
            since_best += 1
        kept_shares.append(max([kept, *kept_shares[-1:]]))
        if not remaining or since_best == PATIENCE:
            break
        gain_NR = (energy_SN.T @ chosen_SR).cpu().double().numpy()
        assigned_N = balanced_assignment(-gain_NR / max(gain_NR.max(), 1e-30))
        if np.array_equal(assigned_N, expert_N):
            break
        expert_N = assigned_N
    return best_RM, kept_shares
