"""The command line: reads arguments, calls the library, prints tables."""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from huggingface_hub.utils import logging as hub_logging
from rich.progress import Progress
from rich.table import Column, Table
from transformers.utils import logging as transformers_logging
from typer.exceptions import TyperException

from moesaic import _version
from moesaic.cli import demo as demo_run
from moesaic.cli.compare import compare_command
from moesaic.cli.export import export_command
from moesaic.cli.finetune import finetune_command
from moesaic.cli.flops import flops_command
from moesaic.cli.options import (
    Device,
    Dtype,
    Grain,
    Trust,
    check_json_file,
    err,
    numbers,
    write_json,
)
from moesaic.cli.tables import folded, macs_table, out, report_tables
from moesaic.conversion.convert import convert as convert_model
from moesaic.conversion.layout_search import check_target
from moesaic.conversion.prepare import prepare
from moesaic.errors import MoesaicError
from moesaic.evaluate import evaluate
from moesaic.families.load import choose_device, choose_dtype
from moesaic.methods.recipe import RECIPES

app = typer.Typer(
    help="Turns a dense language model into a Mixture-of-Experts, without training.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("compare")(compare_command)
app.command("export")(export_command)
app.command("flops")(flops_command)
app.command("finetune")(finetune_command)


@app.command()
def convert(
    model: Annotated[str, typer.Argument(help="Hub id, folder, or demo.")],
    output: Annotated[Path, typer.Option(help="Folder for the converted model.")],
    recipe: Annotated[
        str, typer.Option(help="Name (see moesaic recipes) or FILE.yaml.")
    ] = "moesaic",
    layout: Annotated[
        str | None, typer.Option(help="SxAyEz: shared, active routed, total experts.")
    ] = None,
    sparsity: Annotated[
        float | None,
        typer.Option(
            help="Share of the FFN neurons that a token skips; picks the layout by held-out layer "
            "error [default: 0.25 without --layout]."
        ),
    ] = None,
    target_ratio: Annotated[
        float | None,
        typer.Option(
            help="Skip as many neurons as keep perplexity within this ratio of dense."
        ),
    ] = None,
    grain: Grain = "medium",
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Text: FILE[:FIELD], wikitext2, c4, hub:NAME:CONFIG:SPLIT:FIELD or demo. "
            "Default: wikitext2, or demo for the demo model."
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Calibration windows [default: 8; where weights are fitted, 12 tokens a neuron "
            "and at least 32,768 tokens]."
        ),
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(help="Tokens of a window [default: min(2048, context)]."),
    ] = None,
    seed: Annotated[int, typer.Option()] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUTPUT.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a killed run.")
    ] = False,
    experts: Annotated[
        str | None,
        typer.Option(
            help="In a model that has experts: convert these only, such as 0,3,7."
        ),
    ] = None,
    min_tokens: Annotated[
        int | None,
        typer.Option(
            help="Experts that see fewer calibration tokens stay whole [default: as many as an "
            "expert has neurons]."
        ),
    ] = None,
    dense_layers: Annotated[
        str | None, typer.Option(help="Layers that stay as they are, such as 0,11.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, write nothing.")
    ] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Convert a dense model and save the result."""
    source = calibration or ("demo" if model == "demo" else "wikitext2")
    choose_device(device)
    choose_dtype(dtype)
    chosen = numbers("--experts", experts)
    kept = numbers("--dense-layers", dense_layers) or ()
    if dry_run:
        ready = prepare(
            model,
            recipe,
            layout,
            source,
            sparsity=sparsity,
            grain=grain,
            output=output,
            samples=samples,
            sequence_length=sequence_length,
            seed=seed,
            overwrite=overwrite,
            resume=resume,
            trust_remote_code=trust_remote_code,
            experts=chosen,
            min_tokens=min_tokens,
            dense_layers=kept,
        )
        if target_ratio is not None:
            check_target(target_ratio, layout, sparsity, ready.heldout_ids)
        todo = ready.plans[0]
        if target_ratio is not None:
            out.print(
                f"would search up to {todo.layout.num_routed} experts for {target_ratio}"
            )
            out.print(f"nothing was written to {output}")
            return
        macs_table(
            f"{model}, {todo.layout}: {todo.shape}", todo.dense_macs, todo.macs, 1
        )
        if len(ready.plans) > 1:
            out.print(
                f"layouts to choose from: {', '.join(str(p.layout) for p in ready.plans)}"
            )
        out.print(
            f"would profile {ready.windows_NL.numel()} tokens of {source} in each of "
            f"{len(todo.config.moesaic['layers'])} layers and write {output}; nothing was written"
        )
        return
    _, report = convert_model(
        model,
        recipe,
        layout,
        source,
        sparsity=sparsity,
        target_ratio=target_ratio,
        grain=grain,
        output=output,
        samples=samples,
        sequence_length=sequence_length,
        seed=seed,
        device=device,
        dtype=dtype,
        overwrite=overwrite,
        resume=resume,
        trust_remote_code=trust_remote_code,
        experts=chosen,
        min_tokens=min_tokens,
        dense_layers=kept,
        command=_command(),
        progress=True,
    )
    report_tables(report)
    next_command = [
        _program(),
        "eval",
        str(output),
        "--text",
        source,
        "--against",
        model,
    ]
    out.print(f"written to {output}; next:\n  {shlex.join(next_command)}")
    if Path(source).exists():
        out.print(
            "(better on another text: most of this one may have been used for calibration)"
        )


@app.command("eval")
def evaluate_command(
    model: Annotated[
        str, typer.Argument(help="Hub id, folder (dense or converted), or demo.")
    ],
    text: Annotated[
        list[str] | None, typer.Option(help="As --calibration; repeatable.")
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(help="Tokens of a window [default: min(2048, context)]."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Use only the text's start.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Dense model to compare with on the same tokens.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers to this file.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: Trust = False,
) -> None:
    """Measure perplexity on text: windows of L tokens that do not overlap."""
    check_json_file(json_file)
    with Progress(console=err, transient=True) as bar:

        def progress(name: str, total: int) -> Callable[[int], None]:
            return partial(bar.advance, bar.add_task(f"evaluating {name}", total=total))

        result = evaluate(
            model,
            text,
            against=against,
            sequence_length=sequence_length,
            max_tokens=max_tokens,
            device=choose_device(device),
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    table = Table("model", "text", "perplexity", "tokens", "active FFN")
    for row in [result, result["against"]] if against else [result]:
        for source, value in row["perplexity"].items():
            table.add_row(
                *folded(row["model"], source),
                f"{value:.4f}",
                f"{row['tokens'][source]}",
                f"{row['active_ffn_fraction']:.1%}",
            )
    out.print(table)
    for source, ratio in result.get("ratio", {}).items():
        out.print(f"ratio on {source}: {ratio:.4f}")
    write_json(json_file, result)


@app.command()
def recipes() -> None:
    """List the recipes and their ingredients."""
    named = Column("recipe", no_wrap=True)
    table = Table(named, "importance", "grouping", "router", "gating", "repair")
    for recipe in RECIPES.values():
        gating = recipe.gating if recipe.routed else "none"
        parts = (
            recipe.importance,
            recipe.grouping,
            recipe.router,
            gating,
            recipe.repair,
        )
        table.add_row(recipe.name, *folded(*parts))
    out.print(table)
    for recipe in RECIPES.values():
        out.print(f"{recipe.name}: {recipe.about}")


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the model.")] = Path(
        "moesaic-demo"
    ),
) -> None:
    """Convert the embedded model, save, reload and compare it."""
    rows = demo_run.run_demo(output, lambda line: err.print(line))
    table = Table(
        "recipe",
        "perplexity",
        "over dense",
        "active FFN",
        "MFLOPs per token",
        "seconds",
        title=f"demo model, {demo_run.SPARSITY:.0%} of the FFN skipped, held-out modules",
    )
    for row in rows:
        table.add_row(
            row.name,
            f"{row.perplexity:.2f}",
            f"{row.perplexity / rows[0].perplexity:.3f}",
            f"{row.active_ffn_fraction:.1%}",
            f"{2 * row.macs / 1e6:.2f}",
            "" if row.seconds is None else f"{row.seconds:.2f}",
        )
    out.print(table)
    out.print(f"the converted model lies in {output}")
    words = [_program(), "eval", str(output), "--text", "demo", "--against", "demo"]
    limit = ["--max-tokens", str(demo_run.HELDOUT_TOKENS)]
    out.print(f"next:\n  {shlex.join([*words, *limit])}")


def _program() -> str:
    """What to type for this program: its path where it is not on the PATH (`make demo`)."""
    return "moesaic" if shutil.which("moesaic") else sys.argv[0]


def _command() -> str:
    """The command as the model card keeps it: a resumed run is the run it resumes."""
    kept = [word for word in sys.argv[1:] if word not in {"--resume", "--overwrite"}]
    return shlex.join(["moesaic", *kept])


def _version_and_exit(show: bool) -> None:
    if show:
        out.print(_version.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version_and_exit, is_eager=True)
    ] = False,
) -> None:
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="transformers|huggingface_hub")


def main() -> None:
    """Entry point: bad input is one line on stderr and exit code 2."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        code = app(standalone_mode=False)  # 130 after an interrupt
    except (MoesaicError, OSError) as error:
        code, message = 2, f"error: {' '.join(str(error).split())}"
        err.print(message, markup=False, highlight=False)
    except torch.OutOfMemoryError:
        less = "--device cpu or shorter windows (--sequence-length)"
        if sys.argv[1:2] == ["finetune"]:
            less = "--micro-batch 1, --gradient-checkpointing or a smaller --sequence-length"
        code, message = 2, f"error: out of memory on the GPU; try {less}"
        err.print(message, markup=False, highlight=False)
    except TyperException as error:
        code, message = 2, f"error: {error.format_message()} (see moesaic --help)"
        err.print(message, markup=False, highlight=False)
    if code == 130:
        goes_on = sys.argv[1:2] in (["convert"], ["finetune"])
        err.print(
            f"interrupted{'; what had begun goes on with --resume' if goes_on else ''}"
        )
    sys.exit(code)
