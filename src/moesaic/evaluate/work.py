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
from moesaic.families.load import why_not_made
from moesaic.families.mixture import experts_of
from moesaic.modeling import (
    MoEConfig,
    MoesaicProjection,
    MoesaicReplacement,
    MoesaicThresholdedLinear,
)

# Types of layers whose queries meet no keys.
WITHOUT_SCORES = ("linear_attention", "conv", "moe")


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
        return self.attention + self.ffn_and_routers + self.head

    @property
    def ffn_and_routers(self) -> float:
        """What stands in the place of FFNs."""
        return self.ffn + self.router + self.sub_router


def meta_model(config: Any) -> Any:
    """The model of a configuration without its weights (on the meta device).

    Raises MoesaicError where transformers has no causal language model for it.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises many kinds for odd values
        raise MoesaicError(
            f"this {config.model_type} config is no causal language model's: "
            f"{why_not_made(error)}"
        ) from error


def count_macs(model: Any, tokens: int) -> Macs:
    """Counts a dense or converted model, with or without weights.

    `tokens` is the length of the context. Raises MoesaicError for a family whose FFNs
    are not recognised.
    """
    config = model.config
    if is_converted(config):
        part = _converted_part(model)
    else:
        part = _dense_part(model)
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
    ffns = find_ffns(meta_model(dense_config))
    all_layers = set(range(len(ffns.layers)))
    unconverted = all_layers - set(moe.layers)
    ffns = replace(ffns, unconverted=tuple(unconverted))
    with_shared = moe.outer is not None and moe.outer.shared_sizes is not None

    sizes = moe.first_sizes
    skipped = 1 - sizes.active / sizes.total
    saved = skipped * routed_weights(ffns, with_shared)
    return replace(
        dense,
        ffn=dense.ffn - saved,
        active_ffn_fraction=1 - skipped,
    )


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
    if not is_converted(model.config):
        return _Skipped()
    moe: MoEConfig = model.config.moesaic
    if moe.linears is None:
        return _Skipped()
    # An FFN in parts, as OPT's, has more than one path.
    patterns = (moe.path, *moe.identities)
    ffn_paths = [pattern.partition("{}.")[2] for pattern in patterns]
    ffn = 0.0
    attention = 0.0
    for name, module in model.named_modules():
        if not isinstance(module, MoesaicThresholdedLinear):
            continue
        skipped = module.weight.numel() - module.active_weights()
        if any(f".{path}." in f"{name}." for path in ffn_paths):
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
    ffn = sum(module.active_weights() for module in replacements)
    routers = sum(module.router_weights() for module in replacements)
    inside = sum(matrices(module) for module in replacements)
    neuron = moe.block.matrices * moe.block.hidden_size
    kept_ffn = neuron * moe.first_sizes.total
    kept = _layers_kept(model.config) * kept_ffn
    if moe.outer is None:
        return _FFNPart(
            ffn=ffn + kept,
            router=routers,
            sub_router=0.0,
            matrices=int(inside + kept),
        )

    # Of layers that stay, the experts that run are as they were.
    kept *= moe.outer.num_active
    base = getattr(model, model.base_model_prefix, model)
    layers_path, _, path = moe.path.partition(".{}.")
    layers = base.get_submodule(layers_path)
    around, outer_router = _around_experts(layers, path)
    experts = {id(module) for module in _experts(layers, path)}
    # `around` holds what the replacements of shared experts hold.
    counted_twice = sum(
        matrices(module) for module in replacements if id(module) not in experts
    )
    ffn += kept + around - counted_twice
    return _FFNPart(
        ffn=ffn,
        router=outer_router,
        sub_router=routers,
        matrices=around,
    )


def _experts(layers: Any, path: str) -> list[nn.Module]:
    """The modules of routed experts, in the layers that have some."""
    experts = []
    for layer in layers:
        try:
            experts.append(layer.get_submodule(path))
        except AttributeError:
            continue
    return experts


def _dense_part(model: Any) -> _FFNPart:
    ffns = find_ffns(model)
    routed = routed_weights(ffns)
    if not isinstance(ffns, Mixtures):
        return _FFNPart(ffn=routed, router=0, sub_router=0, matrices=routed)
    around, outer_router = _around_experts(ffns.layers, ffns.ffn_path)
    return _FFNPart(
        ffn=routed + around,
        router=outer_router,
        sub_router=0,
        matrices=around,
    )


def routed_weights(ffns: FFNs, with_shared: bool = False) -> int:
    """Weights of the FFNs that a conversion changes, as many as one token meets.

    With those of a mixture's shared experts where `with_shared`.
    """
    routed = 0
    for layer in ffns.converted:
        routed += _ffn_weights(ffns.read(layer))
    if not isinstance(ffns, Mixtures):
        return routed
    shared = 0
    if with_shared:
        for layer in ffns.converted:
            shared += _ffn_weights(ffns.read_shared_expert(layer))
    return routed * ffns.outer_active + shared


def _ffn_weights(ffn: DenseFFN | None) -> int:
    """Weights of an FFN's matrices."""
    if ffn is None:
        return 0
    tensors = ffn.tensors().values()
    return sum(tensor.numel() for tensor in tensors if tensor.ndim == 2)


