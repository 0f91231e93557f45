"""Fine-tuning of models in memory by the defaults of `moesaic.finetune`.

For a comparison: many students, the same windows, the same recipe, nothing written.

Shape suffixes: N windows, L tokens of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from moesaic.calibration.first_token import first_token
from moesaic.errors import MoesaicError, unknown
from moesaic.finetune.balance import refit_thresholds
from moesaic.finetune.checks import check_options, refuse_float16
from moesaic.finetune.lora import merge, round_routers
from moesaic.finetune.masked import masked
from moesaic.finetune.options import (
    AUTO_TEACHER,
    NO_TEACHER,
    FinetuneOptions,
    Machine,
    Mix,
    Settings,
)
from moesaic.finetune.prepare import (
    LINEARS_STAY,
    NO_FFNS,
    check_rank,
    draw_of_each,
    windows_and_settings,
)
from moesaic.finetune.train import first_windows, train
from moesaic.modeling import MoEConfig


@dataclass(frozen=True)
class Recovery:
    """One recipe: the windows that all models learn, and how."""

    windows_NL: Tensor
    settings: Settings
    machine: Machine
    has_teacher: bool


def recovery_options(
    model: str, samples: int, length: int | None, distill: str, device: str
) -> FinetuneOptions:
    """The options of such a fine-tuning, all others by default.

    Raises MoesaicError for bad ones. Looks at no model.
    """
    if distill not in (AUTO_TEACHER, NO_TEACHER):
        raise unknown("teacher", distill, (AUTO_TEACHER, NO_TEACHER))
    options = FinetuneOptions(
        model=model,
        output=Path(),  # nothing is written
        samples=samples,
        sequence_length=length,
        distill=distill,
        device=device,
    )
    check_options(options)
    if PartialState(cpu=options.use_cpu).num_processes > 1:
        raise MoesaicError(
            "models are fine-tuned in memory by one process only; start one"
        )
    return options


def plan_recovery(
    options: FinetuneOptions, dense: Any, texts: Sequence[Tensor], length: int
) -> Recovery:
    """Draws the windows from a row of token ids, as `moesaic.finetune` would.

    Of several rows as many from each.

    Raises MoesaicError for a text that is too short and a model in float16.
    """
    refuse_float16(dense, options.model)
    check_rank(options.rank, dense.config)
    has_teacher = options.distill != NO_TEACHER
    ids = texts[0]
    if len(texts) > 1:
        first = first_token(dense.config)
        ids = draw_of_each(texts, options.samples, length, options.seed, first)
    windows_NL, settings = windows_and_settings(
        options, ids, length, dense.config, has_teacher
    )
    return Recovery(windows_NL, settings, options.machine(), has_teacher)


def why_not(moe: MoEConfig) -> str | None:
    """Why `moesaic.finetune` takes no model of such a plan; None where it does."""
    if moe.linears is not None:
        return LINEARS_STAY
    if not moe.layers:
        return NO_FFNS
    return None


def tuned(student: Any, recovery: Recovery, dense: Any) -> Any:
    """The student after training, its LoRA weights merged. It is changed in place.

    `dense` is the teacher, where there is one, and keeps its weights.
    """
    teacher = dense if recovery.has_teacher else None
    with _kept(dense):
        trained = train(
            student,
            recovery.windows_NL,
            recovery.settings,
            recovery.machine,
            teacher,
        )
    with torch.no_grad(), masked(trained.model):
        round_routers(trained.model, student.dtype)
        refit_thresholds(trained.model, first_windows(recovery.windows_NL))
    return merge(trained.model)


def tuned_dense(dense: Any, recovery: Recovery) -> Any:
    """A dense model after next-token training on the same windows, in place.

    The fair reference: it has seen the same text.
    """
    settings = replace(recovery.settings, mix=Mix())
    trained = train(dense, recovery.windows_NL, settings, recovery.machine)
    return merge(trained.model)


@contextmanager
def _kept(teacher: Any) -> Iterator[None]:
    """Which of the teacher's weights want gradients: the same afterwards."""
    wanted = [
        (parameter, parameter.requires_grad)
        for parameter in teacher.parameters()
    ]
    try:
        yield
    finally:
        for parameter, wants_gradient in wanted:
            parameter.requires_grad_(wants_gradient)
