"""The models that carry our replacements, and their configuration.

Both are made for a dense family when a model of it is loaded.

Leaf: this file is copied beside the weights, so it imports torch and transformers only.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .block_moesaic import MoesaicBlock
from .int8_neurons_moesaic import MoesaicInt8Neurons
from .linears_moesaic import LINEAR_REPLACEMENTS, MoesaicThresholdedLinear
from .mean_block_moesaic import MoesaicMeanBlock
from .moe_config_moesaic import MoEConfig
from .neuron_routers_moesaic import NEURON_ROUTERS
from .neurons_moesaic import MoesaicNeurons
from .prompt_neurons_moesaic import MoesaicPromptNeurons
from .replacement_moesaic import (
    OWN_KERNELS,
    MoesaicReplacement,
    own_kernels,
)
from .routers_moesaic import MoesaicRouter
from .shortcuts_moesaic import with_shortcuts

REPLACEMENTS: dict[str, Any] = {
    "experts": MoesaicBlock,
    "experts-with-means": MoesaicMeanBlock,
    "neurons": MoesaicNeurons,
    "int8-neurons": MoesaicInt8Neurons,
    "prompt-neurons": MoesaicPromptNeurons,
}
_FLOAT32_NAMES = {
    *MoesaicRouter.float32_names,
    *MoesaicThresholdedLinear.float32_names,
    *(name for kind in NEURON_ROUTERS.values() for name in kind.float32_names),
}


def new_replacement(moe: MoEConfig, layer: int) -> MoesaicReplacement:
    """What stands in for a layer's FFN, or for the experts of a layer that has some."""
    kind = REPLACEMENTS[moe.block.replacement]
    sizes = moe.sizes_of(layer)
    if moe.outer is None:
        return kind(moe.block, sizes)
    whole = moe.outer.whole_experts(layer)
    return kind.stacked(moe.block, sizes, moe.outer, whole)


def new_outer_shared(moe: MoEConfig) -> MoesaicReplacement | None:
    """What stands in for a mixture's own shared expert, where it was converted."""
    if moe.outer is None or moe.outer.shared_sizes is None:
        return None
    kind = REPLACEMENTS[moe.block.replacement]
    return kind(moe.block, moe.outer.shared_sizes)


def new_linear(
    moe: MoEConfig, dense: nn.Module, layer: int, path: str
) -> MoesaicReplacement:
    """What stands in for a linear layer, without weights.

    `path` is the one that the configuration has, with `{}` for the decoder layer.
    """
    assert moe.linears is not None
    kind = LINEAR_REPLACEMENTS[moe.linears.replacement]
    share = moe.linears.share_of(layer, path)
    return kind.like(dense, share, moe.linears.dense_start)


def install(
    base_model: nn.Module, config: Any, layer: int, module: nn.Module
) -> None:
    """Puts a replacement in the place of one layer's FFN, or of its experts."""
    moe = config.moesaic
    ffn_path = moe.path.format(layer)
    _put(base_model, ffn_path, module, config)
    if isinstance(module, MoesaicReplacement):
        module.follow(base_model)
    for path in moe.identities:
        identity_path = path.format(layer)
        _put(base_model, identity_path, nn.Identity(), config)


def install_outer_shared(
    base_model: nn.Module, config: Any, layer: int, module: nn.Module
) -> None:
    """Puts a replacement in the place of one layer's shared expert of a mixture."""
    outer = config.moesaic.outer
    path = outer.shared_path.format(layer)
    _put(base_model, path, module, config)


def install_linear(
    base_model: nn.Module, config: Any, path: str, module: nn.Module
) -> None:
    """Puts a replacement in the place of one linear layer."""
    _put(base_model, path, module, config)


def install_shortcuts(base_model: nn.Module, config: Any) -> None:
    """Puts shortcuts without weights around attention and FFN of every layer."""
    layers_path, _, _ = config.moesaic.path.partition(".{}.")
    layers: Any = base_model.get_submodule(layers_path)
    for number, layer in enumerate(layers):
        layers[number] = with_shortcuts(layer, config.hidden_size)


