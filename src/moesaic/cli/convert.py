"""`moesaic convert`: the main job, as a command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.cli.options import (
    Device,
    Dtype,
    Grain,
    Overwrite,
    Resume,
    Seed,
    SequenceLength,
    Trust,
    numbers,
    parse_settings,
    program,
    typed_command,
)
from moesaic.cli.purpose import method_for, time_lines
from moesaic.cli.quiet import quieten
from moesaic.cli.tables import bytes_lines, macs_table, out, report_tables
from moesaic.conversion.advice import note_on_copies
from moesaic.demo import usual_text
from moesaic.errors import MoesaicError


def convert_command(
    model: Annotated[
        str,
        typer.Argument(
            help="The dense model: hub id, folder, GGUF file, or demo."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(help="Folder for the converted model."),
    ],
    recipe: Annotated[
        str | None,
        typer.Option(
            "--method",
            "--recipe",
            help="How to convert: a name (see moesaic methods), FILE.py or FILE.yaml. "
            "[default: moesaic]",
        ),
    ] = None,
    purpose: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="What is to be fast. Chooses the method, where --method does not. "
            "prefill (prompts): moesaic. decode (answers, one at a time): "
            "moesaic-neurons, which no stock engine runs. batch (many answers at once): "
            "static-repaired.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Change a setting of the method (see moesaic methods NAME). "
            "May be given more than once.",
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help="SxAyEz: x shared experts, y routed ones for each token (on average by "
            "moesaic-dynamic), z in all."
        ),
    ] = None,
    sparsity: Annotated[
        float | None,
        typer.Option(
            help="Share of the FFN neurons that a token skips. The best of a few "
            "layouts is taken. [default: 0.25 without --layout]"
        ),
    ] = None,
    target_ratio: Annotated[
        float | None,
        typer.Option(
            help="Skip as much as this allows: perplexity over the dense model's. "
            "1.03 allows 3 % more."
        ),
    ] = None,
    grain: Grain = None,
    calibration: Annotated[
        list[str] | None,
        typer.Option(
            help="Text that the model is run on: FILE[:FIELD], wikitext2, c4, "
            "hub:NAME:CONFIG:SPLIT:FIELD or demo. May be given more than once: as much "
            "of each. [default: wikitext2, or demo for the demo model]"
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Windows drawn from that text. [default: 8; where weights are "
            "fitted, 12 tokens a neuron and at least 65,536 tokens]"
        ),
    ] = None,
    sequence_length: SequenceLength = None,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    experts: Annotated[
        str | None,
        typer.Option(
            help="For a model that has experts already: convert only these, as 0,3,7."
        ),
    ] = None,
    min_tokens: Annotated[
        int | None,
        typer.Option(
            help="For a model that has experts already: leave those whole that see "
            "fewer calibration tokens. [default: as many as an expert has neurons]"
        ),
    ] = None,
    dense_layers: Annotated[
        str | None,
        typer.Option(help="Leave these layers as they are, as 0,11."),
    ] = None,
    recover: Annotated[
        int | None,
        typer.Option(
            help="Then train on so many tokens of the same text, to imitate the dense "
            "model: 50000 is a start. [default: no training]"
        ),
    ] = None,
    tune_dense: Annotated[
        bool,
        typer.Option(
            "--tune-dense",
            help="With --recover: train the dense model on these tokens first, and "
            "convert that one. Loses less, where the text itself teaches it something.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything and write nothing."),
    ] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Convert a dense model into a Mixture-of-Experts and save it."""
    usual = "moesaic" if purpose is None else method_for(purpose)
    if purpose is not None and recipe is None and layout is not None:
        raise MoesaicError(
            f"--for {purpose} chooses the layout too (of {usual}); leave out --layout "
            f"{layout}, or name a --method"
        )
    sources = calibration or [usual_text(model)]
    source = calibration_of(sources)
    choices: dict[str, Any] = {
        "model": model,
        "recipe": recipe or usual,
        "layout": layout,
        "calibration": source,
        "sparsity": sparsity,
        "grain": grain,
        "output": output,
        "samples": samples,
        "sequence_length": sequence_length,
        "seed": seed,
        "overwrite": overwrite,
        "resume": resume,
        "trust_remote_code": trust_remote_code,
        "experts": numbers("--experts", experts),
        "min_tokens": min_tokens,
        "dense_layers": numbers("--dense-layers", dense_layers) or (),
        "recover": recover,
        "tune_dense": tune_dense,
    }
    choices["settings"] = parse_settings(settings or [])
    quieten()
    from moesaic.families.load import choose_device, choose_dtype

    choose_device(device)
    choose_dtype(dtype)
    if target_ratio is None:
        _tell_time(choices, purpose, dtype)
    if dry_run:
        _dry_run(choices, target_ratio, device, dtype)
    else:
        _convert(choices, target_ratio, device, dtype)


