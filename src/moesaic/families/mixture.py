"""Finds the experts of a model that is a mixture already.

transformers 5 keeps every family's experts in one module with fused weights, called
with hidden states, chosen experts and gate weights. That module is what a conversion
replaces. The outer router, its normalisation, shared experts and auxiliary losses stay
the family's own code.

Shape suffixes: B batch, L tokens of a sample, T tokens, D hidden_size, O experts of a
token, M neurons of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.errors import MoesaicError, first_line
from moesaic.families.ffn import DenseFFN
from moesaic.families.structure import (
    LLAMA,
    FFNs,
    LayerStack,
    Pattern,
    activation_of,
    matches,
    random_inputs,
    relative_difference,
    tolerance,
)

SUPPORTED_MIXTURES = (
    "Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V2, DeepSeek-V3, Granite-MoE, "
    "Glm4-MoE and others with fused gate/up/down experts without biases"
)
_FUSED_EXPERTS = Pattern(up="gate_up_proj", down="down_proj", fused=True)
_SHARED_NAMES = ("shared_expert", "shared_experts")
# What transformers marks experts with whose weights lie otherwise, and the usual value.
_USUAL_FORM = {
    "is_transposed": False,
    "is_concatenated": True,
    "has_post_expert_norm": False,
}


@dataclass(frozen=True)
class Mixtures(FFNs):
    """Where a mixture keeps its experts.

    `ffn_path` is the module of all experts of a layer. `shared_expert_path` is an FFN that
    every token runs: a "shared expert".
    """

    # Layers that have experts; the others stay as they are.
    mixed: tuple[int, ...] = ()
    num_outer: int = 0  # experts of a layer
    outer_active: int = 0  # of them run for a token
    shared_expert_path: str | None = None  # within a layer

    @property
    def converted(self) -> tuple[int, ...]:
        return tuple(
            layer for layer in self.mixed if layer not in self.unconverted
        )

    def read(self, layer: int, expert: int = 0) -> DenseFFN:
        """One expert in canonical form: views of the model's tensors, no copy."""
        experts: Any = self.replaced(layer)
        gate_up = experts.gate_up_proj.detach()[expert]
        gate_MD, up_MD = gate_up.chunk(2)
        down_DM = experts.down_proj.detach()[expert]
        return DenseFFN(up_MD, down_DM, self.activation, gate_MD)

    def read_shared_expert(self, layer: int) -> DenseFFN | None:
        """The shared expert beside the routed ones, where the family has one."""
        if self.shared_expert_path is None:
            return None
        shared: Any = self.layers[layer].get_submodule(self.shared_expert_path)
        gate_FD = shared.gate_proj.weight.detach()
        up_FD = shared.up_proj.weight.detach()
        down_DF = shared.down_proj.weight.detach()
        return DenseFFN(up_FD, down_DF, self.activation, gate_FD)

    def prefixes(self, layer: int) -> list[str]:
        """Where the state dict keeps what replaces the experts, and the shared one."""
        experts = self.state_prefix(layer)
        if self.shared_expert_path is None:
            return [experts]
        layer_prefix = experts.removesuffix(self.ffn_path)
        return [experts, layer_prefix + self.shared_expert_path]

    def replaced_paths(self) -> tuple[str, ...]:
        if self.shared_expert_path is None:
            return (self.ffn_path,)
        return (self.ffn_path, self.shared_expert_path)


def experts_of(layer: nn.Module) -> str | None:
    """Path of the module of routed experts in a layer, or None in a dense one.

    In a whole model it is that of the first layer with experts.
    """
    for path, _ in layer.named_modules():
        name = path.split(".")[-1]
        if name == "experts":
            return str(path)
    return None


