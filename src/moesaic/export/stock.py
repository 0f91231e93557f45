"""What stock MoE architectures ask of a converted model, and what they share with it.

All of them are Llama's layers around another FFN, so a model of such a family keeps everything
but the FFN's weights, by the same names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moesaic.errors import MoesaicError
from moesaic.modeling import MoEConfig, Sizes

FAMILIES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
_OTHER_ROUTER = (
    "convert with --method moesaic, or serve this model as it is through transformers or vLLM's "
    "Transformers backend (docs/serving.md)"
)
# What vLLM's backend does not run: a prompt's choice, and token ids in a layer.
_TRANSFORMERS_ONLY = ("prompt", "hash", "embedding")
_IN_TRANSFORMERS = (
    "convert with --method moesaic, or serve it as it is through transformers"
)


def check_converted_model(config: Any, name: str) -> None:
    """Raises MoesaicError for what moesaic has not converted."""
    is_stock = any(
        getattr(config, record, None)
        for record in ("moesaic_conversion", "moesaic_export")
    )
    if is_stock:
        raise MoesaicError(
            f"{name} is a {config.model_type} model as it is, which other engines load by "
            "themselves; there is nothing to export"
        )
    if config.model_type != "moesaic":
        raise MoesaicError(
            f"{name} is a {config.model_type} model that moesaic has not converted; run moesaic "
            "convert first, and export its output"
        )


def common_reasons(config: Any) -> list[str]:
    """Why no stock MoE architecture can hold a converted model; empty where one may."""
    moe: MoEConfig = config.moesaic
    family = config.base_model_type
    elsewhere = changed_elsewhere(moe)
    if elsewhere:
        return elsewhere
    reasons = []
    if family not in FAMILIES:
        reasons.append(
            f"its family {family} has other layers than Llama's; "
            f"{', '.join(FAMILIES)} fit"
        )
    reasons += _router_reasons(moe)
    if moe.block.output_bias or moe.block.bias:
        reasons.append(
            "its FFN has biases, stock MoE layers have none; convert with "
            "intercept=false where they come from the repair"
        )
    if not moe.block.gated:
        reasons.append("its FFN has no gate projection, stock experts have one")
    elif moe.block.activation not in ("silu", "swish"):
        reasons.append(
            f"its FFN computes {moe.block.activation}, the engines' experts silu"
        )
    if family != "qwen2" and bool(getattr(config, "attention_bias", False)):
        reasons.append("its attention output has a bias")
    return reasons


def changed_elsewhere(moe: MoEConfig) -> list[str]:
    """What a method changed that is no FFN of a dense model; no stock layer has that."""
    if moe.outer is not None:
        return [
            "it routes twice, inside the experts that its own router chose; stock "
            "layers route once (docs/deviations.md)"
        ]
    if moe.linears is not None:
        return [
            f"method {moe.name} made linear layers that skip inputs; stock do not"
        ]
    if moe.shortcuts:
        return [
            f"method {moe.name} put matrices on the shortcuts around attention and FFN; "
            "stock layers have none there"
        ]
    return []


def _router_reasons(moe: MoEConfig) -> list[str]:
    router = moe.router
    if router is None:
        return [
            f"method {moe.name} left no experts: the model is a smaller dense one; "
            "--format dense writes those of some families"
        ]
    reasons = []
    if not router.is_matrix:
        advice = _OTHER_ROUTER
        if router.kind in _TRANSFORMERS_ONLY:
            advice = _IN_TRANSFORMERS
        reasons.append(
            f"its router is {router.kind}, stock ones are a matrix; {advice}"
        )
    if not router.fixed_count:
        reasons.append(
            "its tokens run different numbers of experts, stock ones the same; "
            f"{_OTHER_ROUTER}"
        )
    elif moe.uniform_sizes is None:
        reasons.append(
            "its layers run different numbers of experts, stock ones the same; convert "
            "with --set layer_budgets=uniform, or dense-first where the method has it"
        )
    return reasons


def sizes_of(config: Any) -> Sizes:
    """The sizes that all layers share, of a model that a stock architecture can hold."""
    sizes: Sizes | None = config.moesaic.uniform_sizes
    assert sizes is not None
    return sizes


def sliding_layers(config: Any) -> list[bool]:
    """Which layers look at a window that is shorter than the context."""
    window = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True)
    if not window or not used or window >= config.max_position_embeddings:
        return [False] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return [True] * config.num_hidden_layers
    return [kind == "sliding_attention" for kind in kinds]


def head_dim_of(config: Any) -> int:
    """Dimensions of an attention head."""
    dim: int | None = getattr(config, "head_dim", None)
    return dim or config.hidden_size // config.num_attention_heads


def common_config(config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The attributes that a stock configuration takes over as they are."""
    rope = dict(config.rope_parameters)
    rotary_factor = getattr(config, "partial_rotary_factor", None) or 1.0
    rope.setdefault("partial_rotary_factor", rotary_factor)
    # vLLM reads it here: the length from where long factors are taken.
    original = getattr(config, "original_max_position_embeddings", None)
    lengths = {"original_max_position_embeddings": original} if original else {}
    return lengths | {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": head_dim_of(config),
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        # vLLM's glm4_moe takes no tied head: it is written out.
        "tie_word_embeddings": False,
        "rope_parameters": rope,
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "dtype": dtype,
    }


