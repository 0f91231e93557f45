"""Writes a stock MoE model as GGUF, with its tokenizer: architectures glm4moe and qwen2moe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from moesaic.errors import MoesaicError
from moesaic.export.gguf_vocab import read_vocabulary
from moesaic.export.stock import dense_layers, head_dim_of, sliding_layers

ARCHITECTURES = {
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
}
DTYPES = ("auto", "float32", "bfloat16", "float16", "q8_0")
_KINDS = {
    "float32": Kind.F32,
    "bfloat16": Kind.BF16,
    "float16": Kind.F16,
    "q8_0": Kind.Q8_0,
}
_FILE_TYPES = {
    Kind.F32: gguf.LlamaFileType.ALL_F32,
    Kind.BF16: gguf.LlamaFileType.MOSTLY_BF16,
    Kind.F16: gguf.LlamaFileType.MOSTLY_F16,
    Kind.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
}
# Kinds that gguf takes as arrays of their own type, and not as bytes.
_NUMPY_TYPES: dict[Kind, Any] = {Kind.F32: np.float32, Kind.F16: np.float16}
_SHARED_GATE = 1e-6  # llama.cpp's gate of a shared expert is not finite at 0


def supports(config: Any, tokenizer: Any, architecture: str) -> list[str]:
    """Why llama.cpp cannot run a converted model that the architecture can hold."""
    reasons = []
    rope = config.rope_parameters["rope_type"]
    if rope not in ("default", "linear"):
        reasons.append(
            f"its rope scaling is {rope}; GGUF is written for none and linear"
        )
    if architecture == "qwen2_moe":
        if any(sliding_layers(config)):
            reasons.append("llama.cpp gives qwen2moe no sliding windows")
        if dense_layers(config):
            reasons.append("llama.cpp gives qwen2moe no dense layers")
        attention_width = config.num_attention_heads * head_dim_of(config)
        if attention_width != config.hidden_size:
            reasons.append(
                "llama.cpp's qwen2moe wants heads * head_dim = hidden_size"
            )
    if config.moesaic.first_sizes.num_routed == 1:
        reasons.append("llama.cpp takes a single expert for none")
    try:
        read_vocabulary(tokenizer, config.vocab_size)
    except MoesaicError as error:
        reasons.append(str(error))
    return reasons


def qwen2moe_route(
    logit_TR: Tensor, bias_R: Tensor, num_active: int
) -> tuple[Tensor, Tensor]:
    """llama.cpp's router for qwen2moe: gates are not normalised, W_down makes up for 1/R."""
    num_routed = logit_TR.shape[1]
    p_TR = logit_TR.softmax(1)
    p_TK, index_TK = p_TR.topk(num_active, dim=1)
    gate_TK = p_TK * num_routed
    return index_TK, gate_TK


@torch.no_grad()
def write(path: Path, stock: Any, tokenizer: Any, dtype: str) -> None:
    """Writes one file, tensor by tensor; matrices in `dtype`, vectors and routers in float32.

    A matrix whose rows q8_0 cannot cut into blocks of 32 is written as float16.
    """
    config = stock.config
    architecture = ARCHITECTURES[config.model_type]
    architecture_name = gguf.MODEL_ARCH_NAMES[architecture]
    kind = _KINDS[dtype]
    writer = gguf.GGUFWriter(path, architecture_name)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(_model_name(path))
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_shape(writer, config)
    _add_tokenizer(writer, tokenizer, config)
    kinds = {}
    for key, tensor in _tensors(stock, "meta"):
        shape = tuple(tensor.shape)
        kinds[key] = _kind_of(key, shape, kind)
        _add_tensor_info(writer, key, shape, kinds[key])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for key, tensor in _tensors(stock):
        values = tensor.detach().float().contiguous().numpy()
        stored = gguf.quants.quantize(values, kinds[key])
        writer.write_tensor_data(stored)
    writer.close()


def _kind_of(key: str, shape: tuple[int, ...], kind: Kind) -> Kind:
    """How one tensor is stored, where matrices are stored as `kind`."""
    if len(shape) == 1 or "ffn_gate_inp" in key:
        return Kind.F32
    block_elements, _ = gguf.GGML_QUANT_SIZES[kind]
    fits_blocks = shape[-1] % block_elements == 0
    return kind if fits_blocks else Kind.F16


