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
    shared_weights,
    sizes_of,
    sliding_layers,
)
from moesaic.modeling import Sizes

NARROWEST = 32  # dimensions of a head


def supports(config: Any) -> list[str]:
    """Why this architecture cannot hold a converted model; empty where it can."""
    reasons = common_reasons(config)
    if any(sliding_layers(config)):
        reasons.append(
            f"its attention looks at windows of {config.sliding_window} tokens, glm4_moe at all; "
            "qwen2_moe may fit"
        )
    dense = dense_layers(config)
    if dense != list(range(len(dense))):
        reasons.append(
            f"its layers {', '.join(map(str, dense))} are dense, in glm4_moe the first ones only; "
            "qwen2_moe may fit"
        )
    if config.moesaic.first_sizes.num_routed == 1:
        reasons.append("it has one routed expert, glm4_moe at least two")
    return reasons


def warnings(config: Any) -> list[str]:
    """What a user should know: narrow heads are written wider."""
    own, written = _head_dims(config)
    if own == written:
        return []
    return [
        f"its heads of {own} dimensions are filled up with zeros to {written}, since vLLM has no "
        f"attention on a CPU for narrower ones: the cache takes {written / own:g} times the memory"
    ]


def route(
    logit_TR: Tensor, bias_R: Tensor, num_active: int
) -> tuple[Tensor, Tensor]:
    """What the stock router does: experts by sigmoid + bias, gates normalised to a sum of K."""
    p_TR = logit_TR.sigmoid()
    index_TK = (p_TR + bias_R / 4).topk(num_active, dim=1).indices
    p_TK = p_TR.gather(1, index_TK)
    return index_TK, p_TK / p_TK.sum(1, keepdim=True) * num_active


def stock_config(config: Any, dtype: torch.dtype) -> Glm4MoeConfig:
    sizes = sizes_of(config)
    common = common_config(config, dtype)
    own, written = _head_dims(config)
    if own != written:  # the same dimensions are rotated, by the same angles
        part = int(own * common["partial_rotary_factor"]) / written
        common |= {"head_dim": written, "partial_rotary_factor": part}
        common["rope_parameters"]["partial_rotary_factor"] = part
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
    own, written = _head_dims(model.config)
    if own != written:
        state |= {
            name: _wider(name, w, own, written) for name, w in state.items()
        }
    moe = model.config.moesaic
    sizes = sizes_of(model.config)
    size = _shared_experts(sizes) * sizes.padded
    for layer, block, factor in zip(
        moe.layers, blocks(model), factors, strict=True
    ):
        router, experts, place = (
            block.router,
            block.experts,
            f"model.layers.{layer}.mlp.",
        )
        state[f"{place}gate.weight"] = router.score_proj.weight * factor
        bias_R = router.selection_bias.float() * factor / 4
        state[f"{place}gate.e_score_correction_bias"] = bias_R
        state[f"{place}experts.gate_up_proj"] = experts.gate_up_proj
        state[f"{place}experts.down_proj"] = experts.down_proj
        for name, weight in shared_weights(block, size).items():
            state[f"{place}shared_experts.{name}"] = weight
    return state


def _head_dims(config: Any) -> tuple[int, int]:
    """Dimensions of a head, and those that are written; a norm over a head leaves it as it is."""
    own = (
        getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )
    return own, own if config.base_model_type == "qwen3" else max(
        own, NARROWEST
    )


def _wider(name: str, weight: Tensor, own: int, written: int) -> Tensor:
    """A weight of the attention with zeros after every head's dimensions; others as they are.

    Scores are divided by the root of the written dimensions: the queries make up for it.
    """
    if name.endswith("o_proj.weight"):
        weight_DHW = weight.unflatten(1, (-1, own))
        return pad(weight_DHW, (0, written - own)).flatten(1)
    if name.split(".")[-2] not in ("q_proj", "k_proj", "v_proj"):
        return weight
    weight_HWD = weight.reshape(len(weight) // own, own, -1)
    if ".q_proj." in name:
        weight_HWD = weight_HWD * (written / own) ** 0.5
    return pad(weight_HWD, (0, 0, 0, written - own)).reshape(
        -1, *weight.shape[1:]
    )


def _shared_experts(sizes: Sizes) -> int:
    """Shared experts have the routed ones' width here: as many as hold our shared neurons."""
    return max(1, -(-sizes.shared // sizes.padded))
