"""`moesaic export` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from moesaic.cli.options import Trust, check_json_file, err, write_json
from moesaic.cli.tables import folded, out
from moesaic.errors import MoesaicError
from moesaic.export import FORMATS, ExportReport, explain, export


def export_command(
    model: Annotated[str, typer.Argument(help="A converted model: folder or hub id.")],
    format: Annotated[str | None, typer.Option(help=", ".join(FORMATS))] = None,
    output: Annotated[
        Path | None, typer.Option(help="New folder, or NAME.gguf.")
    ] = None,
    epsilon: Annotated[
        str,
        typer.Option(
            help="Standard deviation given to the scores; auto leaves the gates within 2e-4 of 1."
        ),
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16; GGUF also float16 and q8_0.")
    ] = "auto",
    verify: Annotated[
        str | None,
        typer.Option(help="SOURCE of text to compare the export and the original on."),
    ] = None,
    why: Annotated[
        bool,
        typer.Option(
            "--explain", help="Say which formats can hold the model, and why not."
        ),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file.")
    ] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Write a converted model for stock transformers, vLLM or llama.cpp."""
    check_json_file(json_file)
    if why:
        table = Table("format", "fits", "why not", title=model)
        found = explain(model, trust_remote_code)
        for name, reasons in found.items():
            table.add_row(name, "no" if reasons else "yes", *folded("; ".join(reasons)))
        out.print(table)
        write_json(json_file, found)
        return
    if format is None or output is None:
        raise MoesaicError("export needs --format and --output (or --explain)")
    if json_file is not None and output.absolute() in (
        json_file.absolute(),
        *json_file.absolute().parents,
    ):
        raise MoesaicError(
            f"--json {json_file} is the output, or inside it; choose another file"
        )
    try:
        size = None if epsilon == "auto" else float(epsilon)
    except ValueError as error:
        raise MoesaicError(
            f"--epsilon {epsilon!r} is neither auto nor a number"
        ) from error
    with err.status("exporting") as status:
        report = export(
            model,
            format,
            output,
            epsilon=size,
            dtype=dtype,
            verify=verify,
            trust_remote_code=trust_remote_code,
            progress=status.update,
        )
    _print(report)
    write_json(json_file, report.to_dict())


def _print(report: ExportReport) -> None:
    table = Table("layer", "scale", "gate error", "tokens that change experts")
    for layer, scale in enumerate(report.scales):
        table.add_row(
            str(layer),
            f"{scale.factor:.3g}",
            f"{scale.gate_error:.1e}",
            f"{scale.changed:.3%}",
        )
    out.print(table)
    if (found := report.comparison) is not None:
        changed = max(found.changed)
        out.print(
            f"logits differ by {found.mean:.2e} of their rms on average, {found.largest:.2e} at "
            f"most; {changed:.3%} of {found.tokens} tokens run other experts in the worst layer; "
            f"perplexity {found.perplexity:.4f}, before the export {found.original_perplexity:.4f}"
        )
    for line in report.warnings:
        out.print(f"note: {line}")
    out.print(
        f"written to {report.output} ({report.architecture}), which needs no moesaic"
    )
