"""Table 3: what is there before training, and what light fine-tuning adds."""

from __future__ import annotations

from functools import partial

from moesaic.experiments.rows import (
    accuracy_row,
    attempt,
    contender,
    task_columns,
)
from moesaic.experiments.study import Study
from moesaic.experiments.table import Column, Row, Table, Value

METHODS = ("llama-moe-v2", "cmoe", "moesaic")
TEXTS = ("wiki", "c4")
COLUMNS = (
    *task_columns(["mmlu"]),
    Column("wiki", "perplexity, wiki", 3),
    Column("c4", "perplexity, C4", 3),
)

# Llama-2 7B. Perplexities of the untrained LLaMA-MoE-v2 are bounds.
PAPER: dict[str, dict[str, Value]] = {
    "llama-moe-v2, training-free": {
        "mmlu": 30.33,
        "wiki": "> 10k",
        "c4": "> 7k",
    },
    "llama-moe-v2, fine-tuned": {"mmlu": 38.02, "wiki": 8.68, "c4": 19.76},
    "cmoe, training-free": {"mmlu": 42.50, "wiki": 7.32, "c4": 11.98},
    "cmoe, fine-tuned": {"mmlu": 44.02, "wiki": 5.92, "c4": 11.21},
}


def run(study: Study) -> Table:
    notes = ["moesaic and the dense row are not in the paper"]
    models = {"dense": study.model}
    for method in METHODS:
        convert = partial(contender, study, method)
        made = attempt(method, notes, study, convert)
        if made is None:
            continue
        models[f"{method}, training-free"] = made
        tuned = attempt(method, notes, study, partial(study.tuned, made))
        if tuned is not None:
            models[f"{method}, fine-tuned"] = tuned
    rows = [_row(study, name, model, notes) for name, model in models.items()]
    return Table(COLUMNS, rows, notes)


def _row(study: Study, name: str, model: str, notes: list[str]) -> Row:
    asked = accuracy_row(study, name, model, ["mmlu"], notes)
    values = dict(asked.values)
    for domain in TEXTS:
        values[domain] = study.perplexity(model, domain)
    return Row(
        name,
        values,
        PAPER.get(name, {}),
        asked.errors,
        is_reference=name == "dense",
    )
