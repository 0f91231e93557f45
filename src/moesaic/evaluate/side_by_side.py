"""Perplexity of a model, and of a dense one beside it, on the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from moesaic.calibration.text import to_ids
from moesaic.demo import usual_text
from moesaic.errors import MoesaicError
from moesaic.evaluate.choices import count_choices
from moesaic.evaluate.perplexity import check_windows, perplexity
from moesaic.evaluate.work import active_ffn_fraction_of, is_converted
from moesaic.families.load import (
    base_model_of,
    load_config,
    load_model,
    load_tokenizer,
    window_length,
)


def evaluate(
    model: str,
    text: list[str] | None = None,
    *,
    against: str | None = None,
    sequence_length: int | None = None,
    max_tokens: int | None = None,
    device: torch.device | str = "cpu",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    progress: Callable[[str, int], Callable[[int], Any]] | None = None,
) -> dict[str, Any]:
    """Perplexity on every SOURCE of `text`.

    Gives model, perplexity and tokens by source, active_ffn_fraction (None for a
    mixture that is not ours), dtype, and prompt where so many tokens of every window run
    whole. Where thresholds decide also `choices` by source: the share of a token's units
    (experts, neurons, inputs) that ran, and the planned one, which active_ffn_fraction
    goes by. With `against` also the dense model's, under that key, and `ratio`. The
    default text is the demo's for what came from the demo model, else wikitext2.
    `progress(name, tokens)` returns what is told of each batch. Raises MoesaicError for
    bad input, and where the two models cut a text into different tokens. Costs one
    forward pass over the text per model, and where thresholds decide the choice once more.
    """
    names = [model] if against is None else [model, against]
    configs = [load_config(name, trust_remote_code) for name in names]
    length = window_length(configs, sequence_length)
    _check_windows(configs, length)
    if text is None:
        text = [_default_text(model, configs[0])]
    if max_tokens is not None and max_tokens < 2:
        raise MoesaicError(
            f"at most {max_tokens} tokens predict nothing; take 2 or more"
        )

    texts: list[dict[str, Tensor]] = []
    for name in names:
        tokenizer = load_tokenizer(name, trust_remote_code)
        ids_by_source = {}
        for source in text:
            ids_by_source[source] = to_ids(source, tokenizer, heldout=True)
        texts.append(ids_by_source)
    for source in text:
        if not torch.equal(texts[0][source], texts[-1][source]):
            raise MoesaicError(
                f"{model} and {against} cut {source} into different tokens: "
                "not comparable"
            )

    shortest = min(len(ids[:max_tokens]) for ids in texts[0].values())
    _check_windows(configs, min(length, shortest))

    rows = []
    for name, ids_by_source in zip(names, texts, strict=True):
        loaded = load_model(name, dtype, trust_remote_code, device)
        report = None
        if progress is not None:
            tokens = 0
            for ids in ids_by_source.values():
                tokens += len(ids[:max_tokens])
            report = progress(name, tokens)
        values = {}
        predicted = {}
        shares = {}
        for source in text:
            with count_choices(loaded) as choices:
                values[source], predicted[source] = perplexity(
                    loaded,
                    ids_by_source[source],
                    length,
                    max_tokens,
                    report,
                )
            share = choices.share()
            if share is not None:
                shares[source] = asdict(share)
        row: dict[str, Any] = {
            "model": name,
            "perplexity": values,
            "tokens": predicted,
            "active_ffn_fraction": active_ffn_fraction_of(loaded),
            "dtype": str(loaded.dtype).removeprefix("torch."),
        }
        prompt = prompt_of(loaded.config)
        if prompt is not None:
            row["prompt"] = prompt
        if shares:
            row["choices"] = shares
        rows.append(row)
        del loaded

    result = rows[0] | {"sequence_length": length}
    if against is not None:
        dense = rows[1]
        ratio = {}
        for source in text:
            dense_value = dense["perplexity"][source]
            ratio[source] = result["perplexity"][source] / dense_value
        result["against"] = dense
        result["ratio"] = ratio
    return result


def _check_windows(configs: list[Any], length: int) -> None:
    for config in configs:
        if is_converted(config):
            check_windows(config.moesaic, length)


def prompt_of(config: Any) -> int | None:
    """Tokens of a window that run whole, where they choose for the others."""
    if not is_converted(config) or config.moesaic.router is None:
        return None
    prompt: int | None = config.moesaic.router.prompt
    return prompt


def _default_text(model: str, config: Any) -> str:
    return usual_text(base_model_of(config) or model)
