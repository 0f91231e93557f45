"""Options that several commands share, and where they print."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from moesaic.errors import MoesaicError
from moesaic.output.atomic import write_file

err = Console(stderr=True, soft_wrap=True)

Trust = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that the model brings along."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Grain = Annotated[
    str,
    typer.Option(
        help="coarse, medium or fine: at most 16, 32, 128 experts; slower, more accurate."
    ),
]
Dtype = Annotated[
    str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, float16.")
]


def numbers(option: str, text: str | None) -> list[int] | None:
    """Whole numbers between commas; raises MoesaicError for anything else."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise MoesaicError(f"{option} {text!r}: give whole numbers such as 0,3,7")
    return [int(word) for word in words]


def check_json_file(path: Path | None) -> None:
    """Raises MoesaicError for a --json that cannot be written, before the work begins."""
    if path is not None and (
        path.is_dir() or not os.access(path.absolute().parent, os.W_OK | os.X_OK)
    ):
        raise MoesaicError(f"--json {path} is no file in a folder that can be written")


def write_json(path: Path | None, values: Any) -> None:
    if path is None:
        return
    text = json.dumps(values, indent=2)
    try:
        write_file(path, text + "\n")
    except OSError as error:
        raise MoesaicError(f"cannot write --json {path}: {error}") from error
