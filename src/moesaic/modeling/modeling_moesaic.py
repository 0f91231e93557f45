"""The MoE block that replaces a dense FFN, and the models that carry it.

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: T tokens, D hidden_size, P pairs of a token and an expert that runs for it,
S neurons of the shared expert.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .configuration_moesaic import MoesaicConfig
from .experts_moesaic import make_experts
from .hierarchy_moesaic import MoesaicHierarchy
from .neurons_moesaic import MoesaicNeurons
from .routing_moesaic import MoesaicRouter


class MoesaicSharedExpert(nn.Module):
    """The always-active neurons, contiguous: a dense FFN of S neurons."""

    def __init__(self, config: MoesaicConfig):
        super().__init__()
        moe = config.moesaic
        ffn, size = moe["ffn"], moe["shared_size"]
        self.gate_proj = (
            nn.Linear(config.hidden_size, size, bias=ffn["bias"])
            if ffn["gated"]
            else None
        )
        self.up_proj = nn.Linear(config.hidden_size, size, bias=ffn["bias"])
        self.down_proj = nn.Linear(size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[ffn["activation"]]

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        up_TS = self.up_proj(x_TD)
        h_TS = (
            self.act_fn(up_TS)
            if self.gate_proj is None
            else self.act_fn(self.gate_proj(x_TD)) * up_TS
        )
        return self.down_proj(h_TS)


class MoesaicBlock(nn.Module):
    """Replaces one dense FFN: F(x) = shared(x) + sum over chosen experts of gate * expert(x).

    (Paper, eq. 4.) A part of size zero is absent: without routed experts
    the block is a smaller dense FFN, which is what static pruning leaves. Where every neuron is an
    expert (router `gates`), `neurons` is all there is.
    """

    def __init__(self, config: MoesaicConfig):
        super().__init__()
        moe = config.moesaic
        self.shared_expert = self.router = self.experts = self.output_bias = None
        self.neurons = (
            MoesaicNeurons(config) if moe["router"]["kind"] == "gates" else None
        )
        if self.neurons is not None:
            return
        self.shared_expert = MoesaicSharedExpert(config) if moe["shared_size"] else None
        self.router = MoesaicRouter(config) if moe["num_routed"] else None
        self.experts = (
            make_experts(config, moe["num_routed"], moe["expert_size"])
            if moe["num_routed"]
            else None
        )
        self.output_bias = (
            nn.Parameter(torch.zeros(config.hidden_size))
            if moe["output_bias"]
            else None
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self.neurons is not None:
            return self.neurons(x_TD).view_as(hidden_states)
        y_TD = self.shared_expert(x_TD) if self.shared_expert is not None else None
        if self.experts is not None and self.router is not None:
            if self.router.gating == "topk":
                routed_TD = self.experts(x_TD, *self.router(x_TD))
            else:
                # Every pair as a token of its own with one expert: as much work as pairs.
                token_P, expert_P, gate_P = self.router(x_TD)
                routed_PD = self.experts(
                    x_TD[token_P], expert_P[:, None], gate_P[:, None]
                )
                routed_TD = torch.zeros_like(x_TD).index_add_(0, token_P, routed_PD)
            y_TD = routed_TD if y_TD is None else y_TD + routed_TD
        if self.output_bias is not None:
            y_TD = y_TD + self.output_bias
        return y_TD.view_as(hidden_states)


def new_block(config: MoesaicConfig, layer: int) -> nn.Module:
    """What stands in for a layer's FFN, or for the experts of a layer that has some already."""
    if "num_outer" in config.moesaic:
        return MoesaicHierarchy(config, layer)
    block = MoesaicBlock(config)
    router = block.router if block.neurons is None else block.neurons.router
    if router is not None:
        router.num_active = layer_budget(config, layer)
    return block


def layer_budget(config: MoesaicConfig, layer: int) -> int:
    """Routed experts per token of a layer: its own where thresholds choose and layers differ."""
    moe = config.moesaic
    if "budgets" not in moe:
        return moe["num_active"]
    return moe["budgets"][moe["layers"].index(layer)]


