"""The one error that users see, and the suggestion that goes with a misspelt name."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable


class MoesaicError(ValueError):
    """Bad input: one line with the values, the rule they break and the next step."""


class LostError(RuntimeError):
    """Another process of the same run has ended. What is finished is kept."""


def is_of_disk(error: BaseException) -> bool:
    """Whether a disk is full, gone or not to be written on: nothing more can be kept."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
    found = _origin(error)
    return isinstance(found, OSError) and found.errno in numbers


def may_pass(error: BaseException) -> bool:
    """Whether the same may work another time: what failed is no rule of ours."""
    return not isinstance(_origin(error), MoesaicError)


def _origin(error: BaseException) -> BaseException:
    """What an error of ours was raised from, where that is the system's or torch's."""
    cause = error.__cause__
    if isinstance(error, MoesaicError) and isinstance(
        cause, OSError | MemoryError | RuntimeError
    ):
        return cause
    return error


def reason_of(error: BaseException) -> str:
    """An error in one line; of other people's errors their kind too.

    Not its repr, which can hold a whole file.
    """
    line = first_line(error)
    kind = type(error).__name__
    if isinstance(error, MoesaicError) or line == kind:
        return line
    return f"{kind}: {line}"


def first_line(error: BaseException) -> str:
    """The first line of an error that says something, or the error's kind.

    And the next one, where the first ends in a colon.
    """
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line]
    if not told:
        return type(error).__name__
    if told[0].endswith(":") and len(told) > 1:
        return f"{told[0]} {told[1]}"
    return told[0]


def unknown(kind: str, name: object, known: Iterable[str]) -> MoesaicError:
    """The error for a name that is not in `known`, with the nearest names suggested."""
    names = sorted(known)
    nearest = difflib.get_close_matches(str(name), names, n=2, cutoff=0.5)
    hint = ""
    if nearest:
        suggestion = " or ".join(nearest)
        hint = f"did you mean {suggestion}? "
    listed = ", ".join(names)
    if len(names) > 40:
        listed = f"{len(names)} others"
    return MoesaicError(f"unknown {kind} {name!r}: {hint}known are {listed}")
