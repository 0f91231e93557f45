"""Target `glm4_moe`: sigmoid router with a selection bias, shared experts, attention of Llama.

Shape suffixes: T tokens, R routed experts, K routed experts run per token, D hidden_size, H heads,
W dimensions of one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Glm4MoeConfig

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
from moesaic.modeling import Sizes

# Scaled router weights are below float16's range.
DTYPES = ("auto", "float32", "bfloat16")
NARROWEST = 32  # dimensions of a head


def supports(config: Any) -> list[str]:
    """Why this architecture cannot hold a converted model; empty where it can."""
    reasons = common_reasons(config)
    if any(sliding_layers(config)):
        window = config.sliding_window
        reasons.append(
            f"its attention looks at windows of {window} tokens, glm4_moe at all; "
            "qwen2_moe may fit"
        )
    dense = dense_layers(config)
    if dense != list(range(len(dense))):
        numbers = ", ".join(str(layer) for layer in dense)
        reasons.append(
            f"its layers {numbers} are dense, in glm4_moe the first ones only; "
            "qwen2_moe may fit"
        )
    if config.moesaic.first_sizes.num_routed == 1:
        reasons.append("it has one routed expert, glm4_moe at least two")
    return reasons


def warnings(config: Any) -> list[str]:
    """What a user should know: narrow heads are written wider."""
    dim, stock_dim = _head_dims(config)
    if dim == stock_dim:
        return []
    ratio = stock_dim / dim
    return [
        f"its heads of {dim} dimensions are filled up with zeros to {stock_dim}, "
        "since vLLM has no attention on a CPU for narrower ones: the cache takes "
        f"{ratio:g} times the memory"
    ]


ROUTES_IN_FLOAT32 = True


def route(
    logit_TR: Tensor, bias_R: Tensor, num_active: int
) -> tuple[Tensor, Tensor]:
    """What the stock router does: experts by sigmoid + bias, gates normalised to a sum of K."""
    p_TR = logit_TR.sigmoid()
    biased_TR = p_TR + bias_R / 4
    index_TK = biased_TR.topk(num_active, dim=1).indices
    p_TK = p_TR.gather(1, index_TK)
    sum_T1 = p_TK.sum(1, keepdim=True)
    gate_TK = p_TK / sum_T1 * num_active
    return index_TK, gate_TK


def stock_config(config: Any, dtype: torch.dtype) -> Glm4MoeConfig:
    sizes = sizes_of(config)
    common = common_config(config, dtype)
    dim, stock_dim = _head_dims(config)
    if dim != stock_dim:  # the same dimensions are rotated, by the same angles
        rotated = int(dim * common["partial_rotary_factor"])
        factor = rotated / stock_dim
        common["head_dim"] = stock_dim
        common["partial_rotary_factor"] = factor
        common["rope_parameters"]["partial_rotary_factor"] = factor
    return Glm4MoeConfig(
        **common,
        attention_bias=config.base_model_type == "qwen2",
        use_qk_norm=config.base_model_type == "qwen3",
        moe_intermediate_size=sizes.padded,
        n_routed_experts=sizes.num_routed,
        n_shared_experts=_shared_experts(sizes),
        num_experts_per_tok=sizes.num_active,
        routed_scaling_factor=float(sizes.num_active),
        norm_topk_prob=True,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=len(dense_layers(config)),
        num_mtp_layers=0,
    )


def stock_state(model: Any, factors: list[float]) -> dict[str, Tensor]:
    """The weights by this architecture's names; sigmoid has a slope of 1/4 at 0, so bias / 4."""
    state = common_state(model)
    dim, stock_dim = _head_dims(model.config)
    if dim != stock_dim:
        for name, weight in state.items():
            state[name] = _wider(name, weight, dim, stock_dim)
    moe = model.config.moesaic
    sizes = sizes_of(model.config)
    size = _shared_experts(sizes) * sizes.padded
    layers = zip(moe.layers, blocks(model), factors, strict=True)
    for layer, block, factor in layers:
        router = block.router
        experts = block.experts
        prefix = f"model.layers.{layer}.mlp."
        weight_RD = router.score_proj.weight * factor
        bias_R = router.selection_bias.float() * factor / 4
        state[f"{prefix}gate.weight"] = weight_RD
        state[f"{prefix}gate.e_score_correction_bias"] = bias_R
        state[f"{prefix}experts.gate_up_proj"] = experts.gate_up_proj
        state[f"{prefix}experts.down_proj"] = experts.down_proj
        for name, weight in shared_weights(block, size).items():
            state[f"{prefix}shared_experts.{name}"] = weight
    return state


def _head_dims(config: Any) -> tuple[int, int]:
    """Dimensions of a head, and those that are written; a norm over a head leaves it as it is."""
    dim = head_dim_of(config)
    if config.base_model_type == "qwen3":
        return dim, dim
    return dim, max(dim, NARROWEST)


def _wider(name: str, weight: Tensor, dim: int, stock_dim: int) -> Tensor:
    """A weight of the attention with zeros after every head's dimensions; others as they are.

    Scores are divided by the root of the written dimensions: the queries make up for it.
    """
    filling = stock_dim - dim
    if name.endswith("o_proj.weight"):
        weight_DHW = weight.unflatten(1, (-1, dim))
        weight_DHW = pad(weight_DHW, (0, filling))
        return weight_DHW.flatten(1)
    module = name.split(".")[-2]
    if module not in ("q_proj", "k_proj", "v_proj"):
        return weight
    heads = len(weight) // dim
    weight_HWD = weight.reshape(heads, dim, -1)
    if module == "q_proj":
        weight_HWD = weight_HWD * (stock_dim / dim) ** 0.5
    weight_HWD = pad(weight_HWD, (0, 0, 0, filling))
    return weight_HWD.reshape(-1, *weight.shape[1:])


def _shared_experts(sizes: Sizes) -> int:
    """Shared experts have the routed ones' width here: as many as hold our shared neurons."""
    whole = -(-sizes.shared // sizes.padded)
    return max(1, whole)
