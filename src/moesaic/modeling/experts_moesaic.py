"""Experts on transformers' seam: fused weights, one grouped computation for all of them.

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: T tokens, D hidden_size.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations import use_experts_implementation

from .configuration_moesaic import MoesaicConfig


def random_parameter(*shape: int) -> nn.Parameter:
    # Self-made start values: transformers initialises by the class of the enclosing family model,
    # which does not know these modules. Costs nothing when weights are loaded (meta device).
    return nn.Parameter(torch.empty(*shape).normal_(std=0.02))


def padded(count: int) -> int:
    """Rounded up to a multiple of 8."""
    return -(-count // 8) * 8


@use_experts_implementation
class MoesaicExperts(nn.Module):
    """Routed experts as transformers 5 keeps them: fused 3-D weights, run by one of its kernels.

    `count` experts of `neurons`, stored rounded up to a multiple of 8 with neurons of weight zero,
    which add nothing: torch's grouped product wants rows of whole 16 bytes.

    `forward` is the plain loop over experts ("eager"); `model.set_experts_implementation` switches
    to `grouped_mm` (the default) or `batched_mm`.
    """

    def __init__(self, config: MoesaicConfig, count: int, neurons: int):
        super().__init__()
        ffn, size = config.moesaic["ffn"], padded(neurons)
        self.neurons = neurons
        self.num_experts = count  # the name that transformers' kernels read
        self.act_fn = ACT2FN[ffn["activation"]]
        rows = 2 * size if ffn["gated"] else size
        name = "gate_up_proj" if ffn["gated"] else "up_proj"
        hidden = config.hidden_size
        self.register_parameter(name, random_parameter(self.num_experts, rows, hidden))
        self.down_proj = random_parameter(self.num_experts, hidden, size)
        if ffn["bias"]:
            self.register_parameter(
                f"{name}_bias", random_parameter(self.num_experts, rows)
            )

    @property
    def down_proj_bias(self) -> torch.Tensor:
        """Zeros, which the kernels ask for: the block adds the FFN's own output bias once."""
        return self.down_proj.new_zeros(self.down_proj.shape[:2])

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        output_TD = torch.zeros_like(hidden_states)
        name = "gate_up_proj" if self.has_gate else "up_proj"
        weight, bias = getattr(self, name), getattr(self, f"{name}_bias", None)
        for expert in range(self.num_experts):
            token, slot = torch.where(top_k_index == expert)
            h = nn.functional.linear(
                hidden_states[token],
                weight[expert],
                None if bias is None else bias[expert],
            )
            h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
            y = nn.functional.linear(h, self.down_proj[expert])
            y = y * top_k_weights[token, slot, None]
            output_TD.index_add_(0, token, y.to(output_TD.dtype))
        return output_TD


def make_experts(config: MoesaicConfig, count: int, neurons: int) -> MoesaicExperts:
    """Experts of the family's kind: with a gate or without, with biases or without."""
    experts = MoesaicExperts(config, count, neurons)
    # The decorator sets these per class; ours is per family.
    experts.has_gate, experts.has_bias = (
        config.moesaic["ffn"]["gated"],
        config.moesaic["ffn"]["bias"],
    )
    return experts
