"""The inputs of one FFN for all calibration tokens: most to fit on, the last of them held out.

Shape suffixes: T tokens of a block, D hidden_size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import torch

from moesaic.calibration.text import HELD_OUT


class Inputs:
    """Blocks x (T, D), kept where the calibration's hidden states are kept.

    `hold_out` keeps the last eighth out of what is fitted, in whole windows of `window` tokens
    where it holds any. Without it everything is fitted on, and the last eighth is what is
    measured all the same. `first_held` is the first token held out, where that is known.
    """

    def __init__(
        self,
        blocks: Iterable[torch.Tensor],
        tokens: int,
        hold_out: bool,
        storage: torch.device,
        device: torch.device,
        window: int = 1,
        first_held: int | None = None,
    ):
        self.storage = storage
        self.device, self.hold_out = device, hold_out and tokens >= HELD_OUT
        held = tokens // HELD_OUT
        if first_held is None:
            first_held = tokens - max(held // window * window or held, 1)
        self.tokens = first_held if self.hold_out else tokens
        self._fit: list[torch.Tensor] = []
        self._held: list[torch.Tensor] = []
        start = 0
        for x_TD in blocks:
            before = max(0, min(first_held - start, len(x_TD)))
            if before:
                self._fit.append(x_TD[:before].to(storage))
            if before < len(x_TD):
                self._held.append(x_TD[before:].to(storage))
            start += len(x_TD)

    def apart(self, most: int) -> Inputs:
        """The same with the last eighth held out in any case, and about `most` tokens to fit on."""
        view = copy.copy(self)
        view.hold_out = True
        stride = -(-sum(map(len, self._fit)) // most)
        view._fit = [x_TD[::stride] for x_TD in self._fit]
        view.tokens = sum(map(len, view._fit))
        return view

    def all(self) -> Iterator[torch.Tensor]:
        """Blocks of all tokens."""
        for x_TD in [*self._fit, *self._held]:
            yield x_TD.to(self.device)

    def fit(self) -> Iterator[torch.Tensor]:
        """Blocks of the tokens to fit on."""
        for x_TD in self._fit if self.hold_out else [*self._fit, *self._held]:
            yield x_TD.to(self.device)

    def held(self) -> Iterator[torch.Tensor]:
        """Blocks of the last eighth of the tokens."""
        for x_TD in self._held:
            yield x_TD.to(self.device)
