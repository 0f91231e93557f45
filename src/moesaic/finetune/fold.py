"""Trained gates folded into the experts, as far as one number per expert can hold them.

A stock router's gates are 1, so what an exported expert keeps of 1 + p_j u_j is its
mean over the tokens that it runs for.

Shape suffixes: N windows, L tokens of one, R routed experts, K of them that run for a
token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moesaic.finetune.balance import chosen, hooked, run
from moesaic.finetune.lora import blocks_of, routers_of


@torch.no_grad()
def mean_gates(model: Any, windows_NL: Tensor) -> list[Tensor]:
    """Mean gate (R,) of every layer's experts over the tokens they run for.

    1 for an expert that runs for none.
    """
    routers = routers_of(model)
    sums = []
    counts = []
    for router in routers:
        sums.append(torch.zeros_like(router.selection_bias))
        counts.append(torch.zeros_like(router.selection_bias))

    def add(
        layer: int, router: Any, args: Any, output: tuple[Tensor, ...]
    ) -> None:
        # Both are (T, K): gates are folded where all tokens run as many experts.
        expert = output[-2].flatten()
        gate = output[-1].flatten()
        sums[layer].scatter_add_(0, expert, gate.float())
        count_1R, _ = chosen(router, args, output)
        counts[layer] += count_1R[0]

    with hooked(routers, add):
        run(model, windows_NL)
    gates = []
    for sum_R, count_R in zip(sums, counts, strict=True):
        mean_R = sum_R / count_R.clamp(min=1)
        gate_R = torch.where(count_R > 0, mean_R, 1.0)
        gates.append(gate_R)
    return gates


@torch.no_grad()
def fold_scale(model: Any, gates: list[Tensor]) -> None:
    """Multiplies every expert's W_down by its mean gate, in place.

    Sets expert_scale to zero, so that the router's gates are 1.
    """
    blocks = [block for block in blocks_of(model) if block.router is not None]
    for block, gate_R in zip(blocks, gates, strict=True):
        down: Any = block.experts.down_proj
        scaled = down.float() * gate_R[:, None, None]
        down.copy_(scaled)
        block.router.expert_scale.zero_()
