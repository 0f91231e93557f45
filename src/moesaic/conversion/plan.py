"""Everything about a conversion that is known before a weight is read."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moesaic.errors import MoesaicError, unknown
from moesaic.evaluate.work import Macs, count_macs, meta_model, routed_macs
from moesaic.families import FFNs, Mixtures, find_ffns
from moesaic.families.load import window_length
from moesaic.layout import GRAINS, Layout, Sizes, layouts_for
from moesaic.methods.recipe import Recipe, load_recipe
from moesaic.modeling import config_class_for, layer_budget
from moesaic.parts.routers import FITTED


@dataclass(frozen=True)
class Plan:
    """A checked conversion: of what, by which recipe, into which sizes, at what work per token."""

    model: str
    recipe: Recipe
    layout: Layout
    sizes: Sizes
    sequence_length: int
    config: Any  # of the result
    dense_macs: Macs
    macs: Macs

    @property
    def shape(self) -> str:
        sizes, outer = self.sizes, self.config.moesaic.get("num_outer")
        each = f", in each of {outer} experts" if outer else ""
        if not self.recipe.routed:
            return f"the best {sizes.active} of {sizes.total} neurons, no routing{each}"
        mean = "on average " if self.recipe.gating == "threshold" else ""
        budgets = self.config.moesaic.get("budgets")
        layers = f" ({min(budgets)} to {max(budgets)} in a layer)" if budgets else ""
        if self.recipe.router == "gates":
            return f"{mean}{sizes.num_active}{layers} of {sizes.num_routed} neurons, gates of all"
        return (
            f"{sizes.shared} shared neurons, {mean}{sizes.num_active}{layers} of "
            f"{sizes.num_routed} routed {'sub-' * bool(outer)}experts of {sizes.expert}{each}"
        )

    def sizes_of(self, layer: int) -> Sizes:
        """The sizes of one layer: its own budget where layers differ."""
        if "budgets" not in self.config.moesaic:
            return self.sizes
        return replace(self.sizes, num_active=layer_budget(self.config, layer))


def make_plans(
    config: Any,
    model: str,
    recipe: str | Path | Recipe,
    layout: str | Layout | None = None,
    sparsity: float | None = None,
    grain: str = "medium",
    sequence_length: int | None = None,
    trust_remote_code: bool = False,
    experts: Sequence[int] | None = None,
    min_tokens: int | None = None,
    dense_layers: Sequence[int] = (),
) -> list[Plan]:
    """Plans a conversion from the dense model's configuration; builds it without weights.

    One plan for a layout; for a sparsity (0.25 where neither is given) one per layout that could
    serve, the usual one first. In a model that is a mixture already, a layout is of each expert,
    `experts` names those to convert and `min_tokens` what they must have seen (as many tokens as
    an expert has neurons, unless said); a sparsity takes the usual layout there. A shared expert
    is converted as one more FFN, unless `experts` are named. `dense_layers` stay as they are.
    Raises MoesaicError for a model that is converted already, an unsupported family, an unknown
    recipe, an impossible layout, sparsity, sequence length or choice of experts or layers.
    """
    if config.model_type == "moesaic":
        raise MoesaicError(
            f"{model} is converted already ({config.moesaic['layout']}, recipe "
            f"{config.moesaic['recipe']['name']}) and its experts are not split again: a finer "
            "layout of the model it came from does that at once; convert that one"
        )
    if getattr(config, "quantization_config", None):
        raise MoesaicError(
            f"{model} is quantised; convert the full-precision model, then quantise"
        )
    if config.is_encoder_decoder:
        raise MoesaicError(
            f"{model} is an encoder-decoder; only decoders can be converted"
        )
    if getattr(config.get_text_config(), "is_heterogeneous", False):
        raise MoesaicError(
            f"{model} ({config.model_type}) has layers of different shapes"
        )
    if config.model_type not in CONFIG_MAPPING:
        raise MoesaicError(
            f"{model} brings its own code ({config.model_type}); only families that transformers "
            "itself knows can be converted"
        )
    recipe = load_recipe(recipe)
    if layout is not None and sparsity is not None:
        raise MoesaicError(
            f"layout {layout} and sparsity {sparsity}: give one, it fixes the other"
        )
    if layout is not None and not isinstance(layout, Layout):
        layout = Layout.parse(layout)
    skeleton = meta_model(config, trust_remote_code)
    ffns = _keep(find_ffns(skeleton), dense_layers)
    neurons = ffns.read(ffns.converted[0]).intermediate_size
    if recipe.router == "gates":
        wanted = 0.25 if sparsity is None else sparsity
        layouts = [_single_neurons(ffns, recipe, layout, wanted, grain)]
    elif layout is None:
        wanted = 0.25 if sparsity is None else sparsity
        layouts = layouts_for(wanted, neurons, grain, recipe.experts)
        # Without routing only the number of active neurons counts, and oracles are references.
        # Experts are many: a search over layouts would fit each of them for every layout.
        several = recipe.router in FITTED and not isinstance(ffns, Mixtures)
        layouts = layouts if several else layouts[:1]
    else:
        layouts = [layout]
    asked = _asked(ffns, experts, min_tokens)
    length = window_length([config], sequence_length)
    dense_macs = count_macs(skeleton, 1)
    plans = []
    for one in layouts:
        sizes = _sizes(one.sizes(neurons), recipe)
        ours = _our_config(config, model, ffns, recipe, one, sizes)
        ours.moesaic |= asked | (_beside(ffns, recipe, one) if experts is None else {})
        if recipe.router == "oracle":  # as if to know were free: no model can hold it
            saved = (1 - sizes.active / sizes.total) * routed_macs(
                ffns, "beside" in ours.moesaic
            )
            macs = replace(dense_macs, ffn=dense_macs.ffn - saved)
        else:
            macs = count_macs(meta_model(ours), 1)
        plans.append(Plan(model, recipe, one, sizes, length, ours, dense_macs, macs))
    return plans


def make_plan(*args: Any, **kwargs: Any) -> Plan:
    """The first of `make_plans`."""
    return make_plans(*args, **kwargs)[0]


def _keep(ffns: FFNs, dense_layers: Sequence[int]) -> FFNs:
    """Without the layers that are to stay as they are."""
    depth = len(ffns.layers)
    if not all(type(layer) is int and 0 <= layer < depth for layer in dense_layers):
        raise MoesaicError(
            f"dense layers {', '.join(map(str, dense_layers))}: {ffns.name} has layers 0 to "
            f"{depth - 1}"
        )
    ffns = replace(ffns, kept=tuple(dense_layers))
    if not ffns.converted:
        raise MoesaicError(
            f"all {depth} layers of {ffns.name} would stay dense; convert at least one"
        )
    return ffns


def _single_neurons(
    ffns: FFNs, recipe: Recipe, layout: Layout | None, sparsity: float, grain: str
) -> Layout:
    """A layout of one neuron per expert, of the budget that another layout or a sparsity gives.

    Any known grain is the same: there is none finer.
    """
    if grain not in GRAINS:
        raise unknown("grain", grain, GRAINS)
    ffn = ffns.read(ffns.converted[0])
    if isinstance(ffns, Mixtures) or not ffn.gated:
        what = (
            "experts of a mixture"
            if isinstance(ffns, Mixtures)
            else "FFNs without a gate"
        )
        raise MoesaicError(
            f"recipe {recipe.name!r} chooses neurons by their gates in the FFNs of a dense model; "
            f"{ffns.name} has {what}; take another recipe"
        )
    total = ffn.intermediate_size
    if layout is not None:
        return Layout(0, layout.sizes(total).active, total)
    if not 0 < sparsity < 1:
        raise MoesaicError(
            f"sparsity {sparsity} is outside (0, 1); 0.25 skips a quarter"
        )
    active = round((1 - sparsity) * total)
    if not 1 <= active < total:
        raise MoesaicError(
            f"sparsity {sparsity}: {active} of {total} neurons would run; at least 1 has to, and "
            "at least 1 not"
        )
    return Layout(0, active, total)


def _sizes(sizes: Sizes, recipe: Recipe) -> Sizes:
    """Sizes for a recipe that regroups: the neuron oracle has the same budget in single neurons."""
    if recipe.grouping != "neurons":
        return sizes
    return Sizes(0, 1, sizes.total, sizes.active)


def _asked(
    ffns: FFNs, experts: Sequence[int] | None, min_tokens: int | None
) -> dict[str, Any]:
    """What the configuration of a mixture's result holds besides a dense model's; else nothing."""
    if not isinstance(ffns, Mixtures):
        if experts is not None or min_tokens is not None:
            raise MoesaicError(
                f"{ffns.name} has no experts to choose from: it is dense"
            )
        return {}
    neurons, outer = ffns.read(ffns.converted[0]).intermediate_size, ffns.num_outer
    if experts is not None and (
        not experts or not all(type(e) is int and 0 <= e < outer for e in experts)
    ):
        raise MoesaicError(
            f"experts {', '.join(map(str, experts)) or 'none'}: {ffns.name} has experts 0 to "
            f"{outer - 1}"
        )
    if min_tokens is not None and (type(min_tokens) is not int or min_tokens < 1):
        raise MoesaicError(
            f"min tokens {min_tokens} must be a whole number of at least 1"
        )
    return {
        "num_outer": outer,
        "mixtures": len(ffns.mixed),
        "outer_active": ffns.outer_active,
        "whole": {},
        "asked": {
            "experts": None if experts is None else sorted(set(experts)),
            "min_tokens": neurons if min_tokens is None else min_tokens,
        },
    }


def _beside(ffns: FFNs, recipe: Recipe, layout: Layout) -> dict[str, Any]:
    """Path and sizes of a mixture's shared expert, which is converted as one more FFN."""
    if (
        not isinstance(ffns, Mixtures)
        or (ffn := ffns.read_beside(ffns.converted[0])) is None
    ):
        return {}
    sizes = _sizes(layout.sizes(ffn.intermediate_size), recipe)
    path = f"{ffns.layers_path}.{{}}.{ffns.beside_path}"
    return {"beside": {"path": path} | _stored(sizes, recipe)}


