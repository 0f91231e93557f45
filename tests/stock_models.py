"""Tiny random models of the families that stock MoE architectures hold, with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import moesaic
from tests.families import VOCABULARY, tokens

# What each family needs beside the common values, by a name of its own.
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, head_dim 16": ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "llama, llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, sliding": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {"use_sliding_window": False, "tie_word_embeddings": True}),
    "qwen2, sliding": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3, partial": ("phi3", {"sliding_window": None, "partial_rotary_factor": 0.5}),
}  # fmt: skip


def dense_model(name: str, hidden: int = 32, neurons: int = 52, layers: int = 3) -> Any:
    """Random weights, biases included, large enough to tell errors apart."""
    family, own = DENSE[name]
    values = {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": neurons,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": hidden // 4, "max_position_embeddings": 64, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    config = CONFIG_MAPPING[family](**values | own)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif "bias" in parameter_name:
                parameter.normal_(std=0.1)
            else:
                parameter.uniform_(0.5, 1.5)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of printable ASCII with a few merges."""
    special = ["<pad>", "<s>", "</s>"]
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "a")]
    letters = ["Ġ", "Ċ", *(chr(code) for code in range(33, 120))]
    words = [*special, *letters, *("".join(merge) for merge in merges)]
    model = Tokenizer(BPE({word: index for index, word in enumerate(words)}, merges))
    model.pre_tokenizer = ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    assert len(words) <= VOCABULARY
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def converted_folder(
    name: str,
    output: Path,
    recipe: Any = "moesaic",
    layout: str = "S2A3E8",
    dense_layers: tuple[int, ...] = (),
    **shape: int,
) -> Path:
    """A converted model on disk, with its tokenizer."""
    moesaic.convert(
        dense_model(name, **shape), recipe, layout, tokens(8, 64, seed=1), tokenizer=tokenizer(),
        output=output, dense_layers=dense_layers,
    )  # fmt: skip
    return output