def _tell_time(
    choices: dict[str, Any], purpose: str | None, dtype: str
) -> None:
    """Before anything is read: what the conversion can gain."""
    from moesaic.conversion.options import make_options
    from moesaic.conversion.prepare import planned

    options = {
        name: value
        for name, value in choices.items()
        if name not in {"recover", "tune_dense"}
    }
    plan = planned(make_options(**options, dtype=dtype))
    for line in time_lines(plan, purpose):
        out.print(line)


def calibration_of(sources: list[str]) -> str | dict[str, str]:
    """One text, or several by name. Raises MoesaicError for one that comes twice."""
    if len(sources) == 1:
        return sources[0]
    by_name: dict[str, str] = {}
    for source in sources:
        if source in by_name:
            raise MoesaicError(
                f"--calibration names {source} twice; name each text once"
            )
        by_name[source] = source
    return by_name


def _first_source(calibration: str | dict[str, str]) -> str:
    if isinstance(calibration, str):
        return calibration
    return next(iter(calibration))


def _convert(
    choices: dict[str, Any],
    target_ratio: float | None,
    device: str,
    dtype: str,
) -> None:
    from moesaic.finetune.convert import convert
    from moesaic.inspection.inspect import PAGE_FILE

    model, report = convert(
        **choices,
        target_ratio=target_ratio,
        device=device,
        dtype=dtype,
        command=typed_command(),
        progress=True,
    )
    output = str(choices["output"])
    source = _first_source(choices["calibration"])
    report_tables(report, output)
    moe = getattr(model.config, "moesaic", None)
    note = None if moe is None else note_on_copies(moe)
    if note is not None:
        out.print(note)
    arguments = [
        "eval",
        output,
        "--text",
        source,
        "--against",
        choices["model"],
    ]
    out.print(
        f"written to {output}; next:\n  {program()} {shlex.join(arguments)}"
    )
    page = choices["output"] / PAGE_FILE
    if page.is_file():
        out.print(f"report: {page}", highlight=False)
    if Path(source).exists():
        out.print(
            "(better on another text: most of this one may have been used for "
            "calibration)"
        )


def _dry_run(
    choices: dict[str, Any],
    target_ratio: float | None,
    device: str,
    dtype: str,
) -> None:
    """Says what a conversion would do."""
    from moesaic.conversion.layout_search import most_steps
    from moesaic.conversion.prepare import source_name
    from moesaic.finetune.convert import dry_run

    prepared = dry_run(
        **choices, target_ratio=target_ratio, device=device, dtype=dtype
    )
    output = choices["output"]
    plan = prepared.plans[0]
    if target_ratio is not None:
        routed = plan.layout.num_routed
        out.print(
            f"would search among {routed} routed experts for {target_ratio}: at most "
            f"{most_steps(routed)} conversions in memory, usually four or five, then "
            "the one that is written"
        )
        out.print(f"nothing was written to {output}")
        return
    title = f"{choices['model']}, {plan.label}: {plan.words}"
    macs_table(title, plan.dense_macs, plan.macs, 1)
    bytes_lines(plan.dense_bytes, plan.bytes)
    if len(prepared.plans) > 1:
        layouts = ", ".join(plan.label for plan in prepared.plans)
        out.print(f"layouts to choose from: {layouts}")
    tokens = prepared.windows_NL.numel()
    layers = len(plan.moe.layers) or plan.dense_config.num_hidden_layers
    recover = choices["recover"]
    then = ""
    if recover is not None:
        from moesaic.finetune.estimate import outlook

        then = f", train on about {recover:,} tokens of it,"
        words = outlook(prepared, recover, choices["tune_dense"])
        out.print(words, highlight=False)
    out.print(
        f"would profile {tokens} tokens of {source_name(choices['calibration'])} in "
        "each of "
        f"{layers} layers{then} and write {output}; nothing was written"
    )
