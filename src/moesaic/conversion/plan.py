"""Everything about a conversion that is known before a weight is read."""

from __future__ import annotations

import copy
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moesaic.conversion.layer_error import LayerReport
from moesaic.conversion.options import Scope
from moesaic.errors import MoesaicError
from moesaic.evaluate.weight_bytes import WeightBytes, count_bytes, oracle_bytes
from moesaic.evaluate.work import Macs, count_macs, meta_model, oracle_macs
from moesaic.families import FFNs, Mixtures, find_ffns
from moesaic.layout import Layout
from moesaic.methods.base import (
    Budget,
    FFNShape,
    LinearMethod,
    Method,
    ModelShape,
    OuterShape,
    shape_of,
)
from moesaic.modeling import MoEConfig, Sizes, config_class_for

_AUTO_MAP = {
    "AutoConfig": "modeling_moesaic.MoesaicConfig",
    "AutoModel": "modeling_moesaic.MoesaicModel",
    "AutoModelForCausalLM": "modeling_moesaic.MoesaicForCausalLM",
}


@dataclass(frozen=True)
class Plan:
    """A checked conversion: of what, by which method, into which sizes."""

    model: str
    method: Method
    moe: MoEConfig
    dense_config: Any
    dense_macs: Macs
    dense_bytes: WeightBytes

    @property
    def layout(self) -> Layout:
        """Raises MoesaicError for a method that has no experts."""
        return Layout.parse(self.moe.layout)

    @property
    def label(self) -> str:
        """The layout, or what stands for one, as tables show it."""
        return self.moe.layout

    @property
    def sizes(self) -> Sizes:
        """Of the first layer; layers may differ (`MoEConfig.sizes`)."""
        return self.moe.first_sizes

    @property
    def words(self) -> str:
        """What becomes of every FFN, in words."""
        words = self.method.words(self.moe)
        if self.moe.outer is None:
            return words
        return f"{words}, in each of {self.moe.outer.num_experts} experts"

    @property
    def is_ordinary(self) -> bool:
        """Whether the result is a model of the dense one's own family."""
        return self.moe.is_ordinary

    @cached_property
    def config(self) -> Any:
        """The configuration of the result."""
        config = self.dense_config
        if self.moe.changes is not None:
            config = changed_config(config, self.moe)
        if self.is_ordinary:
            return config
        return our_config(config, self.moe)

    @cached_property
    def macs(self) -> Macs:
        """Multiply-accumulates of one token in the result."""
        if not self.method.saves:
            return oracle_macs(self.dense_macs, self.dense_config, self.moe)
        return count_macs(self._skeleton, 1)

    @cached_property
    def bytes(self) -> WeightBytes:
        """Bytes of weights that one token reads in the result."""
        if not self.method.saves:
            dense = meta_model(self.dense_config)
            saved_weights = self.dense_macs.ffn - self.macs.ffn
            return oracle_bytes(self.dense_bytes, dense, saved_weights)
        return count_bytes(self._skeleton)

    def stored_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the result's weights in files; codes of low-bit copies stay as they are."""
        return _bytes_of(self._skeleton, dtype)

    def stored_dense_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the dense model's weights in files."""
        return _bytes_of(meta_model(self.dense_config), dtype)

    @cached_property
    def _skeleton(self) -> Any:
        """The result without its weights."""
        return meta_model(self.config)

    def with_moe(self, moe: MoEConfig) -> Plan:
        """The same with another configuration."""
        return replace(self, moe=moe)

    def settled(self, layers: Sequence[LayerReport]) -> Plan:
        """With what is known in the end only: experts that stay whole, and shares."""
        moe = self.moe
        for report in layers:
            moe = moe.with_whole(report.layer, report.whole_experts)
            moe = moe.with_shares(report.layer, report.shares)
        return self.with_moe(moe)


def _bytes_of(skeleton: Any, dtype: torch.dtype) -> int:
    named = skeleton.state_dict(keep_vars=True)
    # Tied ones once.
    tensors = {id(tensor): tensor for tensor in named.values()}
    total = 0
    for tensor in tensors.values():
        of_dtype = tensor.is_floating_point()
        width = dtype.itemsize if of_dtype else tensor.element_size()
        total += tensor.numel() * width
    return total


def make_plans(
    config: Any,
    name: str,
    method: Method,
    budget: Budget,
    scope: Scope | None = None,
    domains: int = 1,
) -> list[Plan]:
    """Plans a conversion from the dense model's configuration, without weights.

    One plan a layout that could serve, the usual one first. In a model that is a
    mixture already, a layout is of each expert. `domains` counts calibration texts.
    Raises MoesaicError for a model that is converted already, an unsupported family, an
    impossible budget, and a choice of experts or layers that it does not have.
    """
    check_convertible(config, name, method)
    scope = scope or Scope()
    skeleton = meta_model(config)
    ffns = keep_dense(find_ffns(skeleton), scope.dense_layers)
    earlier = getattr(config, "moesaic", None)
    if earlier is None:
        shape = model_shape(ffns, scope, config)
    else:
        shape = converted_shape(ffns, earlier, config)
    shape = replace(shape, domains=domains)
    dense_macs = count_macs(skeleton, 1)
    dense_bytes = count_bytes(skeleton)
    base_model = public_name(name)
    made_with = versions()
    plans = []
    for moe in method.plans(shape, budget):
        _check_scope(method, moe, scope)
        named = replace(moe, base_model=base_model, versions=made_with)
        if earlier is not None:
            named = on_top(earlier, named)
        plan = Plan(name, method, named, config, dense_macs, dense_bytes)
        plans.append(plan)
    return plans


