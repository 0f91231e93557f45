"""The converted model's architecture, registered with transformers' Auto classes (leaf).

Table of contents: `moe_config` types of config.json; `projections`, `copies`,
`routers`, `neuron_routers`, `token_ids`, `experts` the parts; `replacement` what stands
in for a module, `block` and `mean_block` for an FFN, `neurons` for an FFN neuron by
neuron, `int8_neurons` for the same in 8 bits, `prompt_neurons` for an FFN whose neurons
a prompt chooses, `hierarchy` for the experts of a mixture, `linears` for a linear layer,
`shortcuts` for a decoder layer that is passed by in other axes; `modeling` the models
that carry them.
"""

from transformers import AutoConfig

from .block_moesaic import MoesaicBlock
from .copies_moesaic import GROUP, MoesaicCopy, packed, unpacked
from .experts_moesaic import MoesaicExperts
from .hierarchy_moesaic import MoesaicHierarchy
from .int8_neurons_moesaic import (
    REST_BITS,
    MoesaicInt8Neurons,
    MoesaicInt8Rows,
    MoesaicRest,
)
from .linears_moesaic import MoesaicThresholdedLinear
from .mean_block_moesaic import MoesaicMeanBlock
from .modeling_moesaic import (
    REPLACEMENTS,
    MoesaicConfig,
    config_class_for,
    install,
    install_linear,
    install_outer_shared,
    new_linear,
    new_outer_shared,
    new_replacement,
)
from .moe_config_moesaic import (
    COPY_BITS,
    BlockConfig,
    ConfigError,
    LinearConfig,
    MoEConfig,
    OuterConfig,
    RouterConfig,
    Sizes,
    padded,
)
from .neuron_routers_moesaic import (
    MoesaicCopyRouter,
    MoesaicGateRouter,
    MoesaicSketchRouter,
    new_neuron_router,
)
from .neurons_moesaic import MoesaicNeurons
from .projections_moesaic import (
    MoesaicPairProjection,
    MoesaicProjection,
    can_group,
)
from .prompt_neurons_moesaic import MoesaicPromptNeurons
from .replacement_moesaic import (
    MoesaicReplacement,
    View,
    as_they_are,
    chosen_for_each_token,
)
from .routers_moesaic import (
    MoesaicEmbeddingRouter,
    MoesaicHashRouter,
    MoesaicLinearRouter,
    MoesaicMLPRouter,
    MoesaicNeuronCopyRouter,
    MoesaicQuadraticRouter,
    MoesaicRouter,
    MoesaicUnitMLPRouter,
    choose_experts,
    new_router,
)
from .shortcuts_moesaic import with_shortcuts
from .token_ids_moesaic import TokenIds, hooked_token_ids, token_ids_of

AutoConfig.register(MoesaicConfig.model_type, MoesaicConfig, exist_ok=True)

__all__ = [
    "COPY_BITS",
    "GROUP",
    "REPLACEMENTS",
    "REST_BITS",
    "BlockConfig",
    "ConfigError",
    "LinearConfig",
    "MoEConfig",
    "MoesaicBlock",
    "MoesaicConfig",
    "MoesaicCopy",
    "MoesaicCopyRouter",
    "MoesaicEmbeddingRouter",
    "MoesaicExperts",
    "MoesaicGateRouter",
    "MoesaicHashRouter",
    "MoesaicHierarchy",
    "MoesaicInt8Neurons",
    "MoesaicInt8Rows",
    "MoesaicLinearRouter",
    "MoesaicMLPRouter",
    "MoesaicMeanBlock",
    "MoesaicNeuronCopyRouter",
    "MoesaicNeurons",
    "MoesaicPairProjection",
    "MoesaicProjection",
    "MoesaicPromptNeurons",
    "MoesaicQuadraticRouter",
    "MoesaicReplacement",
    "MoesaicRest",
    "MoesaicRouter",
    "MoesaicSketchRouter",
    "MoesaicThresholdedLinear",
    "MoesaicUnitMLPRouter",
    "OuterConfig",
    "RouterConfig",
    "Sizes",
    "TokenIds",
    "View",
    "as_they_are",
    "chosen_for_each_token",
    "hooked_token_ids",
    "can_group",
    "choose_experts",
    "config_class_for",
    "install",
    "install_linear",
    "install_outer_shared",
    "new_linear",
    "new_neuron_router",
    "new_outer_shared",
    "new_replacement",
    "new_router",
    "packed",
    "padded",
    "token_ids_of",
    "unpacked",
    "with_shortcuts",
]
