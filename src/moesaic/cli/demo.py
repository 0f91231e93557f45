"""`moesaic demo`: the main job on the embedded model, as a command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.options import Overwrite, err, program
from moesaic.cli.quiet import quieten
from moesaic.cli.tables import ACTIVE_FFN, PERPLEXITY, explained, out


def demo_command(
    output: Annotated[
        Path,
        typer.Option(help="Folder for the converted model."),
    ] = Path("moesaic-demo"),
    overwrite: Overwrite = False,
) -> None:
    """Convert the small model that moesaic carries.

    Shows several methods beside each other.
    """
    quieten()
    from moesaic.cli import demo_run

    rows = demo_run.run_demo(output, err.print, overwrite)
    dense_perplexity = rows[0].perplexity
    table = explained(
        "method",
        "perplexity",
        "over dense",
        "active FFN",
        "MFLOPs per token",
        "seconds",
        title=f"demo model, {demo_run.SPARSITY:.0%} of the FFN skipped",
        meanings=[
            PERPLEXITY,
            "over dense: perplexity over the dense model's",
            ACTIVE_FFN,
            "MFLOPs: millions of additions and multiplications",
            "seconds: of the conversion",
        ],
    )
    for row in rows:
        seconds = "" if row.seconds is None else f"{row.seconds:.2f}"
        table.add_row(
            row.name,
            f"{row.perplexity:.2f}",
            f"{row.perplexity / dense_perplexity:.3f}",
            f"{row.active_ffn_fraction:.1%}",
            f"{2 * row.macs / 1e6:.2f}",
            seconds,
        )
    out.print(table)
    out.print(f"the converted model lies in {output}")
    arguments = [
        "eval",
        str(output),
        "--text",
        "demo",
        "--against",
        "demo",
        "--max-tokens",
        str(demo_run.HELDOUT_TOKENS),
    ]
    out.print(f"next:\n  {program()} {shlex.join(arguments)}")
