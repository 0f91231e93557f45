"""The converted model's architecture, registered with transformers' Auto classes (leaf)."""

from transformers import AutoConfig

from .configuration_moesaic import MoesaicConfig, config_class_for
from .experts_moesaic import MoesaicExperts
from .hierarchy_moesaic import MoesaicHierarchy, MoesaicPairProjection, can_group
from .modeling_moesaic import (
    MoesaicBlock,
    beside_config,
    install_beside,
    install_block,
    layer_budget,
    new_beside,
    new_block,
)
from .neurons_moesaic import MoesaicNeuronRouter, MoesaicNeurons
from .routing_moesaic import MoesaicProjection, MoesaicRouter, choose_experts

AutoConfig.register(MoesaicConfig.model_type, MoesaicConfig, exist_ok=True)

__all__ = [
    "MoesaicBlock",
    "MoesaicConfig",
    "MoesaicExperts",
    "MoesaicHierarchy",
    "MoesaicNeuronRouter",
    "MoesaicNeurons",
    "MoesaicPairProjection",
    "MoesaicProjection",
    "MoesaicRouter",
    "beside_config",
    "can_group",
    "choose_experts",
    "config_class_for",
    "install_beside",
    "install_block",
    "layer_budget",
    "new_beside",
    "new_block",
]