def _check_scope(method: Method, moe: MoEConfig, scope: Scope) -> None:
    """Raises MoesaicError for a choice of layers or experts that a method ignores."""
    if moe.layers:
        return
    what = "linear layers in all layers" if moe.linears else "the whole model"
    if scope.dense_layers:
        raise MoesaicError(
            f"method {method.name!r} changes {what}; leave out --dense-layers"
        )
    if scope.experts is not None or scope.min_tokens is not None:
        raise MoesaicError(
            f"method {method.name!r} changes {what}; leave out --experts and "
            "--min-tokens"
        )


def make_plan(
    config: Any,
    name: str,
    method: Method,
    budget: Budget,
    scope: Scope | None = None,
    domains: int = 1,
) -> Plan:
    """The first of `make_plans`."""
    plans = make_plans(config, name, method, budget, scope, domains)
    return plans[0]


def check_convertible(config: Any, name: str, method: Method) -> None:
    """Raises MoesaicError for a configuration whose model cannot be converted."""
    kind = config.model_type
    if kind == "moesaic":
        moe = config.moesaic
        if isinstance(method, LinearMethod):
            _check_linears(moe, name, method)
            return
        raise MoesaicError(
            f"{name} is converted already ({moe.layout}, method {moe.name}) and its "
            "experts are not split again: a finer layout of the model it came from "
            "does that at once; convert that one"
        )
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        raise MoesaicError(
            f"{name} is quantised{_bits_of(quantised)}; convert the full-precision "
            "model, then quantise (copies of 4 bits, by which single neurons are "
            "chosen, add a sixth to FFN weights of 16 bits, and two thirds to those of "
            "4: there they save nothing)"
        )
    if config.is_encoder_decoder:
        raise MoesaicError(
            f"{name} is an encoder-decoder; only decoders can be converted"
        )
    if getattr(config.get_text_config(), "is_heterogeneous", False):
        raise MoesaicError(f"{name} ({kind}) has layers of different shapes")
    if kind not in CONFIG_MAPPING:
        raise MoesaicError(
            f"{name} brings its own code ({kind}); only families that transformers "
            "itself knows can be converted"
        )


def _bits_of(quantised: Any) -> str:
    """In how many bits, where a quantization_config of transformers says so."""
    values = quantised if isinstance(quantised, dict) else vars(quantised)
    bits = values.get("bits")
    if values.get("load_in_4bit") or values.get("_load_in_4bit"):
        bits = 4
    return f" in {bits} bits already" if isinstance(bits, int) else " already"


def _check_linears(moe: MoEConfig, name: str, method: Method) -> None:
    """Raises MoesaicError for a converted model that no linear method stands on."""
    if moe.linears is not None:
        raise MoesaicError(
            f"{name} has linear layers that skip inputs already (method {moe.name}); "
            "convert the model that it came from"
        )
    if moe.outer is not None:
        raise MoesaicError(
            f"{name} was a mixture before moesaic converted its experts, and method "
            f"{method.name!r} is for models that were dense; take another method"
        )


def keep_dense(ffns: FFNs, dense_layers: tuple[int, ...]) -> FFNs:
    """Without the layers that are to stay as they are."""
    depth = len(ffns.layers)
    if not all(_is_index(layer, depth) for layer in dense_layers):
        names = ", ".join(map(str, dense_layers))
        raise MoesaicError(
            f"dense layers {names}: {ffns.name} has layers 0 to {depth - 1}"
        )
    ffns = replace(ffns, unconverted=dense_layers)
    if not ffns.converted:
        raise MoesaicError(
            f"all {depth} layers of {ffns.name} would stay dense; convert at least one"
        )
    return ffns


def model_shape(ffns: FFNs, scope: Scope, config: Any) -> ModelShape:
    """What methods are told of a model."""
    first_ffn = ffns.read(ffns.converted[0])
    ffn = shape_of(first_ffn)
    identities = [_path(ffns, name) for name in ffns.identities]
    return ModelShape(
        name=ffns.name,
        ffn=ffn,
        layers=ffns.converted,
        path=_path(ffns, ffns.ffn_path),
        identities=tuple(identities),
        outer=_outer_shape(ffns, ffn, scope),
        linears=linear_paths(ffns),
        config=config.get_text_config().to_dict(),
    )


