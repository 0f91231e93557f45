"""What a folder or file holds, in a few letters: other contents make other results."""

from __future__ import annotations

import hashlib
from pathlib import Path

WEIGHTS = (".safetensors", ".gguf", ".json")


def digest_of(place: str | Path, suffixes: tuple[str, ...] = ()) -> str | None:
    """Of names and contents of all files in a folder, or of one file.

    `suffixes` are those that count; all where none is given. None for what is neither, such as
    a name of the hub. Reads everything once. Raises OSError where a file cannot be read.
    """
    path = Path(place)
    if not path.exists():
        return None
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    digest = hashlib.sha256()
    for file in files:
        if suffixes and file.suffix not in suffixes:
            continue
        name = file.relative_to(path).as_posix()
        digest.update(name.encode("utf-8", "surrogateescape"))
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256")
        digest.update(content.digest())
    return digest.hexdigest()[:16]
