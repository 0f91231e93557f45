"""The inputs of one FFN for all calibration tokens.

The seam between methods and processes: a method reads all tokens, or says what is to be
made of each. Where several processes share the tokens, they are exchanged here.

Shape suffixes: T tokens of a block, D hidden_size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat

import torch
from torch import Tensor

from moesaic.calibration.calibration_set import Part, Split
from moesaic.calibration.share import ALONE, Rows, every
from moesaic.calibration.statistics import (
    Statistics,
    StatisticsKind,
    compute_statistics,
    sample_stride,
    sum_statistics,
)
from moesaic.families import DenseFFN

# Hidden states of one FFN that take no more than this are computed once, and kept.
HIDDEN_BYTES = 2**31


class FFNInputs:
    """Blocks x (T, D), kept where the calibration's hidden states are kept.

    `layer` is the FFN's, and `ids_T` are the ids of all tokens; None for an expert of a
    mixture. `hold_out` keeps the last tokens of the split out of what is fitted. Without it
    everything is fitted on, and they are what is measured all the same. With `reported`
    a method also fits what its report compares it with. `goals` are of the same tokens,
    two blocks (T, D) each time: the hidden states that the FFN's output is added to, and
    those that should come out. They are asked for once `blocks` are through, and read,
    not copied.

    Where weights are fitted (`hold_out`), the FFN's hidden states are read several times:
    `own_fit_hidden` and `own_heldout_hidden` keep those of the first FFN they are asked
    for, if they take at most HIDDEN_BYTES and blocks lie on the device that computes.

    Of several processes each keeps the blocks of its `part`; split and ids are of all.
    `fit`, `heldout`, `map`, `statistics` and the samples are of all tokens nevertheless,
    in their order: all processes must call them alike. `fit` sends every block, T D
    numbers each time it is read; `own_fit` and `own_heldout` send nothing, and are for
    sums that `share` adds up.
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
        part: Part | None = None,
        goals: Iterable[tuple[Tensor, Tensor]] | None = None,
    ):
        if part is None:
            part = Part(ALONE, [], 0, split.first_heldout, 0)
        self.storage = storage
        self.device = device
        self.layer = layer
        self.share = part.share
        self.heldout_ids_T = None
        if ids_T is not None:
            self.heldout_ids_T = ids_T[split.first_heldout :]
        self.hold_out = hold_out and split.can_hold_out
        self.reported = True
        self.tokens = split.first_heldout if self.hold_out else split.tokens
        self._split = split
        self._first = part.first
        self._first_heldout = part.first_heldout
        self._num_heldout = split.tokens - split.first_heldout
        self._known: dict[StatisticsKind, Statistics] = {}
        self._keeps_hidden = hold_out and storage.type == device.type
        self._ffn: DenseFFN | None = None
        # Of that FFN, by the block's place.
        self._hidden: dict[int, Tensor] = {}
        self._fit, self._heldout = _parted(blocks, part.to_fit, storage)
        self._has_goals = goals is not None
        pairs = list(goals or ())
        before = [before_TD for before_TD, _ in pairs]
        after = [after_TD for _, after_TD in pairs]
        self._before = _parted(before, part.to_fit, storage)
        self._after = _parted(after, part.to_fit, storage)

    def apart(self, most: int, heldout: int | None = None) -> FFNInputs:
        """The same with tokens held out in any case, and about `most` to fit on.

        With `heldout` at most so many are held out, those of `heldout_sample`.
        """
        view = copy.copy(self)
        view.hold_out = True
        view._has_goals = False
        if heldout is not None:
            held_stride = self._heldout_stride(heldout)
            view._heldout = self._every_heldout(held_stride)
            view._first_heldout = -(-self._first_heldout // held_stride)
            view._num_heldout = -(-self._num_heldout // held_stride)
        stride = max(-(-self._split.first_heldout // most), 1)
        view._fit = every(self._fit, stride, self._first)
        view._first = -(-self._first // stride)
        view.tokens = -(-self._split.first_heldout // stride)
        view._known = {}
        view._keeps_hidden = False
        view._ffn = None
        return view

    def own(self) -> Iterator[Tensor]:
        """Blocks of all tokens that this process holds."""
        return self._on_device(self._fit + self._heldout)

    def own_fit(self) -> Iterator[Tensor]:
        """Blocks of the tokens to fit on that this process holds."""
        return self._on_device(self._to_fit)

    def own_heldout(self) -> Iterator[Tensor]:
        """Blocks of the last tokens of the split that this process holds."""
        return self._on_device(self._heldout)

    def own_fit_hidden(self, ffn: DenseFFN) -> Iterator[tuple[Tensor, Tensor]]:
        """The blocks of `own_fit`, each with the FFN's hidden states (T, F).

        These are to be read only: they may be kept.
        """
        return self._with_hidden(ffn, self._to_fit, 0)

    def own_heldout_hidden(
        self, ffn: DenseFFN
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The blocks of `own_heldout`, likewise."""
        return self._with_hidden(ffn, self._heldout, len(self._fit))

    def _with_hidden(
        self, ffn: DenseFFN, blocks: list[Tensor], first: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The blocks from that place on, each with h: as it was kept, or computed."""
        keeps = self._can_keep(ffn)
        for place, x_TD in enumerate(self._on_device(blocks), first):
            h_TF = self._hidden.get(place) if keeps else None
            if h_TF is None:
                h_TF = ffn.hidden(x_TD)
            if keeps:
                self._hidden[place] = h_TF
            yield x_TD, h_TF

    def _can_keep(self, ffn: DenseFFN) -> bool:
        """Whether it is the FFN whose hidden states are kept: the first one asked for."""
        if not self._keeps_hidden:
            return False
        if self._ffn is None:
            tokens = sum(len(x_TD) for x_TD in self._fit + self._heldout)
            number = ffn.up_FD.element_size()
            needed = tokens * ffn.intermediate_size * number
            self._keeps_hidden = needed <= HIDDEN_BYTES
            self._ffn = ffn
        return self._keeps_hidden and self._ffn is ffn

    def own_fit_goals(self) -> Iterator[Tensor | None]:
        """The goals of `own_fit`'s blocks; None for each where there are none."""
        if not self._has_goals:
            return repeat(None, len(self._to_fit))
        if self.hold_out:
            return self._goals(0)
        return chain(self._goals(0), self._goals(1))

    def own_heldout_goals(self) -> Iterator[Tensor | None]:
        """The goals of `own_heldout`'s blocks; None for each where there are none."""
        if not self._has_goals:
            return repeat(None, len(self._heldout))
        return self._goals(1)

    def _goals(self, half: int) -> Iterator[Tensor]:
        """What the FFN should add: 0, for tokens to fit on; 1, for those held out."""
        pairs = zip(self._before[half], self._after[half], strict=True)
        for before_TD, after_TD in pairs:
            goal_TD = after_TD.float() - before_TD.float()
            yield goal_TD.to(self.device)

    def fit(self) -> Iterator[Tensor]:
        """Blocks of the tokens to fit on."""
        return self._on_device(self.share.in_turn(self._to_fit))

    def heldout(self) -> Iterator[Tensor]:
        """Blocks of the last tokens of the split."""
        return self._on_device(self.share.in_turn(self._heldout))

    def map(self, function: Callable[[Tensor], Tensor]) -> Rows:
        """What a function makes of every block to fit on: a row for each token.

        Each process calls it for its own tokens.
        """

        def blocks() -> Iterator[Tensor]:
            return map(function, self.own_fit())

        return Rows(blocks, self.share, self._first)

    def map_hidden(
        self, ffn: DenseFFN, function: Callable[[Tensor], Tensor]
    ) -> Rows:
        """The same of the FFN's hidden states (T, F), which the function only reads."""

        def blocks() -> Iterator[Tensor]:
            for _, h_TF in self.own_fit_hidden(ffn):
                yield function(h_TF)

        return Rows(blocks, self.share, self._first)

    def sample(self) -> Tensor:
        """At most SAMPLE_TOKENS tokens (T, D) to fit on, evenly spaced."""
        stride = sample_stride(self.tokens)
        return self.share.gathered(every(self.own_fit(), stride, self._first))

    def sample_goals(self) -> Tensor | None:
        """The goals of `sample`; None where there are none."""
        if not self._has_goals:
            return None
        stride = sample_stride(self.tokens)
        goals = (
            goal_TD for goal_TD in self.own_fit_goals() if goal_TD is not None
        )
        return self.share.gathered(every(goals, stride, self._first))

    def heldout_sample(self, most: int) -> Tensor:
        """At most so many of the last tokens of the split (T, D), evenly spaced."""
        stride = self._heldout_stride(most)
        blocks = self._on_device(self._every_heldout(stride))
        return self.share.gathered(blocks)

    def _heldout_stride(self, most: int) -> int:
        return -(-self._num_heldout // most)

    def _every_heldout(self, stride: int) -> list[Tensor]:
        """Of the last tokens of the split, evenly spaced ones: those held here."""
        return every(self._heldout, stride, self._first_heldout)

    @property
    def _to_fit(self) -> list[Tensor]:
        return self._fit if self.hold_out else self._fit + self._heldout

    def _on_device(self, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
        for x_TD in blocks:
            yield x_TD.to(self.device)

    def statistics(self, ffn: DenseFFN, kind: StatisticsKind) -> Statistics:
        """Activation statistics on the tokens to fit on: known already, or one pass."""
        known = self._known.get(kind)
        if known is not None:
            return known
        rest = (ffn, kind, self.tokens, self.share, self._first)
        if kind.normalise:
            return compute_statistics(self.own_fit(), *rest)
        return sum_statistics(self.own_fit_hidden(ffn), *rest)

    def keep_statistics(
        self, kind: StatisticsKind, statistics: Statistics
    ) -> None:
        """Hands over statistics that were computed for many experts at once."""
        self._known[kind] = statistics


def _parted(
    blocks: Iterable[Tensor], to_fit: int, storage: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Blocks of the first `to_fit` tokens, and of those that are held out."""
    fit = []
    heldout = []
    start = 0
    for block_TD in blocks:
        tokens = len(block_TD)
        cut = max(0, min(to_fit - start, tokens))
        if cut > 0:
            fit.append(block_TD[:cut].to(storage))
        if cut < tokens:
            heldout.append(block_TD[cut:].to(storage))
        start += tokens
    return fit, heldout
