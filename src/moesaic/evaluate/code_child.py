"""Runs one program under limits; the exit code says whether it came to its end.

`code_execution.py` starts this file by its path, in a process of its own. So it imports
the standard library only. From stdin it reads the program, its limits and the exit code of
success, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from importlib import import_module
from itertools import product

FAILED = 1

_NEW_USER = 0x10000000  # CLONE_NEWUSER of Linux
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# Audit events that raise. A program that is only asked to compute needs none of them.
_REFUSED = (
    "ctypes.",
    "os.chflags",
    "os.chmod",
    "os.chown",
    "os.exec",
    "os.fork",
    "os.kill",
    "os.lchown",
    "os.link",
    "os.mkdir",
    "os.posix_spawn",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.setxattr",
    "os.spawn",
    "os.symlink",
    "os.system",
    "os.truncate",
    "os.utime",
    "pty.",
    "resource.",
    "shutil.",
    "signal.pthread_kill",
    "socket.",
    "subprocess.",
)
# Modules in C that write files, or memory all may see, without an event of their own.
_UNIMPORTABLE = (
    "_dbm",
    "_gdbm",
    "_multiprocessing",
    "_posixshmem",
    "_sqlite3",
    "readline",
)
# Functions that make files, or reach other processes, without an event of their own.
# By the modules that have them: the one in C, and the one that hands them on.
_WITHOUT_EVENT = {
    ("posix", "os"): (
        "login_tty",
        "mkfifo",
        "mknod",
        "pidfd_open",
        "sched_setaffinity",
        "sched_setparam",
        "sched_setscheduler",
        "setns",
        "setpriority",
        "unshare",
    ),
    ("_signal", "signal"): ("pidfd_send_signal",),
}
# Each file that is opened to be written may grow to the limit on a file's size.
_MOST_WRITTEN = 100


def main() -> None:
    order = json.loads(sys.stdin.buffer.read())
    leave_network()
    set_limits(order["memory"], order["cpu_seconds"], order["file_bytes"])
    remove_functions()
    sys.addaudithook(refuse)
    try:
        code = compile(order["program"], "program", "exec")
        exec(code, {"__name__": "program"})
    except (
        BaseException
    ):  # SystemExit too: a program that stops itself early has failed
        os._exit(FAILED)
    # Not sys.exit: no thread and nothing else of the program is waited for.
    os._exit(order["passed"])


def leave_network() -> bool:
    """Moves this process into a network of its own, which leads nowhere.

    False where the system does not allow that: then only the audit hook refuses sockets.
    The new user namespace takes a root user's powers away, too.
    """
    try:
        unshare = ctypes.CDLL(None).unshare
    except (AttributeError, OSError):  # not Linux
        return False
    if unshare(_NEW_USER | _NEW_NETWORK) == 0:
        return True
    return bool(unshare(_NEW_NETWORK) == 0)


def set_limits(memory: int, cpu_seconds: int, file_bytes: int) -> None:
    """Limits that this process cannot raise again. No core file, no process beside it."""
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, limit in limits.items():
        try:
            resource.setrlimit(kind, (limit, limit))
        except (OSError, ValueError):  # macOS has no limit on address space
            continue


def remove_functions() -> None:
    """Takes away what no audit hook could refuse."""
    for names, functions in _WITHOUT_EVENT.items():
        for name, function in product(names, functions):
            module = import_module(name)
            if hasattr(module, function):
                delattr(module, function)


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    """Audit hook: raises where the program reaches for what lies outside of it."""
    if event == "open":
        path, _, flags = arguments
        if _is_folder(path):
            # What is opened relative to a folder says nothing of it in its event.
            raise PermissionError(f"opening the folder {path!r} is refused")
        if isinstance(flags, int) and flags & _WRITING:
            _refuse_writing(path)
    elif event == "import" and arguments[0] in _UNIMPORTABLE:
        raise PermissionError(f"importing {arguments[0]} is refused")
    elif event.startswith(_REFUSED):
        raise PermissionError(f"{event} is refused")


_FOLDER = os.path.realpath(os.getcwd())
_written = 0


def _refuse_writing(path: object) -> None:
    """Raises for a file elsewhere, and for too many of them."""
    global _written
    if not _is_inside(path):
        raise PermissionError(f"writing to {path!r} is refused")
    _written += 1
    if _written > _MOST_WRITTEN:
        raise PermissionError(
            f"writing more than {_MOST_WRITTEN} files is refused"
        )


def _is_folder(path: object) -> bool:
    return isinstance(path, str | bytes | os.PathLike) and os.path.isdir(path)


def _is_inside(path: object) -> bool:
    """Whether a path lies in the folder that the program started in."""
    if not isinstance(path, str | bytes | os.PathLike):
        return True  # the number of a file that is open already
    real = os.path.realpath(os.fsdecode(path))
    return real.startswith(_FOLDER + os.sep)


if __name__ == "__main__":
    main()