def _stored(sizes: Sizes, recipe: Recipe) -> dict[str, int]:
    """An FFN's sizes as the configuration keeps them; `MoesaicConfig` says what they mean."""
    shared = sizes.shared if recipe.routed else sizes.active
    return {
        "num_routed": sizes.num_routed if recipe.routed else 0,
        "num_active": sizes.num_active if recipe.routed else 0,
        "shared_size": shared,
        "expert_size": sizes.expert,
        "padded_size": sizes.expert
        if recipe.router == "gates"
        else -(-sizes.expert // 8) * 8,
        "dropped": 0 if recipe.routed else sizes.total - shared,
    }


def _our_config(
    config: Any, model: str, ffns: FFNs, recipe: Recipe, layout: Layout, sizes: Sizes
) -> Any:
    """The configuration of the result; `MoesaicConfig` says what its keys mean."""
    ffn = ffns.read(ffns.converted[0])
    derived = {"model_type", "transformers_version", "architectures", "_name_or_path"}
    values = {k: v for k, v in config.to_dict().items() if k not in derived}
    ours: Any = config_class_for(config.model_type)(**values)
    ours.moesaic = {
        "layout": str(layout),
        "num_shared": layout.num_shared,
        **_stored(sizes, recipe),
        "layers": list(ffns.converted),
        "ffn": {
            "path": f"{ffns.layers_path}.{{}}.{ffns.ffn_path}",
            "identities": [
                f"{ffns.layers_path}.{{}}.{name}" for name in ffns.identities
            ],
            "gated": ffn.gated,
            "bias": ffn.up_bias_F is not None,
            "activation": ffn.activation,
        },
        "output_bias": ffn.down_bias_D is not None or recipe.intercept,
        "router": {
            "kind": recipe.router,
            "absolute": recipe.absolute,
            "gating": recipe.gating,
            "features": min(recipe.features, ffn.up_FD.shape[1])
            * (recipe.router in ("quadratic", "gates")),
            "cap": recipe.cap,
        },
        "recipe": recipe.to_dict(),
        "base_model": Path(model).name
        if Path(model).exists()
        else model,  # no private paths
        "versions": {
            "moesaic": version("moesaic"),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
    }
    ours.architectures = ["MoesaicForCausalLM"]
    ours.auto_map = {
        "AutoConfig": "configuration_moesaic.MoesaicConfig",
        "AutoModel": "modeling_moesaic.MoesaicModel",
        "AutoModelForCausalLM": "modeling_moesaic.MoesaicForCausalLM",
    }
    return ours
