"""Configuration of a converted model: the dense family's own, and one object of ours.

Leaf: this file is copied beside the weights, so it imports transformers only.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .moe_config_moesaic import MoEConfig


class MoesaicConfig(PreTrainedConfig):
    """A model's configuration with every FFN replaced.

    Every instance belongs to a subclass that also derives from the dense family's
    configuration, so that all the family's attributes, defaults and checks stay in
    force. `base_model_type` names the family. `moesaic` is a MoEConfig.
    """

    model_type = "moesaic"
    base_model_type = ""
    _auto_class = "AutoConfig"  # saving copies this file too

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if not cls.base_model_type:
            family = config_class_for(config_dict["base_model_type"])
            return family.from_dict(config_dict, **kwargs)
        moe = config_dict["moesaic"]
        if not isinstance(moe, MoEConfig):
            moe = MoEConfig.from_dict(moe)
        values = config_dict | {"moesaic": moe}
        return super().from_dict(values, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        values["base_model_type"] = self.base_model_type
        if hasattr(self, "moesaic"):
            values["moesaic"] = self.moesaic.to_dict()
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        # The subclass is made at run time, so pickle (multi-process serving) must be
        # told how.
        return _restore, (self.base_model_type, self.__dict__)


@functools.cache
def config_class_for(base_model_type: str) -> type[MoesaicConfig]:
    """The configuration class for one dense family.

    Raises KeyError for a family that the installed transformers does not know.
    """
    family: Any = CONFIG_MAPPING[base_model_type]
    plan = family.base_model_tp_plan or {}

    class _Config(MoesaicConfig, family):
        pass

    # The family's plans name the dense projections or experts, which are gone.
    replaced = (".mlp.", "experts", "_moe.")
    remaining = [
        path for path in plan if not any(name in path for name in replaced)
    ]
    _Config.base_model_tp_plan = {path: plan[path] for path in remaining}
    _Config.base_model_ep_plan = None
    _Config.model_type = "moesaic"
    _Config.base_model_type = base_model_type
    _Config.__name__ = "MoesaicConfig"
    _Config.__qualname__ = "MoesaicConfig"

    # Not at the top, since that file imports this one. An import all the same: the
    # code beside the weights is what this file imports, and transformers has to know
    # the family's models as soon as it has read a configuration.
    from .modeling_moesaic import register_model_classes

    register_model_classes(_Config)
    return _Config


def _restore(base_model_type: str, state: dict[str, Any]) -> MoesaicConfig:
    config_class = config_class_for(base_model_type)
    config = config_class.__new__(config_class)
    config.__dict__.update(state)
    return config
