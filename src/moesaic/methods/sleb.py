"""SLEB: whole blocks taken out, one after the other, the least missed one first.

Source: Song et al., SLEB: Streamlining LLMs through Redundancy Verification and
Elimination of Transformer Blocks, ICML 2024. docs/method.md holds the rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moesaic.errors import MoesaicError
from moesaic.methods.base import ModelMethod, ModelShape, setting
from moesaic.methods.contents import METHODS
from moesaic.parts.blocks import (
    DEPTH,
    block_changes,
    check_alike,
    depth_of,
    keep_blocks,
    losses_without,
)
from moesaic.progress import track


@dataclass(frozen=True)
class SLEB(ModelMethod):
    """Greedy: in each round every block is left out once, and the best stays out.

    A round costs half a forward pass over the tokens for every block that is left; k of n
    blocks cost about k n / 2 passes. The sparsity is the share of blocks, attention and
    all, so the work that goes is that share of everything but the head.
    """

    description = METHODS["sleb"]

    tokens: int = setting(
        8192, "Calibration tokens that blocks are judged on, at most.", 64
    )

    def changes(self, shape: ModelShape, sparsity: float) -> dict[str, Any]:
        depth = depth_of(shape.config)
        kept = round((1 - sparsity) * depth)
        if not kept:
            most = 1 - 1 / depth
            raise MoesaicError(
                f"sparsity {sparsity} leaves none of {depth} blocks; take at most "
                f"{most:.2f}"
            )
        if kept == depth and sparsity:
            raise MoesaicError(
                f"sparsity {sparsity} takes out none of {depth} blocks; take more than "
                f"{0.5 / depth:.4g}"
            )
        # Which ones stay is not known yet; any choice is as much work.
        return block_changes(shape.config, range(kept))

    def convert(
        self, model: Any, calibration: Any, plan: Any, run: Any
    ) -> list[Any]:
        """Takes blocks out until as many are left as the plan says."""
        check_alike(model, plan.model)
        kept = list(range(model.config.get_text_config().num_hidden_layers))
        rounds = len(kept) - plan.moe.changes[DEPTH]
        windows_NL = calibration.windows_NL
        windows = math.ceil(self.tokens / calibration.length)
        judged_NL = windows_NL[:windows]
        for number in track(
            range(rounds), "taking blocks out", enabled=run.progress
        ):
            least_missed = run.remembered(
                f"round-{number}",
                lambda: self._least_missed(model, kept, judged_NL),
            )
            kept.remove(least_missed)
        keep_blocks(model, kept)
        return []

    def _least_missed(
        self, model: Any, kept: list[int], windows_NL: Tensor
    ) -> int:
        """The block without which the loss is least; of equal ones the first."""
        losses = [
            loss if math.isfinite(loss) else math.inf
            for loss in losses_without(model, kept, windows_NL)
        ]
        least = min(losses)
        return kept[losses.index(least)]
