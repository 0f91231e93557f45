"""Finds the FFNs of a model, be it dense or a mixture already."""

from __future__ import annotations

from typing import Any

from torch import nn

from moesaic.errors import MoesaicError
from moesaic.families.mixture import find_mixtures
from moesaic.families.structure import (
    LLAMA,
    SUPPORTED,
    FFNs,
    LayerStack,
    find_dense_ffns,
)
from moesaic.modeling import MoEConfig


def find_ffns(model: Any) -> FFNs:
    """Locates the FFNs of a causal language model, or the experts (`Mixtures`) of one.

    Of a model that moesaic made they are what stands in their place; these cannot be
    read. Raises MoesaicError, listing what is supported and what was found, for a model whose
    FFNs it does not recognise or whose FFN weights are quantised.
    """
    stack = _find_layers(model)
    moe = getattr(model.config, "moesaic", None)
    if isinstance(moe, MoEConfig):
        return _find_replacements(moe, stack)
    mixtures = find_mixtures(model, stack)
    if mixtures is not None:
        return mixtures
    return find_dense_ffns(model, stack)


def _find_replacements(moe: MoEConfig, stack: LayerStack) -> FFNs:
    """Where a converted model keeps what stands for its FFNs."""
    within_layer = len(f"{stack.layers_path}.{{}}.")
    identities = tuple(path[within_layer:] for path in moe.identities)
    return FFNs(
        **vars(stack),
        ffn_path=moe.path[within_layer:],
        identities=identities,
        pattern=LLAMA,
        activation=moe.block.activation,
    )


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
