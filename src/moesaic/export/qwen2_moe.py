"""Target `qwen2_moe`: softmax router, one gated shared expert of any width, sliding windows.

Shape suffixes: T tokens, R routed experts, K routed experts run per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2MoeConfig

from moesaic.export.stock import (
    blocks,
    common_config,
    common_reasons,
    common_state,
    dense_layers,
    head_dim_of,
    shared_weights,
    sizes_of,
    sliding_layers,
)
from moesaic.modeling import Sizes, padded

ROUTES_IN_FLOAT32 = False  # but in the model's format
# Scaled router weights are below float16's range.
DTYPES = ("auto", "float32", "bfloat16")


def supports(config: Any) -> list[str]:
    """Why this architecture cannot hold a converted model; empty where it can."""
    reasons = common_reasons(config)
    if config.base_model_type == "qwen3":
        reasons.append(
            "its queries and keys are normalised, those of qwen2_moe are not"
        )
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1:
        reasons.append("it rotates a part of each head, qwen2_moe all of it")
    return reasons


def warnings(config: Any) -> list[str]:
    """What engines do otherwise than transformers."""
    differences = []
    slides = sliding_layers(config)
    if any(slides) and not all(slides):
        differences.append(
            "vLLM's qwen2_moe knows no sliding windows of some layers alone: serve with "
            f"--max-model-len {config.sliding_window} there"
        )
    attention_width = config.num_attention_heads * head_dim_of(config)
    if attention_width != config.hidden_size:
        differences.append(
            "vLLM's qwen2_moe wants heads * head_dim = hidden_size: it will not load"
        )
    return differences


def route(
    logit_TR: Tensor, bias_R: Tensor, num_active: int
) -> tuple[Tensor, Tensor]:
    """What the stock router does: experts by softmax, gates normalised; W_down makes up for K."""
    p_TR = logit_TR.softmax(1)
    p_TK, index_TK = p_TR.topk(num_active, dim=1)
    sum_T1 = p_TK.sum(1, keepdim=True)
    gate_TK = p_TK / sum_T1 * num_active
    return index_TK, gate_TK


def stock_config(config: Any, dtype: torch.dtype) -> Qwen2MoeConfig:
    sizes = sizes_of(config)
    common = common_config(config, dtype)
    slides = sliding_layers(config)
    any_slides = any(slides)
    layer_types = [
        "sliding_attention" if slide else "full_attention" for slide in slides
    ]
    return Qwen2MoeConfig(
        **common,
        qkv_bias=True,  # vLLM's always has them: zeros where the model has none
        use_sliding_window=any_slides,
        sliding_window=config.sliding_window if any_slides else None,
        layer_types=layer_types,
        moe_intermediate_size=sizes.padded,
        shared_expert_intermediate_size=_shared_size(sizes),
        num_experts=sizes.num_routed,
        num_experts_per_tok=sizes.num_active,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=dense_layers(config),
    )


def stock_state(model: Any, factors: list[float]) -> dict[str, Tensor]:
    """The weights by this architecture's names.

    Gates are 1/K, so the routed W_down is K times ours; the shared expert's gate is sigmoid(0) =
    1/2, so its W_down is twice ours.
    """
    state = common_state(model)
    for name, weight in list(state.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            bias_name = name.replace("weight", "bias")
            zeros = weight.new_zeros(len(weight))
            state.setdefault(bias_name, zeros)
    moe = model.config.moesaic
    sizes = sizes_of(model.config)
    size = _shared_size(sizes)
    layers = zip(moe.layers, blocks(model), factors, strict=True)
    for layer, block, factor in layers:
        experts = block.experts
        prefix = f"model.layers.{layer}.mlp."
        weight_RD = block.router.score_proj.weight * factor
        down = experts.down_proj * sizes.num_active
        state[f"{prefix}gate.weight"] = weight_RD
        state[f"{prefix}experts.gate_up_proj"] = experts.gate_up_proj
        state[f"{prefix}experts.down_proj"] = down
        for name, weight in shared_weights(block, size).items():
            scaled = weight * 2 if name == "down_proj.weight" else weight
            state[f"{prefix}shared_expert.{name}"] = scaled
        hidden = down.shape[1]
        gate = down.new_zeros(1, hidden)
        state[f"{prefix}shared_expert_gate.weight"] = gate
    return state


def _shared_size(sizes: Sizes) -> int:
    """In whole multiples of 8, as the experts; neurons of zero where there are none."""
    return max(8, padded(sizes.shared))
