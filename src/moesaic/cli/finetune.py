"""`moesaic finetune`: better by a little training, as a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesaic.cli.options import (
    Device,
    Dtype,
    JsonFile,
    Overwrite,
    Resume,
    Seed,
    SequenceLength,
    Trust,
    check_apart,
    check_json_file,
    typed_command,
    write_json,
)
from moesaic.cli.quiet import quieten
from moesaic.cli.tables import DEAD, explained, out

if TYPE_CHECKING:
    from moesaic.finetune.report import FinetuneReport


def finetune_command(
    model: Annotated[
        str,
        typer.Argument(help="A converted model: folder or hub id."),
    ],
    output: Annotated[
        Path,
        typer.Option(help="Folder for the fine-tuned model or adapter."),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="Text to train on: FILE[:FIELD], wikitext2, c4, "
            "hub:NAME:CONFIG:SPLIT:FIELD or demo. "
            "[default: wikitext2, or demo for what came from the demo model]"
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(help="Windows drawn from the text."),
    ] = 2048,
    sequence_length: SequenceLength = None,
    epochs: Annotated[
        int,
        typer.Option(help="How often to go through these windows."),
    ] = 1,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Windows of one optimiser step, over all processes. "
            "[default: 16, or a 48th of fewer than 768 windows, "
            "--samples times --epochs]"
        ),
    ] = None,
    rank: Annotated[
        int,
        typer.Option(help="Rank of the LoRA weights. More can learn more."),
    ] = 8,
    alpha: Annotated[
        float,
        typer.Option(help="LoRA weights count alpha / rank times."),
    ] = 32,
    lora_lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate of LoRA weights and routers. In routed experts it is "
            "divided by R^(1/4) for R of them. "
            "[default: fits steps, width and teacher; the paper's 5.95e-5 for its run]"
        ),
    ] = None,
    scale_lr: Annotated[
        float,
        typer.Option(help="Learning rate of the gates' scales (expert_scale)."),
    ] = 1e-3,
    balance_rate: Annotated[
        float,
        typer.Option(
            help="How fast the routers' biases move towards equal loads of the "
            "experts; where thresholds choose, all of a layer alike towards its "
            "budget. 0: not at all, but for thresholds, which are set anew in the end."
        ),
    ] = 1e-3,
    distill: Annotated[
        str,
        typer.Option(
            help="Dense model to imitate. auto: the one that was converted. "
            "none: learn from the text alone."
        ),
    ] = "auto",
    tune_teacher: Annotated[
        bool,
        typer.Option(
            "--tune-teacher",
            help="First train the dense model on the same windows. It then teaches "
            "better, and is the fair model to compare with.",
        ),
    ] = False,
    freeze_router: Annotated[
        bool,
        typer.Option(
            "--freeze-router",
            help="Keep the routers' weights. Only the gates' scales are trained.",
        ),
    ] = False,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge/--adapter",
            help="Write a whole model, or only a PEFT adapter.",
        ),
    ] = True,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            help="Windows at once on a device. Fewer need less memory. "
            "[default: 4,096 tokens, 512 on a CPU]"
        ),
    ] = None,
    gradient_checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--gradient-checkpointing/--no-gradient-checkpointing",
            help="Needs less memory and more time. "
            "[default: on a CPU, for windows of over 512 tokens]",
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            help="Save so that --resume can go on, every so many optimiser steps. "
            "[default: a tenth of the run]"
        ),
    ] = None,
    tensorboard: Annotated[
        str | None,
        typer.Option(help="Folder for TensorBoard's event files."),
    ] = None,
    json_file: JsonFile = None,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    trust_remote_code: Trust = False,
) -> None:
    """Make a converted model better by a little training."""
    check_json_file(json_file)
    check_apart(json_file, output)
    quieten()
    from accelerate import PartialState

    from moesaic.finetune.run import finetune

    report = finetune(
        model,
        output,
        data,
        samples=samples,
        sequence_length=sequence_length,
        epochs=epochs,
        batch_size=batch_size,
        rank=rank,
        alpha=alpha,
        lora_lr=lora_lr,
        scale_lr=scale_lr,
        balance_rate=balance_rate,
        distill=distill,
        tune_teacher=tune_teacher,
        freeze_router=freeze_router,
        merge=merge,
        micro_batch=micro_batch,
        gradient_checkpointing=gradient_checkpointing,
        checkpoint_every=checkpoint_every,
        tensorboard=tensorboard,
        seed=seed,
        device=device,
        dtype=dtype,
        overwrite=overwrite,
        resume=resume,
        trust_remote_code=trust_remote_code,
        command=typed_command(),
        progress=True,
    )
    if PartialState().is_main_process:
        _print(report, output)
        write_json(json_file, report.to_dict())


def _print(report: FinetuneReport, output: Path) -> None:
    if report.loads_before:
        table = explained(
            "layer",
            "max/mean load",
            "after",
            "dead",
            "after",
            "experts a token",
            "after",
            meanings=[
                "max/mean load: tokens of the most used expert, over the mean of all",
                DEAD,
                "experts a token: how many a token runs on average",
                "after: the same after the training",
            ],
        )
        pairs = zip(report.loads_before, report.loads_after, strict=True)
        for old, new in pairs:
            table.add_row(
                old["group"],
                f"{old['max_over_mean']:.2f}",
                f"{new['max_over_mean']:.2f}",
                str(old["dead"]),
                str(new["dead"]),
                f"{old['experts_per_token']:.2f}",
                f"{new['experts_per_token']:.2f}",
            )
        out.print(table)
    if report.heldout is None:
        out.print(
            "perplexity was not measured: no text was held out (it takes ten windows)"
        )
    if report.perplexity is not None:
        out.print(
            f"perplexity on {report.heldout} ({report.heldout_tokens} tokens): "
            f"{report.perplexity_before:.4f} before, {report.perplexity:.4f} after"
        )
    written = report.written_perplexity
    if report.teacher_perplexity is not None and written is not None:
        ratio = written / report.teacher_perplexity
        out.print(
            f"dense model tuned likewise: {report.teacher_perplexity:.4f}, ratio {ratio:.4f}"
        )
    if report.teacher_trained_weights is not None:
        ours = report.trained_weights / 1e6
        teacher = report.teacher_trained_weights / 1e6
        out.print(
            f"trained weights: {ours:.2f} million, {teacher:.2f} million of the dense model"
        )
    if report.folded_perplexity is not None:
        how = (
            "folded into the experts"
            if report.folded
            else "kept, for folding loses too much"
        )
        out.print(
            f"trained gates: {how} ({report.folded_perplexity:.4f} folded)"
        )
    if report.merged and report.loads_before and not report.folded:
        out.print(
            "note: stock architectures cannot hold the trained gates; moesaic export refuses"
        )
    what = "model" if report.merged else "PEFT adapter"
    out.print(f"{what} written to {output} in {report.seconds:.0f} s")
