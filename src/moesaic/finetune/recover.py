"""Conversion and recovery in one run: one folder, which gets its name when both are done.

Everything lies in OUTPUT.partial: first `converted`, then `recovered`, which becomes
OUTPUT, and before both `dense`, where the dense model is trained first. Each of them is
made by a run of its own, with a draft beside it, so that a killed run goes on in the part
that it was in.

The dense model is read from the disk a second time, as the teacher, when the weights of
the conversion are gone. Two models are in memory then, as in any fine-tuning with a
teacher. Kept from the start, a second one would also be there while layers are converted.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from torch import Tensor

from moesaic.calibration.checks import digest_of_tokens
from moesaic.conversion.convert import convert_prepared, digest_of_config
from moesaic.conversion.model_card import model_card
from moesaic.conversion.options import ConvertOptions
from moesaic.conversion.plan import public_name
from moesaic.conversion.prepare import Prepared, source_name
from moesaic.conversion.python_call import python_call
from moesaic.conversion.report import (
    CONVERSION_FILE,
    RECOVERY_FILE,
    ConversionReport,
)
from moesaic.errors import MoesaicError
from moesaic.evaluate.perplexity import check_windows
from moesaic.evaluate.work import meta_model
from moesaic.families.load import (
    choose_dtype,
    file_beside,
    load_config,
    load_model,
)
from moesaic.finetune.checks import check_options
from moesaic.finetune.estimate import outlook
from moesaic.finetune.fingerprint import (
    LIBRARIES,
    WEIGHTS,
    check_same_weights,
)
from moesaic.finetune.lora import checkpoint_bytes
from moesaic.finetune.model_card import recovery_rows
from moesaic.finetune.options import FinetuneOptions
from moesaic.finetune.prepare import (
    NO_FFNS,
    TrainingText,
    TunedDense,
    check_rank,
    draw_of_each,
)
from moesaic.finetune.report import FinetuneReport
from moesaic.finetune.run import keep_checkpoints, run
from moesaic.finetune.train import CHECKPOINTS_AT_ONCE
from moesaic.finetune.tune_dense import dense_rank, tune_dense
from moesaic.output import draft as drafts
from moesaic.output.atomic import write_file
from moesaic.output.model_card import CARD_FILE, licence_of

TUNED = "dense"
CONVERTED = "converted"
RECOVERED = "recovered"


def convert_and_recover(
    prepared: Prepared, tokens: int, dense_first: bool = False
) -> tuple[Any, ConversionReport]:
    """Converts a model, trains it on `tokens` tokens of the same text, and writes it.

    With `dense_first` the dense model is trained on them before, and that one is
    converted and imitated.
    Returns the model as it was written, and the report of both halves. Raises
    MoesaicError for bad input of either half before any work is done.
    """
    started = time.perf_counter()
    options = prepared.options
    check_recovery(prepared, tokens, dense_first)
    if options.progress:
        words = outlook(prepared, tokens, dense_first)
        Console(stderr=True).print(words, highlight=False)
    output = options.output
    assert output is not None
    identity = _identity(prepared, tokens) | {"tune_dense": dense_first}
    opened = drafts.open_draft(
        output, identity, options.resume, options.progress
    )
    with opened as draft:
        if not dense_first:  # which looks at them by itself
            _check_weights(options, draft)
        tuned = None
        start = prepared
        kept: Any = nullcontext()
        if dense_first:
            with keep_checkpoints():
                tuned = _tuned(prepared, tokens, draft)
            of_tuned = replace(options, model=tuned.folder)
            start = replace(prepared, options=of_tuned)
            kept = keep_checkpoints()
        with kept:
            report = _converted(start, draft / CONVERTED)
        with keep_checkpoints():
            recovery = _recovered(start, tokens, draft, report, tuned)
            _write_both(prepared, draft, report, recovery, tokens)
            drafts.take_name(
                draft, output, options.overwrite, draft / RECOVERED
            )
    report.recovery = recovery.to_dict()
    report.seconds = time.perf_counter() - started
    model = load_model(output, options.dtype, options.trust_remote_code)
    return model, report


# --- before the work -----------------------------------------------------------------


def check_recovery(prepared: Prepared, tokens: int, dense_first: bool) -> None:
    """Raises MoesaicError for a recovery that could not be made after a conversion."""
    options = prepared.options
    if not isinstance(tokens, int) or tokens < 1:
        raise MoesaicError(
            f"recover {tokens}: a whole number of tokens is needed; 50000 is a start"
        )
    _check_place(options)
    plan = prepared.plans[0]
    if plan.moe.linears is not None:
        raise MoesaicError(
            f"recover: method {plan.method.name!r} replaces linear layers, which are "
            "not fine-tuned yet; leave out recover, or take a method for FFNs"
        )
    if not plan.moe.layers:
        raise MoesaicError(
            f"recover: method {plan.method.name!r} cannot be fine-tuned: {NO_FFNS}; "
            "leave out recover, or take a method for FFNs"
        )
    _check_dtype(options, plan.dense_config)
    _check_tokens(prepared, tokens)
    check_windows(plan.moe, _window_length(prepared))
    training = _training_options(prepared, tokens, Path())
    check_options(training)
    check_rank(training.rank, plan.dense_config)
    if PartialState(cpu=training.use_cpu).num_processes > 1:
        raise MoesaicError(
            "recover is for one process; convert, and then run moesaic finetune on "
            "several"
        )
    _check_space(prepared, training, dense_first)


def _check_place(options: ConvertOptions) -> None:
    if options.in_memory:
        raise MoesaicError(
            "recover imitates the dense model, and one in memory is changed in place; "
            "pass its folder or hub id"
        )
    if options.output is None:
        raise MoesaicError("recover writes what it trains; give an output")


def _check_dtype(options: ConvertOptions, dense_config: Any) -> None:
    """Gradients leave the range of float16."""
    dtype = choose_dtype(options.dtype)
    if dtype == "auto":
        dtype = dense_config.dtype
    if dtype == torch.float16:
        raise MoesaicError(
            f"recover: {options.model_name} would be trained in float16, whose range "
            "gradients leave; pass dtype bfloat16 or float32"
        )


def _check_space(
    prepared: Prepared, training: FinetuneOptions, dense_first: bool
) -> None:
    """All models of one run lie beside each other, and the checkpoints of a training."""
    plan = prepared.plans[0]
    output = prepared.options.output
    dtype = plan.dense_config.dtype
    if output is None or dtype is None:
        return
    needed = 2 * plan.stored_bytes(dtype)
    checkpoint = checkpoint_bytes(meta_model(plan.config), training.rank)
    if dense_first:
        needed += plan.stored_dense_bytes(dtype)
        dense = meta_model(plan.dense_config)
        of_dense = checkpoint_bytes(dense, dense_rank(plan.dense_config))
        checkpoint = max(checkpoint, of_dense)
    needed += CHECKPOINTS_AT_ONCE * checkpoint
    drafts.check_space(output, needed, "**/*")


def _check_tokens(prepared: Prepared, tokens: int) -> None:
    length = _window_length(prepared)
    if tokens < length:
        raise MoesaicError(
            f"recover {tokens}: one window is {length} tokens; ask for as many, or "
            "for shorter windows by --sequence-length"
        )
    there = sum(ids.numel() for ids in prepared.texts)
    if tokens > there:
        raise MoesaicError(
            f"recover {tokens}: the text has {there} tokens besides what is held out; "
            "ask for fewer or give a longer text"
        )


def _window_length(prepared: Prepared) -> int:
    return prepared.calibration.length


def _training_options(
    prepared: Prepared, tokens: int, draft: Path
) -> FinetuneOptions:
    """The fine-tuning that follows the conversion."""
    options = prepared.options
    length = _window_length(prepared)
    output = draft / RECOVERED
    return FinetuneOptions(
        model=str(draft / CONVERTED),
        output=output,
        samples=tokens // length,
        sequence_length=length,
        distill=str(options.model),
        seed=options.seed,
        device=options.device,
        dtype=options.dtype,
        resume=drafts.is_begun(output),
        trust_remote_code=options.trust_remote_code,
        progress=options.progress,
    )


def _identity(prepared: Prepared, tokens: int) -> dict[str, Any]:
    """What must be equal for a killed run to be worth going on with.

    Weights are compared beside it: they have to be read for that.
    """
    options = prepared.options
    plan = prepared.plans[0]
    identity = {
        "recover": tokens,
        "model": options.model_name,
        "method": options.method.to_dict(),
        "budget": str(options.budget),
        "target_ratio": options.target_ratio,
        "scope": str(options.scope),
        "seed": options.seed,
        "dtype": options.dtype,
        "calibration tokens": digest_of_tokens(prepared.windows_NL),
        "configuration": digest_of_config(plan.dense_config),
        "versions": {name: version(name) for name in LIBRARIES},
    }
    text = json.dumps(identity)
    as_read: dict[str, Any] = json.loads(text)
    return as_read


# --- the two halves ------------------------------------------------------------------


def _check_weights(options: ConvertOptions, draft: Path) -> None:
    """What an earlier run converted must be what is imitated now."""
    name = str(options.model)
    dense = load_model(name, options.dtype, options.trust_remote_code)
    check_same_weights(dense, name, draft / WEIGHTS)


def _tuned(prepared: Prepared, tokens: int, draft: Path) -> TunedDense:
    """The dense model after training, unless an earlier run made it."""
    after = _training_options(prepared, tokens, draft)
    text = _text(prepared, tokens, None)
    return tune_dense(after, text, draft / TUNED)


def _text(
    prepared: Prepared, tokens: int, measured: tuple[float, int] | None
) -> TrainingText:
    return TrainingText(
        prepared.tokenizer,
        _training_ids(prepared, tokens),
        source_name(prepared.options.calibration),
        prepared.validation,
        measured,
    )


def _converted(prepared: Prepared, folder: Path) -> ConversionReport:
    """Writes the converted model, unless an earlier run did."""
    report_path = folder / CONVERSION_FILE
    if report_path.is_file():
        values = json.loads(report_path.read_text("utf-8"))
        return ConversionReport.from_dict(values)
    resume = drafts.is_begun(folder)
    options = replace(prepared.options, output=folder, resume=resume)
    _, report = convert_prepared(replace(prepared, options=options))
    return report


def _recovered(
    prepared: Prepared,
    tokens: int,
    draft: Path,
    report: ConversionReport,
    tuned: TunedDense | None,
) -> FinetuneReport:
    """Trains the converted model, unless an earlier run did."""
    # The folder that the converted model is in will be gone.
    name = f"{report.model}, {report.layout}"
    report_path = draft / RECOVERED / RECOVERY_FILE
    if report_path.is_file():
        values = json.loads(report_path.read_text("utf-8"))
        return FinetuneReport(**values | {"model": name})
    measured = None
    if report.perplexity is not None:
        measured = (report.perplexity, report.heldout_tokens)
    text = _text(prepared, tokens, measured)
    training = _training_options(prepared, tokens, draft)
    recovery = run(training, text, tuned)
    recovery.model = name
    return recovery


def _training_ids(prepared: Prepared, tokens: int) -> Tensor:
    """The text to draw windows from, or windows: the first given, or some of each text."""
    length = _window_length(prepared)
    samples = tokens // length
    if len(prepared.texts) > 1:
        seed = prepared.options.seed
        return draw_of_each(
            prepared.texts, samples, length, seed, prepared.first
        )
    (ids,) = prepared.texts
    if ids.ndim == 1:
        return ids
    return ids[:samples]


def _write_both(
    prepared: Prepared,
    draft: Path,
    report: ConversionReport,
    recovery: FinetuneReport,
    tokens: int,
) -> None:
    """The card and the reports of both halves, beside the trained weights."""
    folder = draft / RECOVERED
    config = load_config(folder)
    licence = licence_of(file_beside(prepared.options.model, CARD_FILE))
    rows = recovery_rows(recovery)
    command = prepared.options.command
    if command is None:
        command = python_call(
            prepared.options,
            public_name(report.model),
            recover=tokens,
            tune_dense=recovery.teacher_tuned or None,
        )
    card = model_card(report, config.moesaic, licence, command, rows)
    files = {
        CARD_FILE: card,
        CONVERSION_FILE: _json(report.to_dict(timing=False)),
        RECOVERY_FILE: _json(recovery.to_dict()),
    }
    for name, text in files.items():
        write_file(folder / name, text)


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"
