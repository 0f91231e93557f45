"""All of a fine-tuning's input but the weights: checked, and its text read.

Shape suffixes: N windows, L tokens of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from moesaic.calibration.first_token import begun, first_token
from moesaic.calibration.text import to_ids
from moesaic.conversion.prepare import (
    ValidationText,
    hold_out,
    source_name,
    tokenizer_for,
)
from moesaic.demo import usual_text
from moesaic.errors import MoesaicError
from moesaic.evaluate.perplexity import check_windows
from moesaic.families import find_ffns
from moesaic.families.load import (
    dense_of,
    load_config,
    resolve,
    window_length,
)
from moesaic.finetune.checks import check_options
from moesaic.finetune.defaults import usual_batch_size, usual_rate
from moesaic.finetune.options import (
    AUTO_TEACHER,
    NO_TEACHER,
    FinetuneOptions,
    Mix,
    Settings,
)
from moesaic.output import draft as checkpoint

MOST_TOKENS = 2**28  # 2 GB of ids
DISTILLED = Mix(lm=0.5, logits=0.5, ffn=3.0)
LINEARS_STAY = "linear layers that skip inputs, which are not fine-tuned yet"
NO_FFNS = "it changes the whole model, and moesaic finetune is for FFNs that were replaced"
TEACHER_ADVICE = (
    "name it with --distill PATH, or train without a teacher by --distill none"
)


@dataclass(frozen=True)
class TunedDense:
    """A dense model after training, as a folder, and the name of the one that it was.

    Perplexities, before the training and after it, are on held-out text; None where
    nothing was held out.
    """

    folder: str
    name: str
    perplexity_before: float | None
    perplexity: float | None
    trained_weights: int


@dataclass(frozen=True)
class TrainingText:
    """The text of a fine-tuning, and what its model is measured on.

    `ids` are one row or a matrix of windows. `validation` is not trained on; None where
    the text is too short for that. `measured` is the converted model's perplexity on
    it and the tokens predicted, where they are known already.
    """

    tokenizer: Any
    ids: Tensor
    source: str
    validation: ValidationText | None
    measured: tuple[float, int] | None = None


@dataclass(frozen=True)
class TrainingInput:
    """A fine-tuning's input, checked and read, all but the weights.

    `teacher` is the name or path of the dense model to imitate, None where there is
    none. `tuned` says of it that it was trained on the same windows before.
    """

    options: FinetuneOptions
    settings: Settings
    text: TrainingText
    windows_NL: Tensor
    teacher: str | None
    tuned: TunedDense | None = None


def prepare(
    options: FinetuneOptions,
    text: TrainingText | None = None,
    tuned: TunedDense | None = None,
) -> TrainingInput:
    """Checks all of a fine-tuning's input and reads its text, unless it is given.

    Raises MoesaicError for any bad input but broken weights. Writes nothing.
    """
    check_options(options)
    config = load_config(options.model, options.trust_remote_code)
    _check_converted(options.model, config)
    check_rank(options.rank, config)
    if PartialState(cpu=options.use_cpu).is_main_process:
        _check_apart(options)
        checkpoint.check_output(
            options.output, options.overwrite, options.resume
        )
    teacher = find_teacher(options, config)
    length = window_length([config], options.sequence_length)
    if text is None:
        text = _read_text(options, config, length)
    windows_NL, settings = windows_and_settings(
        options, text.ids, length, config, has_teacher=teacher is not None
    )
    return TrainingInput(
        options=options,
        settings=settings,
        text=text,
        windows_NL=windows_NL,
        teacher=teacher,
        tuned=tuned,
    )


def _check_apart(options: FinetuneOptions) -> None:
    """Refuses to replace the model that is trained: an adapter would have none then."""
    output = options.output
    model = Path(resolve(options.model))  # a hub id is no path that exists
    if output.exists() and model.exists() and output.samefile(model):
        raise MoesaicError(
            f"output {output} is the model itself; choose another folder"
        )


def windows_and_settings(
    options: FinetuneOptions,
    ids: Tensor,
    length: int,
    config: Any,
    has_teacher: bool,
) -> tuple[Tensor, Settings]:
    """The windows (N, L) of whole steps, and the settings that follow from them.

    Raises MoesaicError for a text or windows that do not do.
    """
    if ids.ndim == 1:
        _check_tokens(options.samples, length)
        windows_NL = draw_windows(
            ids, options.samples, length, options.seed, first_token(config)
        )
    else:
        windows_NL = _given_windows(ids, options)
    # Windows that were given may be too long.
    window_length([config], windows_NL.shape[1])
    moe = getattr(config, "moesaic", None)
    if moe is not None:
        check_windows(moe, windows_NL.shape[1])
    batch_size = _batch_size(options, len(windows_NL))
    windows_NL = whole_steps(windows_NL, batch_size)
    hidden_size = config.get_text_config().hidden_size
    settings = _settings(
        options, windows_NL, batch_size, hidden_size, has_teacher
    )
    return windows_NL, settings


def _given_windows(windows_NL: Tensor, options: FinetuneOptions) -> Tensor:
    """The first `samples` of the windows that were given."""
    windows_NL = windows_NL[: options.samples]
    samples, length = windows_NL.shape
    if options.sequence_length not in (None, length):
        raise MoesaicError(
            f"sequence length {options.sequence_length}, and the windows that were given "
            f"have {length} tokens; leave it out, or give a row of tokens to draw from"
        )
    _check_tokens(samples, length)
    return windows_NL


def _read_text(
    options: FinetuneOptions, config: Any, length: int
) -> TrainingText:
    source = _source(options, config)
    tokenizer = tokenizer_for(
        [source], options.model, options.trust_remote_code
    )
    all_ids = to_ids(source, tokenizer)
    ids, validation = hold_out(all_ids, source, tokenizer, length)
    name = source_name(source)
    return TrainingText(tokenizer, ids, name, validation)


def _check_converted(model: str, config: Any) -> None:
    if getattr(config, "moesaic_conversion", None):
        raise MoesaicError(
            f"{model} is a {config.model_type} model as it is, and moesaic finetune is for "
            "experts; train it like any model of its family, or convert with another "
            "method"
        )
    if config.model_type != "moesaic":
        raise MoesaicError(
            f"{model} is a {config.model_type} model that moesaic has not converted; "
            "run moesaic convert first, and fine-tune its output"
        )
    if config.moesaic.linears is not None:
        raise MoesaicError(
            f"{model} has {LINEARS_STAY}; fine-tune a model whose FFNs were converted"
        )
    if not config.moesaic.layers:
        raise MoesaicError(
            f"{model} is made by method {config.moesaic.name}: {NO_FFNS}; fine-tune a "
            "model whose FFNs were converted"
        )


def check_rank(rank: int, config: Any) -> None:
    hidden_size = config.get_text_config().hidden_size
    if rank > hidden_size:
        raise MoesaicError(
            f"rank {rank} is above the model's hidden size {hidden_size}; 8 is usual"
        )


def _check_tokens(samples: int, length: int) -> None:
    if samples * length > MOST_TOKENS:
        raise MoesaicError(
            f"{samples} samples of {length} are over {MOST_TOKENS:,} tokens, the most "
            "that are trained on; take fewer --samples"
        )


def _source(options: FinetuneOptions, config: Any) -> Any:
    """The text to train on: what was given, or the usual one."""
    if options.data is not None:
        return options.data
    return usual_text(config.moesaic.base_model)


def find_teacher(options: FinetuneOptions, config: Any) -> str | None:
    """Name or path of the dense model to imitate; None for no teacher.

    Raises MoesaicError where it cannot be found.
    """
    if options.distill == NO_TEACHER:
        return None
    if options.distill == AUTO_TEACHER:
        return _dense_origin(options, config)
    load_config(options.distill, options.trust_remote_code)
    return str(options.distill)


def _dense_origin(options: FinetuneOptions, config: Any) -> str:
    """The dense model that the converted one was made from."""
    name = config.moesaic.base_model
    earlier = config.moesaic.finetune
    if earlier is not None and earlier.get("teacher_tuned"):
        raise MoesaicError(
            f"{options.model} imitates {name!r} as it was after a training, and that "
            "model is not kept: the one that came would take back what was learnt; "
            "take --distill none, or train the dense model and name it with --distill "
            "PATH"
        )
    dense = dense_of(options.model, config)
    if dense is None:
        raise MoesaicError(
            f"the teacher {name!r}, from which {options.model} was converted, is not "
            f"found here or beside it; {TEACHER_ADVICE}"
        )
    try:
        load_config(dense, options.trust_remote_code)
    except MoesaicError as error:
        raise MoesaicError(
            f"the teacher {name!r}, from which {options.model} was converted, cannot "
            f"be loaded ({error}); {TEACHER_ADVICE}"
        ) from error
    return dense


def check_teacher(student: Any, dense: Any) -> None:
    """Raises MoesaicError for a dense model the student cannot have been made from."""
    student_config = student.config
    dense_config = dense.config
    if dense_config.model_type == "moesaic":
        raise MoesaicError(
            "--distill names a converted model; name the dense one it came from"
        )
    names = {
        "vocabulary": "vocab_size",
        "hidden size": "hidden_size",
        "layers": "num_hidden_layers",
    }
    expected = {"family": student_config.base_model_type}
    actual = {"family": dense_config.model_type}
    for name, attribute in names.items():
        expected[name] = getattr(student_config, attribute)
        actual[name] = getattr(dense_config, attribute)
    origin = student_config.moesaic.base_model
    for name, value in actual.items():
        if value != expected[name]:
            raise MoesaicError(
                f"--distill: its {name} is {value}, the converted model's "
                f"{expected[name]}; name the dense model it came from ({origin})"
            )
    find_ffns(dense)


def _batch_size(options: FinetuneOptions, windows: int) -> int:
    """Windows of one step, over all processes. Raises where they cannot share them."""
    processes = PartialState(cpu=options.use_cpu).num_processes
    size = options.batch_size
    if size is None:
        size = usual_batch_size(windows, processes, options.epochs)
    size = min(size, windows)
    if size % processes:
        raise MoesaicError(
            f"a batch of {size} cannot be split over {processes} processes; take a "
            f"--batch-size that is a multiple of {processes}, and as many --samples"
        )
    return size


def whole_steps(windows_NL: Tensor, batch_size: int) -> Tensor:
    """The windows without those of a shorter last step.

    The mean over such a step would depend on how it is split.
    """
    steps = len(windows_NL) // batch_size
    return windows_NL[: steps * batch_size]


def _settings(
    options: FinetuneOptions,
    windows_NL: Tensor,
    batch_size: int,
    hidden_size: int,
    has_teacher: bool,
) -> Settings:
    samples, length = windows_NL.shape
    steps = samples // batch_size * options.epochs
    lora_lr = options.lora_lr
    if lora_lr is None:
        lora_lr = usual_rate(steps, hidden_size, has_teacher)
    return Settings(
        samples=samples,
        sequence_length=length,
        epochs=options.epochs,
        batch_size=batch_size,
        rank=options.rank,
        alpha=options.alpha,
        lora_lr=lora_lr,
        scale_lr=options.scale_lr,
        balance_rate=options.balance_rate,
        freeze_router=options.freeze_router,
        mix=DISTILLED if has_teacher else Mix(),
        seed=options.seed,
    )


def draw_of_each(
    texts: Sequence[Tensor],
    samples: int,
    length: int,
    seed: int,
    first: int | None,
) -> Tensor:
    """Windows (N, L) of several texts, as many of each, or all that a short one has.

    A text is one row, or windows already, which are taken from the first one on.
    """
    left = samples
    drawn = []
    shortest_first = sorted(texts, key=_windows_at_most)
    for place, ids in enumerate(shortest_first):
        share = left // (len(texts) - place)
        if ids.ndim == 2:
            windows_NL = ids[:share]
        else:
            windows_NL = draw_windows(ids, share, length, seed, first)
        left -= len(windows_NL)
        drawn.append(windows_NL)
    together_NL = torch.cat(drawn)
    generator = torch.Generator().manual_seed(seed)
    order_N = torch.randperm(len(together_NL), generator=generator)
    return together_NL[order_N]


def _windows_at_most(ids: Tensor) -> float:
    """A row may be drawn from as often as wanted."""
    return len(ids) if ids.ndim == 2 else math.inf


def draw_windows(
    ids: Tensor,
    samples: int,
    length: int,
    seed: int,
    first: int | None = None,
) -> Tensor:
    """Windows (N, L), one from each of N equal stretches of the text, in random order.

    They overlap where the text has fewer than N L tokens. `first` takes the place of
    the first token of each. Raises MoesaicError for a text shorter than one window.
    """
    room = len(ids) - length
    if room < 0:
        raise MoesaicError(
            f"the training text has {len(ids)} tokens, one sample needs {length}; give "
            "a longer text or a smaller --sequence-length"
        )
    generator = torch.Generator().manual_seed(seed)
    offset_N = torch.rand(samples, generator=generator, dtype=torch.double)
    place_N = torch.arange(samples) + offset_N
    start_N = place_N / samples * (room + 1)
    start_N = start_N.long().clamp(max=room)
    order_N = torch.randperm(samples, generator=generator)
    start_N = start_N[order_N]
    position_NL = start_N[:, None] + torch.arange(length)
    return begun(ids[position_NL], first)
