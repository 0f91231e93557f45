"""Work per token: multiply-accumulates of matrix products with weights.

The count of the paper's efficiency table (Table 7): every weight of a matrix product
counts once per token, the head for every token, embeddings and element-wise work not at
all. Attention scores, which grow with the context, stand on a line of their own. What a
replacement counts it says itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from moesaic.errors import MoesaicError
from moesaic.families import DenseFFN, FFNs, Mixtures, find_ffns
from moesaic.modeling import (
    MoEConfig,
    MoesaicProjection,
    MoesaicReplacement,
    MoesaicThresholdedLinear,
)


@dataclass(frozen=True)
class Macs:
    """Multiply-accumulates for a number of tokens; `scores` is outside `total`.

    In a mixture `ffn` holds the experts that run, shared experts and dense layers,
    `router` the outer router, and `sub_router` the routers inside the experts.
    """

    attention: float
    ffn: float
    router: float
    head: float
    scores: float
    active_ffn_fraction: float = 1.0
    sub_router: float = 0.0

    @property
    def total(self) -> float:
        routers = self.router + self.sub_router
        return self.attention + self.ffn + routers + self.head


def meta_model(config: Any) -> Any:
    """The model of a configuration without its weights (on the meta device).

    Raises MoesaicError where transformers has no causal language model for it.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises many kinds for odd values
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MoesaicError(
            f"this {config.model_type} config is no causal language model's: {reason}"
        ) from error


def count_macs(model: Any, tokens: int) -> Macs:
    """Counts a dense or converted model, with or without weights.

    `tokens` is the length of the context. Raises MoesaicError for a family whose FFNs
    are not recognised.
    """
    config = model.config
    part = (
        _converted_part(model) if is_converted(config) else _dense_part(model)
    )
    head = model.get_output_embeddings().weight.numel()
    skipped = _skipped_inputs(model)
    attention = matrices(model) - part.matrices - head - skipped.attention
    return Macs(
        attention=attention * tokens,
        ffn=(part.ffn - skipped.ffn) * tokens,
        router=part.router * tokens,
        head=head * tokens,
        scores=_scores(config.get_text_config(), tokens),
        active_ffn_fraction=active_ffn_fraction(config),
        sub_router=part.sub_router * tokens,
    )


def oracle_macs(dense: Macs, dense_config: Any, moe: MoEConfig) -> Macs:
    """Of a reference that no model can hold: as if to know were free."""
    found = find_ffns(meta_model(dense_config))
    found = replace(
        found, kept=tuple(set(range(len(found.layers))) - set(moe.layers))
    )
    sizes = moe.first_sizes
    with_shared = moe.outer is not None and moe.outer.shared_sizes is not None
    skipped = 1 - sizes.active / sizes.total
    saved = skipped * routed_weights(found, with_shared)
    fraction = 1 - skipped
    return replace(dense, ffn=dense.ffn - saved, active_ffn_fraction=fraction)


@dataclass(frozen=True)
class _FFNPart:
    """Weights per token of a model's FFNs, and what the model's matrices hold there."""

    ffn: float
    router: float
    sub_router: float
    matrices: int


@dataclass(frozen=True)
class _Skipped:
    """Weights that linear layers leave out for a token, in FFNs and elsewhere."""

    ffn: float = 0.0
    attention: float = 0.0


def _skipped_inputs(model: Any) -> _Skipped:
    """Of linear layers that were replaced by ones that skip inputs."""
    if not is_converted(model.config) or model.config.moesaic.linears is None:
        return _Skipped()
    path = model.config.moesaic.path.partition("{}.")[2]
    ffn = 0.0
    attention = 0.0
    for name, module in model.named_modules():
        if not isinstance(module, MoesaicThresholdedLinear):
            continue
        skipped = module.weight.numel() - module.active_weights()
        if f".{path}." in name:
            ffn += skipped
        else:
            attention += skipped
    return _Skipped(ffn, attention)


def _converted_part(model: Any) -> _FFNPart:
    moe: MoEConfig = model.config.moesaic
    replacements = [
        module
        for module in model.modules()
        if isinstance(module, MoesaicReplacement)
        and not isinstance(module, MoesaicThresholdedLinear)
    ]
    ffn = sum(one.active_weights() for one in replacements)
    routers = sum(one.router_weights() for one in replacements)
    inside = sum(matrices(one) for one in replacements)
    neuron = moe.block.matrices * moe.block.hidden_size
    dense = _layers_kept(model.config) * neuron * moe.first_sizes.total
    if moe.outer is None:
        return _FFNPart(ffn + dense, routers, 0.0, int(inside + dense))
    # Of layers that stay, the experts that run are as they were.
    dense *= moe.outer.num_active
    base = getattr(model, model.base_model_prefix, model)
    layers_path, _, path = moe.path.partition(".{}.")
    layers = base.get_submodule(layers_path)
    around, outer_router = _around_experts(layers, path)
    experts = _experts(layers, path)
    shared = [one for one in replacements if not any(one is e for e in experts)]
    ffn += dense + around - sum(matrices(one) for one in shared)
    return _FFNPart(ffn, outer_router, routers, around)


