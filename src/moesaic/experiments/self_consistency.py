"""Table 11: what votes of several answers are worth, dense and converted."""

from __future__ import annotations

from functools import partial
from typing import Any

from moesaic.experiments.rows import HEADS, attempt
from moesaic.experiments.study import LAYOUT, Study
from moesaic.experiments.table import Column, Row, Table, Value

CHOICES = ("piqa", "arc_easy", "arc_challenge")
TASKS = (*CHOICES, "gsm8k")
VOTES = (1, 3, 5)
COLUMNS = (
    *(Column(task, HEADS[task]) for task in CHOICES),
    Column("mean", "mean of three (%)"),
    Column("gsm8k", HEADS["gsm8k"]),
)
MOST_LIKELY = "most likely"

# Percent: PIQA, ARC-E, ARC-C, mean. The paper's k = 1 is its Table 1.
PAPER = {
    "Llama-2 7B": {
        "dense, k = 1": (78.78, 74.58, 46.16, 66.51),
        "dense, k = 5": (79.21, 75.29, 46.75, 67.08),
        "cmoe, k = 1": (74.34, 67.09, 40.35, 60.59),
        "cmoe, k = 5": (77.52, 73.88, 44.54, 65.31),
    },
    "Qwen-3-30B-A3B": {
        "dense, k = 1": (84.51, 84.43, 57.88, 75.61),
        "dense, k = 5": (85.11, 85.33, 58.12, 76.19),
        "cmoe, k = 1": (80.23, 76.75, 48.80, 68.59),
        "cmoe, k = 5": (84.56, 84.75, 57.19, 75.50),
    },
}


def run(study: Study) -> Table:
    notes = [
        "an answer to a choice is drawn with the model's own probability: the more vote, "
        "the nearer they come to its most likely answer, which is what Table 1 scores",
        "the paper does not say how it draws; its k = 1 equals its Table 1, so that its "
        "votes gain over the most likely answer",
    ]
    models = {
        "dense": study.model,
        "cmoe": study.tuned(study.converted("cmoe", LAYOUT)),
    }
    rows = []
    for name, model in models.items():
        found = {}
        for task in TASKS:
            ask = partial(study.answers, model, task, VOTES)
            asked = attempt(f"{name}, {task}", notes, study, ask)
            if asked is not None:
                found[task] = asked
        rows.append(_row(study, f"{name}, {MOST_LIKELY}", found))
        for count in VOTES:
            voted = {
                task: row["self_consistency"][str(count)]
                for task, row in found.items()
            }
            rows.append(_row(study, f"{name}, k = {count}", voted))
    return Table(COLUMNS, rows, notes)


def _row(study: Study, name: str, found: dict[str, dict[str, Any]]) -> Row:
    values: dict[str, Value] = {}
    errors: dict[str, float | None] = {}
    for task, scores in found.items():
        values[task] = 100 * scores["score"]
        error = scores["standard_error"]
        errors[task] = None if error is None else 100 * error
    if found.keys() >= set(CHOICES):
        three = [100 * found[task]["score"] for task in CHOICES]
        values["mean"] = sum(three) / len(three)
    numbers = PAPER.get(study.paper_model, {}).get(name, ())
    paper = dict(zip((*CHOICES, "mean"), numbers, strict=False))
    return Row(name, values, paper, errors, is_reference=MOST_LIKELY in name)
