"""Programs in processes of their own, forked from one that has imported what they need.

A fresh Python takes seconds to import torch and transformers, more than most such tests take.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Reads a line of JSON for each program, forks, and writes the child's exit code.
_SERVER = """
import importlib, json, os, sys, warnings
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    task = json.loads(line)
    child = os.fork()
    if not child:
        for number in (1, 2):
            file = os.open(task["printed"][number - 1], os.O_WRONLY)
            os.dup2(file, number)
        os.environ.update(task["variables"])
        sys.argv = ["-c", *task["arguments"]]
        warnings.resetwarnings()
        warnings.simplefilter(task["warnings"])
        exec(task["program"], {"__name__": "__main__"})
        sys.exit()
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@dataclass(frozen=True)
class Finished:
    """What a program left; a negative `returncode` is the signal that killed it."""

    returncode: int
    stdout: str
    stderr: str


def run_python(
    program: str,
    *arguments: object,
    imported: tuple[str, ...] = ("torch", "moesaic.finetune.convert"),
    warnings: str = "ignore",
    **variables: str,
) -> Finished:
    """Runs a program with `sys.argv[1:]` and environment as given.

    The modules of `imported` have been imported before. A variable that they read as they
    are imported comes too late.
    """
    server = _server(imported)
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        printed = [Path(folder, name) for name in ("stdout", "stderr")]
        for path in printed:
            path.touch()
        task = {
            "program": program,
            "arguments": [str(argument) for argument in arguments],
            "variables": variables,
            "warnings": warnings,
            "printed": [str(path) for path in printed],
        }
        server.stdin.write(json.dumps(task) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, f"cannot import {imported}"
        stdout, stderr = (path.read_text() for path in printed)
    return Finished(int(answer), stdout, stderr)


@cache
def _server(imported: tuple[str, ...]) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVER, *imported],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    )
    atexit.register(server.kill)
    return server
