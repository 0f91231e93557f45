"""The embedded demo model and its text: Python modules that every CPython carries.

The weights are ours (`demo_model/train.py` in the repository made them); the text is read from
the running interpreter's standard library, so that nothing but weights and tokenizer is shipped.
"""

from __future__ import annotations

import os
import sysconfig
import tokenize
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

__all__ = ["DEMO_SPLITS", "demo_documents", "demo_path", "usual_text"]

# Whole top-level modules, all present from Python 3.11 on; no document is in two splits.
_HELDOUT = {
    "argparse",
    "difflib",
    "ftplib",
    "http",
    "ipaddress",
    "optparse",
    "pickle",
    "shutil",
    "statistics",
    "tarfile",
    "threading",
    "wsgiref",
}
_CALIBRATION = {
    "ast",
    "configparser",
    "dataclasses",
    "doctest",
    "inspect",
    "json",
    "mailbox",
    "pathlib",
    "pdb",
    "smtplib",
    "subprocess",
    "zipfile",
}
# Generated tables, other people's packages, and tests, which would leak the held-out modules.
_SKIPPED = {
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
}

DEMO_SPLITS = ("train", "calibration", "heldout")


def demo_path() -> Path:
    """Folder of the embedded demo model."""
    return Path(str(files("moesaic"))) / "demo_model"


def _split_of(module: str) -> str:
    if module in _HELDOUT:
        return "heldout"
    return "calibration" if module in _CALIBRATION else "train"


def _modules(root: Path) -> Iterator[Path]:
    """The Python files below a folder, but those below skipped names.

    Skipped folders are not entered: site-packages can hold ten times as many files.
    """
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - _SKIPPED
        for name in names:
            if name.endswith(".py"):
                yield Path(folder, name)


def demo_documents(split: str) -> list[str]:
    """Sources of the standard library's modules in `split`, in the order of their paths.

    `train` also holds the language reference in `pydoc_data.topics`. Raises ValueError for a
    split that is not one of `DEMO_SPLITS`. Reads about 10 MB (train) or 0.8 MB of files.
    """
    if split not in DEMO_SPLITS:
        raise ValueError(
            f"demo text has the splits {', '.join(DEMO_SPLITS)}; got {split!r}"
        )
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted(_modules(root)):
        module = path.relative_to(root).parts[0].removesuffix(".py")
        if module.startswith("_sysconfigdata"):
            continue
        if _split_of(module) == split:
            with tokenize.open(
                path
            ) as source:  # honours the file's own encoding line
                documents.append(source.read())
    if split == "train":
        from pydoc_data.topics import topics

        documents.extend(topics[name] for name in sorted(topics))
    return documents


def usual_text(model: str | None) -> str:
    """The text to take for a model where none is named."""
    return "demo" if model == "demo" else "wikitext2"
