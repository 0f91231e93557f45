"""The command line: reads arguments, calls the library, prints tables."""

from __future__ import annotations

import json
import shlex
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers.utils import logging as transformers_logging

from moesaic import _version, demo_run
from moesaic.convert import convert as convert_model
from moesaic.convert import prepare
from moesaic.data import to_ids
from moesaic.errors import MoesaicError
from moesaic.evaluate import perplexity
from moesaic.flops import Macs, count_macs, meta_model
from moesaic.load import choose_device, choose_dtype, load_config, load_model, load_tokenizer
from moesaic.plan import make_plan
from moesaic.recipe import RECIPES
from moesaic.report import ConversionReport

app = typer.Typer(
    help="Turns a dense language model into a Mixture-of-Experts, without training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
out, err = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)

Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the model brings along.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, float16.")]


@app.command()
def convert(
    model: Annotated[str, typer.Argument(help="Hub id, folder, or demo.")],
    output: Annotated[Path, typer.Option(help="Folder for the converted model.")],
    recipe: Annotated[str, typer.Option(help="Name (see moesaic recipes) or FILE.yaml.")] = "cmoe",
    layout: Annotated[str, typer.Option(help="SxAyEz: shared, active routed, total.")] = "S3A3E8",
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Text: FILE[:FIELD], wikitext2, c4, hub:NAME:CONFIG:SPLIT:FIELD or demo. "
            "Default: wikitext2, or demo for the demo model."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Calibration windows.")] = 8,
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens of a window [default: min(2048, context)].")
    ] = None,
    seed: Annotated[int, typer.Option()] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUTPUT.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a killed run.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, write nothing.")
    ] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Convert a dense model and save the result."""
    source = calibration or ("demo" if model == "demo" else "wikitext2")
    choose_device(device)
    choose_dtype(dtype)
    if dry_run:
        ready = prepare(
            model, recipe, layout, source, output=output, samples=samples,
            sequence_length=sequence_length, seed=seed, overwrite=overwrite, resume=resume,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        todo = ready.plan
        _macs_table(f"{model}, {layout}: {todo.shape}", todo.dense_macs, todo.macs, 1)
        out.print(
            f"would profile {ready.windows_NL.numel()} tokens of {source} in each of "
            f"{len(todo.config.moesaic['layers'])} layers and write {output}; nothing was written"
        )
        return
    _, report = convert_model(
        model, recipe, layout, source, output=output, samples=samples,
        sequence_length=sequence_length, seed=seed, device=device, dtype=dtype,
        overwrite=overwrite, resume=resume, trust_remote_code=trust_remote_code,
        command=shlex.join(["moesaic", *sys.argv[1:]]), progress=True,
    )  # fmt: skip
    _report_tables(report)
    against = "" if report.dense_perplexity is None else f" --against {model}"
    out.print(f"written to {output}; next: moesaic eval {output} --text {source}{against}")


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="Hub id, folder (dense or converted), or demo.")],
    text: Annotated[list[str] | None, typer.Option(help="As --calibration; repeatable.")] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens of a window [default: min(2048, context)].")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Use only the text's start.")] = None,
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
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise MoesaicError(f"--json {json_file}: {json_file.parent} is no folder")
    place = choose_device(device)
    names = [model] if against is None else [model, against]
    configs = [load_config(name, trust_remote_code) for name in names]
    if text is None:
        base = getattr(configs[0], "moesaic", {}).get("base_model", model)
        text = ["demo" if base == "demo" else "wikitext2"]
    contexts = [config.get_text_config().max_position_embeddings for config in configs]
    length = sequence_length or min(2048, *contexts)
    if not 2 <= length <= min(contexts):
        raise MoesaicError(f"sequence length {length} is outside 2..{min(contexts)}, the context")
    results = []
    for name in names:
        tokenizer = load_tokenizer(name, trust_remote_code)
        ids = {source: to_ids(source, tokenizer, heldout=True) for source in text}
        loaded = load_model(name, dtype, trust_remote_code, place)
        row: dict[str, Any] = {"model": name, "perplexity": {}, "tokens": {}}
        total = sum(len(i[:max_tokens]) for i in ids.values())
        with Progress(console=err, transient=True) as bar:
            task = bar.add_task(f"evaluating {name}", total=total)
            for source in text:
                advance = partial(bar.advance, task)
                value, count = perplexity(loaded, ids[source], length, max_tokens, advance)
                row["perplexity"][source], row["tokens"][source] = value, count
        row["active_ffn_fraction"] = _active_fraction(loaded.config)
        results.append(row)
        del loaded
    result = results[0] | {"sequence_length": length}
    if against is not None:
        if results[0]["tokens"] != results[1]["tokens"]:
            raise MoesaicError(
                f"{model} and {against} cut the text into different tokens "
                f"({results[0]['tokens']} and {results[1]['tokens']}): not comparable"
            )
        dense = results[1]
        result["against"] = dense
        result["ratio"] = {s: result["perplexity"][s] / dense["perplexity"][s] for s in text}
    table = Table(*["model", "text", "perplexity", "tokens", "active FFN"], title=None)
    for row in results:
        for source in text:
            table.add_row(
                row["model"], source, f"{row['perplexity'][source]:.4f}",
                f"{row['tokens'][source]}", f"{row['active_ffn_fraction']:.1%}",
            )  # fmt: skip
    out.print(table)
    for source, ratio in result.get("ratio", {}).items():
        out.print(f"ratio on {source}: {ratio:.4f}")
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n")


@app.command()
def recipes() -> None:
    """List the recipes and their ingredients."""
    table = Table("recipe", "importance", "grouping", "router", "options", "what it is")
    for recipe in RECIPES.values():
        options = [f"top-{recipe.activation_top_k}"] if recipe.importance == "rate" else []
        options += [name for name in ("normalise", "absolute") if getattr(recipe, name)]
        table.add_row(
            recipe.name, recipe.importance, recipe.grouping, recipe.router,
            ", ".join(options), recipe.about,
        )  # fmt: skip
    out.print(table)


@app.command()
def flops(
    model: Annotated[str, typer.Argument(help="Hub id, folder, config.json, or demo.")],
    layout: Annotated[str, typer.Option(help="SxAyEz.")] = "S3A3E8",
    tokens: Annotated[int, typer.Option(min=1, help="Length of the context.")] = 128,
    recipe: Annotated[str, typer.Option()] = "cmoe",
    trust_remote_code: Trust = False,
) -> None:
    """Count multiply-accumulates before and after, from the configuration alone."""
    config = load_config(model, trust_remote_code)
    if config.model_type == "moesaic":
        ours = count_macs(meta_model(config, trust_remote_code), tokens)
        _macs_table(f"{model}, {config.moesaic['layout']}", None, ours, tokens)
        return
    todo = make_plan(config, model, recipe, layout, trust_remote_code=trust_remote_code)
    dense = count_macs(meta_model(config, trust_remote_code), tokens)
    ours = count_macs(meta_model(todo.config), tokens)
    _macs_table(f"{model}, {layout}: {todo.shape}", dense, ours, tokens)


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the model.")] = Path("moesaic-demo"),
) -> None:
    """Convert the embedded model, save, reload and compare it."""
    rows = demo_run.run_demo(output, lambda line: err.print(line))
    table = Table(
        "recipe", "perplexity", "over dense", "active FFN", "MFLOPs per token", "seconds",
        title=f"demo model, {demo_run.LAYOUT}, perplexity on held-out modules",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.name, f"{row.perplexity:.2f}", f"{row.perplexity / rows[0].perplexity:.3f}",
            f"{row.active_ffn_fraction:.1%}", f"{2 * row.macs / 1e6:.2f}",
            "" if row.seconds is None else f"{row.seconds:.2f}",
        )  # fmt: skip
    out.print(table)
    out.print(f"the converted model lies in {output}")
    out.print(f"next: moesaic eval {output} --text demo --against demo")


def _active_fraction(config: Any) -> float:
    if config.model_type != "moesaic":
        return 1.0
    return count_macs(meta_model(config), 1).active_ffn_fraction


def _macs_table(title: str, dense: Macs | None, ours: Macs, tokens: int) -> None:
    columns = ["GMACs", "converted"] if dense is None else ["GMACs", "dense", "converted"]
    table = Table(*columns, title=f"{title} ({tokens} token{'s' * (tokens > 1)})")
    parts = ["attention", "ffn", "router", "head", "total", "scores"]
    for part in parts:
        counts = [getattr(macs, part) / 1e9 for macs in (dense, ours) if macs is not None]
        name = "attention scores (not in total)" if part == "scores" else part
        table.add_row(
            name, *(f"{count:.4g}" if count < 100 else f"{count:.1f}" for count in counts)
        )
    out.print(table)
    share = f"active FFN neurons {ours.active_ffn_fraction:.1%}"
    if dense is not None:
        share += f", multiply-accumulates {ours.total / dense.total - 1:+.1%}"
    out.print(share)


def _report_tables(report: ConversionReport) -> None:
    table = Table(
        "layer", "relative error", "router recall", "mass kept", "oracle's mass", "load max/mean",
        "seconds", title=f"{report.model}, {report.recipe['name']} {report.layout}: {report.shape}",
    )  # fmt: skip
    for layer in report.layers:
        load = layer.expert_load
        spread = f"{max(load) * len(load) / sum(load):.2f}" if load else ""
        cells = [layer.relative_error, layer.router_recall, layer.mass_kept, layer.oracle_mass]
        table.add_row(
            str(layer.layer), *("" if cell is None else f"{cell:.4f}" for cell in cells), spread,
            f"{layer.seconds:.2f}",
        )  # fmt: skip
    out.print(table)
    if report.dense_perplexity and report.perplexity:
        ratio = report.perplexity / report.dense_perplexity
        out.print(
            f"perplexity {report.perplexity:.3f}, dense {report.dense_perplexity:.3f}, ratio "
            f"{ratio:.3f} ({report.heldout}, {report.heldout_tokens} tokens)"
        )
    out.print(
        f"active FFN neurons {report.active_ffn_fraction:.1%}, multiply-accumulates per token "
        f"{report.macs / report.dense_macs - 1:+.1%}, {report.seconds:.1f} s in all"
    )


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
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="transformers|huggingface_hub")


def main() -> None:
    """Entry point: bad input is one line on stderr and exit code 2."""
    try:
        app()
    except MoesaicError as error:
        err.print(f"error: {' '.join(str(error).split())}", markup=False, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("interrupted; finished layers are kept, run again with --resume")
        sys.exit(130)
