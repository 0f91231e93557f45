"""Converted layers in a draft: from blocks to tensors with the model's names, and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moesaic.conversion.layer_error import LayerReport
from moesaic.modeling import new_beside, new_block
from moesaic.output.draft import State, load_layer, save_layer


def save_blocks(
    draft: Path,
    layer: int,
    prefixes: Sequence[str],
    blocks: Sequence[nn.Module],
    report: LayerReport,
) -> None:
    """Writes what replaces a layer's FFN, or its experts and the shared one.

    `prefixes` say where each block lies in the model.
    """
    state: State = {}
    for prefix, block in zip(prefixes, blocks, strict=False):
        own = block.state_dict()
        state |= {f"{prefix}.{name}": tensor for name, tensor in own.items()}
    save_layer(draft, layer, state, report.to_dict(timing=False))


def load_blocks(
    draft: Path, layer: int, prefixes: Sequence[str], config: Any
) -> tuple[list[nn.Module], LayerReport] | None:
    """A layer that an earlier run finished, or None where it is absent or damaged.

    Which experts of a mixture it left whole goes into the configuration.
    """
    saved = load_layer(draft, layer)
    if saved is None:
        return None
    state, values = saved
    try:
        report = LayerReport(seconds=None, **values)
        _note_whole_experts(config, layer, report)
        blocks = _empty_blocks(config, layer)
        for prefix, block in zip(prefixes, blocks, strict=False):
            own = _below(state, prefix)
            block.load_state_dict(own, assign=True)
            block.eval()
    except (ValueError, TypeError, KeyError, RuntimeError):
        return None
    return blocks, report


def _note_whole_experts(config: Any, layer: int, report: LayerReport) -> None:
    whole = [row["expert"] for row in report.experts if "whole" in row]
    if whole:
        config.moesaic["whole"][str(layer)] = whole


def _empty_blocks(config: Any, layer: int) -> list[nn.Module]:
    """A layer's blocks without memory for their weights."""
    with torch.device("meta"):
        blocks: list[nn.Module] = [new_block(config, layer)]
        if "beside" in config.moesaic:
            blocks.append(new_beside(config))
    return blocks


def _below(state: State, prefix: str) -> State:
    """The tensors under a prefix, by their names below it."""
    start = f"{prefix}."
    return {
        name.removeprefix(start): tensor
        for name, tensor in state.items()
        if name.startswith(start)
    }
