"""The inputs of one FFN for all calibration tokens.

Shape suffixes: T tokens of a block, D hidden_size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from moesaic.calibration.calibration_set import Split
from moesaic.calibration.statistics import (
    Statistics,
    StatisticsKind,
    compute_statistics,
)
from moesaic.families import DenseFFN


class FFNInputs:
    """Blocks x (T, D), kept where the calibration's hidden states are kept.

    `layer` is the FFN's, and `ids_T` are the ids of all tokens; None for an expert of a
    mixture. `hold_out` keeps the last tokens of the split out of what is fitted. Without it
    everything is fitted on, and they are what is measured all the same.
    """

    def __init__(
        self,
        blocks: Iterable[Tensor],
        split: Split,
        hold_out: bool,
        storage: torch.device,
        device: torch.device,
        layer: int | None = None,
        ids_T: Tensor | None = None,
    ):
        self.storage = storage
        self.device = device
        self.layer = layer
        self.heldout_ids_T = None
        if ids_T is not None:
            self.heldout_ids_T = ids_T[split.first_heldout :]
        self.hold_out = hold_out and split.can_hold_out
        self.tokens = split.first_heldout if self.hold_out else split.tokens
        self._fit: list[Tensor] = []
        self._heldout: list[Tensor] = []
        self._known: dict[StatisticsKind, Statistics] = {}
        start = 0
        for x_TD in blocks:
            tokens = len(x_TD)
            cut = split.first_heldout - start
            cut = max(0, min(cut, tokens))
            if cut > 0:
                self._fit.append(x_TD[:cut].to(storage))
            if cut < tokens:
                self._heldout.append(x_TD[cut:].to(storage))
            start += tokens

    def apart(self, most: int) -> FFNInputs:
        """The same with tokens held out in any case, and about `most` to fit on."""
        view = copy.copy(self)
        view.hold_out = True
        tokens = sum(map(len, self._fit))
        stride = -(-tokens // most)
        view._fit = [x_TD[::stride] for x_TD in self._fit]
        view.tokens = sum(map(len, view._fit))
        view._known = {}
        return view

    def all(self) -> Iterator[Tensor]:
        """Blocks of all tokens."""
        yield from self._on_device(self._fit)
        yield from self._on_device(self._heldout)

    def fit(self) -> Iterator[Tensor]:
        """Blocks of the tokens to fit on."""
        if self.hold_out:
            return self._on_device(self._fit)
        return self.all()

    def heldout(self) -> Iterator[Tensor]:
        """Blocks of the last tokens of the split."""
        return self._on_device(self._heldout)

    def _on_device(self, blocks: list[Tensor]) -> Iterator[Tensor]:
        for x_TD in blocks:
            yield x_TD.to(self.device)

    def statistics(self, ffn: DenseFFN, kind: StatisticsKind) -> Statistics:
        """Activation statistics on the tokens to fit on: known already, or one pass."""
        known = self._known.get(kind)
        if known is not None:
            return known
        return compute_statistics(self.fit(), ffn, kind, self.tokens)

    def keep_statistics(
        self, kind: StatisticsKind, statistics: Statistics
    ) -> None:
        """Hands over statistics that were computed for many experts at once."""
        self._known[kind] = statistics
