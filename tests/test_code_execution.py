"""Programs that a model wrote: what passes, what is refused, what is killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moesaic.errors import MoesaicError
from moesaic.evaluate import code_child, code_execution
from moesaic.evaluate.code_execution import LIMITS, Limits, passes

SHORT = Limits(clock_seconds=1.0)  # for what must be killed


@pytest.mark.parametrize(
    "program",
    [
        "assert sum([1, 2]) == 3",
        "import math, typing, re, hashlib, collections\nassert math.sqrt(4) == 2",
        "print('x' * 10**6)",  # nobody reads it, and it does not block
        "open('notes.txt', 'w').write('x')\nassert open('notes.txt').read() == 'x'",
        "import os\nassert os.listdir() == []",
        "import os\nassert not {'HOME', 'PATH', 'USER', 'HF_TOKEN'} & set(os.environ)",
        "import sys\nassert not any('site-packages' in path for path in sys.path)",
        "if __name__ == '__main__':\n    raise SystemExit(1)",  # is not run as a script
    ],
)
def test_a_program_that_comes_to_its_end_passes(program: str) -> None:
    assert passes(program)


@pytest.mark.parametrize(
    "program",
    [
        "assert sum([1, 2]) == 4",
        "def f(:",
        "1 / 0",
        "undefined",
        "def f(): return f()\nf()",
        "input()",
        # To stop early is no success, whatever the exit code:
        "raise SystemExit(0)",
        "import sys\nsys.exit()",
        "import os\nos._exit(0)",
    ],
)
def test_a_program_that_fails_or_stops_early_does_not_pass(program: str) -> None:
    assert not passes(program)


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time\ntime.sleep(60)",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "import signal\nfor each in range(1, 65):\n    try: signal.signal(each, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
    ],
)
def test_an_endless_program_is_killed(program: str) -> None:
    assert not passes(program, SHORT)


def test_computing_time_is_limited_too() -> None:
    assert not passes("while True: pass", Limits(clock_seconds=600.0, cpu_seconds=1))


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not limit address space")
def test_a_program_gets_no_more_memory_than_it_may() -> None:
    small = Limits(memory=2**28)
    assert passes("held = bytearray(2**26)", small)
    assert not passes("held = bytearray(2**29)", small)
    grows = "held = []\nwhile True: held.append(bytearray(2**20))"
    assert not passes(grows, small)


def test_a_file_may_not_grow_large() -> None:
    write = "file = open('big', 'wb')\nfile.write(bytes({size}))\nfile.close()"
    assert passes(write.format(size=LIMITS.file_bytes))
    assert not passes(write.format(size=LIMITS.file_bytes + 1))


@pytest.mark.parametrize(
    "attempt",
    [
        "import os\nos.fork()",
        "import os\nos.forkpty()",
        "import os\nos.system('true')",
        "import os\nos.popen('true')",
        "import os, sys\nos.execv(sys.executable, ['python', '-c', ''])",
        "import os, sys\nos.posix_spawn(sys.executable, ['python', '-c', ''], {})",
        "import subprocess\nsubprocess.run(['true'])",
        "import multiprocessing\nmultiprocessing.Process(target=print).start()",
        "import os\nos.kill(os.getppid(), 0)",
        "import ctypes\nctypes.CDLL(None)",
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (9, 9))",
    ],
)
def test_a_program_starts_no_process(attempt: str) -> None:
    assert not passes(attempt)
    # It fails by this line, for the rest of the program is in order.
    lines = attempt.replace("\n", "\n    ")
    caught = f"try:\n    {lines}\nexcept Exception:\n    pass\nelse:\n    assert False"
    assert passes(caught)


@pytest.mark.parametrize(
    "attempt",
    [
        "open({path!r}, 'w')",
        "open({path!r}, 'a')",
        "open({path!r}, 'r+')",
        "open('../{name}/other', 'w')",
        "import pathlib\npathlib.Path({path!r}).write_text('x')",
        "import os\nos.open({path!r}, os.O_WRONLY | os.O_CREAT)",
        "import os\nos.remove({path!r})",
        "import os\nos.truncate({path!r}, 0)",
        "import os\nos.rename({path!r}, 'mine')",
        "import os\nos.mkdir({path!r} + '.d')",
        "import os\nos.symlink({path!r}, 'link')",
        "import os\nos.chmod({path!r}, 0)",
        "import shutil\nshutil.rmtree({folder!r})",
        "import sqlite3\nsqlite3.connect({path!r} + '.db').execute('create table t (a)')",
        "import dbm\ndbm.open({path!r} + '.dbm', 'c')['a'] = 'b'",
        "import os\nat = os.open({folder!r}, os.O_RDONLY)\n"
        "os.open('new', os.O_WRONLY | os.O_CREAT, dir_fd=at)",
        "import os\nat = os.open('..', os.O_RDONLY)\n"
        "os.open('{name}/new', os.O_WRONLY | os.O_CREAT, dir_fd=at)",
        "import os\nos.mkfifo({path!r} + '.fifo')",
        "import posix\nposix.mkfifo({path!r} + '.fifo')",
        "import os\nos.mknod({path!r} + '.node')",
        "import readline\nreadline.write_history_file({path!r} + '.history')",
        "import _multiprocessing",
        "import os\nos.pidfd_open(os.getppid())",
        "import os\nos.setpriority(os.PRIO_PROCESS, 0, 19)",
    ],
)
def test_nothing_outside_its_folder_is_changed(attempt: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text("kept")
    program = attempt.format(path=str(kept), folder=str(tmp_path), name=tmp_path.name)
    assert not passes(program)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
    assert kept.read_text() == "kept"
    assert kept.stat().st_mode & 0o400


def test_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        server.settimeout(0.2)
        connect = f"import socket\nsocket.create_connection(({host!r}, {port}))"
        assert not passes(connect)
        fetch = f"import urllib.request\nurllib.request.urlopen('http://{host}:{port}')"
        assert not passes(fetch)
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_network_of_its_own_leads_nowhere() -> None:
    """What the system itself refuses, without Python's audit hook."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = (
            "import importlib.util, socket, sys\n"
            f"spec = importlib.util.spec_from_file_location('child', {code_child.__file__!r})\n"
            "child = importlib.util.module_from_spec(spec)\n"
            "spec.loader.exec_module(child)\n"
            "if not child.leave_network(): sys.exit(7)\n"
            f"try: socket.create_connection(('127.0.0.1', {port}))\n"
            "except OSError: sys.exit(0)\n"
        )
        done = subprocess.run([sys.executable, "-I", "-S", "-c", code], check=False)
    if done.returncode == 7:
        pytest.skip("this system gives a process no network of its own (unshare is refused)")
    assert done.returncode == 0


