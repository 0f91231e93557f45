"""Options that no model could be trained with are refused before anything is read."""

from __future__ import annotations

import os
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from moesaic.calibration.calibration_set import check_seed
from moesaic.errors import MoesaicError
from moesaic.families.load import choose_device, choose_dtype
from moesaic.finetune.options import NO_TEACHER, FinetuneOptions
from moesaic.output.draft import draft_folder

MOST_RATE = 1e4
MOST_EPOCHS = 10_000
SHARDED = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")


def check_options(options: FinetuneOptions) -> None:
    """Raises MoesaicError for the first bad value. Looks at no model and no text."""
    _check_counts(options)
    _check_rates(options)
    check_seed(options.seed)
    choose_dtype(options.dtype)
    _check_device(options.device)
    _check_teacher(options)
    _check_tensorboard(options.tensorboard, options.output)


def refuse_float16(model: Any, name: str) -> None:
    """Gradients leave the range of float16."""
    if model.dtype == torch.float16:
        raise MoesaicError(
            f"{name} is in float16, whose range gradients leave; pass --dtype bfloat16 "
            "or float32"
        )


def _check_counts(options: FinetuneOptions) -> None:
    counts = {
        "samples": options.samples,
        "epochs": options.epochs,
        "batch size": options.batch_size,
        "rank": options.rank,
        "micro batch": options.micro_batch,
        "checkpoint every": options.checkpoint_every,
    }
    by_default = ("batch size", "micro batch", "checkpoint every")
    for name, count in counts.items():
        if count is None and name in by_default:
            continue
        if not isinstance(count, int) or count < 1:
            rule = "a whole number of at least 1 is needed"
            raise MoesaicError(f"{name} {count}: {rule}")
    if options.epochs > MOST_EPOCHS:
        raise MoesaicError(
            f"epochs {options.epochs}: at most {MOST_EPOCHS:,} are trained; take fewer, "
            "or more --samples"
        )


def _check_rates(options: FinetuneOptions) -> None:
    positive: dict[str, Any] = {"alpha": options.alpha}
    if options.lora_lr is not None:
        positive["lora lr"] = options.lora_lr
    for name, value in positive.items():
        is_number = isinstance(value, Real)
        if not is_number or not 0 < value < MOST_RATE:
            raise MoesaicError(
                f"{name} {value}: a number above 0 and below {MOST_RATE:g} is needed"
            )
    may_be_zero = {
        "scale lr": options.scale_lr,
        "balance rate": options.balance_rate,
    }
    for name, value in may_be_zero.items():
        is_number = isinstance(value, Real)
        if not is_number or not 0 <= value < MOST_RATE:
            raise MoesaicError(
                f"{name} {value}: a number at least 0 and below {MOST_RATE:g} is needed"
            )


def _check_device(device: str) -> None:
    chosen = choose_device(device)
    if chosen.type not in {"cpu", "cuda"}:
        raise MoesaicError(
            f"device {device}: training runs on cpu or cuda only; take --device cpu"
        )
    numbered = chosen.index is not None
    if numbered:
        raise MoesaicError(
            f"device {device}: training takes the first GPU, or those of accelerate "
            "launch; set CUDA_VISIBLE_DEVICES"
        )


def _check_teacher(options: FinetuneOptions) -> None:
    if options.distill is None:
        raise MoesaicError(
            "distill None: give 'auto', 'none' or the dense model's folder or hub id"
        )
    if not options.tune_teacher:
        return
    if options.distill == NO_TEACHER:
        raise MoesaicError(
            "--tune-teacher needs a teacher, and --distill none says there is none; "
            "leave one of the two out"
        )
    if any(is_set(name) for name in SHARDED):
        raise MoesaicError(
            "--tune-teacher is for one process or data-parallel ones; where weights "
            "are sharded, tune the dense model before and name it with --distill"
        )


def _check_tensorboard(folder: str | None, output: Path) -> None:
    if folder is None:
        return
    if find_spec("tensorboard") is None:
        raise MoesaicError(
            "--tensorboard needs the package: pip install tensorboard"
        )
    place = Path(folder).absolute()
    taken = {output.absolute(), draft_folder(output).absolute()}
    if not taken.isdisjoint((place, *place.parents)):
        raise MoesaicError(
            f"--tensorboard {folder} is the output, or inside it, which must not be there "
            "before the training has ended; choose another folder"
        )


def is_set(name: str) -> bool:
    """Whether an environment variable says true."""
    value = os.environ.get(name, "false")
    return value.lower() == "true"
