"""Finds the FFNs of a decoder by their structure: the only place that knows attribute names.

An adapter is a row of PATTERNS; families that share the names of Llama's parts need none of
their own. Whatever is found is checked numerically, so a family that has the names and computes
something else is refused instead of converted wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from moesaic.errors import MoesaicError
from moesaic.families.ffn import DenseFFN

SUPPORTED = (
    "Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma, Gemma-2, Gemma-3 (text), OLMo-2 and other "
    "decoders with gate/up/down projections; GPT-2, OPT, GPT-NeoX, Phi and other two-matrix FFNs"
)


@dataclass(frozen=True)
class Pattern:
    """Names of the projections inside an FFN module (or inside the layer itself: `inline`)."""

    up: str
    down: str
    gate: str | None = None
    fused: bool = False  # `up` holds the rows of gate, then those of up
    inline: bool = (
        False  # the layer calls the projections itself, around `activation_fn`
    )


PATTERNS = (
    Pattern(
        gate="gate_proj", up="up_proj", down="down_proj"
    ),  # Llama and most after it
    Pattern(up="gate_up_proj", down="down_proj", fused=True),  # Phi-3, GLM
    Pattern(up="c_fc", down="c_proj"),  # GPT-2
    Pattern(up="dense_h_to_4h", down="dense_4h_to_h"),  # GPT-NeoX
    Pattern(up="fc1", down="fc2"),  # Phi
    Pattern(up="up_proj", down="down_proj"),  # Nemotron and other two-matrix FFNs
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
class FFNs:
    """Where a model keeps its layers and FFNs; paths start at the base model."""

    name: str  # of the model's class, for messages
    base: nn.Module
    base_prefix: str  # of the base model within the model, "" where they are the same
    layers: nn.ModuleList
    layers_path: str
    ffn_path: str  # within a layer; the module that our block replaces
    identities: tuple[
        str, ...
    ]  # within a layer; modules that the block makes superfluous
    pattern: Pattern
    activation: str
    kept: tuple[int, ...] = ()  # layers that stay as they are

    @property
    def converted(self) -> tuple[int, ...]:
        """The layers that a conversion changes."""
        return tuple(
            layer for layer in range(len(self.layers)) if layer not in self.kept
        )

    def replaced(self, layer: int) -> nn.Module:
        """The module that receives the FFN's input."""
        return self.layers[layer].get_submodule(self.ffn_path)

    def replaced_paths(self) -> tuple[str, ...]:
        """Within a layer, every module that a conversion replaces."""
        return (self.ffn_path, *self.identities)

    def last_module(self, layer: int) -> nn.Module:
        """The module whose output is the FFN's."""
        inline = self.pattern.down if self.pattern.inline else self.ffn_path
        return self.layers[layer].get_submodule(inline)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Puts every module that a conversion replaces back where it was."""
        kept = [
            (
                layer.get_submodule(parent) if parent else layer,
                name,
                layer.get_submodule(path),
            )
            for layer in (self.layers[i] for i in self.converted)
            for path in self.replaced_paths()
            for parent, _, name in [path.rpartition(".")]
        ]
        try:
            yield
        finally:
            for parent, name, module in kept:
                setattr(parent, name, module)

    def state_prefix(self, layer: int) -> str:
        """Where the state dict keeps what replaces this layer's FFN."""
        parts = (self.base_prefix, self.layers_path, str(layer), self.ffn_path)
        return ".".join(part for part in parts if part)

    def read(self, layer: int) -> DenseFFN:
        """The FFN of one layer in canonical form (views of the model's tensors, no copy)."""
        module = self.layers[layer] if self.pattern.inline else self.replaced(layer)
        up, up_bias = _weight(getattr(module, self.pattern.up))
        down, down_bias = _weight(getattr(module, self.pattern.down))
        gate = gate_bias = None
        if self.pattern.gate is not None:
            gate, gate_bias = _weight(getattr(module, self.pattern.gate))
        elif self.pattern.fused:
            gate, up = up.chunk(2)
            gate_bias, up_bias = (None, None) if up_bias is None else up_bias.chunk(2)
        return DenseFFN(up, down, self.activation, gate, up_bias, gate_bias, down_bias)