def beside_config(config: MoesaicConfig) -> MoesaicConfig:
    """The configuration of what stands in for a shared expert: other sizes, and no mixture."""
    own, moe = copy.copy(config), config.moesaic
    own.moesaic = {k: v for k, v in moe.items() if k != "num_outer"} | moe["beside"]
    return own


def new_beside(config: MoesaicConfig) -> MoesaicBlock:
    """What stands in for a mixture's shared expert."""
    block = MoesaicBlock(beside_config(config))
    if block.experts is not None:
        block.experts.config = config  # whose experts implementation may be set later
    return block


def install_block(
    base_model: nn.Module, config: MoesaicConfig, layer: int, block: nn.Module
) -> None:
    """Puts a block in place of one layer's FFN."""
    ffn = config.moesaic["ffn"]
    _set(base_model, ffn["path"].format(layer), block)
    for path in ffn["identities"]:
        _set(base_model, path.format(layer), nn.Identity())


def install_beside(
    base_model: nn.Module, config: MoesaicConfig, layer: int, block: nn.Module
) -> None:
    """Puts a block in place of one layer's shared expert."""
    _set(base_model, config.moesaic["beside"]["path"].format(layer), block)


def _set(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, module)


class _FamilyModel:
    """Mixed into a dense family's class: builds the dense model, then installs our blocks."""

    # transformers finds these out by reading the source file of the class; the family's own
    # file answers for attention, ours for experts.
    _can_set_experts_implementation_cached_value = True

    def __init__(self, config: MoesaicConfig, *args: Any, **kwargs: Any):
        # The family's inner model is dense: it refuses any experts implementation but none, so
        # the choice is hidden from it and made here.
        wanted = config._experts_implementation
        config._experts_implementation_internal = None
        super().__init__(config, *args, **kwargs)
        for layer in config.moesaic["layers"]:
            base_model = getattr(self, self.base_model_prefix, self)
            install_block(base_model, config, layer, new_block(config, layer))
            if "beside" in config.moesaic:
                install_beside(base_model, config, layer, new_beside(config))
        config._experts_implementation_internal = (
            self.get_correct_experts_implementation(wanted)
        )

    def _check_and_adjust_experts_implementation(
        self, wanted: str | None
    ) -> str | None:
        return wanted and self.get_correct_experts_implementation(wanted)


class _Front(PreTrainedModel):
    """What `auto_map` names: hands over to the class made for the configuration's family."""

    config_class = MoesaicConfig

    @classmethod
    def from_pretrained(
        cls, path: Any, *args: Any, config: Any = None, **kwargs: Any
    ) -> Any:
        if config is None:
            config = MoesaicConfig.from_pretrained(path)
        return cls._auto._model_mapping[type(config)].from_pretrained(
            path, *args, config=config, **kwargs
        )

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        return cls._auto._model_mapping[type(config)]._from_config(config, **kwargs)


class MoesaicModel(_Front):
    _auto = AutoModel


class MoesaicForCausalLM(_Front):
    _auto = AutoModelForCausalLM


def register_model_classes(config_class: type[MoesaicConfig]) -> None:
    """Makes the model classes of one family and tells AutoModel and AutoModelForCausalLM."""
    family_config: Any = CONFIG_MAPPING[config_class.base_model_type]
    for front in (MoesaicModel, MoesaicForCausalLM):
        family: Any = front._auto._model_mapping[family_config]

        class _Model(_FamilyModel, family):
            _auto_class = front._auto.__name__  # saving copies the code
            _can_set_attn_implementation_cached_value = (
                family._can_set_attn_implementation()
            )

        _Model.config_class = config_class
        _Model._keep_in_fp32_modules_strict = [
            *(family._keep_in_fp32_modules_strict or ()),
            "expert_scale",
            "selection_bias",
            "up_variance",
        ]
        _Model.__name__ = _Model.__qualname__ = front.__name__
        front._auto.register(config_class, _Model, exist_ok=True)
