"""`moesaic compare`: several methods at the same budget, as a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.options import (
    Device,
    Dtype,
    Grain,
    Resume,
    SequenceLength,
    Trust,
)
from moesaic.cli.quiet import quieten
from moesaic.cli.tables import comparison_table, out
from moesaic.demo import usual_text
from moesaic.errors import MoesaicError
from moesaic.progress import status


def compare_command(
    model: Annotated[
        str,
        typer.Argument(
            help="The dense model: hub id, folder, GGUF file, or demo."
        ),
    ],
    recipes: Annotated[
        str,
        typer.Option(
            "--methods",
            "--recipes",
            help="Methods, FILE.py or FILE.yaml, with commas; all for every method that "
            "can convert this model. Simple references such as static pruning are always "
            "added.",
        ),
    ] = "moesaic,moesaic-dynamic,cmoe",
    sparsity: Annotated[
        str | None,
        typer.Option(
            help="Shares of the FFN neurons that a token skips, with commas. "
            "[default: 0.25,0.5 unless a work or a layout is given]"
        ),
    ] = None,
    ffn_bytes: Annotated[
        str | None,
        typer.Option(
            help="Equal work: shares of the bytes that the dense FFNs read for one "
            "token, as 0.75,0.5. Each method skips as much as brings it there."
        ),
    ] = None,
    ffn_macs: Annotated[
        str | None,
        typer.Option(
            help="Equal work: shares of the dense FFNs' multiply-accumulates."
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="One SxAyEz for all methods, instead of sparsities."),
    ] = None,
    grain: Grain = None,
    calibration: Annotated[
        list[str] | None,
        typer.Option(
            help="Text that the model is run on, as for convert. More than one: as many "
            "calibration windows of each. [default: wikitext2, or demo for the demo model]"
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to measure on. May be given more than once. "
            "[default: a part of --calibration that no method sees]"
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(
            help="Repeat so often, on other calibration windows each time."
        ),
    ] = 3,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Calibration windows. [default: as many as the methods need]"
        ),
    ] = None,
    sequence_length: SequenceLength = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            help="Measure on so many tokens, from the start of each text."
        ),
    ] = 65_536,
    finetune: Annotated[
        int | None,
        typer.Option(
            help="Fine-tune every converted model on so many windows of the calibration "
            "text, and measure it again. The dense model learns the same windows."
        ),
    ] = None,
    distill: Annotated[
        str,
        typer.Option(
            help="The teacher in --finetune: auto for the dense model, or none."
        ),
    ] = "auto",
    speed: Annotated[
        bool,
        typer.Option(
            "--speed",
            help="Time decoding, one token at a time, against the dense model. For a "
            "machine that does nothing else.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for compare.json, .csv, .md and .png."),
    ] = None,
    resume: Resume = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: Trust = False,
) -> None:
    """Convert a model by several methods and rank them.

    All skip the same share of neurons, or do the same work, and are measured on the
    same text. A method that cannot, or fails, is named with the reason; with --resume
    those that failed are tried again.
    """
    shares = None if sparsity is None else _shares("--sparsity", sparsity)
    bytes_shares = _shares("--ffn-bytes", ffn_bytes)
    macs_shares = _shares("--ffn-macs", ffn_macs)
    names = [name.strip() for name in recipes.split(",")]
    quieten()
    from moesaic.comparison.compare import compare

    with status("comparing") as tell:
        result = compare(
            model,
            names,
            sparsity=shares,
            ffn_bytes=bytes_shares,
            ffn_macs=macs_shares,
            layout=layout,
            grain=grain,
            calibration=calibration or [usual_text(model)],
            text=text,
            seeds=seeds,
            samples=samples,
            sequence_length=sequence_length,
            max_tokens=max_tokens,
            finetune=finetune,
            distill=distill,
            speed=speed,
            output=output,
            resume=resume,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            progress=tell,
        )
    comparison_table(result)
    if output is not None:
        out.print(f"written: {output}/compare.json, .csv, .md and .png")


def _shares(option: str, text: str | None) -> list[float]:
    """Numbers between commas; raises MoesaicError for anything else."""
    if text is None:
        return []
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise MoesaicError(
            f"{option} {text!r}: numbers with commas, as 0.25,0.5"
        ) from error
