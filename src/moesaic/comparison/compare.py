"""Converts one model by several methods at equal budgets, on the same tokens."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.calibration.calibration_set import CalibrationSet, check_samples
from moesaic.calibration.checks import check_vocabulary, check_weights
from moesaic.calibration.hidden_states import Stream, check_stream
from moesaic.calibration.text import has_heldout_split, to_ids
from moesaic.comparison.csv_file import csv_text
from moesaic.comparison.entries import Entry, make_entries
from moesaic.comparison.equal_work import over_dense
from moesaic.comparison.options import (
    TEXT_TOKENS,
    USUAL_SPARSITIES,
    CompareOptions,
)
from moesaic.comparison.page import markdown
from moesaic.comparison.plot import plot
from moesaic.comparison.rows import DEAD, Cell, ranked, remarks
from moesaic.conversion.layer_budgets import share_budgets
from moesaic.conversion.layer_error import LayerReport
from moesaic.conversion.prepare import hold_out, usual_samples
from moesaic.conversion.run import Run
from moesaic.errors import MoesaicError
from moesaic.evaluate.perplexity import perplexity
from moesaic.families import FFNs, find_ffns
from moesaic.families.load import (
    choose_device,
    load_config,
    load_model,
    load_tokenizer,
    window_length,
)
from moesaic.methods.base import FFNMethod, Method
from moesaic.methods.load import load_method
from moesaic.output.atomic import write_file
from moesaic.progress import duration

# What every comparison is measured against.
REFERENCES = ("static", "static-repaired", "random", "oracle", "neuron-oracle")


def compare(
    model: str,
    recipes: Sequence[str | Path | Method] = (
        "moesaic",
        "moesaic-dynamic",
        "cmoe",
    ),
    *,
    sparsity: Sequence[float] | None = None,
    ffn_bytes: Sequence[float] = (),
    ffn_macs: Sequence[float] = (),
    layout: str | None = None,
    grain: str = "medium",
    calibration: str = "wikitext2",
    text: Sequence[str] | None = None,
    references: Sequence[str] = REFERENCES,
    seeds: int = 3,
    samples: int | None = None,
    sequence_length: int | None = None,
    max_tokens: int = TEXT_TOKENS,
    output: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    progress: Callable[[str], Any] = lambda line: None,
) -> dict[str, Any]:
    """Perplexities by method: `settings`, `dense`, `cells`, ranked `rows`, `remarks`.

    `recipes` are methods. All see the same windows of the same calibration text,
    `seeds` drawings of them; the references are among the rows. There is a table, and a
    ranking, for each budget:

    - a `sparsity` gives every method its own layout that skips that share of the FFN
      neurons as nearly as its number of experts allows (the rows say how many are
      active, and a reference that cannot come near is left out);
    - `ffn_bytes` and `ffn_macs` are equal work: every method gets the sparsity at which
      its FFNs, routers included, read that share of the bytes that the dense FFNs read
      for one token, or multiply with that share of their weights. One that cannot come
      within 0.02 is left out;
    - a `layout` gives all the same.

    Without any of them the sparsities are 0.25 and 0.5. A text that is the calibration
    source itself is evaluated on what that keeps apart. With `output` writes
    compare.json after every conversion, then compare.md, compare.csv and compare.png;
    `resume` goes on with such a folder. Converted models are not kept. Costs per
    method, budget and seed one conversion and one pass over every text; where a method
    comes to the same plan for two budgets, once. Raises MoesaicError for bad input.
    """
    methods = [load_method(recipe) for recipe in recipes]
    names = {method.name for method in methods}
    others = [load_method(name) for name in references if name not in names]
    texts = text or [calibration]
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
        grain=grain,
        calibration=calibration,
        texts=tuple(texts),
        ffn_bytes=tuple(ffn_bytes),
        ffn_macs=tuple(ffn_macs),
        seeds=seeds,
        samples=samples,
        sequence_length=sequence_length,
        max_tokens=max_tokens,
        output=folder,
        resume=resume,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    return run_comparison(options, progress)


def run_comparison(
    options: CompareOptions, progress: Callable[[str], Any]
) -> dict[str, Any]:
    """Plan, read texts, load, take up what is done, fill in the cells, rank, write."""
    model = options.model
    trust = options.trust_remote_code
    device = choose_device(options.device)
    config = load_config(model, trust, options.dtype)
    progress("planning")
    planned = make_entries(options, config)
    length = window_length([config], options.sequence_length)
    samples = options.samples
    if samples is None:
        # One number for all: the method that needs most decides, or nobody's numbers
        # are comparable.
        samples = max(
            usual_samples(entry.plan, length) for entry in planned.entries
        )
    check_samples(samples, length)
    tokenizer = load_tokenizer(model, trust)
    ids, texts = _read_texts(options, tokenizer, length)
    seeds = range(options.seeds)
    calibration_sets = [
        CalibrationSet.sample(ids, samples, length, seed) for seed in seeds
    ]
    dense = load_model(model, options.dtype, trust, device)
    ffns = find_ffns(dense)
    check_vocabulary(dense, ids)
    evaluation = _Evaluation(texts, length, options.max_tokens)
    dtype = str(dense.dtype).removeprefix("torch.")
    calibration = {
        "source": options.calibration,
        "samples": samples,
        "sequence_length": length,
    }
    settings = {
        "model": model,
        "weights": check_weights(ffns, dense),
        "dtype": dtype,
        "device": device.type,
        "calibration": calibration,
        "calibration_tokens": _digest(ids),
        "texts": evaluation.digests(),
        "max_tokens": options.max_tokens,
        "versions": _versions(),
    }
    check_stream(ffns, calibration_sets[0].windows_NL)
    results = _Results.resumed(options, settings)
    if not results.dense:
        progress("dense: evaluating")
        results.dense = evaluation.perplexities(dense)
        results.write()
    left_out = list(planned.left_out)
    trials = _Trials(dense, ffns, device, evaluation)
    cells = [(entry, seed) for entry in planned.entries for seed in seeds]
    keys = [entry.key(seed) for entry, seed in cells]
    missing = [
        (entry, seed)
        for entry, seed in cells
        if entry.key(seed) not in results.cells
    ]
    started = time.perf_counter()
    for done, (entry, seed) in enumerate(missing):
        name = f"{entry.label}, {entry.plan.label}, seed {seed}"
        cell = results.twin(entry, seed)
        if cell is None:
            seconds = time.perf_counter() - started
            progress(f"{name} ({_outlook(done, len(missing), seconds)})")
            try:
                cell = trials.cell(entry, calibration_sets[seed], seed)
            except MoesaicError as error:
                # One that diverges must not cost the others.
                left_out.append(f"without {name}: {error}")
                continue
        results.cells[entry.key(seed)] = cell
        results.write()
    return results.finish(keys, left_out)


def _outlook(done: int, total: int, seconds: float) -> str:
    """Which conversion this is, and how long it and those after it may take."""
    count = f"{done + 1} of {total}"
    if done == 0:
        return count
    left = duration(seconds / done * (total - done))
    return f"{count}, {left} left"


@dataclass(frozen=True)
class _Evaluation:
    """The texts that every model is measured on."""

    texts: dict[str, Tensor]
    length: int
    max_tokens: int

    def perplexities(self, model: Any) -> dict[str, float]:
        values = {}
        for name, ids in self.texts.items():
            value, _ = perplexity(model, ids, self.length, self.max_tokens)
            values[name] = value
        return values

    def digests(self) -> dict[str, str]:
        digests = {}
        for name, ids in self.texts.items():
            evaluated = ids[: self.max_tokens]
            digests[name] = _digest(evaluated)
        return digests


@dataclass(frozen=True)
class _Trials:
    """The dense model, which every conversion starts from and leaves as it was."""

    dense: Any
    ffns: FFNs
    device: torch.device
    evaluation: _Evaluation

    def cell(
        self, entry: Entry, calibration: CalibrationSet, seed: int
    ) -> Cell:
        """Converts in memory, evaluates, and puts the dense FFNs back."""
        seconds: dict[str, float] = {}
        started = time.perf_counter()
        plan = share_budgets(
            self.dense, self.ffns, entry.plan, calibration, self.device, seed
        )
        seconds["budgets"] = time.perf_counter() - started
        with self.ffns.restored():
            stream = Stream(self.ffns, calibration.windows_NL, self.device)
            run = Run(stream, plan, calibration, seed, seconds, trial=True)
            layers = plan.method.convert(self.dense, calibration, plan, run)
            plan = plan.settled(layers)
            values = self.evaluation.perplexities(self.dense)
        method = entry.method
        repairs = isinstance(method, FFNMethod) and method.fits_weights
        work = over_dense(plan)
        loads = [layer.expert_load for layer in layers if layer.expert_load]
        errors = [layer.relative_error for layer in layers]
        better_static = [layer.layer for layer in layers if layer.better_static]
        return Cell(
            method=entry.label,
            role=entry.role,
            saves=method.saves,
            routes=plan.moe.router is not None,
            repairs=repairs,
            equal=entry.goal.equal,
            at=entry.goal.at,
            sparsity=entry.sparsity,
            seed=seed,
            layout=plan.label,
            shape=plan.words,
            active_ffn_fraction=plan.macs.active_ffn_fraction,
            macs=work.macs,
            bytes=work.bytes,
            ffn_macs=work.ffn_macs,
            ffn_bytes=work.ffn_bytes,
            perplexity=values,
            relative_error=errors,
            better_static=better_static,
            load_max_over_mean=_unevenness(loads),
            dead_experts=_dead_experts(loads),
            notes=_notes(layers),
            seconds=sum(seconds.values()),
        )


def _unevenness(loads: list[list[float]]) -> float | None:
    """The most used expert's load over the mean, in the worst layer."""
    ratios = []
    for load in loads:
        ratio = max(load) * len(load) / sum(load)
        ratios.append(ratio)
    return max(ratios, default=None)


