"""Tiny random models, one per supported family, with weights large enough to tell errors apart."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HIDDEN, NEURONS, LAYERS, VOCABULARY, CONTEXT = 32, 52, 3, 96, 64  # 52 = 8 * 6 + 4 left over

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": NEURONS,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SLIDING = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2}

# Family to what its configuration needs besides the common values (None removes a value).
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": True},  # biases on every FFN matrix
    "mistral": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": False, "tie_word_embeddings": True},
    "qwen3": {},
    "phi3": {"head_dim": None, "rope_scaling": None},
    "gemma": {},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "olmo2": {"head_dim": None},
    "gpt2": {"bos_token_id": 1, "eos_token_id": 2, "n_embd": HIDDEN, "n_inner": NEURONS,
             "n_layer": LAYERS, "n_head": 4, "n_positions": CONTEXT, "vocab_size": VOCABULARY},
    "opt": {"ffn_dim": NEURONS, "word_embed_proj_dim": HIDDEN, "intermediate_size": None,
            "head_dim": None, "num_key_value_heads": None},
    "gpt_neox": {"head_dim": None, "num_key_value_heads": None},
    # Found by structure, without a row of their own:
    "phi": {"head_dim": None},
    "glm": {},
    "granite": {"head_dim": None},
    "starcoder2": {"head_dim": None, "sliding_window": None},
    "nemotron": {},
    "smollm3": {"head_dim": None},
    "cohere": {"head_dim": None},
    "stablelm": {"head_dim": None},
}  # fmt: skip


def tiny_model(family: str, seed: int = 0) -> Any:
    """A dense model of a family with random weights, biases included, in evaluation mode."""
    own = FAMILIES[family]
    values = own if family == "gpt2" else _COMMON | own
    config = CONFIG_MAPPING[family](**{k: v for k, v in values.items() if v is not None})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
            elif "bias" in name:
                parameter.normal_(std=0.1, generator=generator)
    return model


def tokens(samples: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (samples, length), generator=generator)
