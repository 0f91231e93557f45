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
from moesaic.export.stock import dense_layers, sliding_layers

ARCHITECTURES = {
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
}
OWN = ("float16", "q8_0")  # dtypes that folders are not written in
DTYPES = ("auto", "float32", "bfloat16", *OWN)
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
_SHARED_GATE = 1e-6  # llama.cpp's gate of a shared expert is not finite at 0


def supports(config: Any, tokenizer: Any, architecture: str) -> list[str]:
    """Why llama.cpp cannot run a converted model that the architecture can hold."""
    reasons = []
    rope = config.rope_parameters["rope_type"]
    if rope not in ("default", "linear"):
        reasons.append(
            f"its rope scaling is {rope}; GGUF is written for none and linear"
        )
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if architecture == "qwen2_moe":
        if any(sliding_layers(config)):
            reasons.append("llama.cpp gives qwen2moe no sliding windows")
        if dense_layers(config):
            reasons.append("llama.cpp gives qwen2moe no dense layers")
        if heads * head_dim != config.hidden_size:
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
    p_TK, index_TK = logit_TR.softmax(1).topk(num_active, dim=1)
    return index_TK, p_TK * logit_TR.shape[1]


@torch.no_grad()
def write(path: Path, stock: Any, tokenizer: Any, dtype: str) -> None:
    """Writes one file, tensor by tensor; matrices in `dtype`, vectors and routers in float32.

    A matrix whose rows q8_0 cannot cut into blocks of 32 is written as float16.
    """
    config = stock.config
    architecture = ARCHITECTURES[config.model_type]
    kind = _KINDS[dtype]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(path.stem)
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_shape(writer, config)
    _add_tokenizer(writer, tokenizer, config)
    kinds = {}
    for key, shape in _shapes(stock):
        kinds[key] = _kind_of(key, shape, kind)
        stored = gguf.quant_shape_to_byte_shape(shape, kinds[key])
        plain = kinds[key] in (Kind.F32, Kind.F16)
        form = np.dtype(np.float32 if kinds[key] == Kind.F32 else np.float16)
        writer.add_tensor_info(
            key,
            shape if plain else stored,
            form if plain else np.dtype(np.uint8),
            int(np.prod(stored)),
            raw_dtype=kinds[key],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for key, tensor in _tensors(stock):
        values = tensor.detach().float().contiguous().numpy()
        writer.write_tensor_data(gguf.quants.quantize(values, kinds[key]))
    writer.close()


def _add_shape(writer: Any, config: Any) -> None:
    rope, head_dim = config.rope_parameters, config.head_dim
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
    writer.add_rope_dimension_count(
        int(head_dim * rope.get("partial_rotary_factor", 1.0))
    )
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
        writer.add_expert_count(config.num_experts)
        writer.add_expert_shared_feed_forward_length(
            config.shared_expert_intermediate_size
        )


def _add_tokenizer(writer: Any, tokenizer: Any, config: Any) -> None:
    found = read_vocabulary(tokenizer, config.vocab_size)
    writer.add_tokenizer_model(found.model)
    writer.add_tokenizer_pre(found.pre)
    writer.add_token_list(found.tokens)
    writer.add_token_types(found.types)
    if found.scores is not None:
        writer.add_token_scores(found.scores)
        writer.add_add_space_prefix(found.space_prefix)
    if found.merges is not None:
        writer.add_token_merges(found.merges)
    ends = config.eos_token_id
    for name, own, other in (
        ("bos", tokenizer.bos_token_id, config.bos_token_id),
        (
            "eos",
            tokenizer.eos_token_id,
            ends[0] if isinstance(ends, list) else ends,
        ),
        ("pad", tokenizer.pad_token_id, config.pad_token_id),
        ("unk", tokenizer.unk_token_id, None),
    ):
        index = other if own is None else own
        if index is not None:
            getattr(writer, f"add_{name}_token_id")(index)
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(len(ids) > 1 and ids[-1] == tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _kind_of(key: str, shape: tuple[int, ...], kind: Kind) -> Kind:
    if len(shape) == 1 or "ffn_gate_inp" in key:
        return Kind.F32
    block = gguf.GGML_QUANT_SIZES[kind][0]
    return kind if shape[-1] % block == 0 else Kind.F16


def _shapes(stock: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    return (
        (key, tuple(tensor.shape)) for key, tensor in _tensors(stock, "meta")
    )


def _tensors(
    stock: Any, device: str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under GGUF's name for it, in one order; on `meta`, for its shape alone."""
    config = stock.config
    names = gguf.get_tensor_name_map(
        ARCHITECTURES[config.model_type], config.num_hidden_layers
    )
    ours = config.model_type == "qwen2_moe"
    for key, tensor in stock.state_dict().items():
        tensor = tensor if device is None else tensor.to(device)
        stem, _, suffix = key.rpartition(".")
        if key.endswith("mlp.experts.gate_up_proj"):
            for part, half in zip(
                ("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True
            ):
                yield f"{names.get_name(f'{stem}.{part}')}.weight", half
        elif key.endswith("mlp.experts.down_proj"):
            # llama.cpp does not normalise the gates of qwen2moe: softmax leaves 1/R, not 1/K.
            ratio = (
                config.num_experts / config.num_experts_per_tok if ours else 1
            )
            yield f"{names.get_name(key)}.weight", tensor * ratio
        elif key.endswith("e_score_correction_bias"):
            yield f"{names.get_name(key.removesuffix('_bias'))}.bias", tensor
        elif key.endswith("shared_expert_gate.weight"):
            yield (
                f"{names.get_name(stem)}.weight",
                torch.full_like(tensor[0], _SHARED_GATE),
            )
        else:
            name = names.get_name(stem)
            if name is None:
                raise MoesaicError(f"GGUF has no name for the weight {key}")
            yield f"{name}.{suffix}", tensor