def test_the_whole_session_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a program left behind ends with it, had it got past the refusal to fork."""
    child = tmp_path / "child.py"
    number = tmp_path / "number"
    child.write_text(
        "import os, time\n"
        "if os.fork() == 0:\n"
        f"    open({str(number)!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(60)\n"
        f"while not os.path.exists({str(number)!r}) or not open({str(number)!r}).read():\n"
        "    time.sleep(0.01)\n"
    )
    monkeypatch.setattr(code_execution, "_CHILD", child)
    assert not passes("")
    left = int(number.read_text())
    for _ in range(500):
        if not _runs(left):
            return
        time.sleep(0.01)
    pytest.fail(f"process {left} still runs")


def _runs(process: int) -> bool:
    """Whether a process runs; one that ended and waits for its parent does not."""
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def test_its_folder_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert passes("open('notes.txt', 'w').write('x')")
    assert list(tmp_path.iterdir()) == []


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(code_execution.os, "name", "nt")
        with pytest.raises(MoesaicError, match="only Linux and macOS"):
            code_execution.check_can_run()


def test_files_are_few() -> None:
    """So that what a program leaves on the disk until it ends is bounded, too."""
    write = "for number in range({count}):\n    open(str(number), 'w').close()"
    assert passes(write.format(count=100))
    assert not passes(write.format(count=101))
