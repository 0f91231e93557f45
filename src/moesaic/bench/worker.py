"""One model in an engine, in a process of its own: read by the engine's Python.

This file and the three engines' beside it import nothing of moesaic, so that vLLM and
llama.cpp may live in environments without it.

A worker writes lines of JSON after a mark, since libraries write to stdout as well. The
first says that the model is loaded; then every line that it reads is a regime, and
every line that it writes the seconds that it took.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

MARK = "\x1emoesaic "  # nothing that a library logs begins so


def say(values: dict[str, Any]) -> None:
    """One line for the process that started this one."""
    print(MARK + json.dumps(values), flush=True)


def serve(
    load: Callable[[dict[str, Any]], tuple[Any, str]],
    measure: Callable[..., tuple[float, float]],
    memory: Callable[[], int] | None = None,
) -> None:
    """Loads the model that the first line names, and times one regime a line.

    `load(settings)` gives the engine's model, and `measure(model, batch, prompt, new)`
    seconds for the prompt and for all new tokens. `memory()` gives the bytes that were
    held at most, where the engine computes in this process.
    """
    settings = json.loads(sys.stdin.readline())
    started = time.perf_counter()
    model, version = load(settings)
    seconds = time.perf_counter() - started
    say({"version": version, "load_seconds": seconds})
    for line in sys.stdin:
        prefill, decode = measure(model, **json.loads(line))
        values: dict[str, Any] = {"prefill": prefill, "decode": decode}
        if memory is not None:
            values["memory"] = memory()
        say(values)


def peak() -> int:
    """Bytes of memory that this process has held at most."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def repeated(ids: list[int], length: int) -> list[int]:
    """So many tokens: the text from its start, again where it ends."""
    times = -(-length // len(ids))
    return (ids * times)[:length]
