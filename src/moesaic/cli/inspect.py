"""`moesaic inspect`: what a converted model is, what it lost and where."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesaic.cli.options import (
    Device,
    Dtype,
    JsonFile,
    Trust,
    check_json_file,
    write_json,
)
from moesaic.cli.quiet import quieten
from moesaic.cli.tables import NARROW, explained, folded, out

if TYPE_CHECKING:
    from moesaic.inspection.inspect import Inspected

_LISTED_LAYERS = 8


def inspect_command(
    model: Annotated[
        str,
        typer.Argument(help="A folder that moesaic convert or finetune wrote."),
    ],
    text: Annotated[
        str | None,
        typer.Option(
            help="Text to watch token by token: FILE[:FIELD], wikitext2, c4, "
            "hub:NAME:CONFIG:SPLIT:FIELD or demo. [default: a short passage]"
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Another converted model, to stand beside it."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the page to this file."),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(
            help="Times, as moesaic bench --json wrote them. [default: work is counted]"
        ),
    ] = None,
    json_file: JsonFile = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: Trust = False,
) -> None:
    """Say what a conversion lost, where, if it is faster, and what to try.

    In brief here, in full on a page that opens in any browser, without a network.
    """
    check_json_file(json_file)
    quieten()
    from moesaic.inspection.inspect import inspect

    result = inspect(
        model,
        text,
        against=against,
        html=html,
        bench=bench,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        progress=True,
    )
    _print(result.model)
    if result.against is not None:
        out.print()
        _print(result.against)
    write_json(json_file, result.to_dict())
    if html is None:
        out.print("more of it on a page: --html report.html")
    else:
        out.print(f"page: {html}", highlight=False)


def _print(inspected: Inspected) -> None:
    """The page in brief."""
    from moesaic.inspection.answers import FOLDER

    record = inspected.record
    answers = inspected.answers
    out.print(record.title, style="bold", highlight=False)
    for question, lines in (
        ("What did I lose?", answers.lost),
        ("Where?", answers.where),
        ("Is it faster?", answers.faster),
        ("What should I try next?", answers.next),
    ):
        out.print(question, style="bold")
        for line in lines:
            words = line.replace(FOLDER, shlex.quote(record.model))
            out.print(f"  - {words}", highlight=False)
    _print_layers(inspected)


def _print_layers(inspected: Inspected) -> None:
    """The layers that lose most."""
    report = inspected.record.report
    if report is None or not report.layers:
        return
    worst = sorted(
        report.layers, key=lambda layer: layer.relative_error, reverse=True
    )
    table = explained(
        "layer",
        "error",
        "static\n+repair",
        "oracle",
        "recall",
        "kept",
        title="layers that lose most",
        meanings=[
            f"error: of the layer's output on {report.layers_measured_on}, over the "
            "output's energy",
            "kept: share of all experts' output energy in those that ran",
        ],
        **NARROW,
    )
    for layer in worst[:_LISTED_LAYERS]:
        values = [
            layer.relative_error,
            layer.references.get("static-repaired"),
            layer.references.get("oracle"),
            layer.router_recall,
            layer.mass_kept,
        ]
        cells = ["" if value is None else f"{value:.3f}" for value in values]
        table.add_row(*folded(str(layer.layer), *cells))
    out.print(table)