def _dead_experts(loads: list[list[float]]) -> int:
    """Experts that hardly run, in all layers."""
    dead = 0
    for load in loads:
        mean = sum(load) / len(load)
        least = DEAD * mean
        dead += sum(share < least for share in load)
    return dead


def _notes(layers: list[LayerReport]) -> list[str]:
    notes: set[str] = set()
    for layer in layers:
        notes.update(layer.notes)
    return sorted(notes)


@dataclass
class _Results:
    """What is known so far, and the folder that it is kept in."""

    options: CompareOptions
    settings: dict[str, Any]
    dense: dict[str, float]
    cells: dict[str, Cell]

    @classmethod
    def resumed(
        cls, options: CompareOptions, settings: dict[str, Any]
    ) -> _Results:
        """The cells that an earlier run finished.

        Raises MoesaicError where it had other settings.
        """
        fresh = cls(options, settings, {}, {})
        if options.output is None:
            return fresh
        path = options.output / "compare.json"
        if not path.exists():
            return fresh
        if not options.resume:
            raise MoesaicError(
                f"{path} exists; pass --resume to go on with it, or choose another "
                "output"
            )
        try:
            values: dict[str, Any] = json.loads(path.read_text("utf-8"))
            earlier_settings = values["settings"]
            dense = values["dense"]
            cells = {
                key: Cell.from_dict(cell)
                for key, cell in values["cells"].items()
            }
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:
            raise MoesaicError(
                f"{path} cannot be resumed ({error!r}); remove it"
            ) from error
        for key, value in settings.items():
            earlier = earlier_settings.get(key)
            if earlier != value:
                raise MoesaicError(
                    f"{path} was made with {key} = {earlier}, this run has {value}; "
                    "choose another output"
                )
        return cls(options, settings, dense, cells)

    def twin(self, entry: Entry, seed: int) -> Cell | None:
        """The cell of another table that the same conversion has filled."""
        ending = entry.conversion(seed)
        for key, cell in self.cells.items():
            if key.endswith(ending):
                return replace(
                    cell,
                    method=entry.label,
                    role=entry.role,
                    equal=entry.goal.equal,
                    at=entry.goal.at,
                    sparsity=entry.sparsity,
                )
        return None

    def to_dict(self) -> dict[str, Any]:
        cells = {key: cell.to_dict() for key, cell in self.cells.items()}
        return {"settings": self.settings, "dense": self.dense, "cells": cells}

    def write(self, result: dict[str, Any] | None = None) -> None:
        values = result
        if values is None:
            values = self.to_dict()
            values["rows"] = []
        text = json.dumps(values, indent=2)
        _write(self.options.output, "compare.json", text + "\n")

    def finish(self, keys: list[str], left_out: list[str]) -> dict[str, Any]:
        """Ranks the cells of this run; writes table, page and plot."""
        cells = [self.cells[key] for key in keys if key in self.cells]
        rows = ranked(cells, self.dense)
        result = self.to_dict()
        result["rows"] = [row.to_dict() for row in rows]
        result["remarks"] = left_out + remarks(rows)
        self.write(result)
        _write(self.options.output, "compare.csv", csv_text(rows))
        page = markdown(self.settings, self.dense, rows, result["remarks"])
        _write(self.options.output, "compare.md", page)
        image = plot(self.settings["model"], self.dense, rows)
        _write(self.options.output, "compare.png", image)
        return result


def _read_texts(
    options: CompareOptions, tokenizer: Any, length: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Calibration ids, and the ids of every text; no text is among the former."""
    source = options.calibration
    source_path = Path(source).resolve()
    ids = to_ids(source, tokenizer)
    ids, validation = hold_out(ids, source, tokenizer, length)
    texts = {}
    for text in options.texts:
        is_source = Path(text).resolve() == source_path
        if not is_source or has_heldout_split(text):
            texts[text] = to_ids(text, tokenizer, heldout=True)
        elif validation is not None:
            texts[text] = validation.ids
        else:
            raise MoesaicError(
                f"{text} is too short to calibrate on nine tenths and evaluate on the "
                "rest; give another --text"
            )
    return ids, texts


def _versions() -> dict[str, str]:
    names = ("moesaic", "torch", "transformers", "POT")
    return {name: version(name) for name in names}


def _digest(ids: Tensor) -> str:
    content = ids.numpy().tobytes()
    return hashlib.sha256(content).hexdigest()


def _write(output: Path | None, name: str, content: str | bytes) -> None:
    """The whole file or the old one: a killed run leaves no half."""
    if output is None:
        return
    path = output / name
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
    except OSError as error:
        raise MoesaicError(f"cannot write {path}: {error}") from error
