"""Which of several processes this is, as torchrun and accelerate launch say it.

Read from the environment, so that it is known before torch is imported.
"""

from __future__ import annotations

import os


def processes() -> int:
    """How many processes this run has, on all machines."""
    return _number("WORLD_SIZE", 1)


def processes_here() -> int:
    """How many of them run on this machine."""
    return _number("LOCAL_WORLD_SIZE", processes())


def place_here() -> int:
    """This process's number on its machine, from 0."""
    return _number("LOCAL_RANK", 0)


def is_first() -> bool:
    """Whether this is the process that writes and speaks."""
    return processes() == 1 or _number("RANK", 0) == 0


def _number(name: str, usual: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else usual
