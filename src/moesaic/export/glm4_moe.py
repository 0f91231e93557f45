"""Target `glm4_moe`: sigmoid router with a selection bias, shared experts, attention of Llama.

Shape suffixes: T tokens, R routed experts, K routed experts run per token.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Glm4MoeConfig

from moesaic.export.stock import (
    blocks,
    common_config,
    common_reasons,
    common_state,
    shared_weights,
    sliding_layers,
)


def supports(config: Any) -> list[str]:
    """Why this architecture cannot hold a converted model; empty where it can."""
    reasons = common_reasons(config)
    if any(sliding_layers(config)):
        reasons.append(
            f"its attention looks at windows of {config.sliding_window} tokens, glm4_moe at all; "
            "qwen2_moe may fit"
        )
    if config.moesaic["num_routed"] == 1:
        reasons.append("it has one routed expert, glm4_moe at least two")
    return reasons


def warnings(config: Any) -> list[str]:
    """What engines do otherwise than transformers: nothing that is known."""
    return []


def route(
    logit_TR: torch.Tensor, bias_R: torch.Tensor, num_active: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the stock router does: experts by sigmoid + bias, gates normalised to a sum of K."""
    p_TR = logit_TR.sigmoid()
    index_TK = (p_TR + bias_R / 4).topk(num_active, dim=1).indices
    p_TK = p_TR.gather(1, index_TK)
    return index_TK, p_TK / p_TK.sum(1, keepdim=True) * num_active


def stock_config(config: Any, dtype: torch.dtype) -> Glm4MoeConfig:
    moe = config.moesaic
    return Glm4MoeConfig(
        **common_config(config, dtype),
        attention_bias=config.base_model_type == "qwen2",
        use_qk_norm=config.base_model_type == "qwen3",
        moe_intermediate_size=moe["padded_size"],
        n_routed_experts=moe["num_routed"],
        n_shared_experts=_shared_experts(moe),
        num_experts_per_tok=moe["num_active"],
        routed_scaling_factor=float(moe["num_active"]),
        norm_topk_prob=True,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        num_mtp_layers=0,
    )


def stock_state(model: Any, factors: list[float]) -> dict[str, torch.Tensor]:
    """The weights by this architecture's names; sigmoid has a slope of 1/4 at 0, so bias / 4."""
    state = common_state(model)
    moe = model.config.moesaic
    size = _shared_experts(moe) * moe["padded_size"]
    for layer, (block, factor) in enumerate(zip(blocks(model), factors, strict=True)):
        router, experts, place = block.router, block.experts, f"model.layers.{layer}.mlp."
        state[f"{place}gate.weight"] = router.score_proj.weight * factor
        bias_R = router.selection_bias.float() * factor / 4
        state[f"{place}gate.e_score_correction_bias"] = bias_R
        state[f"{place}experts.gate_up_proj"] = experts.gate_up_proj
        state[f"{place}experts.down_proj"] = experts.down_proj
        for name, weight in shared_weights(block, size).items():
            state[f"{place}shared_experts.{name}"] = weight
    return state


def _shared_experts(moe: dict[str, int]) -> int:
    """Shared experts have the routed ones' width here: as many as hold our shared neurons."""
    return max(1, -(-moe["shared_size"] // moe["padded_size"]))
