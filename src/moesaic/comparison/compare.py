"""Converts one model by several methods at equal budgets, on the same tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.calibration.calibration_set import CalibrationSet, check_samples
from moesaic.calibration.checks import (
    check_vocabulary,
    check_weights,
    digest_of_tokens,
)
from moesaic.calibration.first_token import first_token
from moesaic.calibration.hidden_states import check_stream
from moesaic.calibration.text import has_heldout_split, place_of, to_ids
from moesaic.comparison.entries import (
    Entries,
    Entry,
    make_entries,
    without_short_windows,
)
from moesaic.comparison.missing import CONVERSION, TUNING, Missing
from moesaic.comparison.options import (
    TEXT_TOKENS,
    USUAL_SPARSITIES,
    CompareOptions,
)
from moesaic.comparison.results import Results
from moesaic.comparison.rows import Cell
from moesaic.comparison.trials import Evaluation, Trials, pass_seconds
from moesaic.conversion.options import check_grain_or_layout
from moesaic.conversion.prepare import hold_out, usual_samples
from moesaic.errors import MoesaicError, reason_of
from moesaic.families import find_ffns
from moesaic.families.load import (
    choose_device,
    load_config,
    load_model,
    load_tokenizer,
    window_length,
)
from moesaic.finetune.in_memory import (
    Recovery,
    plan_recovery,
    recovery_options,
)
from moesaic.finetune.options import AUTO_TEACHER, FinetuneOptions
from moesaic.methods.base import Method
from moesaic.methods.contents import METHODS
from moesaic.methods.load import load_method
from moesaic.output.atomic import check_folder
from moesaic.parts.products import widened_products
from moesaic.progress import duration

ALL = "all"
# What every comparison is measured against.
REFERENCES = ("static", "static-repaired", "random", "oracle", "neuron-oracle")


def compare(
    model: str,
    recipes: str | Path | Method | Sequence[str | Path | Method] = (
        "moesaic",
        "moesaic-dynamic",
        "cmoe",
    ),
    *,
    sparsity: Sequence[float] | None = None,
    ffn_bytes: Sequence[float] = (),
    ffn_macs: Sequence[float] = (),
    layout: str | None = None,
    grain: str | None = None,
    calibration: str | Sequence[str] = "wikitext2",
    text: Sequence[str] | None = None,
    references: Sequence[str] = REFERENCES,
    seeds: int = 3,
    samples: int | None = None,
    sequence_length: int | None = None,
    max_tokens: int = TEXT_TOKENS,
    finetune: int | None = None,
    distill: str = AUTO_TEACHER,
    speed: bool = False,
    output: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    progress: Callable[[str], Any] = lambda line: None,
) -> dict[str, Any]:
    """Perplexities by method: `settings`, `dense`, `cells`, ranked `rows`, `remarks`.

    `recipes` are methods; "all" stands for every one there is that is no reference. All
    see the same windows of the same calibration texts, `seeds` drawings of them; the
    references are among the rows. There is a table, and a ranking, for each budget:

    - a `sparsity` gives every method its own layout that skips that share of the FFN
      neurons as nearly as its number of experts allows (the rows say how many are
      active);
    - `ffn_bytes` and `ffn_macs` are equal work: every method gets the sparsity at which
      its FFNs, routers included, read that share of the bytes that the dense FFNs read
      for one token, or multiply with that share of their weights. One that cannot come
      within 0.02 is left out;
    - a `layout` gives all the same.

    Without any of them the sparsities are 0.25 and 0.5. A text that is the calibration
    source itself is evaluated on what that keeps apart.

    With `finetune` every converted model is trained on so many windows of the
    calibration text, by the defaults of `moesaic.finetune`, and measured again. The
    dense model is its teacher, unless `distill` is "none". The dense model itself learns
    the same windows by next-token loss: the fair reference. `speed` times decoding, one
    token at a time, in turn with the dense model.

    A method that is not for the model or the budget is left out, and one that fails is
    reported; `missing` has both, with their reasons, and the others go on. With `output`
    writes compare.json after every conversion, then compare.md, compare.csv and
    compare.png; `resume` goes on with such a folder and tries again what failed.
    Converted models are not kept.

    Costs per method, budget and seed one conversion, one pass over every text, and what
    fine-tuning takes; where a method comes to the same plan for two budgets, once.
    Memory: the dense model and the new FFNs; with `finetune` or `speed` a second model.
    Raises MoesaicError for bad input, and where no method is left.
    """
    if grain is not None:
        check_grain_or_layout(grain, layout)
    methods = [load_method(recipe) for recipe in _named(recipes, references)]
    names = {method.name for method in methods}
    others = [load_method(name) for name in references if name not in names]
    sources = [calibration] if isinstance(calibration, str) else calibration
    texts = text or sources
    folder = None if output is None else Path(output)
    if sparsity is None:
        asked = layout is not None or ffn_bytes or ffn_macs
        sparsity = () if asked else USUAL_SPARSITIES
    options = CompareOptions(
        model=model,
        methods=tuple(methods),
        references=tuple(others),
        sparsities=tuple(sparsity),
        layout=layout,
        grain=grain or "medium",
        calibration=tuple(sources),
        texts=tuple(texts),
        ffn_bytes=tuple(ffn_bytes),
        ffn_macs=tuple(ffn_macs),
        seeds=seeds,
        samples=samples,
        sequence_length=sequence_length,
        max_tokens=max_tokens,
        finetune=finetune,
        distill=distill,
        speed=speed,
        output=folder,
        resume=resume,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    return run_comparison(options, progress)


def _named(
    recipes: str | Path | Method | Sequence[str | Path | Method],
    references: Sequence[str],
) -> list[str | Path | Method]:
    """The methods asked for, "all" spelt out."""
    if isinstance(recipes, str | Path | Method):
        recipes = [recipes]
    asked: list[str | Path | Method] = []
    for recipe in recipes:
        if recipe != ALL:
            asked.append(recipe)
            continue
        others = [str(one) for one in recipes]
        asked += [
            name
            for name in METHODS
            if name not in references and name not in others
        ]
    return asked


def run_comparison(
    options: CompareOptions, progress: Callable[[str], Any]
) -> dict[str, Any]:
    """Plan, read texts, load, take up what is done, fill in the cells, rank, write."""
    trust = options.trust_remote_code
    device = choose_device(options.device)
    tuning = _tuning(options)
    _check_output(options)
    config = load_config(options.model, trust, options.dtype)
    progress("planning")
    planned = make_entries(options, config)
    tokens = _read_tokens(options, planned.entries, config)
    planned = without_short_windows(planned, tokens.evaluation.window)
    dense = load_model(options.model, options.dtype, trust, device)
    with widened_products(dense.dtype, device):
        return _compared(
            options, device, tuning, planned, tokens, dense, progress
        )


def _compared(
    options: CompareOptions,
    device: torch.device,
    tuning: FinetuneOptions | None,
    planned: Entries,
    tokens: _Tokens,
    dense: Any,
    progress: Callable[[str], Any],
) -> dict[str, Any]:
    """What is left once texts and the dense model are there."""
    ffns = find_ffns(dense)
    check_vocabulary(dense, tokens.ids)
    recovery = None
    if tuning is not None:
        recovery = plan_recovery(
            tuning, dense, tokens.calibration_ids, tokens.length
        )
    settings = _settings(
        options, tokens, recovery, check_weights(ffns, dense), dense
    )
    first_set = tokens.calibration_sets[0]
    check_stream(ffns, first_set.windows_NL)
    results = Results.resumed(options, settings)
    results.missing += planned.missing
    evaluation = tokens.evaluation
    if not results.dense:
        progress("dense: evaluating")
        results.dense = evaluation.perplexities(dense)
        results.write()
    seeds = range(options.seeds)
    cells = [(entry, seed) for entry in planned.entries for seed in seeds]
    keys = [entry.key(seed) for entry, seed in cells]
    undone = [
        (entry, seed)
        for entry, seed in cells
        if entry.key(seed) not in results.cells
    ]
    if undone:
        progress("dense: timing a pass over the calibration tokens")
        dense_seconds = pass_seconds(dense, first_set.windows_NL)
        results.dense_seconds = dense_seconds
        trials = Trials(
            dense,
            ffns,
            device,
            evaluation,
            dense_seconds,
            recovery,
            options.speed,
        )
        if recovery is not None and results.tuned_dense is None:
            progress("dense: fine-tuning")
            results.tuned_dense = trials.tuned_dense(recovery)
            results.write()
        _fill_in(results, undone, trials, tokens.calibration_sets, progress)
    return results.finish(keys)


def _tuning(options: CompareOptions) -> FinetuneOptions | None:
    """How results are fine-tuned, where they are."""
    if options.finetune is None:
        return None
    if not isinstance(options.finetune, int) or options.finetune < 1:
        raise MoesaicError(
            f"finetune {options.finetune}: windows to train on are counted from 1; 64 is "
            "usual"
        )
    return recovery_options(
        options.model,
        options.finetune,
        options.sequence_length,
        options.distill,
        options.device,
    )


@dataclass(frozen=True)
class _Tokens:
    """What all methods see: windows of `length` for each seed, and what is measured on."""

    calibration_ids: list[Tensor]  # of each text
    length: int
    calibration_sets: list[CalibrationSet]
    evaluation: Evaluation

    @property
    def ids(self) -> Tensor:
        """Of all calibration texts."""
        return torch.cat(self.calibration_ids)


def _read_tokens(
    options: CompareOptions, entries: Sequence[Entry], config: Any
) -> _Tokens:
    length = window_length([config], options.sequence_length)
    samples = options.samples
    if samples is None:
        # One number for all: the method that needs most decides, or nobody's numbers
        # are comparable.
        samples = max(usual_samples(entry.plan, length) for entry in entries)
    check_samples(samples, length)
    tokenizer = load_tokenizer(options.model, options.trust_remote_code)
    source_ids, texts = _read_texts(options, tokenizer, length)
    first = first_token(config)
    calibration_sets = [
        CalibrationSet.of_texts(source_ids, samples, length, seed, first)
        for seed in range(options.seeds)
    ]
    evaluation = Evaluation(texts, length, options.max_tokens)
    return _Tokens(source_ids, length, calibration_sets, evaluation)


def _check_output(options: CompareOptions) -> None:
    if options.output is not None:
        check_folder(options.output)
    elif options.resume:
        raise MoesaicError("resume needs the output that the earlier run had")


def _settings(
    options: CompareOptions,
    tokens: _Tokens,
    recovery: Recovery | None,
    weights: str,
    dense: Any,
) -> dict[str, Any]:
    """What cells depend on: a run only goes on with a folder of the same."""
    calibration = {
        "sources": list(options.calibration),
        "samples": tokens.calibration_sets[0].samples,
        "sequence_length": tokens.length,
    }
    return {
        "model": options.model,
        "weights": weights,
        "dtype": str(dense.dtype).removeprefix("torch."),
        "device": dense.device.type,
        "calibration": calibration,
        "calibration_tokens": digest_of_tokens(tokens.ids),
        "texts": tokens.evaluation.digests(),
        "max_tokens": options.max_tokens,
        "finetune": _finetune_settings(recovery),
        "speed": options.speed,
        "versions": _versions(recovery),
    }


def _fill_in(
    results: Results,
    undone: Sequence[tuple[Entry, int]],
    trials: Trials,
    calibration_sets: Sequence[CalibrationSet],
    progress: Callable[[str], Any],
) -> None:
    """A conversion for each cell that is not there yet; written after every one."""
    started = time.perf_counter()
    for done, (entry, seed) in enumerate(undone):
        seconds = time.perf_counter() - started
        outlook = _outlook(done, len(undone), seconds)
        name = f"{entry.label}, {entry.plan.label}, seed {seed}"
        cell = results.twin(entry, seed)
        if cell is None:
            progress(f"{name} ({outlook})")
            cell = _tried(trials, entry, calibration_sets[seed], seed, results)
        if cell is not None:
            results.cells[entry.key(seed)] = cell
            if cell.tuning_failed:
                lack = _lack(entry, seed, TUNING, cell.untuned or "")
                results.missing.append(lack)
        results.write()


def _tried(
    trials: Trials,
    entry: Entry,
    calibration: CalibrationSet,
    seed: int,
    results: Results,
) -> Cell | None:
    """A cell, or None and the reason among what is missing: the others go on."""
    try:
        return trials.cell(entry, calibration, seed)
    except Exception as error:  # of methods, of libraries, of memory
        reason = reason_of(error)
    results.missing.append(_lack(entry, seed, CONVERSION, reason))
    return None


def _lack(entry: Entry, seed: int, step: str, reason: str) -> Missing:
    goal = entry.goal
    return Missing(
        entry.label, entry.role, goal.equal, goal.at, step, reason, seed
    )


def _outlook(done: int, total: int, seconds: float) -> str:
    """Which conversion this is, and how long it and those after it may take."""
    count = f"{done + 1} of {total}"
    if done == 0:
        return count
    left = duration(seconds / done * (total - done))
    return f"{count}, {left} left"


def _read_texts(
    options: CompareOptions, tokenizer: Any, length: int
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Ids of every calibration source, and of every text, which share none with them."""
    source_ids = []
    validations = {}
    for source in options.calibration:
        ids = to_ids(source, tokenizer)
        ids, validation = hold_out(ids, source, tokenizer, length)
        source_ids.append(ids)
        validations[place_of(source)] = validation
    texts = {}
    for text in options.texts:
        place = place_of(text)
        validation = validations.get(place)
        if place not in validations or has_heldout_split(text):
            texts[text] = to_ids(text, tokenizer, heldout=True)
        elif validation is not None:
            texts[text] = validation.ids
        else:
            raise MoesaicError(
                f"{text} is too short to calibrate on nine tenths and evaluate on the "
                "rest; give another --text"
            )
    return source_ids, texts


def _finetune_settings(recovery: Recovery | None) -> dict[str, Any] | None:
    """What rows are fine-tuned by, and on which tokens."""
    if recovery is None:
        return None
    return {
        "samples": recovery.settings.samples,
        "sequence_length": recovery.settings.sequence_length,
        "teacher": recovery.has_teacher,
        "settings": recovery.settings.to_dict(),
        "tokens": digest_of_tokens(recovery.windows_NL),
    }


def _versions(recovery: Recovery | None) -> dict[str, str]:
    names = ["moesaic", "torch", "transformers", "POT"]
    if recovery is not None:
        names.append("peft")
    return {name: version(name) for name in names}
