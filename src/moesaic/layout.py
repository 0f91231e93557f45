"""SxAyEz: how many experts are shared, how many routed ones run per token, how many there are."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moesaic.errors import MoesaicError

_FORM = re.compile(r"S([0-9]{1,6})A([0-9]{1,6})E([0-9]{1,6})")


@dataclass(frozen=True)
class Sizes:
    """Neurons of one FFN under a layout; shared + num_routed * expert is the whole FFN."""

    shared: int
    expert: int
    num_routed: int
    num_active: int

    @property
    def total(self) -> int:
        return self.shared + self.num_routed * self.expert

    @property
    def active(self) -> int:
        """Neurons computed for a token."""
        return self.shared + self.num_active * self.expert


@dataclass(frozen=True)
class Layout:
    """S3A3E8: 3 shared experts and 3 of the 5 routed ones run for each token, 8 in total.

    The letters are the paper's N_s, N_k and N = N_s + N_r (Section 4.1).
    """

    num_shared: int
    num_active: int
    num_total: int

    def __post_init__(self) -> None:
        if self.num_shared < 0:
            raise MoesaicError(f"layout {self}: the number of shared experts is at least 0")
        if self.num_active < 1:
            raise MoesaicError(f"layout {self}: at least one routed expert must run (A >= 1)")
        if self.num_total <= self.num_shared:
            raise MoesaicError(
                f"layout {self}: {self.num_shared} shared of {self.num_total} experts leave none "
                "to route (E must exceed S)"
            )
        if self.num_active > self.num_routed:
            raise MoesaicError(
                f"layout {self}: {self.num_active} routed experts cannot run where "
                f"{self.num_total} - {self.num_shared} = {self.num_routed} exist (A <= E - S)"
            )

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Reads "S3A3E8"; raises MoesaicError for any other form or an impossible count."""
        match = _FORM.fullmatch(str(text).strip().upper())
        if match is None:
            raise MoesaicError(
                f"layout {text!r} is not of the form SxAyEz; S3A3E8 means 3 shared experts and "
                "3 of the 5 routed ones per token, 8 in total"
            )
        return cls(*(int(number) for number in match.groups()))

    @property
    def num_routed(self) -> int:
        return self.num_total - self.num_shared

    def sizes(self, intermediate_size: int) -> Sizes:
        """Splits an FFN's neurons: experts of floor(d_h / N), what is left over joins the shared.

        Raises MoesaicError where an expert would have no neuron.
        """
        expert = intermediate_size // self.num_total
        if expert == 0:
            raise MoesaicError(
                f"layout {self}: {self.num_total} experts cannot share the {intermediate_size} "
                f"neurons of an FFN; take E <= {intermediate_size}"
            )
        shared = intermediate_size - self.num_routed * expert
        return Sizes(shared, expert, self.num_routed, self.num_active)

    def __str__(self) -> str:
        return f"S{self.num_shared}A{self.num_active}E{self.num_total}"
