"""Files and folders that are whole or absent.

Each is written under another name, put on the disk, and then renamed. A kill or a power cut
leaves what was there before, never a half.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from moesaic.errors import MoesaicError

PART = ".part"  # ends the name of a file that is being written


def write_file(path: Path, content: str | bytes) -> None:
    """Writes the whole file, or leaves the old one. Raises OSError."""
    data = _to_bytes(content)
    if _is_stream(path):
        path.write_bytes(data)
        return
    with new_file(path) as part:
        part.write_bytes(data)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A path to write to. It takes the place of `path` when the block ends well."""
    part = path.with_name(path.name + PART)
    try:
        yield part
        set_usual_permissions(part)
        sync(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def new_path(output: Path) -> Iterator[Path]:
    """A path for a file or folder, which becomes `output` when the block ends well.

    It goes when the block fails, and so do the folders above it that were made for it. A killed
    run leaves NAME.partial-XXXX, which nothing takes for a model. Raises MoesaicError.
    """
    parents = output.absolute().parents
    missing = [parent for parent in parents if not parent.exists()]
    folder = _make_work_folder(output)
    try:
        part = folder / output.name
        yield part
        _give_new_name(part, output)
    except (OSError, SafetensorError) as error:
        raise MoesaicError(
            f"cannot write {output}: {error}; nothing is left of it"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not output.exists():
            _remove_empty(missing)


def check_new(output: Path, suffix: str) -> None:
    """Raises MoesaicError where `output` exists, has another suffix, or cannot be written."""
    if os.path.lexists(output):
        raise MoesaicError(f"output {output} exists; choose another")
    if suffix and output.suffix != suffix:
        raise MoesaicError(
            f"output {output} is one file for llama.cpp; call it NAME{suffix}"
        )
    check_parent(output)


def check_folder(output: Path) -> None:
    """Raises MoesaicError where `output` is no folder that files can be written to."""
    if os.path.lexists(output) and not output.is_dir():
        raise MoesaicError(f"output {output} is no folder; choose another")
    check_parent(output / "file")


def check_parent(output: Path) -> None:
    """Raises MoesaicError where no file can be made beside `output`."""
    parent = nearest_parent(output)
    if not parent.is_dir():
        raise MoesaicError(
            f"output {output}: {parent} is not a folder; choose another output"
        )
    try:
        # Root may write anywhere by its rights, and cannot in /proc.
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise MoesaicError(
            f"output {output}: {parent} cannot be written; choose another output"
        ) from error


def nearest_parent(output: Path) -> Path:
    """The lowest folder above `output` that exists."""
    parent = output.absolute().parent
    while not parent.exists():
        parent = parent.parent
    return parent


def set_usual_permissions(path: Path) -> None:
    """Gives a file the permissions of the user's other files.

    safetensors and temporary folders make private ones.
    """
    mask = os.umask(0)  # the only way to read it is to set it
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def sync(path: Path) -> None:
    """Waits until a file, or the list of a folder's files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_all(path: Path) -> None:
    """The same for a file, or for a folder and all that is in it."""
    for inner in path.rglob("*"):
        sync(inner)
    sync(path)


def _is_stream(path: Path) -> bool:
    """A pipe or a device such as /dev/stdout: a rename would take it away."""
    special = path.exists() and not path.is_file()
    return special or path.is_symlink()


def _to_bytes(content: str | bytes) -> bytes:
    if isinstance(content, bytes):
        return content
    return content.encode()


def _make_work_folder(output: Path) -> Path:
    prefix = f"{output.name}.partial-"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=prefix, dir=output.parent)
    except OSError as error:
        raise MoesaicError(f"cannot write beside {output}: {error}") from error
    return Path(folder)


def _give_new_name(part: Path, output: Path) -> None:
    for path in (part, *part.rglob("*")):
        if path.is_file():
            set_usual_permissions(path)
    sync_all(part)
    if os.path.lexists(output):
        raise MoesaicError(f"output {output} exists by now; choose another")
    part.rename(output)
    sync(output.parent)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
