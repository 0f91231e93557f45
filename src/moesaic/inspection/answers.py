"""Plain sentences: what was lost, where, whether it is faster, what to try next."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.conversion.advice import ACCEPTABLE_RATIO, next_steps
from moesaic.conversion.layer_error import LayerReport
from moesaic.conversion.report import ConversionReport
from moesaic.inspection.record import Record

FOLDER = "DIR"  # stands for the model's folder, which may be moved
_WORST = 3  # layers that are named at most
_FAR_ABOVE = 1.5  # times the median layer's error
_MUCH = 1.1  # perplexity over dense that is called much
_KINDS = {"prefill": "a prompt", "decode": "one token at a time"}


@dataclass(frozen=True)
class Answers:
    """What a reader asks first, each answered in a few sentences."""

    lost: list[str]
    where: list[str]
    faster: list[str]
    next: list[str]


def answer(record: Record, bench: dict[str, Any] | None) -> Answers:
    """From a model's history, and from what `moesaic bench` measured, if it did."""
    report = record.report
    return Answers(
        lost=[*_perplexity_words(record), *_error_words(record)],
        where=_where(report),
        faster=_faster(record, bench),
        next=_next(record),
    )


# --- what was lost ---------------------------------------------------------------------


def _perplexity_words(record: Record) -> list[str]:
    ratio = record.ratio
    values = record.perplexities
    if ratio is None:
        return _words_without_dense(record)
    last = list(values.values())[-1]
    heldout = ""
    if record.report is not None and record.report.heldout:
        heldout = (
            f" on text it has not seen ({record.report.heldout}, "
            f"{record.report.heldout_tokens:,} tokens)"
        )
    sentences = [
        f"Perplexity {changed(ratio)}: {last:.3f}, dense "
        f"{values['dense']:.3f}{heldout}. {_size_of(ratio)}"
    ]
    before = record.conversion_ratio
    if record.recovery is not None and before is not None:
        trained = "has not trained on this text, and would gain by it too"
        came = record.recovery.get("teacher_perplexity_before")
        if came is not None:
            trained = f"was trained on the same tokens before: it came with {came:.3f}"
        sentences.append(
            f"Before it was trained, perplexity {changed(before)}. The dense model "
            f"{trained}."
        )
    return sentences


def _words_without_dense(record: Record) -> list[str]:
    values = record.perplexities
    sentences = [
        "The perplexity of this model beside the dense one's was not measured."
    ]
    if values:
        known = [f"{name} {value:.3f}" for name, value in values.items()]
        sentences.append(f"Known is: {', '.join(known)}.")
    before = record.conversion_ratio
    if record.recovery is not None and before is not None:
        sentences.append(
            f"When it was converted, perplexity {changed(before)}, on another text "
            "or in other windows than after the training."
        )
    sentences.append(
        f"Measure: moesaic eval {FOLDER} --text SOURCE, which takes the dense model too."
    )
    return sentences


def changed(ratio: float) -> str:
    """In words, by how much something rose or fell."""
    percent = 100 * (ratio - 1)
    if abs(percent) < 0.05:
        return "stayed as it was"
    return f"{'rose' if percent > 0 else 'fell'} by {abs(percent):.1f} %"


def _size_of(ratio: float) -> str:
    if ratio <= ACCEPTABLE_RATIO:
        return "That is little."
    if ratio <= _MUCH:
        return "That can be seen in use."
    return "That is much."


def _error_words(record: Record) -> list[str]:
    """The mean layer beside the ways to spend the budget otherwise."""
    report = record.report
    if report is None or not report.layers:
        return []
    layers = report.layers
    own = statistics.mean(layer.relative_error for layer in layers)
    when = "" if record.recovery is None else "before the training "
    sentence = f"A layer's output {when}is off by {percent(own)} of its energy, on average"
    others = []
    for name, words in (
        ("static-repaired", "static pruning with repair"),
        ("static", "static pruning"),
        ("random", "random neurons"),
    ):
        value = mean_reference(layers, name)
        if value is not None:
            others.append(f"{words} {percent(value)}")
    if not others:
        return [f"{sentence}."]
    return [f"{sentence}. At the same budget: {', '.join(others)}."]


