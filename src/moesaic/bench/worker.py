"""One model in an engine, in a process of its own: read by the engine's Python.

This file imports nothing of moesaic, and so do those of vLLM and llama.cpp beside it:
these may live in environments without it.

A worker reads and writes lines of JSON. It answers the first one when the model is
loaded; after that every line that it reads is a regime, and every answer the seconds
that it took. What libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def serve(
    load: Callable[[dict[str, Any]], tuple[Any, dict[str, str]]],
    measure: Callable[..., tuple[float, float]],
    memory: Callable[[], int] | None = None,
    notes: Callable[[], list[str]] | None = None,
) -> None:
    """Loads the model that the first line names, and times one regime a line.

    `load(settings)` gives the engine's model, and what to say of it: version and device.
    `measure(model, batch, prompt, new)` gives seconds for the prompt and for all new
    tokens. `memory()` gives the bytes that were held at most, where the engine computes
    in this process. `notes()` gives what a user should know of these times.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout.flush()

    def say(values: dict[str, Any]) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    settings = json.loads(sys.stdin.readline())
    started = time.perf_counter()
    model, about = load(settings)
    say(about | {"load_seconds": time.perf_counter() - started})
    for line in sys.stdin:
        prefill, decode = measure(model, **json.loads(line))
        values: dict[str, Any] = {"prefill": prefill, "decode": decode}
        if memory is not None:
            values["memory"] = memory()
        if notes is not None:
            values["notes"] = notes()
        say(values)


def peak() -> int:
    """Bytes of memory that this process has held at most.

    On Linux `getrusage` also counts what the starting process held.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def repeated(ids: list[int], length: int) -> list[int]:
    """So many tokens: the text from its start, again where it ends."""
    times = -(-length // len(ids))
    return (ids * times)[:length]


def rows_of(ids: list[int], batch: int, length: int) -> list[list[int]]:
    """So many tokens for each sequence, from another place of the text each."""
    rows = []
    for row in range(batch):
        start = row * length % len(ids)
        rows.append(repeated(ids, start + length)[start:])
    return rows
