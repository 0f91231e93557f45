"""The MoE block that replaces a dense FFN, and the models that carry it.

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: T tokens, D hidden_size, P pairs of a token and an expert that runs for it,
S neurons of the shared expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.integrations import use_experts_implementation
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .configuration_moesaic import MoesaicConfig
from .routing_moesaic import MoesaicRouter


def _random(*shape: int) -> nn.Parameter:
    # Self-made start values: transformers initialises by the class of the enclosing family model,
    # which does not know these modules. Costs nothing when weights are loaded (meta device).
    return nn.Parameter(torch.empty(*shape).normal_(std=0.02))


@use_experts_implementation
class MoesaicExperts(nn.Module):
    """Routed experts as transformers 5 keeps them: fused 3-D weights, run by one of its kernels.

    Expert sizes are stored rounded up to `padded_size`, a multiple of 8, with neurons of weight
    zero, which add nothing: torch's grouped product wants rows of whole 16 bytes.

    `forward` is the plain loop over experts ("eager"); `model.set_experts_implementation` switches
    to `grouped_mm` (the default) or `batched_mm`.
    """

    def __init__(self, config: MoesaicConfig):
        super().__init__()
        moe = config.moesaic
        ffn, size = moe["ffn"], moe["padded_size"]
        self.num_experts = moe["num_routed"]  # the name that transformers' kernels read
        self.act_fn = ACT2FN[ffn["activation"]]
        rows = 2 * size if ffn["gated"] else size
        name = "gate_up_proj" if ffn["gated"] else "up_proj"
        hidden = config.hidden_size
        self.register_parameter(name, _random(self.num_experts, rows, hidden))
        self.down_proj = _random(self.num_experts, hidden, size)
        if ffn["bias"]:
            self.register_parameter(f"{name}_bias", _random(self.num_experts, rows))

    @property
    def down_proj_bias(self) -> torch.Tensor:
        """Zeros, which the kernels ask for: the block adds the FFN's own output bias once."""
        return self.down_proj.new_zeros(self.down_proj.shape[:2])

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        output_TD = torch.zeros_like(hidden_states)
        name = "gate_up_proj" if self.has_gate else "up_proj"
        weight, bias = getattr(self, name), getattr(self, f"{name}_bias", None)
        for expert in range(self.num_experts):
            token, slot = torch.where(top_k_index == expert)
            h = nn.functional.linear(
                hidden_states[token], weight[expert], None if bias is None else bias[expert]
            )
            h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
            y = nn.functional.linear(h, self.down_proj[expert])
            y = y * top_k_weights[token, slot, None]
            output_TD.index_add_(0, token, y.to(output_TD.dtype))
        return output_TD


class MoesaicSharedExpert(nn.Module):
    """The always-active neurons, contiguous: a dense FFN of S neurons."""

    def __init__(self, config: MoesaicConfig):
        super().__init__()
        moe = config.moesaic
        ffn, size = moe["ffn"], moe["shared_size"]
        self.gate_proj = (
            nn.Linear(config.hidden_size, size, bias=ffn["bias"]) if ffn["gated"] else None
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
    the block is a smaller dense FFN, which is what static pruning leaves.
    """

    def __init__(self, config: MoesaicConfig):
        super().__init__()
        moe = config.moesaic
        ffn = moe["ffn"]
        self.shared_expert = MoesaicSharedExpert(config) if moe["shared_size"] else None
        self.router = MoesaicRouter(config) if moe["num_routed"] else None
        self.experts = MoesaicExperts(config) if moe["num_routed"] else None
        if self.experts is not None:  # the decorator sets these per class; ours is per family
            self.experts.has_gate, self.experts.has_bias = ffn["gated"], ffn["bias"]
        self.output_bias = (
            nn.Parameter(torch.zeros(config.hidden_size)) if moe["output_bias"] else None
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        y_TD = self.shared_expert(x_TD) if self.shared_expert is not None else None
        if self.experts is not None and self.router is not None:
            if self.router.gating == "topk":
                routed_TD = self.experts(x_TD, *self.router(x_TD))
            else:
                # Every pair as a token of its own with one expert: as much work as pairs.
                token_P, expert_P, gate_P = self.router(x_TD)
                routed_PD = self.experts(x_TD[token_P], expert_P[:, None], gate_P[:, None])
                routed_TD = torch.zeros_like(x_TD).index_add_(0, token_P, routed_PD)
            y_TD = routed_TD if y_TD is None else y_TD + routed_TD
        if self.output_bias is not None:
            y_TD = y_TD + self.output_bias
        return y_TD.view_as(hidden_states)


def install_block(
    base_model: nn.Module, config: MoesaicConfig, layer: int, block: nn.Module
) -> None:
    """Puts a block in place of one layer's FFN."""
    ffn = config.moesaic["ffn"]
    _set(base_model, ffn["path"].format(layer), block)
    for path in ffn["identities"]:
        _set(base_model, path.format(layer), nn.Identity())


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
            install_block(base_model, config, layer, MoesaicBlock(config))
        config._experts_implementation_internal = self.get_correct_experts_implementation(wanted)

    def _check_and_adjust_experts_implementation(self, wanted: str | None) -> str | None:
        return wanted and self.get_correct_experts_implementation(wanted)


class _Front(PreTrainedModel):
    """What `auto_map` names: hands over to the class made for the configuration's family."""

    config_class = MoesaicConfig

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
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
            _can_set_attn_implementation_cached_value = family._can_set_attn_implementation()

        _Model.config_class = config_class
        _Model._keep_in_fp32_modules_strict = [
            *(family._keep_in_fp32_modules_strict or ()),
            "expert_scale",
            "selection_bias",
        ]
        _Model.__name__ = _Model.__qualname__ = front.__name__
        front._auto.register(config_class, _Model, exist_ok=True)
