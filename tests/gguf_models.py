"""A tiny llama and its tokenizer as a GGUF file, written as llama.cpp's converter writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, CONTEXT = 2, 64
MERGES = ["t h", "th e", "Ġ the"]


def vocabulary() -> list[str]:
    """The 256 bytes, what the merges make, and two special tokens."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*sorted(ByteLevel.alphabet()), *merged, "<s>", "</s>"]


def tiny_llama(tied: bool = False) -> Any:
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        bos_token_id=259,
        eos_token_id=260,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def write_gguf(path: Path, model: Any, kind: Kind = Kind.F32, **metadata: Any) -> Path:
    """Matrices in `kind`, vectors in float32. `metadata` names more numbers and words."""
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", "llama"))
    _add_shape(writer, model.config)
    _add_vocabulary(writer)
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key.replace("__", "."), value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem = key.removesuffix(".weight")
        values = _as_llama_cpp_rotates(stem, tensor, model.config).float().numpy()
        stored = kind if tensor.ndim > 1 else Kind.F32
        data = gguf.quants.quantize(values, stored)
        writer.add_tensor(f"{names.get_name(stem)}.weight", data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    tokens = vocabulary()
    types = [gguf.TokenType.NORMAL] * (len(tokens) - 2) + [gguf.TokenType.CONTROL] * 2
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(259)
    writer.add_eos_token_id(260)
    writer.add_add_bos_token(False)


def _as_llama_cpp_rotates(stem: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """llama.cpp rotates neighbouring rows of q and k; transformers those half a head apart."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(stem.rpartition(".")[2])
    if count is None:
        return tensor
    halves = tensor.view(count, 2, -1, tensor.shape[1])
    return halves.transpose(1, 2).reshape(tensor.shape)
