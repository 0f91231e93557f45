"""What a layer's experts are called with, expert by expert.

Shape suffixes: T tokens, D hidden_size, O experts of a token, P = T O pairs of a token
and one of its experts, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from moesaic.calibration.calibration_set import Split
from moesaic.calibration.ffn_inputs import FFNInputs

BLOCK_TOKENS = 2048


class ExpertInputs:
    """What a layer's experts are called with for all calibration tokens.

    Recorded in one pass from the model's own router and sorted by expert once; the
    tokens of one expert are gathered by `inputs`. Holds x (T, D), chosen experts and
    gate weights (T, O).
    """

    def __init__(
        self,
        calls: Iterable[tuple[Tensor, ...]],
        experts: int,
        split: Split,
        hold_out: bool,
        storage: torch.device,
        device: torch.device,
    ):
        x: list[Tensor] = []
        index: list[Tensor] = []
        weight: list[Tensor] = []
        for x_block, index_block, weight_block in calls:
            x.append(x_block.to(storage))
            index.append(index_block.to(storage))
            weight.append(weight_block.to(storage))
        self.x_TD = torch.cat(x)
        self.index_TO = torch.cat(index)
        self.weight_TO = torch.cat(weight)
        self.hold_out = hold_out
        self.storage = storage
        self.device = device
        self.split = split
        experts_of_token = self.index_TO.shape[1]
        expert_P = self.index_TO.reshape(-1)
        order_P = expert_P.argsort(stable=True)
        token_P = order_P // experts_of_token
        count_E = torch.bincount(expert_P, minlength=experts)
        self.tokens_of = token_P.split(count_E.tolist())

    def all(self) -> Iterator[tuple[Tensor, ...]]:
        """Calls of all tokens, block by block."""
        calls = zip(
            self.x_TD.split(BLOCK_TOKENS),
            self.index_TO.split(BLOCK_TOKENS),
            self.weight_TO.split(BLOCK_TOKENS),
            strict=True,
        )
        for call in calls:
            yield tuple(tensor.to(self.device) for tensor in call)

    def all_inputs(self) -> FFNInputs:
        """All tokens: what the shared expert is called with."""
        return self._inputs(self.x_TD, self.split)

    def inputs(self, expert: int) -> FFNInputs:
        """The tokens that the router sends to an expert.

        Held out are those of the same windows. Where it gets none of those, or mostly
        those, the last eighth of its own.
        """
        token_P = self.tokens_of[expert]
        tokens = len(token_P)
        to_fit_P = token_P < self.split.first_heldout
        first_heldout = int(to_fit_P.sum())
        split = Split(tokens, first_heldout)
        if not tokens / 2 <= first_heldout < tokens:
            split = Split.last_eighth(tokens)
        return self._inputs(self.x_TD[token_P], split)

    def _inputs(self, x_TD: Tensor, split: Split) -> FFNInputs:
        blocks = x_TD.split(BLOCK_TOKENS)
        return FFNInputs(
            blocks,
            split,
            self.hold_out,
            self.storage,
            self.device,
        )
