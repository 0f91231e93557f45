"""Compiles the C++ of this package for the machine it runs on, once.

The library lies in the user's cache folder, under a name that says from which source, by
which compiler, for which processor and for which C library it was made.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from filelock import FileLock

HERE = Path(__file__).parent
SOURCES = tuple(
    HERE / f"{what}_cpu.cpp" for what in ("experts", "neurons", "linears")
)
HEADERS = tuple(HERE / f"{what}.h" for what in ("vectors", "panels", "tiles"))
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-fno-math-errno",
    "-shared",
    "-fPIC",
)
COMPILERS = ("g++", "c++")  # whose vectors the source is written with

log = logging.getLogger(__name__)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None, and a warning with the reason, where there is none.

    Takes some 10 seconds the first time on a machine.
    """
    try:
        compiled = ctypes.CDLL(str(_compiled(cache_folder())))
    except Exception as error:  # whatever it is, models run without
        log.warning(
            "torch computes in place of moesaic's kernels for a CPU, which is slower: %s",
            reason_of(error),
        )
        return None
    return compiled


def cache_folder() -> Path:
    """Where compiled libraries are kept."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "moesaic" / "kernels"


def _compiled(folder: Path) -> Path:
    """The library in this folder, compiled unless it is there.

    Raises OSError without a compiler, and CalledProcessError where it fails.
    """
    compiler = _compiler()
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True
    ).stdout
    made_from = [
        *(path.read_bytes() for path in (*HEADERS, *SOURCES)),
        version,
        _processor(),
        "-".join(platform.libc_ver()).encode(),
        " ".join(FLAGS).encode(),
    ]
    digest = hashlib.sha256(b"\0".join(made_from)).hexdigest()[:16]
    target = folder / f"kernels-{digest}.so"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_owner(folder)
    with FileLock(target.with_suffix(".lock")):
        if not target.exists():
            _compile(compiler, target)
    return target


def _check_owner(folder: Path) -> None:
    """Code is not loaded from where others may put it."""
    found = folder.stat()
    own = getattr(os, "getuid", lambda: found.st_uid)()
    if found.st_uid != own or found.st_mode & 0o022:
        raise OSError(
            f"{folder} is not yours alone; set XDG_CACHE_HOME to another folder"
        )


def _compile(compiler: str, target: Path) -> None:
    """Whole or not at all: a stopped run leaves no half of a library."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / target.name
        command = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(output)]
        subprocess.run(command, capture_output=True, check=True)
        output.replace(target)


def _compiler() -> str:
    for name in (os.environ.get("CXX"), *COMPILERS):
        path = name and shutil.which(name)
        if path:
            return path
    raise FileNotFoundError(
        "no C++ compiler was found; install g++, or name one by CXX"
    )


def _processor() -> bytes:
    """What -march=native depends on."""
    machine = platform.machine().encode()
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return machine + platform.processor().encode()
    told = (b"flags", b"Features", b"model name")
    known = {line for line in lines if line.startswith(told)}
    return machine + b"".join(sorted(known))


def reason_of(error: Exception) -> str:
    """In one line; of a compiler its first complaint."""
    if isinstance(error, subprocess.CalledProcessError):
        said = (error.stderr or b"").decode(errors="replace").splitlines()
        complaints = [line for line in said if "error" in line]
        first = (complaints or said or [f"exit code {error.returncode}"])[0]
        return f"{error.cmd[0]}: {first}"
    return str(error)
