"""`moesaic export`: a converted model for other engines, as a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from moesaic.cli.options import (
    JsonFile,
    Trust,
    check_apart,
    check_json_file,
    write_json,
)
from moesaic.cli.quiet import quieten
from moesaic.cli.tables import explained, folded, out
from moesaic.errors import MoesaicError
from moesaic.progress import status

if TYPE_CHECKING:
    from moesaic.export import ExportReport

STOCK_SPEED = (
    "speed: in llama.cpp on a CPU experts take longer than the dense model (SmolLM2, 25 % "
    "skipped, same number format: a prompt 1.2 to 5.8 times as long, a token 1.2 to 1.6 "
    "times). So do prompts in vLLM on a CPU (1.2 to 1.45), where a token takes 0.92 to "
    "0.97. Wider FFNs gain more: of 896 by 4,864 a token takes 0.77 in vLLM, 1.06 in "
    "llama.cpp. moesaic bench measures yours, docs/speed.md tells more"
)


def export_command(
    model: Annotated[
        str,
        typer.Argument(help="A converted model: folder or hub id."),
    ],
    format: Annotated[
        str | None,
        # As in moesaic.export.fits.FORMATS, which is too slow to import for a help text.
        typer.Option(
            help="glm4_moe, qwen2_moe, gguf or gguf-qwen2moe; dense for what static "
            "pruning leaves."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="A new folder; for GGUF a new file NAME.gguf."),
    ] = None,
    epsilon: Annotated[
        str,
        typer.Option(
            help="How far to scale the router's scores down: their standard deviation "
            "afterwards. auto leaves the gates within 2e-4 of 1, with many "
            "small experts within 1.6e-3."
        ),
    ] = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            help="Number format: auto, float32 or bfloat16; dense and GGUF also float16, GGUF q8_0."
        ),
    ] = "auto",
    verify: Annotated[
        str | None,
        typer.Option(
            help="Compare the export with the original on this text, "
            "given as for eval --text."
        ),
    ] = None,
    why: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Only say which formats can hold the model, and why others cannot.",
        ),
    ] = False,
    json_file: JsonFile = None,
    trust_remote_code: Trust = False,
) -> None:
    """Write a converted model for other engines.

    These are stock transformers, vLLM and llama.cpp.
    """
    check_json_file(json_file)
    if why:
        written = {
            "--format": format,
            "--output": output,
            "--verify": verify,
            "--epsilon": None if epsilon == "auto" else epsilon,
            "--dtype": None if dtype == "auto" else dtype,
        }
        for option, value in written.items():
            if value is not None:
                raise MoesaicError(
                    f"{option} does not go with --explain, which writes nothing; leave one out"
                )
        _explain(model, json_file, trust_remote_code)
        return
    if format is None or output is None:
        raise MoesaicError("export needs --format and --output (or --explain)")
    check_apart(json_file, output)
    size = _scale_of(epsilon)
    quieten()
    from moesaic.export.run import export

    with status("exporting") as tell:
        report = export(
            model,
            format,
            output,
            epsilon=size,
            dtype=dtype,
            verify=verify,
            trust_remote_code=trust_remote_code,
            progress=tell,
        )
    _print(report)
    write_json(json_file, report.to_dict())


def _explain(
    model: str, json_file: Path | None, trust_remote_code: bool
) -> None:
    quieten()
    from moesaic.export.fits import GGUF, explain
    from moesaic.families.load import resolve

    found = explain(model, trust_remote_code)
    table = Table("format", "fits", "why not", title=model)
    for name, reasons in found.items():
        fits = "no" if reasons else "yes"
        table.add_row(name, fits, *folded("; ".join(reasons)))
    out.print(table)
    if not Path(resolve(model)).is_dir():
        out.print(
            "not looked at: weights on the hub. A router whose gates or biases were trained "
            "may not fit"
        )
    if any(not found[name] for name in GGUF):
        out.print(STOCK_SPEED)
    write_json(json_file, found)


def _scale_of(epsilon: str) -> float | None:
    if epsilon == "auto":
        return None
    try:
        return float(epsilon)
    except ValueError as error:
        raise MoesaicError(
            f"--epsilon {epsilon!r} is neither auto nor a number"
        ) from error


def _print(report: ExportReport) -> None:
    if report.scales:
        out.print(_table(report))
    if (found := report.comparison) is not None:
        changed = ""
        if found.changed:
            changed = (
                f"{max(found.changed):.3%} of the choices of experts differ in the "
                f"worst layer ({found.tokens} tokens); "
            )
        out.print(
            f"logits differ by {found.mean:.2e} of their rms on average, "
            f"{found.largest:.2e} at most; {changed}"
            f"perplexity {found.perplexity:.4f}, before the export "
            f"{found.original_perplexity:.4f}"
        )
    for line in report.warnings:
        out.print(f"note: {line}")
    out.print(
        f"written to {report.output} ({report.architecture}), which needs no moesaic"
    )


def _table(report: ExportReport) -> Table:
    """What became of the routers, a row a layer."""
    table = explained(
        "layer",
        "scale",
        "gate error",
        "tokens that change experts",
        meanings=[
            "scale: the router's scores are multiplied by it",
            "gate error: how far the gates are from 1",
            "tokens that change experts: share that now runs others than before",
        ],
    )
    for scale in report.scales:
        table.add_row(
            str(scale.layer),
            f"{scale.factor:.3g}",
            f"{scale.gate_error:.1e}",
            f"{scale.changed:.3%}",
        )
    return table
