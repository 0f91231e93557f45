"""The one error that users see, and the suggestion that goes with a misspelt name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MoesaicError(ValueError):
    """Bad input: one line with the values, the rule they break and the next step."""


class LostError(RuntimeError):
    """Another process of the same run has ended. What is finished is kept."""


def reason_of(error: Exception) -> str:
    """An error's kind and what it says. (Its repr can hold a whole file.)"""
    return f"{type(error).__name__}: {error}"


def first_line(error: Exception) -> str:
    """The first line of another library's error that says something, or its kind.

    A name that was looked up and not found says nothing by itself.
    """
    for line in str(error).splitlines():
        if not line.strip():
            continue
        if isinstance(error, KeyError):
            line += " is no known name; see where its config.json has it"
        return line.strip()
    return type(error).__name__


def unknown(kind: str, name: str, known: Iterable[str]) -> MoesaicError:
    """The error for a name that is not in `known`, with the nearest names suggested."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
    hint = ""
    if nearest:
        suggestion = " or ".join(nearest)
        hint = f"did you mean {suggestion}? "
    listed = ", ".join(names)
    if len(names) > 40:
        listed = f"{len(names)} others"
    return MoesaicError(f"unknown {kind} {name!r}: {hint}known are {listed}")