def mean_reference(layers: Iterable[LayerReport], name: str) -> float | None:
    """Mean error of a reference over layers; None where a layer lacks it."""
    values = [layer.references.get(name) for layer in layers]
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return statistics.mean(known)


def percent(share: float) -> str:
    """A share with two digits that matter."""
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


# --- where -----------------------------------------------------------------------------


def worst_layers(report: ConversionReport | None) -> list[LayerReport]:
    """The few layers whose error is far above the median's, the worst first."""
    if report is None or len(report.layers) < 3:
        return []
    median = statistics.median(layer.relative_error for layer in report.layers)
    by_error = sorted(
        report.layers, key=lambda layer: layer.relative_error, reverse=True
    )
    return [
        layer
        for layer in by_error[:_WORST]
        if layer.relative_error > _FAR_ABOVE * median
    ]


def _where(report: ConversionReport | None) -> list[str]:
    if report is None:
        return [
            "This folder has no moesaic_report.json, which a conversion writes: errors "
            "by layer are not known here."
        ]
    layers = report.layers
    if not layers:
        return [
            "No layer was replaced by itself: the whole model was changed at once, so "
            "there is no error by layer."
        ]
    errors = [layer.relative_error for layer in layers]
    median = statistics.median(errors)
    worst = worst_layers(report)
    sentences = []
    if worst:
        named = [
            f"{layer.layer} ({percent(layer.relative_error)})"
            for layer in worst
        ]
        sentences.append(
            f"{_layers(len(named))} {', '.join(named)} "
            f"{'loses' if len(named) == 1 else 'lose'} most. The median layer loses "
            f"{percent(median)}."
        )
    else:
        sentences.append(
            f"No layer stands out: errors lie between {percent(min(errors))} and "
            f"{percent(max(errors))}."
        )
    sentences += _router_words(layers)
    behind = [str(layer.layer) for layer in layers if layer.better_static]
    if behind:
        sentences.append(
            f"{_layers(len(behind))} {', '.join(behind)}: static pruning at the same "
            "budget loses less than routing does."
        )
    return sentences


def _layers(count: int) -> str:
    return "Layer" if count == 1 else "Layers"


def _router_words(layers: list[LayerReport]) -> list[str]:
    recalls = [layer.router_recall for layer in layers]
    known = [recall for recall in recalls if recall is not None]
    if not known:
        return []
    mean = statistics.mean(known)
    sentence = f"The routers pick {percent(mean)} of the experts that an oracle would run"
    chance = _chance(layers)
    if chance is not None:
        sentence += f", where chance is {percent(chance)}"
    unrepaired = mean_reference(layers, "unrepaired")
    oracle = mean_reference(layers, "oracle")
    if unrepaired is not None and oracle is not None:
        sentence += (
            f". By the dense weights a layer loses {percent(unrepaired)} with this choice, "
            f"{percent(oracle)} with that of an oracle that runs as many for every token"
        )
    return [f"{sentence}."]


def _chance(layers: list[LayerReport]) -> float | None:
    """The recall of a router that picks as many experts at random."""
    loads = [load for layer in layers for load in layer.expert_load]
    return statistics.mean(loads) if loads else None


# --- whether it is faster ---------------------------------------------------------------


def _faster(record: Record, bench: dict[str, Any] | None) -> list[str]:
    counted = _counted(record)
    if bench is not None:
        return [*_measured(record, bench), *counted]
    return [
        "The time was not measured.",
        *counted,
        "Counted work is the best that a kernel could make of it. "
        f"Measure: moesaic bench {FOLDER} --json bench.json, then "
        f"moesaic inspect {FOLDER} --bench bench.json --html report.html.",
    ]


