"""All of a conversion's input but the weights: checked, and its text read."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic import launch
from moesaic.calibration.calibration_set import (
    MOST_TOKENS,
    CalibrationSet,
    check_samples,
    check_seed,
)
from moesaic.calibration.first_token import first_token
from moesaic.calibration.text import has_heldout_split, public_text, to_ids
from moesaic.conversion.options import ConvertOptions
from moesaic.conversion.plan import Plan, make_plans
from moesaic.errors import MoesaicError
from moesaic.families.load import (
    context_of,
    load_config,
    load_tokenizer,
    resolve,
    source_of,
    window_length,
)
from moesaic.methods.base import FFNMethod, Method
from moesaic.output.draft import check_output

PAPER_SAMPLES = 8
# What a conversion can give a method besides activations.
GIVEN = frozenset({"gradients", "token ids", "domains"})
LEAST_FITTED_TOKENS = 65_536
CALIBRATION_PER_NEURON = 12


@dataclass(frozen=True)
class ValidationText:
    """Text that a conversion does not see: perplexities are measured on it."""

    ids: Tensor
    name: str


@dataclass(frozen=True)
class Prepared:
    """A conversion whose every input has been checked and read, but for the weights.

    `texts` are those given, without what is held out: calibration windows come from
    them.
    """

    options: ConvertOptions
    plans: list[Plan]  # of the layouts that could serve, the usual one first
    tokenizer: Any
    texts: list[Tensor]  # each one row, or a matrix of windows
    calibration: CalibrationSet
    validation: ValidationText | None
    length: int  # tokens of a window that perplexities are measured on
    source: str | None  # of a GGUF file's weights, which may be trained before
    first: int | None = None  # token that every window must begin with

    @property
    def windows_NL(self) -> Tensor:
        return self.calibration.windows_NL


def prepare(options: ConvertOptions) -> Prepared:
    """Checks all of a conversion's input and reads its text (`--dry-run` ends here).

    Raises MoesaicError for any bad input but broken weights; writes nothing.
    """
    if not options.sources:
        raise MoesaicError(
            "the mapping of calibration texts is empty; name one"
        )
    config = _read_config(options)
    plans = _plans(options, config)
    if not options.method.saves:
        raise MoesaicError(
            f"method {options.method.name!r} is a reference that computes every neuron "
            "to choose; no model can hold it. See it in moesaic compare"
        )
    length = window_length([config], options.sequence_length)
    samples = options.samples
    if samples is None:
        samples = usual_samples(plans[0], length)
    check_needs(options.method, len(options.sources))
    _check_numbers(samples, length, options.seed)
    if options.output is not None and launch.is_first():
        check_output(options.output, options.overwrite, options.resume)
    tokenizer = _tokenizer_of(options, config)
    first = first_token(config)
    texts, calibration, validation = read_sources(
        options, tokenizer, samples, length, first
    )
    context = context_of(config)
    if calibration.length < 2:
        raise MoesaicError(
            "windows of one token tell nothing of a text; give windows of 2 or more"
        )
    if calibration.length > context:
        raise MoesaicError(
            f"windows of {calibration.length} tokens exceed {context}, the context of "
            f"{options.model_name}"
        )
    check_processes(options.model_name, plans[0], calibration)
    return Prepared(
        options,
        plans,
        tokenizer,
        texts,
        calibration,
        validation,
        length,
        source=source_of(options.model),
        first=first,
    )


def planned(options: ConvertOptions) -> Plan:
    """The usual plan, from config.json alone. Raises MoesaicError where there is none."""
    return _plans(options, _read_config(options))[0]


def _plans(options: ConvertOptions, config: Any) -> list[Plan]:
    return make_plans(
        config,
        options.model_name,
        options.method,
        options.budget,
        options.scope,
        len(options.sources),
    )


def read_sources(
    options: ConvertOptions,
    tokenizer: Any,
    samples: int,
    length: int,
    first: int | None,
) -> tuple[list[Tensor], CalibrationSet, ValidationText | None]:
    """The texts without what is held out, their windows, and what is held out.

    Of several texts each gives the same number of windows. These begin with `first`.
    """
    sources = list(options.sources.values())
    all_ids = []
    validations = []
    for source in sources:
        ids = to_ids(source, tokenizer)
        ids, validation = hold_out(ids, source, tokenizer, length)
        all_ids.append(ids)
        if validation is not None:
            validations.append(validation)
    calibration = CalibrationSet.of_texts(
        all_ids, samples, length, options.seed, first
    )
    if len(sources) == 1:
        only = validations[0] if validations else None
        return all_ids, calibration, only
    if len({ids.ndim for ids in all_ids}) > 1:
        raise MoesaicError(
            "some texts are rows of ids (N,) and others windows (N, L); give all as "
            "rows, or all as windows"
        )
    if len(validations) < len(sources):
        return all_ids, calibration, None
    heldout_ids = in_turns([one.ids for one in validations], length)
    name = " + ".join(validation.name for validation in validations)
    return all_ids, calibration, ValidationText(heldout_ids, name)


def in_turns(texts: Sequence[Tensor], length: int) -> Tensor:
    """A window of each text in turn, until the shortest has no more."""
    shortest = min(len(ids) for ids in texts)
    count = max(shortest // length, 1)
    window = min(shortest, length)
    windows = [ids[: count * window].reshape(count, window) for ids in texts]
    return torch.stack(windows, dim=1).flatten()


def check_needs(method: Method, domains: int) -> None:
    """Raises MoesaicError for a method that wants what this conversion does not give."""
    missing = sorted(method.needs - GIVEN)
    if missing:
        raise MoesaicError(
            f"method {method.name!r} needs {', '.join(missing)}, and a conversion "
            f"gives {', '.join(sorted(GIVEN))} besides activations; take another "
            "method"
        )
    if "domains" in method.needs and domains < 2:
        raise MoesaicError(
            f"{method.name} wants texts of at least two domains; give --calibration "
            "once for each"
        )


def check_processes(
    model: str, plan: Plan, calibration: CalibrationSet
) -> None:
    """Raises MoesaicError for what the processes of a launcher cannot share."""
    count = launch.processes()
    if count == 1:
        return
    method = plan.method
    if not isinstance(method, FFNMethod):
        raise MoesaicError(
            f"method {method.name!r} replaces no FFNs, and several processes share the "
            "conversion of FFNs only; run it as one process"
        )
    router = plan.moe.router
    if router is not None and router.prompt is not None:
        raise MoesaicError(
            f"method {method.name!r} takes the windows that lie side by side for one "
            "prompt, and several processes would lay them otherwise; run it as one process"
        )
    if plan.moe.outer is not None:
        raise MoesaicError(
            f"{model} is a mixture of experts, whose conversion {count} processes "
            "cannot share; run it as one process"
        )
    windows = calibration.samples
    heldout = calibration.heldout_samples if method.fits_weights else 0
    if windows - heldout < count:
        raise MoesaicError(
            f"{windows - heldout} calibration windows to fit on cannot be shared by "
            f"{count} processes; take more --samples, or fewer processes"
        )


def usual_samples(plan: Plan, length: int) -> int:
    """The paper's 8 windows; where weights are fitted, 12 tokens a neuron.

    At least 65,536 tokens then; and of an expert's tokens, on average, in a model that
    is a mixture already.
    """
    if not getattr(plan.method, "fits_weights", False):
        return PAPER_SAMPLES
    tokens_per_use = 1.0  # so many pass by for each one that an FFN sees
    outer = plan.moe.outer
    if outer is not None:
        tokens_per_use = outer.num_experts / outer.num_active
    neurons = plan.sizes.total * tokens_per_use
    needed = min(CALIBRATION_PER_NEURON * neurons, MOST_TOKENS // 2)
    tokens = max(LEAST_FITTED_TOKENS, int(needed))
    windows = math.ceil(tokens / length)
    return max(PAPER_SAMPLES, windows)


def hold_out(
    ids: Tensor, source: Any, tokenizer: Any, length: int
) -> tuple[Tensor, ValidationText | None]:
    """The ids to calibrate or train on, and text apart from them, if there is enough.

    That is the source's own split, or the last tenth of the tokens.
    """
    if has_heldout_split(source):
        heldout_ids = to_ids(source, tokenizer, heldout=True)
        name = f"{source}, held-out split"
        return ids, ValidationText(heldout_ids, name)
    if ids.ndim != 1 or len(ids) < 10 * length:
        return ids, None
    tenth = len(ids) // 10
    first_heldout = len(ids) - tenth
    name = f"last tenth of {source_name(source)}"
    validation = ValidationText(ids[first_heldout:], name)
    return ids[:first_heldout], validation


def source_name(calibration: Any) -> str:
    """What reports call a calibration source, or several."""
    if isinstance(calibration, Mapping):
        names = [
            source_name(source) if isinstance(source, str | Path) else str(name)
            for name, source in calibration.items()
        ]
        return " + ".join(names)
    if not isinstance(calibration, str | Path):
        return f"a {type(calibration).__name__} in memory"
    return public_text(str(calibration))


def _read_config(options: ConvertOptions) -> Any:
    if not options.in_memory:
        resolve(options.model)
        trust = options.trust_remote_code
        return load_config(options.model, trust, options.dtype)
    get_head = getattr(options.model, "get_output_embeddings", None)
    if get_head is None or get_head() is None:
        raise MoesaicError(
            f"a {type(options.model).__name__} is no causal language model; load it "
            "with AutoModelForCausalLM, or pass its folder"
        )
    # The model may have been cast since its configuration was read.
    config = copy.copy(options.model.config)
    config.dtype = options.model.dtype
    return config


def _check_numbers(samples: int, length: int, seed: int) -> None:
    if not isinstance(samples, int) or not isinstance(seed, int):
        raise MoesaicError(
            f"samples {samples!r} and seed {seed!r} must be whole numbers"
        )
    check_samples(samples, length)
    check_seed(seed)


def _tokenizer_of(options: ConvertOptions, config: Any) -> Any:
    """The tokenizer given, or the model's; None where none is needed and none found."""
    if options.tokenizer is not None:
        return options.tokenizer
    trust = options.trust_remote_code
    if options.in_memory:
        name = config.name_or_path
    else:
        name = options.model
    if not name:
        return None
    texts = [] if options.in_memory else options.sources.values()
    return tokenizer_for(texts, name, trust)


def tokenizer_for(
    sources: Iterable[Any], model: str | Path, trust_remote_code: bool
) -> Any:
    """The model's tokenizer; None where it has none, and no source is text to read."""
    try:
        return load_tokenizer(model, trust_remote_code)
    except MoesaicError:
        if any(isinstance(source, str | Path) for source in sources):
            raise
        return None
