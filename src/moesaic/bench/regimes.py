"""What is timed: prompts, and tokens one after the other, for one sequence or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.errors import MoesaicError


@dataclass(frozen=True)
class Regime:
    """One kind of work: `batch` sequences at once.

    Of each `prompt` tokens are read at once, and then `new` tokens one at a time.
    """

    batch: int
    prompt: int
    new: int


def make_regimes(
    prefill: int, decode: int, batches: Sequence[int]
) -> list[Regime]:
    """One for each batch. Raises MoesaicError for numbers below 1."""
    for name, number in (("prefill", prefill), ("decode", decode)):
        if number < 1:
            raise MoesaicError(f"{name} {number}: at least 1 token is timed")
    if not batches or min(batches) < 1:
        listed = ", ".join(map(str, batches))
        raise MoesaicError(f"batch {listed!r}: give sequences at once, as 1,16")
    return [Regime(batch, prefill, decode) for batch in dict.fromkeys(batches)]
