"""`moesaic reproduce`: the paper's tables and figures on a model of yours, as a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.options import Device, Dtype, Trust, err
from moesaic.cli.quiet import quieten
from moesaic.cli.tables import out
from moesaic.errors import MoesaicError
from moesaic.progress import duration

BAD_INPUT = 2


def reproduce_command(
    model: Annotated[
        str, typer.Argument(help="A model: hub id, folder, or demo.")
    ],
    output: Annotated[
        Path,
        typer.Option(help="Folder for pages, numbers, plots and models."),
    ],
    tables: Annotated[
        str,
        typer.Option(
            help="Names with commas, as zero_shot,flops; a wrong one lists all."
        ),
    ] = "all",
    scale: Annotated[
        str,
        typer.Option(
            help="smoke (minutes, offline), small (hours on a CPU; 0.1 to 1 billion weights; "
            "texts and questions from the hub unless given), or paper (a GPU)."
        ),
    ] = "smoke",
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="DOMAIN=SOURCE, for wiki, c4, code, maths or science. May be given more "
            "than once. [default: the scale's]"
        ),
    ] = None,
    task_data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the questions as TASK.SPLIT.jsonl. [default: the hub's, at "
            "smoke made-up ones]"
        ),
    ] = None,
    allow_code_execution: Annotated[
        bool,
        typer.Option(
            "--allow-code-execution",
            help="Run what the model writes for humaneval, under limits, on this machine.",
        ),
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: Trust = False,
) -> None:
    """Make the paper's tables and figures on a model, beside the paper's numbers.

    Each is a page, a JSON file and a plot. Run it again to go on: what is there stays.
    """
    texts = _texts(text or [])
    quieten()
    from moesaic.experiments.reproduce import reproduce

    # Plain lines: the steps below show bars of their own.
    done = reproduce(
        model,
        output,
        tables=tables,
        scale=scale,
        texts=texts,
        task_data=task_data,
        allow_code_execution=allow_code_execution,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        progress=_say,
    )
    out.print(
        f"{done.made} made in {duration(done.seconds)}, {done.kept} were there; "
        f"see {output}/README.md"
    )
    for name, reason in done.failed.items():
        err.print(f"error: {name}: {reason}", highlight=False)
    for name, reason in done.in_part.items():
        err.print(f"error: {name}, in part: {reason}", highlight=False)
    if done.failed or done.in_part:
        raise typer.Exit(BAD_INPUT)


def _say(line: str) -> None:
    err.print(line, highlight=False)


def _texts(given: list[str]) -> dict[str, str]:
    """What --text DOMAIN=SOURCE says."""
    texts = {}
    for word in given:
        domain, equals, source = word.partition("=")
        if not equals or not source:
            raise MoesaicError(
                f"--text {word!r} is not of the form DOMAIN=SOURCE, as wiki=wikitext2"
            )
        texts[domain.strip()] = source
    return texts
