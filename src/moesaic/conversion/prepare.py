"""All of a conversion's input but the weights: checked, and its text read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from moesaic.calibration.calibration_set import (
    MOST_TOKENS,
    CalibrationSet,
    check_samples,
)
from moesaic.calibration.text import has_heldout_split, to_ids
from moesaic.conversion.options import ConvertOptions
from moesaic.conversion.plan import Plan, make_plans
from moesaic.errors import MoesaicError
from moesaic.families.load import (
    context_of,
    load_config,
    load_tokenizer,
    resolve,
    window_length,
)
from moesaic.output.draft import check_output

PAPER_SAMPLES = 8
LEAST_FITTED_TOKENS = 32_768
TOKENS_PER_NEURON = 12


@dataclass(frozen=True)
class ValidationText:
    """Text that a conversion does not see: perplexities are measured on it."""

    ids: Tensor
    name: str


@dataclass(frozen=True)
class Prepared:
    """A conversion whose every input has been checked and read, but for the weights."""

    options: ConvertOptions
    plans: list[Plan]  # of the layouts that could serve, the usual one first
    tokenizer: Any
    calibration: CalibrationSet
    validation: ValidationText | None
    length: int  # tokens of a window that perplexities are measured on

    @property
    def windows_NL(self) -> Tensor:
        return self.calibration.windows_NL


def prepare(options: ConvertOptions) -> Prepared:
    """Checks all of a conversion's input and reads its text (`--dry-run` ends here).

    Raises MoesaicError for any bad input but broken weights; writes nothing.
    """
    config = _read_config(options)
    plans = make_plans(
        config,
        options.model_name,
        options.method,
        options.budget,
        options.scope,
    )
    if not options.method.saves:
        raise MoesaicError(
            f"method {options.method.name!r} is a reference that computes every neuron "
            "to choose; no model can hold it. See it in moesaic compare"
        )
    length = window_length([config], options.sequence_length)
    samples = options.samples
    if samples is None:
        samples = usual_samples(plans[0], length)
    _check_numbers(samples, length, options.seed)
    if options.output is not None:
        check_output(options.output, options.overwrite, options.resume)
    tokenizer = _tokenizer_of(options, config)
    ids = to_ids(options.calibration, tokenizer)
    ids, validation = hold_out(ids, options.calibration, tokenizer, length)
    calibration = CalibrationSet.sample(ids, samples, length, options.seed)
    context = context_of(config)
    if calibration.length > context:
        raise MoesaicError(
            f"windows of {calibration.length} tokens exceed {context}, the context of "
            f"{options.model_name}"
        )
    return Prepared(options, plans, tokenizer, calibration, validation, length)


def usual_samples(plan: Plan, length: int) -> int:
    """The paper's 8 windows; where weights are fitted, 12 tokens a neuron.

    At least 32,768 tokens then; and of an expert's tokens, on average, in a model that
    is a mixture already.
    """
    if not getattr(plan.method, "fits_weights", False):
        return PAPER_SAMPLES
    outer = plan.moe.outer
    spread = 1.0 if outer is None else outer.num_experts / outer.num_active
    neurons = plan.sizes.total * spread
    needed = int(min(TOKENS_PER_NEURON * neurons, MOST_TOKENS // 2))
    return max(PAPER_SAMPLES, -(-max(LEAST_FITTED_TOKENS, needed) // length))


def hold_out(
    ids: Tensor, source: Any, tokenizer: Any, length: int
) -> tuple[Tensor, ValidationText | None]:
    """The ids to calibrate or train on, and text apart from them, if there is enough.

    That is the source's own split, or the last tenth of the tokens.
    """
    if has_heldout_split(source):
        apart = to_ids(source, tokenizer, heldout=True)
        return ids, ValidationText(apart, f"{source}, held-out split")
    if ids.ndim != 1 or len(ids) < 10 * length:
        return ids, None
    cut = len(ids) - len(ids) // 10
    name = f"last tenth of {source_name(source)}"
    return ids[:cut], ValidationText(ids[cut:], name)


def source_name(calibration: Any) -> str:
    """What reports call a calibration source."""
    if not isinstance(calibration, str | Path):
        return f"a {type(calibration).__name__} in memory"
    path = Path(calibration)
    return path.name if path.exists() else str(calibration)


def _read_config(options: ConvertOptions) -> Any:
    if not options.in_memory:
        resolve(options.model)
        return load_config(options.model, options.trust_remote_code)
    head = getattr(options.model, "get_output_embeddings", lambda: None)()
    if head is None:
        raise MoesaicError(
            f"a {type(options.model).__name__} is no causal language model; load it "
            "with AutoModelForCausalLM, or pass its folder"
        )
    return options.model.config


def _check_numbers(samples: int, length: int, seed: int) -> None:
    if not isinstance(samples, int) or not isinstance(seed, int):
        raise MoesaicError(
            f"samples {samples!r} and seed {seed!r} must be whole numbers"
        )
    check_samples(samples, length)
    if not 0 <= seed < 2**31:
        raise MoesaicError(f"seed {seed} is outside 0..{2**31 - 1}")


def _tokenizer_of(options: ConvertOptions, config: Any) -> Any:
    """The tokenizer given, or the model's; None where none is needed and none found."""
    if options.tokenizer is not None:
        return options.tokenizer
    name = config.name_or_path if options.in_memory else options.model
    needed = (
        isinstance(options.calibration, str | Path) and not options.in_memory
    )
    if needed:
        return load_tokenizer(name, options.trust_remote_code)
    try:
        return load_tokenizer(name, options.trust_remote_code) if name else None
    except MoesaicError:
        return None