def find_ffns(model: Any) -> FFNs:
    """Locates the FFNs of a causal language model; the experts (`Mixtures`) of one that has some.

    Raises MoesaicError, listing what is supported and what was found, for a model whose FFNs it
    does not recognise or whose FFN weights are quantised.
    """
    name = type(model).__name__
    base = getattr(model, model.base_model_prefix, model)
    count = model.config.get_text_config().num_hidden_layers
    stacks = [
        (path, module)
        for path, module in base.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not stacks or count < 1:
        raise MoesaicError(
            f"{name}: no stack of {count} layers found; supported are {SUPPORTED}"
        )
    layers_path, layers = stacks[0]
    first = layers[0]
    from moesaic.families.mixture import find_mixtures  # which derives from FFNs

    if (mixtures := find_mixtures(model, base, layers_path, layers)) is not None:
        return mixtures
    candidates = [
        (path, pattern)
        for pattern in PATTERNS
        for path, module in first.named_modules()
        if matches(module, pattern) and pattern.inline == (path == "")
    ]
    if not candidates:
        seen = [
            path
            for path, module in first.named_modules()
            if isinstance(module, _PROJECTIONS)
        ]
        raise MoesaicError(
            f"{name}: no FFN recognised in its layers; supported are {SUPPORTED}; "
            f"found the projections {', '.join(seen) or 'none'}"
        )
    path, pattern = candidates[0]
    found = FFNs(
        name=name,
        base=base,
        base_prefix="" if base is model else model.base_model_prefix,
        layers=layers,
        layers_path=layers_path,
        ffn_path=pattern.up if pattern.inline else path,
        identities=("activation_fn", pattern.down) if pattern.inline else (),
        pattern=pattern,
        activation=activation_of(model, name),
    )
    _check_all(found)
    return found


def matches(module: nn.Module, pattern: Pattern) -> bool:
    names = [name for name in (pattern.up, pattern.down, pattern.gate) if name]
    projections = {
        name
        for name, child in module.named_children()
        if isinstance(child, _PROJECTIONS)
    }
    if pattern.inline:
        return projections.issuperset(names) and hasattr(module, "activation_fn")
    return projections == set(names)


def _weight(projection: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight: Any = projection.weight
    bias: Any = projection.bias
    return weight.detach().T if isinstance(projection, Conv1D) else weight.detach(), (
        None if bias is None else bias.detach()
    )


def activation_of(model: Any, name: str) -> str:
    config = model.config.get_text_config()
    for key in _ACTIVATION_KEYS:
        if isinstance(value := getattr(config, key, None), str) and value in ACT2FN:
            return value
    raise MoesaicError(
        f"{name}: its config names no activation that transformers knows (looked for "
        f"{', '.join(_ACTIVATION_KEYS)}); supported are {SUPPORTED}"
    )


def _check_all(found: FFNs) -> None:
    """Every layer has the FFN where the first has it, and it computes what we believe."""
    name, shape = found.name, found.read(0).up_FD.shape
    for layer, module in enumerate(found.layers):
        try:
            owner = (
                module if found.pattern.inline else module.get_submodule(found.ffn_path)
            )
            ok = matches(owner, found.pattern)
        except AttributeError:
            ok = False
        if not ok:
            raise MoesaicError(
                f"{name}: layer {layer} has no {found.ffn_path!r} as layer 0 has; models whose "
                "layers differ in structure are not supported"
            )
        weight = found.read(layer).up_FD
        if weight.shape != shape:
            raise MoesaicError(
                f"{name}: layer {layer} has an FFN of {weight.shape[0]} neurons, layer 0 one of "
                f"{shape[0]}; FFNs of different widths are not supported"
            )
        if not weight.is_floating_point():
            raise MoesaicError(
                f"{name}: the FFN weights are quantised ({weight.dtype}); convert the model "
                "first and quantise the result"
            )
        if not found.pattern.inline and not weight.is_meta:
            _check_formula(found, layer)


@torch.no_grad()
def _check_formula(found: FFNs, layer: int) -> None:
    """Compares our canonical FFN with the module on random inputs; reads the weights twice."""
    module, ffn = found.replaced(layer), found.read(layer)
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(4, ffn.up_FD.shape[1], generator=generator).to(ffn.up_FD)
    training = module.training
    try:
        expected = module.eval()(x_TD)
        difference = (ffn.output(ffn.hidden(x_TD)) - expected).float().norm()
    except (
        Exception
    ) as error:  # whatever a module of another kind makes of these inputs
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MoesaicError(
            f"{found.name}: its FFN {found.ffn_path!r} is not called with hidden states alone "
            f"({reason}); supported are {SUPPORTED}"
        ) from error
    finally:
        module.train(training)
    if not torch.isfinite(expected).all():
        return  # broken weights are reported by name, by the conversion
    relative = difference / expected.float().norm().clamp(min=1e-20)
    if not relative <= (1e-4 if x_TD.dtype == torch.float32 else 1e-2):
        raise MoesaicError(
            f"{found.name}: the FFN {found.ffn_path!r} of layer {layer} has the usual projections "
            f"but computes something else (relative difference {float(relative):.2g}); supported "
            f"are {SUPPORTED}"
        )
