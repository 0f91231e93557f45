"""Finds the FFNs of a model, be it dense or a mixture already."""

from __future__ import annotations

from typing import Any

from torch import nn

from moesaic.errors import MoesaicError
from moesaic.families.mixture import find_mixtures
from moesaic.families.structure import (
    SUPPORTED,
    FFNs,
    LayerStack,
    find_dense_ffns,
)


def find_ffns(model: Any) -> FFNs:
    """Locates the FFNs of a causal language model, or the experts (`Mixtures`) of one.

    Raises MoesaicError, listing what is supported and what was found, for a model whose
    FFNs it does not recognise or whose FFN weights are quantised.
    """
    stack = _find_layers(model)
    mixtures = find_mixtures(model, stack)
    if mixtures is not None:
        return mixtures
    return find_dense_ffns(model, stack)


def _find_layers(model: Any) -> LayerStack:
    """The first list of as many modules as the model has layers."""
    name = type(model).__name__
    prefix = model.base_model_prefix
    base = getattr(model, prefix, model)
    if base is model:
        prefix = ""
    depth = model.config.get_text_config().num_hidden_layers
    for path, module in base.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        if len(module) == depth and depth >= 1:
            return LayerStack(name, model, base, prefix, module, path)
    raise MoesaicError(
        f"{name}: no stack of {depth} layers found; supported are {SUPPORTED}"
    )
