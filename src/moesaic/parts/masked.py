"""A converted layer as a dense FFN with a mask: all neurons are computed, those chosen count.

The same outputs as the block's, up to rounding, and on a CPU faster than many small experts; it
saves nothing, so it serves to calibrate the layers after it, and to hold the oracle.

Shape suffixes: T tokens, F neurons, S shared neurons, R routed experts, M neurons of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moesaic.families import DenseFFN
from moesaic.modeling import MoesaicBlock, MoesaicNeurons

LEAST = 10.0  # nats below the threshold, from which on a neuron's score says no more

Choose = Callable[
    [torch.Tensor], torch.Tensor
]  # inputs (T, D) to the experts that run (T, R)


class MaskedBlock(nn.Module):
    """`ffn` holds the shared neurons, then expert by expert `expert_size` neurons.

    `scores` are what experts are chosen by (T, R), selection bias included, where a router scores.
    """

    def __init__(
        self,
        ffn: DenseFFN,
        shared_size: int,
        expert_size: int,
        choose: Choose | None,
        scores: Choose | None = None,
    ):
        super().__init__()
        self.ffn, self.choose, self.scores = ffn, choose, scores
        self.shared_size, self.expert_size = shared_size, expert_size

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        h_TF = self.ffn.hidden(x_TD)
        if self.choose is not None:
            chosen_TR = self.choose(x_TD).to(h_TF.dtype)
            if (
                torch.is_grad_enabled()
            ):  # an activation may keep its output for its gradient
                h_TF = h_TF.clone()
            h_TRM = h_TF[:, self.shared_size :].unflatten(1, (-1, self.expert_size))
            h_TRM.mul_(chosen_TR[:, :, None])
        return self.ffn.output(h_TF).view_as(hidden_states)


def masked_view(block: MoesaicBlock, ffn: DenseFFN, config: Any) -> MaskedBlock:
    """A block's weights as one dense FFN, read from the block alone; `ffn` names the activation.

    Takes the block's unit gates for granted: before training they are 1. One copy of the weights.
    """
    moe: dict[str, Any] = config.moesaic
    if block.neurons is not None:
        return _masked_neurons(block.neurons, ffn.activation)
    shared, experts, router = block.shared_expert, block.experts, block.router
    size, padded = moe["expert_size"], moe["padded_size"]
    parts: dict[str, list[torch.Tensor]] = {
        "gate": [],
        "up": [],
        "gate_bias": [],
        "up_bias": [],
    }
    down = []
    if shared is not None:
        for name in ("gate", "up"):
            linear: Any = getattr(shared, f"{name}_proj")
            if linear is not None:
                parts[name].append(linear.weight)
                if linear.bias is not None:
                    parts[f"{name}_bias"].append(linear.bias)
        down.append(shared.down_proj.weight)
    if experts is not None:
        names = ("gate", "up") if ffn.gated else ("up",)
        stacked = "gate_up_proj" if ffn.gated else "up_proj"
        for suffix in ("", "_bias"):
            fused: torch.Tensor | None = getattr(experts, stacked + suffix, None)
            if fused is not None:
                for place, name in enumerate(names):
                    start = place * padded
                    rows = fused[:, start : start + size]
                    parts[name + suffix].append(rows.flatten(0, 1))
        down.append(experts.down_proj[:, :, :size].permute(1, 0, 2).flatten(1))

    def joined(name: str) -> torch.Tensor | None:
        return torch.cat(parts[name]).detach() if parts[name] else None

    up_FD = joined("up")
    assert up_FD is not None
    whole = DenseFFN(
        up_FD,
        torch.cat(down, dim=1).detach(),
        ffn.activation,
        joined("gate"),
        joined("up_bias"),
        joined("gate_bias"),
        block.output_bias,
    )
    if router is None:
        return MaskedBlock(whole, moe["shared_size"], size, None)
    return MaskedBlock(
        whole,
        moe["shared_size"],
        size,
        lambda x_TD: router.choose(router.scores(x_TD)),
        lambda x_TD: router.biased(router.scores(x_TD)),
    )


def _masked_neurons(neurons: MoesaicNeurons, activation: str) -> MaskedBlock:
    """The same where every neuron is an expert."""
    gate: Any = neurons.gate_proj
    up: Any = neurons.up_proj
    down: Any = neurons.down_proj
    tensors = [up.weight, down.weight.T, gate.weight, up.bias, gate.bias, down.bias]
    up_FD, down_DF, *rest = (None if t is None else t.detach() for t in tensors)
    assert up_FD is not None
    assert down_DF is not None
    whole = DenseFFN(up_FD, down_DF, activation, *rest)

    def scores(x_TD: torch.Tensor) -> torch.Tensor:
        score_TF: torch.Tensor = neurons.router(x_TD, whole.gates(x_TD))
        return score_TF

    # Gates of exactly 0 score far below all others: they would decide the scores' spread.
    return MaskedBlock(
        whole,
        0,
        1,
        lambda x_TD: scores(x_TD) > 0,
        lambda x_TD: scores(x_TD).clamp(min=-LEAST),
    )
