"""Target `dense`: a model of its own family with narrower FFNs, as static pruning leaves it.

No engine needs to know more than the family.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moesaic.export.stock import blocks, changed_elsewhere, sizes_of
from moesaic.modeling import MoEConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")
# Their FFNs are gate_proj, up_proj and down_proj, of one width in all layers.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# What our configuration has besides the family's.
_OURS = (
    "model_type",
    "base_model_type",
    "moesaic",
    "auto_map",
    "architectures",
    "transformers_version",
    "_name_or_path",
)


def supports(config: Any) -> list[str]:
    """Why no model of the family is the same; empty where one is."""
    moe: MoEConfig = config.moesaic
    family = config.base_model_type
    elsewhere = changed_elsewhere(moe)
    if elsewhere:
        return elsewhere
    if moe.router is not None:
        return [
            "its tokens run different neurons; a dense model is what static, "
            "static-repaired and flap leave"
        ]
    reasons = []
    if family not in FAMILIES:
        reasons.append(
            f"its family {family} has other FFNs than {', '.join(FAMILIES)}"
        )
    all_layers = len(moe.layers) == config.num_hidden_layers
    if moe.uniform_sizes is None or not all_layers:
        reasons.append(
            "its layers have different widths, those of its family one; convert flap "
            "with --set widths=equal, static-repaired with layer_budgets=uniform, and all layers"
        )
    if moe.block.output_bias and family != "llama":
        reasons.append(
            f"its FFNs have an output bias, which {family} models have not"
        )
    return reasons


def warnings(config: Any) -> list[str]:
    """What engines do otherwise than transformers: nothing."""
    return []


def stock_config(config: Any, dtype: torch.dtype) -> Any:
    """The family's own configuration, with the width that is left."""
    values = config.to_dict()
    for name in _OURS:
        values.pop(name, None)
    values["intermediate_size"] = sizes_of(config).active
    values["dtype"] = dtype
    if config.moesaic.block.output_bias:
        values["mlp_bias"] = True
    family: Any = CONFIG_MAPPING[config.base_model_type]
    return family(**values)


def stock_state(model: Any, factors: list[float]) -> dict[str, Tensor]:
    """The weights by the family's names: views.

    Where an FFN has an output bias, gate and up have one too, of zeros if need be.
    """
    moe: MoEConfig = model.config.moesaic
    prefix = f"{model.base_model_prefix}."
    paths = [f"{prefix}{moe.replacement_path(layer)}." for layer in moe.layers]
    converted = tuple(paths)
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith(converted)
    }
    for path, block in zip(paths, blocks(model), strict=True):
        for name, tensor in block.shared_expert.state_dict().items():
            state[f"{path}{name}"] = tensor
        if not moe.block.output_bias:
            continue
        state[f"{path}down_proj.bias"] = block.output_bias
        for name in ("gate_proj", "up_proj"):
            weight = state[f"{path}{name}.weight"]
            zeros = weight.new_zeros(len(weight))
            state.setdefault(f"{path}{name}.bias", zeros)
    return state