def find_mixtures(model: Any, stack: LayerStack) -> Mixtures | None:
    """Locates the experts of a causal language model; None where it is dense.

    Raises MoesaicError, listing what is supported, for experts of another form or with
    quantised weights, and where layers differ in their experts.
    """
    paths: dict[int, str] = {}
    for number, layer in enumerate(stack.layers):
        path = experts_of(layer)
        if path is not None:
            paths[number] = path
    if not paths:
        return None
    first = min(paths)
    layer = stack.layers[first]
    path = paths[first]
    experts: Any = layer.get_submodule(path)
    outer_active = _active_experts(model, stack.name, experts)
    mixtures = Mixtures(
        **vars(stack),
        ffn_path=path,
        identities=(),
        pattern=_FUSED_EXPERTS,
        mixed=tuple(sorted(paths)),
        outer_active=outer_active,
        num_outer=len(experts.gate_up_proj),
        activation=activation_of(model, stack.name),
        shared_expert_path=_shared_expert_path(layer, path),
    )
    for number, path in paths.items():
        _check_layer(mixtures, number, path)
    return mixtures


def _active_experts(model: Any, name: str, experts: nn.Module) -> int:
    """How many experts run for a token.

    Raises MoesaicError where that is not known, or the experts cannot be split.
    """
    config = model.config.get_text_config()
    active = getattr(config, "num_experts_per_tok", None)
    reason = _unlike(experts)
    if reason is None and isinstance(active, int):
        return active
    if reason is None:
        reason = "its config names no num_experts_per_tok"
    raise MoesaicError(
        f"{name} is a mixture of experts whose experts ({type(experts).__name__}) "
        f"cannot be split: {reason}; supported mixtures are {SUPPORTED_MIXTURES}"
    )


def _shared_expert_path(layer: nn.Module, experts_path: str) -> str | None:
    """Path of a plain gate/up/down FFN beside the experts that is named as shared.

    None for one with biases.
    """
    parent_path = experts_path.rpartition(".")[0]
    parent = layer.get_submodule(parent_path)
    for name, module in parent.named_children():
        if name in _SHARED_NAMES and matches(module, LLAMA):
            if _has_biases(module):
                return None
            return f"{parent_path}.{name}"
    return None


def _has_biases(module: nn.Module) -> bool:
    names = [name for name, _ in module.named_parameters()]
    return any(name.endswith("bias") for name in names)


def _unlike(experts: Any) -> str | None:
    """Why a module is not one of fused gate/up/down experts; None where it is."""
    gate_up: Any = getattr(experts, "gate_up_proj", None)
    down: Any = getattr(experts, "down_proj", None)
    if isinstance(experts, nn.ModuleList):
        return "they are separate modules"
    if not _is_stack(gate_up) or not _is_stack(down):
        return "they have no fused gate_up_proj and down_proj"
    if getattr(experts, "limit", None) is not None:
        return (
            "gate and up are clamped before they are multiplied, which sub-experts do "
            "not hold"
        )
    if _has_biases(experts):
        return "they have biases"
    for mark, usual in _USUAL_FORM.items():
        if getattr(experts, mark, usual) != usual:
            return "gate and up are interleaved, transposed or normalised"
    _, gate_up_rows, gate_up_columns = gate_up.shape
    _, hidden, neurons = down.shape
    if gate_up_rows != 2 * neurons or gate_up_columns != hidden:
        return "their weights are not (E, 2m, d) and (E, d, m)"
    return None


def _is_stack(weight: Any) -> bool:
    """Whether it is one matrix an expert."""
    return isinstance(weight, Tensor) and weight.ndim == 3


def _check_layer(mixtures: Mixtures, layer: int, path: str) -> None:
    """A layer has the experts of the first, and they compute what we believe."""
    name = mixtures.name
    first = mixtures.mixed[0]
    first_experts: Any = mixtures.replaced(first)
    experts: Any = mixtures.layers[layer].get_submodule(path)
    same_class = type(experts) is type(first_experts)
    if path != mixtures.ffn_path or not same_class:
        raise MoesaicError(
            f"{name}: layer {layer} has other experts than layer {first}"
        )
    first_shape = tuple(first_experts.gate_up_proj.shape)
    weight = experts.gate_up_proj
    shape = tuple(weight.shape)
    if shape != first_shape:
        raise MoesaicError(
            f"{name}: layer {layer} has experts of shape {shape}, layer {first} of "
            f"{first_shape}; layers of different shapes are not supported"
        )
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise MoesaicError(
            f"{name}: the expert weights are quantised ({weight.dtype}); convert the "
            "model first and quantise the result"
        )
    if not weight.is_meta:
        _check_experts(mixtures, layer)
        _check_shared_expert(mixtures, layer)