def converted_shape(ffns: FFNs, moe: MoEConfig, config: Any) -> ModelShape:
    """The same of a model that moesaic made, whose FFNs have been replaced."""
    block = moe.block
    ffn = FFNShape(
        hidden_size=block.hidden_size,
        intermediate_size=moe.first_sizes.total,
        gated=block.gated,
        bias=block.bias,
        output_bias=block.output_bias,
        activation=block.activation,
    )
    # Routers read all of their inputs; where neurons run one by one, rows of the FFN's
    # matrices are skipped already.
    kept = f"{moe.path}.router."
    if block.replacement != "experts":
        kept = f"{moe.path}."
    linears = tuple(
        path for path in linear_paths(ffns) if not path.startswith(kept)
    )
    return ModelShape(
        name=ffns.name,
        ffn=ffn,
        layers=moe.layers,
        path=moe.path,
        identities=moe.identities,
        linears=linears,
        config=config.get_text_config().to_dict(),
    )


def on_top(earlier: MoEConfig, moe: MoEConfig) -> MoEConfig:
    """A converted model's configuration, its linear layers replaced besides.

    `method` is what was done last; its "after" says what was done before.
    """
    method = moe.method | {"after": earlier.method}
    return replace(
        earlier,
        method=method,
        layout=f"{earlier.layout}, {moe.layout}",
        linears=moe.linears,
        versions=moe.versions,
    )


def linear_paths(ffns: FFNs) -> tuple[str, ...]:
    """All linear layers that every decoder layer has, with `{}` for the layer."""
    names = _linear_names(ffns.layers[0])
    for layer in ffns.layers[1:]:
        names_of_layer = set(_linear_names(layer))
        names = [name for name in names if name in names_of_layer]
    return tuple(_path(ffns, name) for name in names)


def _linear_names(layer: nn.Module) -> list[str]:
    names = []
    for name, module in layer.named_modules():
        if type(module) is nn.Linear:
            names.append(name)
    return names


def _path(ffns: FFNs, name: str) -> str:
    """From the base model to a layer's module, with `{}` for the layer."""
    return f"{ffns.layers_path}.{{}}.{name}"


def _outer_shape(ffns: FFNs, ffn: FFNShape, scope: Scope) -> OuterShape | None:
    """Of a model that is a mixture already; checks which experts were asked for."""
    if not isinstance(ffns, Mixtures):
        if scope.experts is not None or scope.min_tokens is not None:
            raise MoesaicError(
                f"{ffns.name} has no experts to choose from: it is dense"
            )
        return None
    chosen = scope.experts
    least = scope.min_tokens
    if chosen is not None and not _are_experts(chosen, ffns.num_outer):
        names = ", ".join(map(str, chosen)) or "none"
        last = ffns.num_outer - 1
        raise MoesaicError(
            f"experts {names}: {ffns.name} has experts 0 to {last}"
        )
    if least is not None and (type(least) is not int or least < 1):
        raise MoesaicError(
            f"min tokens {least} must be a whole number of at least 1"
        )
    shared_path = None
    shared_size = None
    shared_expert = ffns.read_shared_expert(ffns.converted[0])
    if shared_expert is not None and ffns.shared_expert_path is not None:
        shared_path = _path(ffns, ffns.shared_expert_path)
        shared_size = shared_expert.intermediate_size
    return OuterShape(
        num_experts=ffns.num_outer,
        num_active=ffns.outer_active,
        num_layers=len(ffns.mixed),
        min_tokens=ffn.intermediate_size if least is None else least,
        chosen=None if chosen is None else tuple(sorted(set(chosen))),
        shared_path=shared_path,
        shared_size=shared_size,
    )


def _are_experts(chosen: tuple[int, ...], count: int) -> bool:
    """Whether there are any, and all of them exist."""
    return bool(chosen) and all(_is_index(expert, count) for expert in chosen)


def _is_index(value: Any, count: int) -> bool:
    return type(value) is int and 0 <= value < count


def our_config(dense_config: Any, moe: MoEConfig) -> Any:
    """The dense configuration with a MoEConfig, in the class made for its family."""
    derived = {
        "model_type",
        "transformers_version",
        "architectures",
        "_name_or_path",
        "moesaic_conversion",
        "moesaic_export",
        "moesaic",
        "base_model_type",
    }
    values = copy.copy(dense_config.to_dict())
    for key in derived:
        values.pop(key, None)
    family = getattr(dense_config, "base_model_type", dense_config.model_type)
    config_class: Any = config_class_for(family)
    config = config_class(**values)
    config.moesaic = moe
    config.architectures = ["MoesaicForCausalLM"]
    config.auto_map = dict(_AUTO_MAP)
    return config


def changed_config(dense_config: Any, moe: MoEConfig) -> Any:
    """The dense configuration with a method's changes, in its own class."""
    assert moe.changes is not None
    config = copy.deepcopy(dense_config)
    text_config = config.get_text_config()
    for name, value in moe.changes.items():
        setattr(text_config, name, value)
    return config


def versions() -> dict[str, str]:
    """The versions that a conversion depends on."""
    return {
        "moesaic": version("moesaic"),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def public_name(model: str) -> str:
    """A model's name without private paths."""
    path = Path(model)
    return path.resolve().name if path.exists() else model
