"""Tiny random models that are mixtures of experts already, one per supported family."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.families import CONTEXT, HIDDEN, LAYERS, VOCABULARY

NEURONS, OUTER, ACTIVE = 20, 4, 2  # 20 = 8 * 2 + 4 left over

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "num_experts_per_tok": ACTIVE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SIZED = {"moe_intermediate_size": NEURONS, "intermediate_size": 44}
_LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "head_dim": None, "num_key_value_heads": 4,
}  # fmt: skip

# Family to what its configuration needs besides the common values (None removes a value).
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": OUTER, "intermediate_size": NEURONS},
    "qwen2_moe": _SIZED | {"num_experts": OUTER, "shared_expert_intermediate_size": 24,
                           "mlp_only_layers": [1], "head_dim": None},
    "qwen3_moe": _SIZED | {"num_experts": OUTER, "norm_topk_prob": True},
    "olmoe": {"num_experts": OUTER, "intermediate_size": NEURONS, "head_dim": None},
    "deepseek_v2": _SIZED | _LATENT | {
        "n_routed_experts": OUTER, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "topk_method": "greedy", "routed_scaling_factor": 1.5},
    "deepseek_v3": _SIZED | _LATENT | {
        "n_routed_experts": OUTER, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5},
    "granitemoe": {"num_local_experts": OUTER, "intermediate_size": NEURONS, "head_dim": None,
                   "residual_multiplier": 0.5},
    "glm4_moe": _SIZED | {"n_routed_experts": OUTER, "n_shared_experts": 1,
                          "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}  # fmt: skip


def tiny_mixture(family: str, seed: int = 0, **changes: Any) -> Any:
    """A mixture of a family with random weights, in evaluation mode."""
    values = _COMMON | MIXTURES[family] | changes
    config = CONFIG_MAPPING[family](**{k: v for k, v in values.items() if v is not None})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    return model
