"""Trained gates folded into the experts, as far as one number per expert can hold them.

A stock router's gates are 1, so what an exported expert keeps of 1 + p_j u_j is its mean over the
tokens that it runs for.

Shape suffixes: R routed experts, L layers, K routed experts run per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moesaic.finetune.balance import chosen, hooked, run
from moesaic.finetune.lora import blocks_of, routers_of


@torch.no_grad()
def mean_gates(model: Any, windows_NL: Tensor) -> list[Tensor]:
    """Mean gate (R,) of every layer's experts over the tokens they run for; 1 where none does."""
    routers = routers_of(model)
    sums = [torch.zeros_like(router.selection_bias) for router in routers]
    counts = [torch.zeros_like(router.selection_bias) for router in routers]

    def add(
        layer: int, router: Any, args: Any, output: tuple[Tensor, ...]
    ) -> None:
        expert, gate = (
            output[-2],
            output[-1],
        )  # of top-k: (T, K); of thresholds: (P,)
        sums[layer].scatter_add_(0, expert.flatten(), gate.flatten().float())
        counts[layer] += chosen(router, args, output)[0][0]

    with hooked(routers, add):
        run(model, windows_NL)
    return [
        torch.where(count_R > 0, sum_R / count_R.clamp(min=1), 1.0)
        for sum_R, count_R in zip(sums, counts, strict=True)
    ]


@torch.no_grad()
def fold_scale(model: Any, gates: list[Tensor]) -> None:
    """Multiplies every expert's W_down by its mean gate and sets expert_scale to zero, in place."""
    blocks = [block for block in blocks_of(model) if block.router is not None]
    for block, gate_R in zip(blocks, gates, strict=True):
        down: Any = block.experts.down_proj
        down.copy_(down.float() * gate_R[:, None, None])
        block.router.expert_scale.zero_()
