"""Finds the FFNs of a decoder by their structure.

The only place that knows the names of their parts: an adapter is a row of PATTERNS, and
families that share the names of Llama's parts need none of their own. Whatever is found
is checked numerically, so a family that has the names and computes something else is
refused instead of converted wrongly.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from moesaic.errors import MoesaicError, first_line
from moesaic.families.ffn import DenseFFN

SUPPORTED = (
    "Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma, Gemma-2, Gemma-3 (text), OLMo-2 and "
    "other decoders with gate/up/down projections; GPT-2, OPT, GPT-NeoX, Phi and other "
    "two-matrix FFNs"
)


@dataclass(frozen=True)
class Pattern:
    """Names of the projections inside an FFN module.

    `inline`: the layer has the projections itself, and calls them around its
    `activation_fn`.
    """

    up: str
    down: str
    gate: str | None = None
    fused: bool = False  # `up` holds the rows of gate, then those of up
    inline: bool = False

    @property
    def projections(self) -> set[str]:
        names = {self.up, self.down}
        if self.gate is not None:
            names.add(self.gate)
        return names


# Llama and most families after it.
LLAMA = Pattern(gate="gate_proj", up="up_proj", down="down_proj")
PATTERNS = (
    LLAMA,
    Pattern(up="gate_up_proj", down="down_proj", fused=True),  # Phi-3, GLM
    Pattern(up="c_fc", down="c_proj"),  # GPT-2
    Pattern(up="dense_h_to_4h", down="dense_4h_to_h"),  # GPT-NeoX
    Pattern(up="fc1", down="fc2"),  # Phi
    Pattern(
        up="up_proj", down="down_proj"
    ),  # Nemotron and other two-matrix FFNs
    Pattern(up="fc1", down="fc2", inline=True),  # OPT
)
_PROJECTIONS = (nn.Linear, Conv1D)
_ACTIVATION_KEYS = (
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "activation",
)


@dataclass(frozen=True)
class LayerStack:
    """Where a model keeps its layers; paths start at the base model."""

    name: str  # of the model's class, for messages
    model: nn.Module
    base: nn.Module
    # Of the base model within the model, "" where they are the same.
    base_prefix: str
    layers: nn.ModuleList
    layers_path: str


@dataclass(frozen=True)
class FFNs(LayerStack):
    """Where a model keeps its FFNs. Paths of modules are within a layer."""

    ffn_path: str  # the module that our block replaces
    identities: tuple[str, ...]  # modules that the block makes superfluous
    pattern: Pattern
    activation: str
    unconverted: tuple[int, ...] = ()  # layers that stay as they are

    @property
    def converted(self) -> tuple[int, ...]:
        """The layers that a conversion changes."""
        numbers = range(len(self.layers))
        return tuple(
            layer for layer in numbers if layer not in self.unconverted
        )

    def replaced(self, layer: int) -> nn.Module:
        """The module that receives the FFN's input."""
        return self.layers[layer].get_submodule(self.ffn_path)

    def replaced_paths(self) -> tuple[str, ...]:
        """Within a layer, every module that a conversion replaces."""
        return (self.ffn_path, *self.identities)

    def last_module(self, layer: int) -> nn.Module:
        """The module whose output is the FFN's."""
        path = self.pattern.down if self.pattern.inline else self.ffn_path
        return self.layers[layer].get_submodule(path)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Puts every module, parameter and attribute back where it was.

        So is the configuration. Values inside tensors are not: nobody writes there.
        """
        config: Any = self.model.config
        config_before = copy.deepcopy(vars(config))
        before = []
        for module in self.model.modules():
            attributes = dict(vars(module))
            for table in ("_modules", "_parameters", "_buffers"):
                attributes[table] = dict(attributes[table])
            before.append((module, attributes))
        try:
            yield
        finally:
            for module, attributes in before:
                vars(module).clear()
                vars(module).update(attributes)
            vars(config).clear()
            vars(config).update(config_before)

    def state_prefix(self, layer: int) -> str:
        """Where the state dict keeps what replaces this layer's FFN."""
        parts = [self.layers_path, str(layer), self.ffn_path]
        if self.base_prefix:
            parts.insert(0, self.base_prefix)
        return ".".join(parts)

    def read(self, layer: int) -> DenseFFN:
        """The FFN of one layer in canonical form: views of its tensors, no copy."""
        module = self.holder(layer)
        pattern = self.pattern
        up = getattr(module, pattern.up)
        down = getattr(module, pattern.down)
        up_FD = _weight(up)
        up_bias_F = _bias(up)
        gate_FD = None
        gate_bias_F = None
        if pattern.gate is not None:
            gate = getattr(module, pattern.gate)
            gate_FD = _weight(gate)
            gate_bias_F = _bias(gate)
        elif pattern.fused:
            gate_FD, up_FD = up_FD.chunk(2)
            if up_bias_F is not None:
                gate_bias_F, up_bias_F = up_bias_F.chunk(2)
        return DenseFFN(
            up_FD=up_FD,
            down_DF=_weight(down),
            activation=self.activation,
            gate_FD=gate_FD,
            up_bias_F=up_bias_F,
            gate_bias_F=gate_bias_F,
            down_bias_D=_bias(down),
        )

    def holder(self, layer: int) -> nn.Module:
        """The module that has the projections."""
        if self.pattern.inline:
            return self.layers[layer]
        return self.replaced(layer)