def _experts(layers: Any, path: str) -> list[nn.Module]:
    """The modules of routed experts, in the layers that have some."""
    found = []
    for layer in layers:
        try:
            found.append(layer.get_submodule(path))
        except AttributeError:
            continue
    return found


def _dense_part(model: Any) -> _FFNPart:
    found = find_ffns(model)
    routed = routed_weights(found)
    if not isinstance(found, Mixtures):
        return _FFNPart(routed, 0, 0, routed)
    around, outer_router = _around_experts(found.layers, found.ffn_path)
    return _FFNPart(routed + around, outer_router, 0, around)


def routed_weights(found: FFNs, with_shared: bool = False) -> int:
    """Weights of the FFNs that a conversion changes, as many as one token meets.

    With those of a mixture's shared experts where `with_shared`.
    """
    each = sum(_ffn_weights(found.read(layer)) for layer in found.converted)
    if not isinstance(found, Mixtures):
        return each
    shared = 0
    if with_shared:
        layers = found.converted
        shared = sum(_ffn_weights(found.read_beside(layer)) for layer in layers)
    return each * found.outer_active + shared


def _ffn_weights(ffn: DenseFFN | None) -> int:
    if ffn is None:
        return 0
    return sum(t.numel() for t in ffn.tensors().values() if t.ndim == 2)


def _around_experts(layers: Any, path: str) -> tuple[int, int]:
    """Weights of shared experts and dense layers beside the experts; of outer routers."""
    parent, _, name = path.rpartition(".")
    beside = 0
    router = 0
    for layer in layers:
        try:
            block = layer.get_submodule(parent)
        except AttributeError:  # a layer without an FFN, as hybrids have
            continue
        linear = matrices(block)
        experts = getattr(block, name, None)
        beside += linear
        router += _flat_weights(block) - linear - _flat_weights(experts)
    return beside, router


def _flat_weights(module: nn.Module | None) -> int:
    """Weights in parameters of two dimensions."""
    if module is None:
        return 0
    return sum(p.numel() for p in module.parameters() if p.ndim == 2)


def is_converted(config: Any) -> bool:
    """Whether moesaic has converted the model of this configuration."""
    return isinstance(getattr(config, "moesaic", None), MoEConfig)


def active_ffn_fraction(config: Any) -> float:
    """Share of the model's FFN neurons that a token computes; 1 before a conversion.

    In a mixture, of the neurons of the experts that a token is sent to, each expert
    counting alike, and of a shared one that has been converted.
    """
    if not is_converted(config):
        return 1.0
    moe: MoEConfig = config.moesaic
    total = float(moe.first_sizes.total)
    converted = len(moe.layers)
    if not converted:
        return 1.0
    active = sum(sizes.active for sizes in moe.sizes) / converted
    if moe.outer is not None:
        outer = moe.outer
        whole = sum(map(len, outer.whole.values()))
        share = whole / (converted * outer.num_experts)
        active = outer.num_active * (share * total + (1 - share) * active)
        total *= outer.num_active
        if outer.shared_sizes is not None:
            active += outer.shared_sizes.active
            total += outer.shared_sizes.total
    kept = _layers_kept(config)
    return (converted * active + kept * total) / ((converted + kept) * total)


def _layers_kept(config: Any) -> int:
    """Layers that a conversion has left, of those with experts in a mixture."""
    moe: MoEConfig = config.moesaic
    depth = config.get_text_config().num_hidden_layers
    if moe.outer is not None:
        depth = moe.outer.num_layers
    return int(depth - len(moe.layers))


def matrices(module: nn.Module | None) -> int:
    """Weights of all matrix products inside a module."""
    if module is None:
        return 0
    kinds = nn.Linear | Conv1D | MoesaicProjection | MoesaicThresholdedLinear
    return sum(
        m.weight.numel() for m in module.modules() if isinstance(m, kinds)
    )


def _scores(config: Any, tokens: int) -> float:
    """Queries times keys and probabilities times values, causal, within windows."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, "sliding_window", None)
    # A family with a window and no list of layer types slides in every layer.
    types = getattr(config, "layer_types", None)
    if not types:
        types = ["sliding_attention"] * config.num_hidden_layers
    seen = 0
    for kind in types:
        reach = tokens
        if window and kind == "sliding_attention":
            reach = min(window, tokens)
        seen += reach * (reach + 1) // 2 + (tokens - reach) * reach
    return float(2 * heads * head_dim * seen)
