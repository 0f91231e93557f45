"""SxAyEz: how many experts are shared, how many routed ones run per token, how many there are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesaic.errors import MoesaicError, unknown

if TYPE_CHECKING:
    from moesaic.modeling import Sizes

_FORM = re.compile(r"S([0-9]{1,6})A([0-9]{1,6})E([0-9]{1,6})")


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
            raise MoesaicError(
                f"layout {self}: the number of shared experts is at least 0"
            )
        if self.num_active < 1:
            raise MoesaicError(
                f"layout {self}: at least one routed expert must run (A >= 1)"
            )
        if self.num_total <= self.num_shared:
            raise MoesaicError(
                f"layout {self}: {self.num_shared} shared of {self.num_total} experts "
                "leave none to route (E must exceed S)"
            )
        if self.num_active > self.num_routed:
            raise MoesaicError(
                f"layout {self}: {self.num_active} routed experts cannot run where "
                f"{self.num_total} - {self.num_shared} = {self.num_routed} exist "
                "(A <= E - S)"
            )

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Reads "S3A3E8"; raises MoesaicError for any other form or an impossible count."""
        match = _FORM.fullmatch(str(text).strip().upper())
        if match is None:
            raise MoesaicError(
                f"layout {text!r} is not of the form SxAyEz; S3A3E8 means 3 shared "
                "experts and 3 of the 5 routed ones per token, 8 in total"
            )
        shared, active, total = match.groups()
        return cls(int(shared), int(active), int(total))

    @property
    def num_routed(self) -> int:
        return self.num_total - self.num_shared

    def sizes(self, intermediate_size: int) -> Sizes:
        """Splits an FFN's neurons: experts of floor(d_h / N), the shared ones get the rest.

        Raises MoesaicError where an expert would have no neuron.
        """
        from moesaic.modeling import Sizes  # which imports torch

        expert = intermediate_size // self.num_total
        if expert == 0:
            raise MoesaicError(
                f"layout {self}: {self.num_total} experts cannot share the "
                f"{intermediate_size} neurons of an FFN; take E <= {intermediate_size}"
            )
        shared = intermediate_size - self.num_routed * expert
        return Sizes(shared, expert, self.num_routed, self.num_active)

    def __str__(self) -> str:
        return f"S{self.num_shared}A{self.num_active}E{self.num_total}"


# The most experts of a grain: finer is more accurate and slower (docs/method.md).
GRAINS = {"coarse": 16, "medium": 32, "fine": 128}


def layouts_for(
    sparsity: float,
    intermediate_size: int,
    grain: str = "medium",
    experts: int | None = None,
    shared: int | None = None,
) -> list[Layout]:
    """Layouts that leave out `sparsity` of the neurons for a token, the usual one first.

    Experts are as many as the grain allows, or half of that, of one size that divides the FFN
    with little left over; one is shared, or an eighth. With `experts` as many as a paper's
    method has, and half of the active ones shared (S3A3E8 at 0.25, S2A2E8 at 0.5), or
    `shared`.
    Raises MoesaicError for an unknown grain, and for a sparsity outside (0, 1) or out of reach.
    """
    if grain not in GRAINS:
        raise unknown("grain", grain, GRAINS)
    if not 0 < sparsity < 1:
        raise MoesaicError(
            f"sparsity {sparsity} is outside (0, 1); 0.25 skips a quarter"
        )
    # Candidates: how many experts there are, and how many of them are shared.
    candidates = []
    if experts:
        half_of_active = round((1 - sparsity) * experts) // 2
        if shared is None:
            shared = half_of_active
        candidates.append((experts, shared))
    else:
        most = GRAINS[grain]
        for count in (most, most // 2):
            neurons = -(-intermediate_size // count)
            total = intermediate_size // neurons
            candidates += [(total, 1), (total, total // 8)]
    active_neurons = (1 - sparsity) * intermediate_size
    layouts: list[Layout] = []
    for total, shared_experts in candidates:
        size = max(1, intermediate_size // total)  # as `sizes` has it
        routed = total - shared_experts
        shared_neurons = intermediate_size - routed * size
        num_active = round((active_neurons - shared_neurons) / size)
        if shared_neurons >= 0 and 1 <= num_active < routed:
            layout = Layout(shared_experts, num_active, total)
            if layout not in layouts:
                layouts.append(layout)
    if not layouts:
        allowed = f"at most {GRAINS[grain]}"
        advice = "take another --grain or --sparsity"
        if experts:
            allowed = str(experts)
            advice = "give a --layout"
        raise MoesaicError(
            f"sparsity {sparsity}: no layout with {allowed} experts of an FFN of "
            f"{intermediate_size} neurons reaches it; {advice}"
        )
    return layouts
