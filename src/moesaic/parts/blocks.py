"""Whole decoder blocks taken out of a model, which stays one of its family.

Shape suffixes: N windows, L tokens of a window, D hidden size, 1 one window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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


def check_alike(model: Any, name: str) -> None:
    """Raises MoesaicError for a model whose blocks hold different parameters.

    What is left would then be more or less work than planned, and configurations say
    which block is of which kind in many ways.
    """
    first: dict[str, Any] = {}
    for layer, block in enumerate(find_ffns(model).layers):
        shapes = {
            key: tuple(tensor.shape)
            for key, tensor in block.state_dict().items()
        }
        first = first or shapes
        if shapes != first:
            raise MoesaicError(
                f"{name}: block {layer} is of another kind than block 0; whole blocks are "
                "taken only out of models whose blocks are all alike; take another method"
            )


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
def losses_without(
    model: Any, kept: Sequence[int], windows_NL: Tensor
) -> list[float]:
    """The mean loss of the next token with these blocks but one, for each of them in turn.

    The model stays as it is. What enters a block does not change when it is left out, so
    it is computed once: k blocks cost about k / 2 forward passes over the windows, and a
    window's input to each block as memory.
    """
    ffns = find_ffns(model)
    totals = [0.0] * len(kept)
    with ffns.restored():
        keep_blocks(model, kept)
        for window_L in windows_NL:
            ids_1L = window_L[None].to(model.device)
            inputs = _block_inputs(model, ids_1L)
            for place, input_1LD in enumerate(inputs):
                totals[place] += _loss_after(model, place, input_1LD, ids_1L)
    return [total / len(windows_NL) for total in totals]


def _block_inputs(model: Any, ids_1L: Tensor) -> list[Tensor]:
    """What enters each block, in order."""
    ffns = find_ffns(model)
    inputs: list[Tensor] = []

    def keep(block: Any, args: Any, kwargs: Any) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])

    with ExitStack() as hooks:
        for block in ffns.layers:
            hook = block.register_forward_pre_hook(keep, with_kwargs=True)
            hooks.enter_context(hook)
        ffns.base(input_ids=ids_1L, use_cache=False)
    return inputs


def _loss_after(
    model: Any, place: int, input_1LD: Tensor, ids_1L: Tensor
) -> float:
    """The loss where this block passes on its input, which is known."""
    ffns = find_ffns(model)
    depth = len(ffns.layers)

    def pass_on(block: Any, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return input_1LD, *output[1:]
        return input_1LD

    hook = ffns.layers[place].register_forward_hook(pass_on)
    with ffns.restored(), hook:
        keep_blocks(model, range(place, depth))
        output = model(input_ids=ids_1L, labels=ids_1L, use_cache=False)
    return float(output.loss)