def _add_tensor_info(
    writer: Any, key: str, shape: tuple[int, ...], kind: Kind
) -> None:
    """Announces a tensor: floats by their shape, the others by that of their bytes."""
    byte_shape = gguf.quant_shape_to_byte_shape(shape, kind)
    num_bytes = int(np.prod(byte_shape))
    numpy_type = _NUMPY_TYPES.get(kind)
    if numpy_type is None:
        shape = byte_shape
        numpy_type = np.uint8
    writer.add_tensor_info(
        key, shape, np.dtype(numpy_type), num_bytes, raw_dtype=kind
    )


def _add_shape(writer: Any, config: Any) -> None:
    rope = config.rope_parameters
    head_dim = config.head_dim
    rotary_factor = rope.get("partial_rotary_factor", 1.0)
    rotated = int(head_dim * rotary_factor)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(rotated)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "glm4_moe":
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(True)
        writer.add_nextn_predict_layers(0)
    else:
        shared_size = config.shared_expert_intermediate_size
        writer.add_expert_count(config.num_experts)
        writer.add_expert_shared_feed_forward_length(shared_size)


def _add_tokenizer(writer: Any, tokenizer: Any, config: Any) -> None:
    vocabulary = read_vocabulary(tokenizer, config.vocab_size)
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.space_prefix)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    for name, index in _special_tokens(tokenizer, config).items():
        if index is not None:
            add_token_id = getattr(writer, f"add_{name}_token_id")
            add_token_id(index)
    ids = tokenizer("a")["input_ids"]
    starts_with_bos = bool(ids) and ids[0] == tokenizer.bos_token_id
    ends_with_eos = len(ids) > 1 and ids[-1] == tokenizer.eos_token_id
    writer.add_add_bos_token(starts_with_bos)
    writer.add_add_eos_token(ends_with_eos)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [
            {"name": name, "template": text} for name, text in template.items()
        ]
    if template:
        writer.add_chat_template(template)


def _model_name(path: Path) -> str:
    """The file's. By these llama.cpp would expect the tokens of Phi-3's own tokenizer."""
    name = path.stem
    if "phi3" in name.lower() or "phi-3" in name.lower():
        return "moesaic"
    return name


def _special_tokens(tokenizer: Any, config: Any) -> dict[str, int | None]:
    """The tokenizer's special tokens, or the configuration's where it names none.

    Old configurations say -1 for none.
    """
    eos = config.eos_token_id
    if isinstance(eos, list):
        eos = eos[0] if eos else None
    of_config = {
        "bos": config.bos_token_id,
        "eos": eos,
        "pad": config.pad_token_id,
        "unk": None,
    }
    tokens: dict[str, int | None] = {}
    for name, index in of_config.items():
        of_tokenizer = getattr(tokenizer, f"{name}_token_id")
        token = index if of_tokenizer is None else of_tokenizer
        if token is not None and not 0 <= token < config.vocab_size:
            token = None
        tokens[name] = token
    return tokens


def _tensors(
    stock: Any, device: str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under GGUF's name for it, in one order; on `meta`, for its shape alone."""
    config = stock.config
    architecture = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    gate_ratio = 1.0
    if config.model_type == "qwen2_moe":
        # llama.cpp does not normalise its gates: softmax leaves 1/R, not 1/K.
        gate_ratio = config.num_experts / config.num_experts_per_tok
    for key, tensor in stock.state_dict().items():
        if device is not None:
            tensor = tensor.to(device)
        stem, _, suffix = key.rpartition(".")
        if key.endswith("mlp.experts.gate_up_proj"):
            gate_name = names.get_name(f"{stem}.gate_proj")
            up_name = names.get_name(f"{stem}.up_proj")
            gate, up = tensor.chunk(2, dim=1)
            yield f"{gate_name}.weight", gate
            yield f"{up_name}.weight", up
        elif key.endswith("mlp.experts.down_proj"):
            name = names.get_name(key)
            if gate_ratio != 1:  # in bfloat16 the product would be rounded
                tensor = tensor.float() * gate_ratio
            yield f"{name}.weight", tensor
        elif key.endswith("e_score_correction_bias"):
            name = names.get_name(key.removesuffix("_bias"))
            yield f"{name}.bias", tensor
        elif key.endswith("shared_expert_gate.weight"):
            name = names.get_name(stem)
            gate = torch.full_like(tensor[0], _SHARED_GATE)
            yield f"{name}.weight", gate
        else:
            name = names.get_name(stem)
            if name is None:
                raise MoesaicError(f"GGUF has no name for the weight {key}")
            yield f"{name}.{suffix}", tensor
