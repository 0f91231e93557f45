"""Whole decoder blocks taken out of a model, which stays one of its family.

Shape suffixes: N windows, L tokens of a window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.errors import MoesaicError
from moesaic.families import find_ffns

DEPTH = "num_hidden_layers"


def depth_of(config: Mapping[str, Any]) -> int:
    """How many blocks a configuration says.

    Raises MoesaicError where it says so by another name, as GPT-2's does.
    """
    depth = config.get(DEPTH)
    if depth is None:
        kind = config.get("model_type")
        raise MoesaicError(
            f"the configuration of a {kind} model has no {DEPTH}; blocks cannot be taken "
            "out of it; take another method"
        )
    return int(depth)


def block_changes(
    config: Mapping[str, Any], kept: Sequence[int]
) -> dict[str, Any]:
    """What a configuration says otherwise once only these blocks are left.

    Lists with an entry for each layer, such as `layer_types`, lose theirs too.
    """
    depth = depth_of(config)
    changes: dict[str, Any] = {DEPTH: len(kept)}
    for name, value in config.items():
        by_layer = isinstance(value, list) and "layer" in name
        if by_layer and len(value) == depth:
            changes[name] = [value[layer] for layer in kept]
    return changes


def keep_blocks(model: Any, kept: Sequence[int]) -> None:
    """Takes all other blocks out of a model, in place, and out of its configuration.

    What stays is numbered anew, as a cache counts layers. Costs no copy of a weight.
    """
    ffns = find_ffns(model)
    config = model.config.get_text_config()
    changes = block_changes(config.to_dict(), kept)
    blocks = [ffns.layers[layer] for layer in kept]
    for place, block in enumerate(blocks):
        for module in block.modules():
            attributes = vars(module)
            if "layer_idx" in attributes:
                attributes["layer_idx"] = place
    parent_path, _, name = ffns.layers_path.rpartition(".")
    parent = ffns.base.get_submodule(parent_path)
    setattr(parent, name, nn.ModuleList(blocks))
    for key, value in changes.items():
        setattr(config, key, value)


@torch.no_grad()
def loss_without(model: Any, kept: Sequence[int], windows_NL: Tensor) -> float:
    """The mean loss of the next token with these blocks only; the model stays as it is.

    Costs a forward pass over the windows.
    """
    ffns = find_ffns(model)
    total = 0.0
    with ffns.restored():
        keep_blocks(model, kept)
        for window_L in windows_NL:
            ids_1L = window_L[None].to(model.device)
            output = model(input_ids=ids_1L, labels=ids_1L, use_cache=False)
            total += float(output.loss)
    return total / len(windows_NL)