def common_state(model: Any) -> dict[str, Tensor]:
    """Every weight outside the MoE blocks, by Llama's names: views.

    Phi-3's joint projections are cut; a head that is tied to the embeddings is one of its own.
    """
    config = model.config
    moe: MoEConfig = config.moesaic
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    paths = [moe.replacement_path(layer) for layer in moe.layers]
    converted = tuple(f"{prefix}{path}." for path in paths)
    state = {}
    for name, tensor in model.state_dict().items():
        if name.startswith(converted):
            continue
        if name.endswith("gate_up_proj.weight"):
            gate, up = tensor.chunk(2)
            state[name.replace("gate_up_proj", "gate_proj")] = gate
            state[name.replace("gate_up_proj", "up_proj")] = up
        elif name.endswith("qkv_proj.weight"):
            dim = head_dim_of(config)
            query_rows = config.num_attention_heads * dim
            key_rows = config.num_key_value_heads * dim
            rows = [query_rows, key_rows, key_rows]
            query, key, value = tensor.split(rows)
            state[name.replace("qkv_proj", "q_proj")] = query
            state[name.replace("qkv_proj", "k_proj")] = key
            state[name.replace("qkv_proj", "v_proj")] = value
        elif name in model.all_tied_weights_keys:
            state[name] = tensor.clone()  # saving drops what shares its memory
        else:
            state[name] = tensor
    return state


def dense_layers(config: Any) -> list[int]:
    """The layers that a conversion has left as they were."""
    converted = set(config.moesaic.layers)
    return [
        layer
        for layer in range(config.num_hidden_layers)
        if layer not in converted
    ]


def blocks(model: Any) -> list[Any]:
    """The MoE block of every converted layer."""
    base = getattr(model, model.base_model_prefix)
    moe: MoEConfig = model.config.moesaic
    return [
        base.get_submodule(moe.replacement_path(layer)) for layer in moe.layers
    ]


def shared_weights(block: Any, size: int) -> dict[str, Tensor]:
    """The shared expert's weights, filled up with neurons of zero to `size` of them."""
    experts_down = block.experts.down_proj
    hidden = experts_down.shape[1]
    padded_weights = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        is_down = name == "down_proj"
        neuron_dim = 1 if is_down else 0
        shape = (hidden, size) if is_down else (size, hidden)
        weight = experts_down.new_zeros(shape)
        if block.shared_expert is not None:
            projection = getattr(block.shared_expert, name)
            shared = projection.weight.detach()
            neurons = shared.shape[neuron_dim]
            weight.narrow(neuron_dim, 0, neurons).copy_(shared)
        padded_weights[f"{name}.weight"] = weight
    return padded_weights
