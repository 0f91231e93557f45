"""All of a conversion's input but the weights: checked, and its text read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moesaic.calibration.text import has_heldout_split, sample_windows, to_ids
from moesaic.conversion.plan import Plan, make_plans
from moesaic.errors import MoesaicError
from moesaic.families.load import context_of, load_config, load_tokenizer, resolve
from moesaic.layout import Layout
from moesaic.methods.recipe import Recipe
from moesaic.output import draft as checkpoint

MOST_CALIBRATION_TOKENS = 2**24


@dataclass(frozen=True)
class Prepared:
    """A conversion whose every input has been checked and read, but for the weights."""

    plans: list[Plan]  # of the layouts that could serve, the usual one first
    tokenizer: Any
    windows_NL: torch.Tensor
    heldout_ids: torch.Tensor | None
    heldout: str | None
    config: Any  # of the dense model


def prepare(
    model: Any,
    recipe: str | Path | Recipe,
    layout: str | Layout | None,
    calibration: Any,
    *,
    sparsity: float | None = None,
    grain: str = "medium",
    tokenizer: Any = None,
    output: Path | None = None,
    samples: int | None = None,
    sequence_length: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
    resume: bool = False,
    trust_remote_code: bool = False,
    experts: Sequence[int] | None = None,
    min_tokens: int | None = None,
    dense_layers: Sequence[int] = (),
) -> Prepared:
    """Checks all of a conversion's input and reads its text (`--dry-run` ends here).

    Raises MoesaicError for any bad input but broken weights; writes nothing.
    """
    in_memory = not isinstance(model, str | Path)
    if in_memory and getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise MoesaicError(
            f"a {type(model).__name__} is no causal language model; load it with "
            "AutoModelForCausalLM, or pass its folder"
        )
    if not in_memory:
        resolve(model)
    name = (
        (model.config.name_or_path or type(model).__name__) if in_memory else str(model)
    )
    config = model.config if in_memory else load_config(model, trust_remote_code)
    plans = make_plans(
        config,
        name,
        recipe,
        layout,
        sparsity,
        grain,
        sequence_length,
        trust_remote_code,
        experts,
        min_tokens,
        dense_layers,
    )
    todo = plans[0]
    if samples is None:
        samples = usual_samples(todo)
    if todo.recipe.router == "oracle":
        raise MoesaicError(
            f"recipe {todo.recipe.name!r} is a reference that computes every neuron to choose; no "
            "model can hold it. See it in moesaic compare"
        )
    if not isinstance(samples, int) or not isinstance(seed, int):
        raise MoesaicError(
            f"samples {samples!r} and seed {seed!r} must be whole numbers"
        )
    check_samples(samples, todo.sequence_length)
    if not 0 <= seed < 2**31:
        raise MoesaicError(f"seed {seed} is outside 0..{2**31 - 1}")
    if output is not None:
        checkpoint.check_output(output, overwrite, resume)
    if tokenizer is None:
        needed = isinstance(calibration, str | Path) and not in_memory
        load = load_tokenizer if needed else _tokenizer_or_none
        tokenizer = load(config.name_or_path if in_memory else model, trust_remote_code)
    ids = to_ids(calibration, tokenizer)
    ids, heldout_ids, heldout = hold_out(
        ids, calibration, tokenizer, todo.sequence_length
    )
    windows_NL = sample_windows(ids, samples, todo.sequence_length, seed)
    if windows_NL.shape[1] > context_of(config):
        raise MoesaicError(
            f"windows of {windows_NL.shape[1]} tokens exceed {context_of(config)}, the context of "
            f"{name}"
        )
    return Prepared(plans, tokenizer, windows_NL, heldout_ids, heldout, config)


def check_samples(samples: int, length: int) -> None:
    """Raises MoesaicError for no calibration windows, or more than are profiled."""
    if samples < 1:
        raise MoesaicError(f"{samples} calibration samples; at least 1 is needed")
    if samples * length > MOST_CALIBRATION_TOKENS:
        raise MoesaicError(
            f"{samples} samples of {length} are over {MOST_CALIBRATION_TOKENS:,} tokens, the most "
            "that are profiled; take fewer --samples"
        )


def usual_samples(plan: Plan) -> int:
    """The paper's 8 windows; where weights are fitted, 12 tokens a neuron and at least 32,768.

    Of an expert's tokens, on average, in a model that is a mixture already.
    """
    moe = plan.config.moesaic
    spread = moe["num_outer"] / moe["outer_active"] if "num_outer" in moe else 1
    if not plan.recipe.fits:
        return 8
    needed = min(12 * plan.sizes.total * spread, MOST_CALIBRATION_TOKENS // 2)
    return max(8, -(-max(32_768, int(needed)) // plan.sequence_length))


def hold_out(
    ids: torch.Tensor, calibration: Any, tokenizer: Any, length: int
) -> tuple[torch.Tensor, torch.Tensor | None, str | None]:
    """Text for the card's perplexities: the source's own split, or the last tenth of the tokens."""
    if has_heldout_split(calibration):
        return (
            ids,
            to_ids(calibration, tokenizer, heldout=True),
            f"{calibration}, held-out split",
        )
    if ids.ndim != 1 or len(ids) < 10 * length:
        return ids, None, None
    cut = len(ids) - len(ids) // 10
    return ids[:cut], ids[cut:], f"last tenth of {source_name(calibration)}"


def source_name(calibration: Any) -> str:
    """What reports call a calibration source."""
    if isinstance(calibration, str | Path):
        return (
            Path(calibration).name if Path(calibration).exists() else str(calibration)
        )
    return f"a {type(calibration).__name__} in memory"


def _tokenizer_or_none(name: str | Path, trust_remote_code: bool) -> Any:
    try:
        return load_tokenizer(name, trust_remote_code) if name else None
    except MoesaicError:
        return None
