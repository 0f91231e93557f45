"""One fine-tuning, step by step: check, load, measure, train, refit, measure, save.

Work goes on in OUTPUT.partial, which gets OUTPUT's name when it is whole.

Shape suffixes: N windows, L tokens of one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console

from moesaic.calibration.checks import check_vocabulary
from moesaic.conversion.layout_search import HELDOUT_TOKENS
from moesaic.errors import MoesaicError
from moesaic.evaluate.perplexity import perplexity
from moesaic.families.head import check_head
from moesaic.families.load import dtype_name, load_model
from moesaic.finetune.balance import measure_loads, refit_thresholds
from moesaic.finetune.checks import SHARDED, is_set, refuse_float16
from moesaic.finetune.estimate import training_seconds
from moesaic.finetune.fingerprint import fingerprint
from moesaic.finetune.lora import merge as merge_lora
from moesaic.finetune.lora import round_routers
from moesaic.finetune.masked import masked
from moesaic.finetune.options import AUTO_TEACHER, FinetuneOptions, Mix
from moesaic.finetune.prepare import (
    TrainingInput,
    TrainingText,
    TunedDense,
    check_teacher,
    prepare,
)
from moesaic.finetune.report import FinetuneReport, new_report
from moesaic.finetune.save import heldout_perplexity, save_model, write_files
from moesaic.finetune.train import Trained, first_windows, gather, train
from moesaic.output import draft as checkpoint
from moesaic.parts.products import widened_products
from moesaic.progress import duration


def finetune(
    model: str | Path,
    output: str | Path,
    data: Any = None,
    *,
    samples: int = 2048,
    sequence_length: int | None = None,
    epochs: int = 1,
    batch_size: int | None = None,
    rank: int = 8,
    alpha: float = 32,
    lora_lr: float | None = None,
    scale_lr: float = 1e-3,
    balance_rate: float = 1e-3,
    distill: str | Path = AUTO_TEACHER,
    tune_teacher: bool = False,
    freeze_router: bool = False,
    merge: bool = True,
    micro_batch: int | None = None,
    gradient_checkpointing: bool | None = None,
    checkpoint_every: int | None = None,
    tensorboard: str | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    overwrite: bool = False,
    resume: bool = False,
    trust_remote_code: bool = False,
    command: str | None = None,
    progress: bool = False,
) -> FinetuneReport:
    """Recovers a converted model's quality by light fine-tuning (paper, Section 4.3).

    Adam trains LoRA weights of `rank` and `alpha` in attention and experts, the routers
    (unless frozen) and expert_scale, on `samples` windows of `data`. That is a SOURCE:
    wikitext2 unless given, or demo for what came from the demo model. After every step
    the selection biases move by `balance_rate` towards equal loads, or, where thresholds
    choose, all of a layer alike towards its budget.

    `distill` is the teacher, whose logits and FFNs are imitated: "auto" for the dense
    model that was converted, "none", or a dense model's folder or hub id. With
    `tune_teacher` it first learns the same windows by next-token loss, in memory: it
    teaches better then, and is the fair reference.

    `lora_lr` and `batch_size` fit the length of the run unless given. `merge` writes a
    model like the one given, otherwise `output` is a PEFT adapter for it. Perplexity on
    held-out text and loads are measured before and after; the learning curve is written
    beside the weights.

    Runs alone or under `accelerate launch`. Raises MoesaicError for bad input, leaving
    nothing behind. Where the loss stops being finite or the disk is full it raises too,
    and leaves the checkpoints in OUTPUT.partial.

    Costs about three forward passes per token, four with a teacher, and three of the
    dense model with `tune_teacher`. Memory: the model, the teacher, and activations of
    `micro_batch` windows: 4,096 tokens unless given, 512 on a CPU. With
    `gradient_checkpointing` most activations are computed again, for one pass more.
    Unless given, that is done on a CPU for windows of more than 512 tokens.
    """
    options = FinetuneOptions(
        model=str(model),
        output=Path(output).absolute(),
        data=data,
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
        dtype=dtype_name(dtype),
        overwrite=overwrite,
        resume=resume,
        trust_remote_code=trust_remote_code,
        command=command,
        progress=progress,
    )
    return run(options)


def run(
    options: FinetuneOptions,
    text: TrainingText | None = None,
    tuned: TunedDense | None = None,
) -> FinetuneReport:
    """The steps of a fine-tuning, in their order. Reads the text unless it is given.

    `tuned` is the teacher where it was trained on the same windows before.
    """
    started = time.perf_counter()
    inputs = prepare(options, text, tuned)
    student = load_student(inputs)
    teacher = load_teacher(inputs, student)
    with widened_products(student.dtype, student.device):
        return _run(inputs, student, teacher, started)


def _run(
    inputs: TrainingInput, student: Any, teacher: Any, started: float
) -> FinetuneReport:
    """What is left once text and models are there."""
    options = inputs.options
    to_train = [student, teacher] if options.tune_teacher else [student]
    for model in to_train:
        check_head(model, inputs.windows_NL[0])
    report = new_report(inputs, student)
    measure_before(student, inputs, report)
    announce(student, inputs)
    with open_output(inputs, student, teacher, report) as draft:
        if options.tune_teacher:
            teacher = tune_teacher(teacher, inputs, draft, report)
        trained = train_student(student, teacher, inputs, draft)
        report.trained_weights = trained.weights
        if not is_first_process(options):
            return report
        load_again_if_sharded(trained, inputs)
        windows_NL = first_windows(inputs.windows_NL)
        # Without masks experts inside LoRA weights would each copy its tokens.
        with torch.no_grad(), masked(trained.model):
            round_routers(trained.model, student.dtype)
            refit_thresholds(trained.model, windows_NL)
            trained.loads_after = measure_loads(trained.model, windows_NL)
        report.set_loads(trained.loads_before, trained.loads_after)
        folder = draft / "model"
        save_model(trained.model, folder, inputs, windows_NL, report)
        report.seconds = time.perf_counter() - started
        write_files(folder, report, trained, options.command)
        checkpoint.take_name(draft, options.output, options.overwrite)
    return report


def is_first_process(options: FinetuneOptions) -> bool:
    """Whether this process measures and writes; the others only train."""
    state = PartialState(cpu=options.use_cpu)
    return bool(state.is_main_process)


def load_student(inputs: TrainingInput) -> Any:
    """The converted model, on its device unless its weights are to be sharded.

    Raises MoesaicError where it cannot be trained on this text.
    """
    options = inputs.options
    student = load_model(
        options.model, options.dtype, options.trust_remote_code
    )
    refuse_float16(student, options.model)
    check_vocabulary(student, inputs.windows_NL)
    if not is_set("ACCELERATE_USE_FSDP"):
        state = PartialState(cpu=options.use_cpu)
        student.to(state.device)
    return student


def load_teacher(inputs: TrainingInput, student: Any) -> Any:
    """The dense model to imitate, or None. Raises for one of another shape."""
    if inputs.teacher is None:
        return None
    options = inputs.options
    teacher = load_model(
        inputs.teacher, options.dtype, options.trust_remote_code
    )
    check_teacher(student, teacher)
    if options.tune_teacher and teacher.dtype == torch.float16:
        raise MoesaicError(
            f"{inputs.teacher} is in float16, whose range gradients leave, and "
            "--tune-teacher trains it; pass --dtype bfloat16 or float32"
        )
    return teacher


def measure_before(
    student: Any, inputs: TrainingInput, report: FinetuneReport
) -> None:
    """Perplexity before training, where text is held out; not if it is known."""
    text = inputs.text
    if text.validation is None or not is_first_process(inputs.options):
        return
    measured = text.measured
    if measured is None:
        measured = perplexity(
            student,
            text.validation.ids,
            inputs.settings.sequence_length,
            HELDOUT_TOKENS,
        )
    report.perplexity_before, report.heldout_tokens = measured


def announce(student: Any, inputs: TrainingInput) -> None:
    """Says how long training will take, where progress is wanted."""
    options = inputs.options
    is_sharded = any(is_set(name) for name in SHARDED)
    if not options.progress or is_sharded or not is_first_process(options):
        return
    processes = PartialState(cpu=options.use_cpu).num_processes
    seconds = training_seconds(student, inputs, processes)
    settings = inputs.settings
    steps = settings.samples // settings.batch_size * settings.epochs
    tokens = inputs.windows_NL.numel() * settings.epochs
    console = Console(stderr=True)
    console.print(
        f"training on {tokens:,} tokens in {steps:,} steps: "
        f"{duration(seconds)} by a forward pass"
    )


@contextmanager
def open_output(
    inputs: TrainingInput, student: Any, teacher: Any, report: FinetuneReport
) -> Iterator[Path]:
    """The folder to work in, opened by the first process.

    Whatever goes wrong inside costs no checkpoint.
    """
    options = inputs.options
    state = PartialState(cpu=options.use_cpu)
    processes = state.num_processes
    identity = fingerprint(inputs, student, teacher, report, processes)
    opened: Any = nullcontext()
    if state.is_main_process:
        opened = checkpoint.open_draft(
            options.output, identity, options.resume, options.progress
        )
    draft = checkpoint.draft_folder(options.output)
    with opened, keep_checkpoints():
        state.wait_for_everyone()
        with checkpoint.writing(draft, "checkpoints"):
            yield draft


@contextmanager
def keep_checkpoints() -> Iterator[None]:
    """Turns any of our errors into one that leaves the draft where it is."""
    try:
        yield
    except checkpoint.UnfinishedError:
        raise
    except MoesaicError as error:
        raise checkpoint.UnfinishedError(str(error)) from error


def tune_teacher(
    dense: Any, inputs: TrainingInput, draft: Path, report: FinetuneReport
) -> Any:
    """The dense model after next-token training by the same settings and windows."""
    options = inputs.options
    settings = replace(inputs.settings, mix=Mix())
    machine = options.machine()
    if machine.tensorboard is not None:
        # A run of its own: else its curves mix with the student's.
        folder = Path(machine.tensorboard) / "teacher"
        machine = replace(machine, tensorboard=str(folder))
    trained = train(
        dense,
        inputs.windows_NL,
        settings,
        machine,
        folder=draft / "teacher",
        resume=options.resume,
    )
    report.teacher_trained_weights = trained.weights
    teacher = merge_lora(trained.model)
    if is_first_process(options):
        report.teacher_perplexity = heldout_perplexity(teacher, inputs)
    return teacher


def train_student(
    student: Any, teacher: Any, inputs: TrainingInput, draft: Path
) -> Trained:
    """The student after training, wrapped in its LoRA weights."""
    options = inputs.options
    return train(
        student,
        inputs.windows_NL,
        inputs.settings,
        options.machine(),
        teacher,
        folder=draft / "trainer",
        resume=options.resume,
    )


def load_again_if_sharded(trained: Trained, inputs: TrainingInput) -> None:
    """After sharded training: the trained weights around the whole model."""
    if trained.sharded is None:
        return
    options = inputs.options
    model = load_model(options.model, options.dtype, options.trust_remote_code)
    gather(trained, model, inputs.settings)