def _around_experts(layers: Any, path: str) -> tuple[int, int]:
    """Weights of shared experts and dense layers; of outer routers."""
    parent, _, name = path.rpartition(".")
    around = 0
    router = 0
    for layer in layers:
        try:
            block = layer.get_submodule(parent)
        except AttributeError:  # a layer without an FFN, as hybrids have
            continue
        linear = matrices(block)
        experts = getattr(block, name, None)
        around += linear
        router += _flat_weights(block) - linear - _flat_weights(experts)
    return around, router


def _flat_weights(module: nn.Module | None) -> int:
    """Weights in parameters of two dimensions."""
    if module is None:
        return 0
    parameters = module.parameters()
    return sum(weight.numel() for weight in parameters if weight.ndim == 2)


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
    outer = moe.outer
    total = float(moe.first_sizes.total)
    converted = len(moe.layers)
    if not converted:
        return 1.0
    active_sum = sum(sizes.active for sizes in moe.sizes)
    active = active_sum / converted
    if outer is not None:
        whole_experts = sum(map(len, outer.whole.values()))
        all_experts = converted * outer.num_experts
        whole_share = whole_experts / all_experts
        expert_active = whole_share * total + (1 - whole_share) * active
        active = outer.num_active * expert_active
        total *= outer.num_active
        if outer.shared_sizes is not None:
            active += outer.shared_sizes.active
            total += outer.shared_sizes.total
    kept = _layers_kept(config)
    active_neurons = converted * active + kept * total
    all_neurons = (converted + kept) * total
    return active_neurons / all_neurons


def active_ffn_fraction_of(model: Any) -> float | None:
    """The same of a loaded model; None for a mixture that moesaic did not convert.

    An export is one: which of its neurons a token computes only its family knows.
    """
    if not is_converted(model.config) and experts_of(model) is not None:
        return None
    return active_ffn_fraction(model.config)


def _layers_kept(config: Any) -> int:
    """Layers that a conversion has left, of those with experts in a mixture."""
    moe: MoEConfig = config.moesaic
    layers = config.get_text_config().num_hidden_layers
    if moe.outer is not None:
        layers = moe.outer.num_layers
    return int(layers - len(moe.layers))


def matrices(module: nn.Module | None) -> int:
    """Weights of all matrix products inside a module."""
    if module is None:
        return 0
    kinds = nn.Linear | Conv1D | MoesaicProjection | MoesaicThresholdedLinear
    weights = 0
    for submodule in module.modules():
        if isinstance(submodule, kinds):
            weights += submodule.weight.numel()
    return weights


def _scores(config: Any, tokens: int) -> float:
    """Queries times keys and probabilities times values, causal, within windows.

    Of layers that attend: the recurrence of others is left out.
    """
    heads = config.num_attention_heads
    key_dim, value_dim = _head_dims(config)
    window = getattr(config, "sliding_window", None)
    # A family with a window and no list of layer types slides in every layer.
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:
        layer_types = ["sliding_attention"] * config.num_hidden_layers
    pairs = 0  # of a query and a key that it sees
    for layer_type in layer_types:
        if layer_type in WITHOUT_SCORES:
            continue
        reach = tokens
        if window and layer_type == "sliding_attention":
            reach = min(window, tokens)
        first_queries = reach * (reach + 1) // 2
        later_queries = (tokens - reach) * reach
        pairs += first_queries + later_queries
    return float(heads * (key_dim + value_dim) * pairs)


def _head_dims(config: Any) -> tuple[int, int]:
    """Numbers of a head's key, and of its value."""
    head_dim = getattr(config, "head_dim", None)
    if not head_dim:
        head_dim = config.hidden_size // config.num_attention_heads
    value_dim = getattr(config, "v_head_dim", None) or head_dim
    unplaced = getattr(config, "qk_nope_head_dim", None)
    if unplaced:  # DeepSeek's: keys with and without a position
        return unplaced + config.qk_rope_head_dim, value_dim
    return head_dim, value_dim