def timed_against(record: Record, bench: dict[str, Any]) -> str:
    """What the model was timed against: dense, or another model's name."""
    against = bench.get("against")
    if against is None:
        return "dense"
    name = Path(str(against)).name
    return "dense" if name == record.base else name


def _measured(record: Record, bench: dict[str, Any]) -> list[str]:
    where = f"{bench['engine']} on {bench['device']}"
    other = timed_against(record, bench)
    whose = "the dense model's" if other == "dense" else f"{other}'s"
    sentences = []
    timed = Path(str(bench["model"])).name
    if timed != Path(record.model).absolute().name:
        sentences.append(f"The times are those of {timed}, as the file says.")
    for row in bench["rows"]:
        kind = _KINDS.get(row["kind"], str(row["kind"]))
        if "ratio" not in row:
            speed = row["tokens_per_second"][0]
            sentences.append(
                f"Measured in {where}, batch {row['batch']}, {kind}: {speed:,.1f} "
                "tokens a second. The dense model was not timed beside it."
            )
            continue
        verdict = "faster" if row["ratio"] < 1 else "not faster"
        sentences.append(
            f"Measured in {where}, batch {row['batch']}, {kind}: {row['ratio']:.2f} of "
            f"{whose} time ({row['least']:.2f} to {row['most']:.2f}), {verdict}."
        )
    return sentences


def _counted(record: Record) -> list[str]:
    report = record.report
    if report is None:
        return [
            f"Counted: a token computes {percent(record.active_ffn_fraction)} of the "
            "FFN neurons."
        ]
    macs = report.macs / report.dense_macs
    read = report.bytes / report.dense_bytes
    sentences = [
        f"Counted for one token, over the dense model: {macs:.2f} of the "
        f"multiply-accumulates, {read:.2f} of the bytes of weights."
    ]
    if record.prompts_run_all:
        sentences.append("A prompt runs all neurons, as the dense model does.")
    elif report.macs >= report.dense_macs:
        sentences.append(
            "That is more work for a prompt than the dense model does"
            + (
                ", and less to read for one token at a time."
                if report.bytes < report.dense_bytes
                else "."
            )
        )
    return sentences


# --- what to try -----------------------------------------------------------------------


def _next(record: Record) -> list[str]:
    report = record.report
    ratio = record.ratio
    if report is None:
        return [
            "Inspect the folder that this one was trained from: it has the layers' "
            "errors."
        ]
    steps = []
    if ratio is not None and ratio <= ACCEPTABLE_RATIO:
        steps.append(
            "little was lost, so skip more: a higher --sparsity, or --target-ratio "
            f"{ACCEPTABLE_RATIO}, which finds how much"
        )
    steps += _dense_layers(report, ratio)
    if record.recovery is None:
        steps += next_steps(report, FOLDER)
    elif ratio is not None and ratio > ACCEPTABLE_RATIO:
        settings = record.recovery["settings"]
        trained = settings["samples"] * settings["sequence_length"]
        steps.append(
            f"more training: {trained:,} tokens were used; --recover {4 * trained}"
        )
    if not steps:
        steps.append(
            "questions instead of perplexity: moesaic eval "
            f"{FOLDER} --tasks piqa,hellaswag"
        )
    return steps


def _dense_layers(report: ConversionReport, ratio: float | None) -> list[str]:
    """What is won and given back by leaving the worst layers as they were."""
    worst = worst_layers(report)
    # Without references linear layers were replaced, everywhere alike.
    whole_ffns = all(layer.references for layer in worst)
    if not worst or not whole_ffns:
        return []
    if ratio is not None and ratio <= ACCEPTABLE_RATIO:
        return []
    numbers = sorted(layer.layer for layer in worst)
    total = sum(layer.relative_error for layer in report.layers)
    saved = sum(layer.relative_error for layer in worst) / total
    given_back = len(worst) / len(report.layers)
    named = ",".join(map(str, numbers))
    return [
        f"leave the worst layers as they are: --dense-layers {named} takes "
        f"{percent(saved)} of the layers' summed error away and gives "
        f"{percent(given_back)} of the saving back"
    ]
