"""The one error that users see, and the suggestion that goes with a misspelt name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MoesaicError(ValueError):
    """Bad input: one line with the values, the rule they break and the next step."""


def unknown(kind: str, name: str, known: Iterable[str]) -> MoesaicError:
    """The error for a name that is not in `known`, with the nearest names suggested."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    listed = ", ".join(known) if len(known) <= 20 else f"{len(known)} others"
    return MoesaicError(f"unknown {kind} {name!r}: {hint}known are {listed}")
