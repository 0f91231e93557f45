"""`moesaic compare` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.options import Device, Dtype, Grain, Trust, err
from moesaic.cli.tables import comparison_table, out
from moesaic.comparison.compare import compare
from moesaic.errors import MoesaicError


def compare_command(
    model: Annotated[str, typer.Argument(help="Hub id, folder, or demo.")],
    recipes: Annotated[
        str,
        typer.Option(
            help="Names or FILE.yaml, with commas; references are always added."
        ),
    ] = "moesaic,moesaic-dynamic,cmoe",
    sparsity: Annotated[
        str, typer.Option(help="Shares of the FFN to skip, with commas.")
    ] = ("0.25,0.5"),
    layout: Annotated[
        str | None,
        typer.Option(help="One SxAyEz for all recipes instead of sparsities."),
    ] = None,
    grain: Grain = "medium",
    calibration: Annotated[str | None, typer.Option(help="As for convert.")] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="SOURCE to evaluate on; repeatable. Default: held out of --calibration."
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="Drawings of the calibration windows.")
    ] = 3,
    samples: Annotated[
        int | None,
        typer.Option(help="Calibration windows [default: what the recipes need]."),
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(help="Tokens of a window [default: min(2048, context)]."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Of each text, its start.")] = 65_536,
    output: Annotated[
        Path | None, typer.Option(help="Folder for compare.json, .md and .png.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a killed run.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: Trust = False,
) -> None:
    """Convert by several recipes at equal budgets and rank them on the same tokens."""
    try:
        shares = [float(part) for part in sparsity.split(",")]
    except ValueError as error:
        raise MoesaicError(
            f"--sparsity {sparsity!r}: numbers with commas, as 0.25,0.5"
        ) from error
    with err.status("comparing") as status:
        result = compare(
            model,
            [name.strip() for name in recipes.split(",")],
            sparsity=shares,
            layout=layout,
            grain=grain,
            calibration=calibration or ("demo" if model == "demo" else "wikitext2"),
            text=text,
            seeds=seeds,
            samples=samples,
            sequence_length=sequence_length,
            max_tokens=max_tokens,
            output=output,
            resume=resume,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            progress=status.update,
        )
    comparison_table(result)
    if output is not None:
        out.print(f"written: {output}/compare.json, compare.md, compare.png")
