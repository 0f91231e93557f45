"""Rows that several tables make alike: accuracies in percent, and who could not be made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from moesaic.errors import is_of_disk, may_pass, reason_of
from moesaic.experiments.study import LAYOUT, SPARSITY, Study
from moesaic.experiments.table import Column, Row, Value

Made = TypeVar("Made")

HEADS = {
    "piqa": "PIQA (%)",
    "winogrande": "WinoGrande (%)",
    "arc_easy": "ARC-E (%)",
    "arc_challenge": "ARC-C (%)",
    "hellaswag": "HellaSwag (%)",
    "mmlu": "MMLU (%)",
    "gsm8k": "GSM8K (%)",
    "humaneval": "HumanEval (%)",
}

UNTRAINED = "not fine-tuned"
# The paper's Table 1 cuts these by a fifth, attention included; they have no experts.
PRUNED = {"slicegpt": 0.2, "sleb": 0.2}


def task_columns(tasks: Sequence[str]) -> list[Column]:
    """A column of percent for each task."""
    return [Column(task, HEADS[task]) for task in tasks]


def attempt(
    name: str, notes: list[str], study: Study, make: Callable[[], Made]
) -> Made | None:
    """What `make` gives; None and a note where it cannot be: the others go on.

    A disk that is full or gone is no such reason. What may work another time the study
    remembers.
    """
    try:
        return make()
    except Exception as error:  # of methods, of libraries, of memory
        if is_of_disk(error):
            raise
        reason = reason_of(error).replace(str(study.folder), "DIR")
        notes.append(f"{name}: {reason}")
        if may_pass(error):
            study.broken.append(f"{name}: {reason}")
        return None


def accuracy_row(
    study: Study,
    name: str,
    model: str,
    tasks: Sequence[str],
    notes: list[str],
    paper: Mapping[str, Value] | None = None,
) -> Row:
    """A model's answers to several tasks, in percent with standard errors."""
    values: dict[str, Value] = {}
    errors: dict[str, float | None] = {}
    for task in tasks:
        found = attempt(
            f"{name}, {task}",
            notes,
            study,
            partial(study.answers, model, task),
        )
        if found is None:
            continue
        values[task] = 100 * found["score"]
        error = found["standard_error"]
        errors[task] = None if error is None else 100 * error
    is_dense = model == study.model
    return Row(name, values, paper or {}, errors, is_reference=is_dense)


def contender(study: Study, method: str) -> str:
    """A method at the usual budget: 25 % of the neurons, S3A3E8 for the paper's."""
    if method in PRUNED:
        return study.converted(method, sparsity=PRUNED[method])
    if method == "cmoe":
        return study.converted(method, LAYOUT)
    return study.converted(method, sparsity=SPARSITY)


def tuned_contenders(
    study: Study, methods: Sequence[str], notes: list[str]
) -> dict[str, str]:
    """Each method's model after fine-tuning, by the name of its row.

    What cannot be fine-tuned here stands as it was converted, and its name says so.
    """
    models = {}
    for method in methods:
        convert = partial(contender, study, method)
        made = attempt(method, notes, study, convert)
        if made is None:
            continue
        if method in PRUNED:
            models[f"{method}, {UNTRAINED}"] = made
            continue
        tuned = attempt(method, notes, study, partial(study.tuned, made))
        if tuned is not None:
            models[method] = tuned
    return models


def method_of(name: str) -> str:
    """The method that a row's name begins with."""
    return name.partition(",")[0]
