"""What a layer's experts are called with, expert by expert.

Shape suffixes: T tokens, D hidden_size, O experts of a token, P = T O pairs of a token and one of
its experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from moesaic.calibration.ffn_inputs import Inputs
from moesaic.calibration.text import HELD_OUT

BLOCK_TOKENS = 2048


class Routed:
    """What a layer's experts are called with for all calibration tokens, sorted by expert once.

    Recorded in one pass from the model's own router; the tokens of one expert are gathered by
    `inputs`. Holds x (T, D), chosen experts and gate weights (T, O).
    """

    def __init__(
        self,
        calls: Iterable[tuple[torch.Tensor, ...]],
        experts: int,
        hold_out: bool,
        storage: torch.device,
        device: torch.device,
        window: int,
    ):
        kept = [[tensor.to(storage) for tensor in call] for call in calls]
        self.x_TD, self.index_TO, self.weight_TO = (
            torch.cat(t) for t in zip(*kept, strict=True)
        )
        self.hold_out, self.storage, self.device = hold_out, storage, device
        tokens = len(self.x_TD)
        held = tokens // HELD_OUT
        self.first_held = tokens - max(held // window * window or held, 1)
        expert_P = self.index_TO.reshape(-1)
        order_P = expert_P.argsort(stable=True)
        count_E = torch.bincount(expert_P, minlength=experts)
        self.tokens_of = (order_P // self.index_TO.shape[1]).split(count_E.tolist())

    def all(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Calls of all tokens, block by block."""
        for tensors in zip(
            *(
                t.split(BLOCK_TOKENS)
                for t in (self.x_TD, self.index_TO, self.weight_TO)
            ),
            strict=True,
        ):
            yield tuple(tensor.to(self.device) for tensor in tensors)

    def all_inputs(self) -> Inputs:
        """All tokens: what the shared expert is called with."""
        return Inputs(
            self.x_TD.split(BLOCK_TOKENS),
            len(self.x_TD),
            self.hold_out,
            self.storage,
            self.device,
            first_held=self.first_held,
        )

    def inputs(self, expert: int) -> Inputs:
        """The tokens that the router sends to an expert; held out are those of the same windows.

        Where it gets none of those, or mostly those, the last eighth of its own.
        """
        token_P = self.tokens_of[expert]
        x_PD, count = self.x_TD[token_P], len(token_P)
        first_held = int((token_P < self.first_held).sum())
        if not count / 2 <= first_held < count:
            first_held = count - max(count // HELD_OUT, 1)
        return Inputs(
            x_PD.split(BLOCK_TOKENS),
            count,
            self.hold_out,
            self.storage,
            self.device,
            first_held=first_held,
        )
