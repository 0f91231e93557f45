"""Finished layers of a conversion: written as shards, and built again from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moesaic.conversion.layer_error import LayerReport
from moesaic.modeling import (
    MoEConfig,
    new_linear,
    new_outer_shared,
    new_replacement,
)
from moesaic.output import draft as drafts


@dataclass(frozen=True)
class SavedLayer:
    """What stands in for a layer's FFN, or its experts and the shared one."""

    replacements: list[Any]
    report: LayerReport


def save_layer(
    draft: Path,
    layer: int,
    prefixes: Sequence[str],
    replacements: Sequence[Any],
    report: LayerReport,
) -> None:
    """Writes the replacements of a layer, under their names in the model's state."""
    state = {}
    for prefix, replacement in zip(prefixes, replacements, strict=False):
        for name, tensor in replacement.state_dict().items():
            state[f"{prefix}.{name}"] = tensor
    values = report.to_dict(timing=False)
    drafts.save_layer(draft, layer, state, values)


def read_from_draft(
    draft: Path,
    layer: int,
    prefixes: Sequence[str],
    replacements: Sequence[Any],
    report: LayerReport,
) -> bool:
    """The replacements take for weights what `save_layer` has just written, on the CPU.

    The file is mapped, not read: a finished layer takes no memory of its own. False
    where it is not there, or another's, as on another machine: weights stay in memory.
    """
    saved = drafts.load_layer(draft, layer)
    if saved is None:
        return False
    state, values = saved
    written = json.dumps(report.to_dict(timing=False))
    if json.dumps(values) != written:
        return False
    _take_weights(replacements, prefixes, state)
    return True


def _take_weights(
    replacements: Sequence[Any],
    prefixes: Sequence[str],
    state: dict[str, Any],
) -> None:
    """The replacements get these very tensors for weights."""
    for prefix, replacement in zip(prefixes, replacements, strict=False):
        weights = _weights_of(state, prefix)
        replacement.load_state_dict(weights, assign=True)
        replacement.eval()


def load_layer(
    draft: Path, layer: int, prefixes: Sequence[str], moe: MoEConfig
) -> SavedLayer | None:
    """A layer that an earlier run finished, or None where it is absent or damaged."""

    def empty(report: LayerReport) -> list[Any]:
        moe_of_layer = moe.with_whole(layer, report.whole_experts)
        return _empty(moe_of_layer, layer)

    return _load(draft, layer, prefixes, empty)


def unfilled_layer(
    layer: int, report: LayerReport, moe: MoEConfig, device: torch.device
) -> SavedLayer:
    """A finished layer that another process has, to be filled with its weights."""
    moe_of_layer = moe.with_whole(layer, report.whole_experts)
    replacements = _empty(moe_of_layer, layer)
    for replacement in replacements:
        replacement.to_empty(device=device)
        replacement.eval()
    return SavedLayer(replacements, report)


def load_linears(
    draft: Path,
    layer: int,
    prefixes: Sequence[str],
    moe: MoEConfig,
    dense: Sequence[Any],
) -> SavedLayer | None:
    """The same for a layer whose linear layers `dense` were replaced."""

    def empty(report: LayerReport) -> list[Any]:
        moe_of_layer = moe.with_shares(layer, report.shares)
        assert moe.linears is not None
        return [
            new_linear(moe_of_layer, linear, layer, path)
            for linear, path in zip(dense, moe.linears.paths, strict=True)
        ]

    return _load(draft, layer, prefixes, empty)


def _load(
    draft: Path,
    layer: int,
    prefixes: Sequence[str],
    empty: Callable[[LayerReport], list[Any]],
) -> SavedLayer | None:
    saved = drafts.load_layer(draft, layer)
    if saved is None:
        return None
    state, values = saved
    try:
        report = LayerReport(seconds=None, **values)
        replacements = empty(report)
        _take_weights(replacements, prefixes, state)
    except (ValueError, TypeError, KeyError, RuntimeError):
        return None
    return SavedLayer(replacements, report)


def _weights_of(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The tensors below a prefix, by their names without it."""
    start = f"{prefix}."
    weights = {}
    for name, tensor in state.items():
        if name.startswith(start):
            weights[name.removeprefix(start)] = tensor
    return weights


def _empty(moe: MoEConfig, layer: int) -> list[Any]:
    """The replacements of a layer without weights."""
    with torch.device("meta"):
        replacement: Any = new_replacement(moe, layer)
        shared = new_outer_shared(moe)
    if shared is None:
        return [replacement]
    return [replacement, shared]
