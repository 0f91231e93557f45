"""Finds the experts of a model that is a mixture already.

transformers 5 keeps every family's experts in one module with fused weights, called with hidden
states, chosen experts and gate weights. That module is what a conversion replaces: the outer
router, its normalisation, shared experts and auxiliary losses stay the family's own code.

Shape suffixes: T tokens, D hidden_size, O experts of a token, M neurons of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moesaic.errors import MoesaicError
from moesaic.families.ffn import DenseFFN
from moesaic.families.structure import PATTERNS, FFNs, Pattern, activation_of, matches

SUPPORTED_MIXTURES = (
    "Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V2, DeepSeek-V3, Granite-MoE, Glm4-MoE and "
    "others with fused gate/up/down experts without biases"
)
_NO_PATTERN = Pattern(up="gate_up_proj", down="down_proj", fused=True)


@dataclass(frozen=True)
class Mixtures(FFNs):
    """Where a mixture keeps its experts; `ffn_path` is the module of all experts of a layer."""

    mixed: tuple[int, ...] = ()  # layers that have experts; the others stay as they are
    num_outer: int = 0  # experts of a layer
    outer_active: int = 0  # of them run for a token
    beside_path: str | None = (
        None  # within a layer: an FFN that every token runs, "shared expert"
    )

    @property
    def converted(self) -> tuple[int, ...]:
        return tuple(layer for layer in self.mixed if layer not in self.kept)

    def read(self, layer: int, expert: int = 0) -> DenseFFN:
        """One expert in canonical form (views of the model's tensors, no copy)."""
        module: Any = self.replaced(layer)
        gate_MD, up_MD = module.gate_up_proj.detach()[expert].chunk(2)
        return DenseFFN(
            up_MD, module.down_proj.detach()[expert], self.activation, gate_MD
        )

    def read_beside(self, layer: int) -> DenseFFN | None:
        """The shared expert that stands beside the routed ones, where the family has one."""
        if self.beside_path is None:
            return None
        module: Any = self.layers[layer].get_submodule(self.beside_path)
        gate, up, down = (
            getattr(module, f"{name}_proj") for name in ("gate", "up", "down")
        )
        return DenseFFN(
            up.weight.detach(),
            down.weight.detach(),
            self.activation,
            gate.weight.detach(),
        )

    def prefixes(self, layer: int) -> list[str]:
        """Where the state dict keeps what replaces the experts, and the shared one."""
        experts = self.state_prefix(layer)
        if self.beside_path is None:
            return [experts]
        return [experts, experts.removesuffix(self.ffn_path) + self.beside_path]

    def replaced_paths(self) -> tuple[str, ...]:
        return (self.ffn_path, *([self.beside_path] if self.beside_path else []))


def experts_of(layer: nn.Module) -> str | None:
    """Path of a layer's module of routed experts, or None in a dense layer."""
    found = [
        path for path, _ in layer.named_modules() if path.split(".")[-1] == "experts"
    ]
    return found[0] if found else None


def find_mixtures(
    model: Any, base: nn.Module, layers_path: str, layers: nn.ModuleList
) -> Mixtures | None:
    """Locates the experts of a causal language model; None where it is dense.

    Raises MoesaicError, listing what is supported, for experts of another form or with quantised
    weights, and where layers differ in their experts.
    """
    name = type(model).__name__
    paths = {
        i: path
        for i, layer in enumerate(layers)
        if (path := experts_of(layer)) is not None
    }
    if not paths:
        return None
    config = model.config.get_text_config()
    first = min(paths)
    experts: Any = layers[first].get_submodule(paths[first])
    kind, reason = type(experts).__name__, _unlike(experts)
    active = getattr(config, "num_experts_per_tok", None)
    if reason is None and not isinstance(active, int):
        reason = "its config names no num_experts_per_tok"
    if reason is not None:
        raise MoesaicError(
            f"{name} is a mixture of experts whose experts ({kind}) cannot be split: {reason}; "
            f"supported mixtures are {SUPPORTED_MIXTURES}"
        )
    found = Mixtures(
        name=name,
        base=base,
        base_prefix="" if base is model else model.base_model_prefix,
        layers=layers,
        layers_path=layers_path,
        ffn_path=paths[first],
        identities=(),
        pattern=_NO_PATTERN,
        activation=activation_of(model, name),
        mixed=tuple(sorted(paths)),
        num_outer=len(experts.gate_up_proj),
        outer_active=int(active or 0),
        beside_path=_beside(layers[first], paths[first]),
    )
    shape = experts.gate_up_proj.shape
    for layer, path in paths.items():
        other: Any = layers[layer].get_submodule(path)
        if path != found.ffn_path or type(other) is not type(experts):
            raise MoesaicError(
                f"{name}: layer {layer} has other experts than layer {first}"
            )
        weight = other.gate_up_proj
        if weight.shape != shape:
            raise MoesaicError(
                f"{name}: layer {layer} has experts of shape {tuple(weight.shape)}, layer {first} "
                f"of {tuple(shape)}; layers of different shapes are not supported"
            )
        if not weight.is_floating_point() or weight.element_size() < 2:
            raise MoesaicError(
                f"{name}: the expert weights are quantised ({weight.dtype}); convert the model "
                "first and quantise the result"
            )
        if not weight.is_meta:
            _check_experts(found, layer)
            _check_beside(found, layer)
    return found


def _beside(layer: nn.Module, experts_path: str) -> str | None:
    """Path of a plain gate/up/down FFN without biases beside the experts, named as shared."""
    parent = experts_path.rpartition(".")[0]
    for name, module in layer.get_submodule(parent).named_children():
        if name in ("shared_expert", "shared_experts") and matches(module, PATTERNS[0]):
            biases = [b for b, _ in module.named_parameters() if b.endswith("bias")]
            return None if biases else f"{parent}.{name}"
    return None


def _unlike(experts: Any) -> str | None:
    """Why a module is not one of fused gate/up/down experts; None where it is."""
    gate_up: Any = getattr(experts, "gate_up_proj", None)
    down: Any = getattr(experts, "down_proj", None)
    if isinstance(experts, nn.ModuleList):
        return "they are separate modules"
    if not all(isinstance(w, torch.Tensor) and w.ndim == 3 for w in (gate_up, down)):
        return "they have no fused gate_up_proj and down_proj"
    if getattr(experts, "limit", None) is not None:
        return "gate and up are clamped before they are multiplied, which sub-experts do not hold"
    if any(name.endswith("bias") for name, _ in experts.named_parameters()):
        return "they have biases"
    marks = {
        "is_transposed": False,
        "is_concatenated": True,
        "has_post_expert_norm": False,
    }
    if any(getattr(experts, mark, usual) != usual for mark, usual in marks.items()):
        return "gate and up are interleaved, transposed or normalised"
    if gate_up.shape[1] != 2 * down.shape[2] or gate_up.shape[2] != down.shape[1]:
        return "their weights are not (E, 2m, d) and (E, d, m)"
    return None


@torch.no_grad()
def _check_experts(found: Mixtures, layer: int) -> None:
    """Compares our canonical experts with the module on random inputs, for each of them."""
    module: Any = found.replaced(layer)
    weight = module.down_proj
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(found.num_outer, weight.shape[1], generator=generator).to(weight)
    index_TO = torch.arange(found.num_outer, device=weight.device)[:, None]
    gate_TO = torch.full_like(x_TD[:, :1], 0.5)
    try:
        expected_TD = module(x_TD, index_TO, gate_TO)
    except (
        Exception
    ) as error:  # whatever a module of another kind makes of these inputs
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MoesaicError(
            f"{found.name}: the experts of layer {layer} cannot be run ({reason}); supported "
            f"mixtures are {SUPPORTED_MIXTURES}"
        ) from error
    ffns = [found.read(layer, expert) for expert in range(found.num_outer)]
    rows = zip(ffns, x_TD.split(1), strict=True)
    ours_TD = 0.5 * torch.cat([ffn.output(ffn.hidden(x_1D)) for ffn, x_1D in rows])
    if not torch.isfinite(expected_TD).all():
        return  # broken weights are reported by name, by the conversion
    difference = (ours_TD - expected_TD).float().norm()
    relative = float(difference / expected_TD.float().norm().clamp(min=1e-20))
    if not relative <= (1e-4 if x_TD.dtype == torch.float32 else 1e-2):
        raise MoesaicError(
            f"{found.name}: the experts of layer {layer} have the usual weights but compute "
            f"something else (relative difference {relative:.2g}); supported mixtures are "
            f"{SUPPORTED_MIXTURES}"
        )


@torch.no_grad()
def _check_beside(found: Mixtures, layer: int) -> None:
    """The shared expert computes what we believe, on the same inputs as the routed ones."""
    ffn = found.read_beside(layer)
    if ffn is None:
        return
    assert found.beside_path is not None
    owner = found.layers[layer].get_submodule(found.ffn_path.rpartition(".")[0])
    beside = found.layers[layer].get_submodule(found.beside_path)
    generator = torch.Generator().manual_seed(0)
    x_BLD = torch.randn(1, 4, ffn.up_FD.shape[1], generator=generator).to(ffn.up_FD)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    handle = beside.register_forward_hook(
        lambda _, args, output: seen.append((args[0], output))
    )
    training = owner.training
    try:
        owner.eval()(x_BLD)
    finally:
        handle.remove()
        owner.train(training)
    ((x, y),) = seen
    ours = ffn.output(ffn.hidden(x))
    relative = float((ours - y).float().norm() / y.float().norm().clamp(min=1e-20))
    same = torch.equal(x.reshape(-1), x_BLD.reshape(-1))
    close = relative <= (1e-4 if y.dtype == torch.float32 else 1e-2)
    if torch.isfinite(y).all() and not (same and close):
        raise MoesaicError(
            f"{found.name}: the shared expert {found.beside_path!r} of layer {layer} computes "
            f"something else; supported mixtures are {SUPPORTED_MIXTURES}"
        )
