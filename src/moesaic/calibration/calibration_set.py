"""The calibration tokens, cut once into those that are fitted on and those held out.

Shape suffixes: N windows, H those that are held out, L tokens of a window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.calibration.first_token import begun
from moesaic.calibration.share import Share
from moesaic.errors import MoesaicError

LARGEST_SEED = 2**31 - 1
HELD_OUT = 8  # one token in so many, the last ones, is not fitted on
MOST_TOKENS = 2**24


@dataclass(frozen=True)
class Split:
    """How many tokens there are, and the first one that is held out."""

    tokens: int
    first_heldout: int

    @classmethod
    def last_eighth(cls, tokens: int, window: int = 1) -> Split:
        """The last eighth held out: in whole windows, where it is one at least."""
        heldout = tokens // HELD_OUT
        if heldout >= window:
            heldout = heldout // window * window
        heldout = max(heldout, 1)
        return cls(tokens, first_heldout=tokens - heldout)

    @property
    def can_hold_out(self) -> bool:
        """Whether there are enough tokens to leave some out of a fit."""
        return self.tokens >= HELD_OUT


@dataclass(frozen=True)
class Part:
    """The windows that one of several processes holds.

    `first` is the place of its first token among all, `to_fit` how many of its tokens
    come before the first that is held out, and `first_heldout` the place of its first
    one of those among them.
    """

    share: Share
    window_N: list[int]  # their numbers
    first: int
    to_fit: int
    first_heldout: int


@dataclass(frozen=True)
class CalibrationSet:
    """Windows of token ids (N, L); the last of them are held out of every fit.

    `domain_N` says which of several texts a window comes from; None for one text.
    `heldout_of_texts` is how many windows are held out of those of several texts: some
    of each.
    """

    windows_NL: Tensor
    domain_N: Tensor | None = None
    heldout_of_texts: int | None = None

    @classmethod
    def sample(
        cls,
        ids: Tensor,
        samples: int,
        length: int,
        seed: int,
        first: int | None = None,
    ) -> CalibrationSet:
        """Windows at random places of a text, drawn with the seed (paper, Section 5.1).

        The windows that are held out come from the last eighth of the text (one window
        at least), the others from before: what is held out of a fit shares no token
        with what is fitted. `first` takes the place of the first token of each. A 2-D
        tensor of ids is taken as windows already, as they are. Raises MoesaicError for a
        text too short for that.
        """
        if ids.ndim == 2:
            return cls(ids)
        tokens = len(ids)
        heldout_tokens = 0
        if samples > 1:
            heldout_tokens = max(tokens // HELD_OUT, length)
        fit_tokens = tokens - heldout_tokens
        if fit_tokens < length:
            windows = "one window"
            needed = length
            if samples > 1:
                windows = "two windows"
                needed = 2 * length
            raise MoesaicError(
                f"the calibration text is too short: {tokens:,} tokens, at least "
                f"{needed:,} ({windows} of {length}) are needed; give a longer text or a "
                "smaller --sequence-length"
            )

        generator = torch.Generator().manual_seed(seed)
        place_N = torch.rand(samples, generator=generator, dtype=torch.float64)
        fit_starts = fit_tokens - length + 1
        start_N = (place_N * fit_starts).long()
        first_heldout = samples - heldout_windows(samples)
        heldout_starts = heldout_tokens - length + 1
        place_H = place_N[first_heldout:]
        offset_H = (place_H * heldout_starts).long()
        start_N[first_heldout:] = fit_tokens + offset_H

        offset_L = torch.arange(length)
        index_NL = start_N[:, None] + offset_L
        return cls(begun(ids[index_NL], first))

    @classmethod
    def of_texts(
        cls,
        texts: Sequence[Tensor],
        samples: int,
        length: int,
        seed: int,
        first: int | None = None,
    ) -> CalibrationSet:
        """Windows of one text, or as many of each of several."""
        share = math.ceil(samples / len(texts))
        sets = [cls.sample(ids, share, length, seed, first) for ids in texts]
        if len(sets) == 1:
            return sets[0]
        return cls.joined(sets)

    @classmethod
    def joined(cls, sets: Sequence[CalibrationSet]) -> CalibrationSet:
        """The windows of several texts: those to fit on of all, then the others.

        Texts take turns among both, so that the first or last windows are of all. Raises
        MoesaicError where windows differ in length.
        """
        lengths = {one.length for one in sets}
        if len(lengths) > 1:
            numbers = " and ".join(map(str, sorted(lengths)))
            raise MoesaicError(
                f"windows of {numbers} tokens; those of all texts must be equal"
            )
        fitted = []
        heldout = []
        for one in sets:
            first_heldout = one.samples - heldout_windows(one.samples)
            fitted.append(one.windows_NL[:first_heldout])
            heldout.append(one.windows_NL[first_heldout:])
        fitted_NL, fitted_domain_N = _in_turns(fitted)
        heldout_HL, heldout_domain_H = _in_turns(heldout)
        return cls(
            torch.cat([fitted_NL, heldout_HL]),
            torch.cat([fitted_domain_N, heldout_domain_H]),
            len(heldout_HL) or None,
        )

    @property
    def samples(self) -> int:
        return len(self.windows_NL)

    @property
    def heldout_samples(self) -> int:
        """How many windows are held out; of several texts some of each."""
        if self.heldout_of_texts is not None:
            return self.heldout_of_texts
        return heldout_windows(self.samples)

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return self.windows_NL.shape[1]

    @property
    def tokens(self) -> int:
        return self.windows_NL.numel()

    @property
    def split(self) -> Split:
        """The same cut, by token."""
        if self.heldout_of_texts is not None:
            heldout = self.heldout_of_texts * self.length
            return Split(self.tokens, self.tokens - heldout)
        return Split.last_eighth(self.tokens, self.length)

    def part(self, share: Share, hold_out: bool) -> Part:
        """The windows of this process, in their order.

        Those that are held out are shared apart from the others, where they are read
        apart from them: all processes have something to do at any time.
        """
        length = self.length
        split = self.split
        heldout = 0
        if hold_out:  # fewer tokens than a window are the end of the last one
            heldout = (split.tokens - split.first_heldout) // length
        others = self.samples - heldout
        own = share.own(others)
        own_heldout = share.own(heldout)
        windows = range(self.samples)
        first = own.start * length
        end = own.stop * length
        first_heldout = max(first - split.first_heldout, 0)
        if heldout:
            first_heldout = own_heldout.start * length
        return Part(
            share,
            window_N=[*windows[:others][own], *windows[others:][own_heldout]],
            first=first,
            to_fit=max(min(end, split.first_heldout) - first, 0),
            first_heldout=first_heldout,
        )

    def heldout(self, most: int) -> Tensor:
        """At most so many of the windows that are held out; the last one at least."""
        count = min(max(self.heldout_samples, 1), most)
        return self.windows_NL[-count:]

    @property
    def _texts(self) -> int:
        """How many texts the windows are of."""
        if self.domain_N is None:
            return 1
        return len(self.domain_N.unique())

    def fewer(self, samples: int) -> CalibrationSet:
        """At most so many windows, held out and others in proportion.

        Of several texts one of each is held out, as long as half of the windows are
        left to fit on, and never is a window fitted on that was held out.
        """
        if samples >= self.samples:
            return self
        heldout = heldout_windows(samples)
        heldout_of_texts = None
        if self.heldout_of_texts is not None:
            heldout = max(heldout, min(self._texts, samples // 2))
            heldout = min(heldout, self.heldout_of_texts)
            to_fit = self.samples - self.heldout_of_texts
            heldout = max(heldout, samples - to_fit)
            heldout_of_texts = heldout or None
        fitted = samples - heldout
        first_heldout = self.samples - heldout
        number_N = torch.arange(self.samples)
        kept_N = torch.cat([number_N[:fitted], number_N[first_heldout:]])
        domain_N = self.domain_N
        if domain_N is not None:
            domain_N = domain_N[kept_N]
        return CalibrationSet(
            self.windows_NL[kept_N], domain_N, heldout_of_texts
        )


def _in_turns(texts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Windows (N, L) of several texts, mixed evenly, and which text each is from (N,)."""
    places = []
    domains = []
    for domain, text_NL in enumerate(texts):
        count = len(text_NL)
        places += [(number + 0.5) / count for number in range(count)]
        domains += [domain] * count
    order = sorted(range(len(places)), key=lambda number: places[number])
    domain_N = torch.tensor(domains, dtype=torch.int64)
    return torch.cat(list(texts))[order], domain_N[order]


def heldout_windows(samples: int) -> int:
    """How many of so many windows are held out: one at least, of several."""
    if samples <= 1:
        return 0
    return max(samples // HELD_OUT, 1)


def check_seed(seed: int) -> None:
    """Raises MoesaicError for a seed that no generator takes."""
    if not isinstance(seed, int) or not 0 <= seed <= LARGEST_SEED:
        raise MoesaicError(
            f"seed {seed} is outside 0..{LARGEST_SEED}; choose a whole number inside it"
        )


def check_samples(samples: int, length: int) -> None:
    """Raises MoesaicError for no calibration windows, or more than are profiled."""
    if samples < 1:
        raise MoesaicError(
            f"{samples} calibration samples; at least 1 is needed"
        )
    if samples * length > MOST_TOKENS:
        raise MoesaicError(
            f"{samples} samples of {length} are over {MOST_TOKENS:,} tokens, the most "
            "that are profiled; take fewer --samples"
        )