@torch.no_grad()
def _check_experts(mixtures: Mixtures, layer: int) -> None:
    """Compares each of our canonical experts with the module, on one random input."""
    module: Any = mixtures.replaced(layer)
    count = mixtures.num_outer
    experts = [mixtures.read(layer, number) for number in range(count)]
    # As many tokens as experts, one for each.
    x_TD = random_inputs(count, experts[0].up_FD)
    index_T = torch.arange(count, device=x_TD.device)
    index_TO = index_T[:, None]
    gate_TO = torch.full_like(x_TD[:, :1], 0.5)
    try:
        expected_TD = module(x_TD, index_TO, gate_TO)
    except Exception as error:  # a module of another kind may raise anything
        reason = first_line(error)
        raise MoesaicError(
            f"{mixtures.name}: the experts of layer {layer} cannot be run ({reason}); "
            f"supported mixtures are {SUPPORTED_MIXTURES}"
        ) from error
    rows = []
    for expert, x_1D in zip(experts, x_TD.split(1), strict=True):
        h_1M = expert.hidden(x_1D)
        rows.append(expert.output(h_1M))
    ours_TD = 0.5 * torch.cat(rows)
    if not torch.isfinite(expected_TD).all():
        return  # broken weights are reported by name, by the conversion
    relative = relative_difference(ours_TD, expected_TD)
    if not relative <= tolerance(x_TD.dtype):
        raise MoesaicError(
            f"{mixtures.name}: the experts of layer {layer} have the usual weights but "
            f"compute something else (relative difference {relative:.2g}); supported "
            f"mixtures are {SUPPORTED_MIXTURES}"
        )


@torch.no_grad()
def _check_shared_expert(mixtures: Mixtures, layer: int) -> None:
    """The shared expert gets the layer's inputs, and computes what we believe."""
    expert = mixtures.read_shared_expert(layer)
    if expert is None:
        return
    x_TD = random_inputs(4, expert.up_FD)
    input_BLD, expected_BLD = _run_shared_expert(mixtures, layer, x_TD)
    if not torch.isfinite(expected_BLD).all():
        return  # broken weights are reported by name, by the conversion
    same_inputs = torch.equal(input_BLD.reshape(-1), x_TD.reshape(-1))
    h_BLM = expert.hidden(input_BLD)
    ours_BLD = expert.output(h_BLM)
    relative = relative_difference(ours_BLD, expected_BLD)
    same_outputs = relative <= tolerance(expected_BLD.dtype)
    if not (same_inputs and same_outputs):
        raise MoesaicError(
            f"{mixtures.name}: the shared expert {mixtures.shared_expert_path!r} of layer "
            f"{layer} computes something else; supported mixtures are "
            f"{SUPPORTED_MIXTURES}"
        )


def _run_shared_expert(
    mixtures: Mixtures, layer: int, x_TD: Tensor
) -> tuple[Tensor, Tensor]:
    """What the shared expert is called with and returns when its parent is run."""
    assert mixtures.shared_expert_path is not None
    parent_path, _, _ = mixtures.ffn_path.rpartition(".")
    decoder_layer = mixtures.layers[layer]
    parent = decoder_layer.get_submodule(parent_path)
    shared_expert = decoder_layer.get_submodule(mixtures.shared_expert_path)
    calls: list[tuple[Tensor, Tensor]] = []

    def record(module: nn.Module, inputs: Any, output: Tensor) -> None:
        calls.append((inputs[0], output))

    handle = shared_expert.register_forward_hook(record)
    training = parent.training
    parent.eval()
    try:
        parent(x_TD[None])
    finally:
        handle.remove()
        parent.train(training)
    (call,) = calls
    return call