def _put(root: nn.Module, path: str, module: nn.Module, config: Any) -> None:
    parent_path, _, name = path.rpartition(".")
    parent = root.get_submodule(parent_path)
    setattr(parent, name, module)
    if isinstance(module, MoesaicReplacement):
        module.set_config(config)


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
    register_model_classes(_Config)
    return _Config


def _restore(base_model_type: str, state: dict[str, Any]) -> MoesaicConfig:
    config_class = config_class_for(base_model_type)
    config = config_class.__new__(config_class)
    config.__dict__.update(state)
    return config


class _FamilyModel:
    """Mixed into a dense family's class: builds the dense model, then replaces FFNs."""

    # transformers finds these out by reading the source file of the class; the
    # family's own file answers for attention, ours for experts.
    _can_set_experts_implementation_cached_value = True

    def __init__(self, config: MoesaicConfig, *args: Any, **kwargs: Any):
        # The family's inner model is dense: it refuses any experts implementation but
        # none, so the choice is hidden from it and made here.
        wanted = config._experts_implementation
        config._experts_implementation_internal = None
        super().__init__(config, *args, **kwargs)
        base_model = getattr(self, self.base_model_prefix, self)
        moe = config.moesaic
        if moe.shortcuts:
            install_shortcuts(base_model, config)
        for layer in moe.layers:
            replacement = new_replacement(moe, layer)
            install(base_model, config, layer, replacement)
            shared = new_outer_shared(moe)
            if shared is not None:
                install_outer_shared(base_model, config, layer, shared)
        if moe.linears is not None:
            self._install_linears(base_model, config)
        implementation = self.get_correct_experts_implementation(wanted)
        config._experts_implementation_internal = implementation

    def _install_linears(self, base_model: Any, config: Any) -> None:
        moe = config.moesaic
        depth = config.get_text_config().num_hidden_layers
        for layer in range(depth):
            for pattern in moe.linears.paths:
                path = pattern.format(layer)
                dense = base_model.get_submodule(path)
                replacement = new_linear(moe, dense, layer, pattern)
                install_linear(base_model, config, path, replacement)

    def get_correct_experts_implementation(self, wanted: str | None) -> str:
        """moesaic's own where it is there for this machine, and no other is asked for."""
        if wanted is None and own_kernels() is not None:
            return OWN_KERNELS
        return super().get_correct_experts_implementation(wanted)

    def _check_and_adjust_experts_implementation(
        self, wanted: str | None
    ) -> str | None:
        return wanted and self.get_correct_experts_implementation(wanted)


# What says where a model is found, and how: the configuration lies there too.
_WHERE = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)


class _Front(PreTrainedModel):
    """What `auto_map` names: hands over to the class made for the family."""

    config_class = MoesaicConfig

    @classmethod
    def from_pretrained(
        cls, path: Any, *args: Any, config: Any = None, **kwargs: Any
    ) -> Any:
        if config is None:
            where = {name: kwargs[name] for name in _WHERE if name in kwargs}
            config = MoesaicConfig.from_pretrained(path, **where)
        model_class = cls._auto._model_mapping[type(config)]
        return model_class.from_pretrained(path, *args, config=config, **kwargs)

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        model_class = cls._auto._model_mapping[type(config)]
        return model_class._from_config(config, **kwargs)


class MoesaicModel(_Front):
    _auto = AutoModel


class MoesaicForCausalLM(_Front):
    _auto = AutoModelForCausalLM


def register_model_classes(config_class: type[MoesaicConfig]) -> None:
    """Makes the model classes of one family and tells transformers' Auto classes."""
    family_config: Any = CONFIG_MAPPING[config_class.base_model_type]
    for front in (MoesaicModel, MoesaicForCausalLM):
        family: Any = front._auto._model_mapping[family_config]

        class _Model(_FamilyModel, family):
            _auto_class = front._auto.__name__  # saving copies the code
            _can_set_attn_implementation_cached_value = (
                family._can_set_attn_implementation()
            )

        _Model.config_class = config_class
        family_names = family._keep_in_fp32_modules_strict or ()
        our_names = sorted(_FLOAT32_NAMES)
        _Model._keep_in_fp32_modules_strict = [*family_names, *our_names]
        _Model.__name__ = front.__name__
        _Model.__qualname__ = front.__name__
        front._auto.register(config_class, _Model, exist_ok=True)
