"""Cuts one dense FFN into the weights of a MoE block.

Shape suffixes: D hidden_size, F neurons, S shared neurons, R routed experts, M neurons of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic.adapters import DenseFFN
from moesaic.grouping import GROUPING
from moesaic.importance import IMPORTANCE
from moesaic.layout import Sizes
from moesaic.modeling import MoesaicBlock
from moesaic.profile import Profile
from moesaic.recipe import Recipe
from moesaic.routers import ROUTERS


@dataclass(frozen=True)
class Partition:
    """Which neurons are shared, which make up each routed expert, and who represents it.

    shared, experts and dropped neurons together are a permutation of the FFN's neurons; only
    static pruning drops any.
    """

    shared_S: NDArray[np.int64]
    experts_RM: NDArray[np.int64]  # R = 0 for static pruning
    representative_R: NDArray[np.int64]


def partition(
    profile: Profile, ffn: DenseFFN, recipe: Recipe, sizes: Sizes, generator: np.random.Generator
) -> Partition:
    """Applies a recipe's importance, grouping and router ingredients to one FFN's statistics."""
    score_F = IMPORTANCE[recipe.importance](profile, ffn, generator)
    order_F = np.argsort(-score_F, kind="stable")  # ties: lowest index first
    group, route = GROUPING[recipe.grouping], ROUTERS[recipe.router]
    if group is None or route is None:
        none = np.empty(0, dtype=np.int64)
        return Partition(np.sort(order_F[: sizes.active]), none.reshape(0, 0), none)
    shared_S = np.sort(order_F[: sizes.shared])
    candidates_N = np.sort(order_F[sizes.shared :])
    experts_RM = group(profile, candidates_N, sizes.num_routed, recipe.kmeans_rounds, generator)
    return Partition(shared_S, experts_RM, route(profile, experts_RM, generator))


@torch.no_grad()
def carve(ffn: DenseFFN, parts: Partition, recipe: Recipe, config: Any) -> MoesaicBlock:
    """The block whose weights are rows of `gate` and `up` and columns of `down`, copied.

    The router copies the representatives' rows (paper, Section 4.2), scaled to unit length where
    the recipe says so. Costs one copy of the FFN's weights.
    """
    with torch.device("meta"):
        block = MoesaicBlock(config)
    state: dict[str, torch.Tensor] = {}

    def rows(name: str, source: DenseFFN, index: NDArray[np.int64]) -> None:
        index_t = torch.from_numpy(index).to(source.up_FD.device)
        for part, weight, bias in (
            ("gate_proj", source.gate_FD, source.gate_bias_F),
            ("up_proj", source.up_FD, source.up_bias_F),
        ):
            if weight is not None:
                state[f"{name}.{part}.weight"] = weight[index_t]
            if bias is not None:
                state[f"{name}.{part}.bias"] = bias[index_t]

    if len(parts.shared_S):
        rows("shared_expert", ffn, parts.shared_S)
        state["shared_expert.down_proj.weight"] = ffn.down_DF[:, torch.from_numpy(parts.shared_S)]
    if len(parts.experts_RM):
        rows("router", ffn.with_unit_rows() if recipe.normalise else ffn, parts.representative_R)
        # In float32 whatever the model's dtype: their updates are smaller than bf16 resolves.
        scale_R = ffn.up_FD.new_zeros(len(parts.experts_RM), dtype=torch.float32)
        state |= {"router.expert_scale": scale_R, "router.selection_bias": scale_R.clone()}
        experts_RM = torch.from_numpy(parts.experts_RM).to(ffn.up_FD.device)
        padded = config.moesaic["padded_size"]

        def stack(*sources: torch.Tensor | None) -> torch.Tensor:
            """Rows of each expert (R, rows, ...), gate before up, each padded with zero rows."""
            given = [source for source in sources if source is not None]
            rows = len(given) * padded
            stacked = given[0].new_zeros(len(experts_RM), rows, *given[0].shape[1:])
            # Expert by expert: the copies in between stay small beside the weights.
            for expert, members_M in zip(stacked, experts_RM, strict=True):
                for start, source in zip(range(0, rows, padded), given, strict=True):
                    expert[start : start + len(members_M)] = source[members_M]
            return stacked

        name = "gate_up_proj" if ffn.gated else "up_proj"
        state[f"experts.{name}"] = stack(ffn.gate_FD, ffn.up_FD)
        if ffn.up_bias_F is not None:
            state[f"experts.{name}_bias"] = stack(ffn.gate_bias_F, ffn.up_bias_F)
        down_RDM = ffn.down_DF.new_zeros(len(experts_RM), len(ffn.down_DF), padded)
        for down_DM, members_M in zip(down_RDM, experts_RM, strict=True):
            down_DM[:, : len(members_M)] = ffn.down_DF[:, members_M]
        state["experts.down_proj"] = down_RDM
    if ffn.down_bias_D is not None:
        state["output_bias"] = ffn.down_bias_D.clone()
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    block.load_state_dict(state, assign=True)
    return block.eval()