def _weight(projection: Any) -> Tensor:
    """The weight with a row for each output."""
    weight: Tensor = projection.weight.detach()
    return weight.T if isinstance(projection, Conv1D) else weight


def _bias(projection: Any) -> Tensor | None:
    bias: Tensor | None = projection.bias
    if bias is None:
        return None
    return bias.detach()


def find_dense_ffns(model: Any, stack: LayerStack) -> FFNs:
    """Locates the FFNs in the layers of a model that is no mixture.

    Raises MoesaicError where it recognises none, or where layers differ.
    """
    path, pattern = _find_pattern(stack)
    identities: tuple[str, ...] = ()
    if pattern.inline:
        path = pattern.up
        identities = ("activation_fn", pattern.down)
    ffns = FFNs(
        **vars(stack),
        ffn_path=path,
        identities=identities,
        pattern=pattern,
        activation=activation_of(model, stack.name),
    )
    for layer in range(len(ffns.layers)):
        _check_layer(ffns, layer)
    _check_apart(ffns)
    return ffns


def _check_apart(ffns: FFNs) -> None:
    """Every layer has a module of its own."""
    seen: dict[int, int] = {}
    for layer in range(len(ffns.layers)):
        other = seen.setdefault(id(ffns.layers[layer]), layer)
        if other != layer:
            raise MoesaicError(
                f"{ffns.name}: layers {other} and {layer} are one module, which would be "
                "converted twice; such models are not supported"
            )


def _find_pattern(stack: LayerStack) -> tuple[str, Pattern]:
    """Path of the FFN in the first layer, and its pattern. The first pattern wins."""
    modules = dict(stack.layers[0].named_modules())
    for pattern in PATTERNS:
        for path, module in modules.items():
            is_layer = path == ""
            if is_layer == pattern.inline and matches(module, pattern):
                return path, pattern
    projections = [
        path
        for path, module in modules.items()
        if isinstance(module, _PROJECTIONS)
    ]
    paths = ", ".join(projections) or "none"
    raise MoesaicError(
        f"{stack.name}: no FFN recognised in its layers; supported are {SUPPORTED}; "
        f"found the projections {paths}"
    )


def matches(module: nn.Module, pattern: Pattern) -> bool:
    """Whether a module has the projections of a pattern, and no others."""
    projections = {
        name
        for name, child in module.named_children()
        if isinstance(child, _PROJECTIONS)
    }
    if pattern.inline:
        has_all = projections.issuperset(pattern.projections)
        return has_all and hasattr(module, "activation_fn")
    return projections == pattern.projections


