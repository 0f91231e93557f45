"""Options that several commands share. Read without importing torch."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from moesaic.errors import MoesaicError
from moesaic.output.atomic import write_file

err = Console(stderr=True, soft_wrap=True, markup=False, emoji=False)

Trust = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run code that the model brings along."
    ),
]
Device = Annotated[
    str,
    typer.Option(help="Where to compute: auto, cpu, cuda, cuda:1 and so on."),
]
Grain = Annotated[
    str | None,
    typer.Option(
        help="How many experts: coarse, medium or fine, at most 16, 32 or 128. "
        "Finer is slower and more accurate. [default: medium]"
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Number format: float32, bfloat16 or float16. auto keeps the model's own."
    ),
]
Seed = Annotated[
    int,
    typer.Option(help="Same seed, same random choices."),
]
SequenceLength = Annotated[
    int | None,
    typer.Option(
        help="Tokens in a window of text. "
        "[default: as many as the model reads at once, at most 2048]"
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write the numbers to this file too."),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace the output if it is a model of moesaic's, with nothing else "
        "beside it.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with a run that was stopped before its output was there.",
    ),
]


def numbers(
    option: str, text: str | None, example: str = "0,3,7"
) -> list[int] | None:
    """Whole numbers between commas; raises MoesaicError for anything else."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(_is_whole_number(word) for word in words):
        raise MoesaicError(
            f"{option} {text!r}: give whole numbers such as {example}"
        )
    return [int(word) for word in words]


def _is_whole_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 10


def parse_settings(given: list[str]) -> dict[str, object]:
    """What --set NAME=VALUE says: numbers, true and false as such, the rest as text."""
    settings: dict[str, object] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise MoesaicError(
                f"--set {text!r} is not of the form NAME=VALUE; "
                "write it as --set kmeans_rounds=8"
            )
        settings[name] = _value_of(value)
    return settings


def _value_of(text: str) -> object:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text.strip()
    if isinstance(value, bool | int | float) or value is None:
        return value
    # YAML knows no number without a dot and a sign in its exponent, such as 1e-3.
    try:
        return float(text)
    except ValueError:
        return text.strip()


def check_json_file(path: Path | None) -> None:
    """Refuses a --json that cannot be written, before the work begins."""
    if path is None:
        return
    refused = MoesaicError(
        f"--json {path} is no file in a folder that can be written"
    )
    if path.is_dir():
        raise refused
    try:
        # Root may write anywhere by its rights, and cannot in /proc.
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise refused from error


def check_apart(path: Path | None, output: Path) -> None:
    """Refuses a --json that would lie in the output, or in its place."""
    if path is None:
        return
    place = path.absolute()
    if output.absolute() in (place, *place.parents):
        raise MoesaicError(
            f"--json {path} is the output, or inside it; choose another file"
        )


def write_json(path: Path | None, values: Any) -> None:
    """Writes the numbers of a command to the file that --json names."""
    if path is None:
        return
    text = json.dumps(values, indent=2) + "\n"
    try:
        write_file(path, text)
    except OSError as error:
        raise MoesaicError(f"cannot write --json {path}: {error}") from error


def program() -> str:
    """What to type for this program: its path where it is not on the PATH."""
    if shutil.which("moesaic"):
        return "moesaic"
    if Path(sys.argv[0]).name == "__main__.py":
        return "python -m moesaic"
    return shlex.quote(sys.argv[0])


def typed_command() -> str:
    """The command as model cards keep it. A resumed run is the run that it resumes."""
    kept = [
        word for word in sys.argv[1:] if word not in {"--resume", "--overwrite"}
    ]
    return shlex.join(["moesaic", *kept])
