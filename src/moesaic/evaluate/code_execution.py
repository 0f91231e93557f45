"""Runs code that a model wrote, and tells whether its tests pass.

Each program runs in a Python process of its own:

- without site packages, environment variables or input, in an empty folder that goes
  afterwards;
- under limits on memory, computing time, file size and processes, and on time by the
  clock. Then the whole session is killed, with all that it started;
- without a network: in a network namespace of its own, where the system lets a process
  make one (Linux, unless a container forbids it). Elsewhere only Python's sockets are
  refused, which is weaker;
- with an audit hook, which refuses to write outside that folder, to remove or rename
  files, to start processes, to open sockets and to load C libraries.

This guards against accidents. It does not hold code that means to break out: an audit
hook can be got around, files can be read, and a program can fake its success. For such
code use a container or a virtual machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moesaic.errors import MoesaicError

_CHILD = Path(__file__).with_name("code_child.py")
_PASSED = 113  # neither 0 nor 1, with which a program may stop itself early


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    clock_seconds: float = 15.0
    cpu_seconds: int = 5
    memory: int = 2**30  # bytes of address space
    file_bytes: int = 2**20


LIMITS = Limits()


def check_can_run() -> None:
    """Raises MoesaicError on a system without these limits."""
    if os.name != "posix":
        raise MoesaicError(
            "humaneval runs code under limits that only Linux and macOS have; "
            "leave humaneval out"
        )


def passes(program: str, limits: Limits = LIMITS) -> bool:
    """Whether a program runs to its end without an error, within its limits.

    Costs at most `limits.clock_seconds`, and about 0.05 s for starting Python.
    """
    order = {
        "program": program,
        "passed": _PASSED,
        "memory": limits.memory,
        "cpu_seconds": limits.cpu_seconds,
        "file_bytes": limits.file_bytes,
    }
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            process.communicate(
                json.dumps(order).encode(), timeout=limits.clock_seconds
            )
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill_session(process)
    return process.returncode == _PASSED


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all that it started, also where it has ended already."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
