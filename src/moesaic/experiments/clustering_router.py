"""Table 5: what a grouping of neurons and what a router is worth, fine-tuned."""

from __future__ import annotations

from functools import partial

from moesaic.experiments.rows import accuracy_row, attempt, task_columns
from moesaic.experiments.study import LAYOUT, SPARSITY, Study
from moesaic.experiments.table import Column, Row, Table

METHODS = ("moefication", "g-moefication", "read-me")
ANALYTICAL = {"router": "analytical"}
DOMAINS = (
    "wiki",
    "code",
    "maths",
)  # read-me makes an expert for each kind of text
COLUMNS = (
    *task_columns(["mmlu"]),
    Column("wiki", "perplexity, wiki", 3),
    Column("untuned", "the same, training-free", 3),
)

# MMLU in percent, Llama-2 7B.
PAPER = {
    "moefication": 35.17,
    "g-moefication": 36.37,
    "read-me": 31.24,
    "moefication + analytical router": 37.33,
    "g-moefication + analytical router": 39.21,
    "read-me + analytical router": 36.79,
    "cmoe": 44.02,
}


def run(study: Study) -> Table:
    notes = [
        f"25 % of the neurons skipped; read-me is calibrated on {', '.join(DOMAINS)}, "
        "all others on wiki"
    ]
    rows = []
    for method in METHODS:
        domains = DOMAINS if method == "read-me" else ("wiki",)
        for settings in ({}, ANALYTICAL):
            name = f"{method} + analytical router" if settings else method
            convert = partial(
                study.converted,
                method,
                sparsity=SPARSITY,
                settings=settings,
                domains=domains,
            )
            made = attempt(name, notes, study, convert)
            if made is not None:
                rows.append(_row(study, name, made, notes))
    rows.append(_row(study, "cmoe", study.converted("cmoe", LAYOUT), notes))
    return Table(COLUMNS, rows, notes)


def _row(study: Study, name: str, made: str, notes: list[str]) -> Row:
    model = attempt(name, notes, study, partial(study.tuned, made))
    if model is None:
        return Row(name, {"untuned": study.perplexity(made, "wiki")})
    asked = accuracy_row(study, name, model, ["mmlu"], notes)
    values = dict(asked.values)
    values["wiki"] = study.perplexity(model, "wiki")
    values["untuned"] = study.perplexity(made, "wiki")
    return Row(name, values, {"mmlu": PAPER[name]}, asked.errors)
