"""Which neurons are shared and which make up each routed expert.

Shape suffixes: F neurons, S shared neurons, N candidates, R routed experts, M neurons of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic.calibration.statistics import Profile
from moesaic.families import DenseFFN
from moesaic.layout import Sizes
from moesaic.methods.recipe import Recipe
from moesaic.parts.grouping import GROUPING, reassign
from moesaic.parts.importance import IMPORTANCE
from moesaic.parts.routers.linear import Ridge, log_energy


@dataclass(frozen=True)
class Partition:
    """Shared, experts and dropped neurons together are a permutation of the FFN's neurons.

    Only static pruning drops any: then there are no experts (R = 0). `kept_energy` is the share
    of the routed neurons' energy in the experts chosen, at the start and after every round of
    re-assignment.
    """

    shared_S: NDArray[np.int64]
    experts_RM: NDArray[np.int64]
    kept_energy: list[float] = field(default_factory=list)

    @property
    def neurons_N(self) -> NDArray[np.int64]:
        """All neurons that are kept: the shared ones, then expert by expert."""
        return np.concatenate([self.shared_S, self.experts_RM.reshape(-1)])

    def mask(self, chosen_TR: torch.Tensor) -> torch.Tensor:
        """1.0 for each of `neurons_N` that runs for a token, else 0.0 (T, N)."""
        shared_TS = chosen_TR.new_ones(
            len(chosen_TR), len(self.shared_S), dtype=torch.float32
        )
        size = self.experts_RM.shape[1]
        return torch.cat(
            [shared_TS, chosen_TR.float().repeat_interleave(size, dim=1)], dim=1
        )


def partition(
    profile: Profile,
    ffn: DenseFFN,
    recipe: Recipe,
    sizes: Sizes,
    generator: np.random.Generator,
) -> Partition:
    """Applies a recipe's importance, grouping and re-assignment to one FFN's statistics."""
    score_F = IMPORTANCE[recipe.importance](profile, ffn, generator)
    order_F = np.argsort(-score_F, kind="stable")  # ties: lowest index first
    group = GROUPING[recipe.grouping]
    if group is None:
        return Partition(
            np.sort(order_F[: sizes.active]), np.empty((0, 0), dtype=np.int64)
        )
    shared_S = np.sort(order_F[: sizes.shared])
    candidates_N = np.sort(order_F[sizes.shared :])
    experts_RM = group(
        profile, ffn, candidates_N, sizes.num_routed, recipe.kmeans_rounds, generator
    )
    if not recipe.reassign_rounds:
        return Partition(shared_S, experts_RM)
    sample_x_SD = profile.sample_x_SD
    assert sample_x_SD is not None
    ridge = Ridge.of(lambda: [sample_x_SD], centre=False)

    def fit(energy_SR: torch.Tensor) -> torch.Tensor:
        weight_DR = ridge.solve(lambda: [sample_x_SD], log_energy(energy_SR, dim=1))
        return sample_x_SD @ weight_DR

    experts_RM, kept_energy = reassign(
        profile, ffn, experts_RM, sizes.num_active, recipe.reassign_rounds, fit
    )
    return Partition(shared_S, experts_RM, kept_energy)