def activation_of(model: Any, name: str) -> str:
    """The activation that a model's configuration names."""
    config = model.config.get_text_config()
    for key in _ACTIVATION_KEYS:
        activation = getattr(config, key, None)
        if isinstance(activation, str) and activation in ACT2FN:
            if getattr(ACT2FN[activation], "state_dict", dict)():
                raise MoesaicError(
                    f"{name}: its activation {activation!r} has weights of its own, which a "
                    "converted model would not have; such models are not supported"
                )
            return activation
    keys = ", ".join(_ACTIVATION_KEYS)
    raise MoesaicError(
        f"{name}: its config names no activation that transformers knows (looked for "
        f"{keys}); supported are {SUPPORTED}"
    )


def _check_layer(ffns: FFNs, layer: int) -> None:
    """A layer has the FFN where the first has it, and it computes what we believe."""
    if not _has_ffn(ffns, layer):
        raise MoesaicError(
            f"{ffns.name}: layer {layer} has no {ffns.ffn_path!r} as layer 0 has; "
            "models whose layers differ in structure are not supported"
        )
    first = ffns.read(0).up_FD
    weight = ffns.read(layer).up_FD
    neurons = len(weight)
    if neurons == 0:
        raise MoesaicError(
            f"{ffns.name}: the FFN of layer {layer} holds no neurons; mend what "
            "config.json says of its width"
        )
    if weight.shape != first.shape:
        first_neurons = len(first)
        raise MoesaicError(
            f"{ffns.name}: layer {layer} has an FFN of {neurons} neurons, layer 0 one "
            f"of {first_neurons}; FFNs of different widths are not supported"
        )
    if not weight.is_floating_point():
        raise MoesaicError(
            f"{ffns.name}: the FFN weights are quantised ({weight.dtype}); convert the "
            "model first and quantise the result"
        )
    if not ffns.pattern.inline and not weight.is_meta:
        _check_formula(ffns, layer)


def _has_ffn(ffns: FFNs, layer: int) -> bool:
    try:
        module = ffns.holder(layer)
    except AttributeError:
        return False
    return matches(module, ffns.pattern)


@torch.no_grad()
def _check_formula(ffns: FFNs, layer: int) -> None:
    """Compares our canonical FFN with the module on random inputs.

    Reads the weights twice.
    """
    module = ffns.replaced(layer)
    ffn = ffns.read(layer)
    x_TD = random_inputs(4, ffn.up_FD)
    training = module.training
    module.eval()
    try:
        expected_TD = module(x_TD)
        h_TF = ffn.hidden(x_TD)
        ours_TD = ffn.output(h_TF)
        relative = relative_difference(ours_TD, expected_TD)
    except Exception as error:  # a module of another kind may raise anything
        reason = first_line(error)
        raise MoesaicError(
            f"{ffns.name}: its FFN {ffns.ffn_path!r} is not called with hidden states "
            f"alone ({reason}); supported are {SUPPORTED}"
        ) from error
    finally:
        module.train(training)
    if not torch.isfinite(expected_TD).all():
        return  # broken weights are reported by name, by the conversion
    if not relative <= tolerance(x_TD.dtype):
        raise MoesaicError(
            f"{ffns.name}: the FFN {ffns.ffn_path!r} of layer {layer} has the usual "
            f"projections but computes something else (relative difference "
            f"{relative:.2g}); supported are {SUPPORTED}"
        )


def random_inputs(rows: int, weight_FD: Tensor) -> Tensor:
    """Rows to check a formula with: the same each time, of the weight's dtype."""
    generator = torch.Generator().manual_seed(0)
    hidden = weight_FD.shape[1]
    x_TD = torch.randn(rows, hidden, generator=generator)
    return x_TD.to(weight_FD)


def relative_difference(ours: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of what is expected."""
    difference = (ours - expected).float()
    norm = expected.float().norm().clamp(min=1e-20)
    return float(difference.norm() / norm)


def tolerance(dtype: torch.dtype) -> float:
    """The relative difference that rounding makes between equal formulas."""
    return 1e-4 if dtype == torch.float32 else 1e-2
