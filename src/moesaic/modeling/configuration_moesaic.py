"""Configuration of a converted model: the dense family's own configuration plus one dict of ours.

Leaf: this file is copied beside the weights, so it imports transformers only.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


class MoesaicConfig(PreTrainedConfig):
    """A model's configuration with every FFN replaced by shared and routed experts.

    Every instance belongs to a subclass that also derives from the dense family's configuration,
    so that all the family's attributes, defaults and checks stay in force. `base_model_type` names
    the family. `moesaic` is a plain dict:

    - `layout`, `num_shared`, `num_routed`, `num_active`, and in neurons `shared_size`,
      `expert_size`, `padded_size` (of an expert as stored) and `dropped` (by static pruning)
    - `ffn`: `path` of the FFN from the base model with `{}` for the layer, `identities` (modules
      that the block makes superfluous), `gated`, `bias`, `output_bias`, `activation`
    - `output_bias`: whether the block adds one (the dense FFN's, or a repair's intercept)
    - `router`: `kind` (`gates` where every neuron is an expert), `absolute`, `gating` (`topk` or
      `threshold`), `features` (directions whose products a quadratic router reads, or that stand
      in for W_up beside gates), `cap` (most experts of a token, or None)
    - `layers`: the converted layers; `budgets`, only where they differ: the mean number of routed
      experts per token of each, whose mean is `num_active`
    - only in a model that was a mixture before: `mixtures` (its layers with experts), `num_outer`
      (experts of a layer, each of which has the sizes above), `outer_active` (of them run for a
      token), `whole` (by layer, those that run all their sub-experts: the expert as it was),
      `asked` (what `whole` follows from), `beside` (path and sizes of its shared expert, converted
      as one more FFN)
    - `recipe`, `calibration`, `base_model`, `versions`: how the model was made
    """

    model_type = "moesaic"
    base_model_type = ""
    _auto_class = "AutoConfig"  # saving copies this file too

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if cls.base_model_type:
            return super().from_dict(config_dict, **kwargs)
        return config_class_for(config_dict["base_model_type"]).from_dict(
            config_dict, **kwargs
        )

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"base_model_type": self.base_model_type}

    def __reduce__(self) -> tuple[Any, ...]:
        # The subclass is made at run time, so pickle (multi-process serving) must be told how.
        return _restore, (self.base_model_type, self.__dict__)


@functools.cache
def config_class_for(base_model_type: str) -> type[MoesaicConfig]:
    """The configuration class for one dense family, registered with AutoModel.

    Raises KeyError for a family that the installed transformers does not know.
    """
    family: Any = CONFIG_MAPPING[base_model_type]
    plan = family.base_model_tp_plan or {}

    class _Config(MoesaicConfig, family):
        pass

    # The family's plans name the dense projections or experts, which are no longer there.
    gone = (".mlp.", "experts", "_moe.")
    _Config.base_model_tp_plan = {
        k: how for k, how in plan.items() if not any(part in k for part in gone)
    }
    _Config.base_model_ep_plan = None
    _Config.model_type = "moesaic"
    _Config.base_model_type = base_model_type
    _Config.__name__ = _Config.__qualname__ = "MoesaicConfig"

    from .modeling_moesaic import register_model_classes

    register_model_classes(_Config)
    return _Config


def _restore(base_model_type: str, state: dict[str, Any]) -> MoesaicConfig:
    config_class = config_class_for(base_model_type)
    config = config_class.__new__(config_class)
    config.__dict__.update(state)
    return config
