"""Table 4: how much the calibration text and its size matter, after fine-tuning."""

from __future__ import annotations

from itertools import product

from moesaic.experiments.rows import accuracy_row, task_columns
from moesaic.experiments.study import LAYOUT, Study
from moesaic.experiments.table import Column, Row, Table

SOURCES = ("wiki", "c4")
COLUMNS = (
    *task_columns(["mmlu"]),
    Column("wiki", "perplexity, wiki", 3),
    Column("c4", "perplexity, C4", 3),
)

# Llama-2 7B, by source and windows: MMLU in percent, two perplexities.
PAPER = {
    ("wiki", 8): (44.02, 5.92, 11.21),
    ("wiki", 32): (44.63, 5.72, 11.15),
    ("wiki", 64): (44.89, 5.69, 10.98),
    ("c4", 8): (42.31, 7.04, 9.17),
    ("c4", 32): (43.25, 6.92, 9.07),
    ("c4", 64): (43.39, 6.78, 9.02),
}


def run(study: Study) -> Table:
    notes = [
        f"cmoe {LAYOUT}, fine-tuned on the text it was calibrated on: the paper does not "
        "say on which, but its C4 rows gain on C4 and lose on WikiText-2"
    ]
    cases = product(SOURCES, study.scale.calibrations)
    rows = [_row(study, source, samples, notes) for source, samples in cases]
    return Table(COLUMNS, rows, notes)


def _row(study: Study, source: str, samples: int, notes: list[str]) -> Row:
    name = f"{source}, {samples} windows"
    made = study.converted("cmoe", LAYOUT, domains=[source], samples=samples)
    model = study.tuned(made, domain=source)
    asked = accuracy_row(study, name, model, ["mmlu"], notes)
    values = dict(asked.values)
    for domain in SOURCES:
        values[domain] = study.perplexity(model, domain)
    keys = [column.key for column in COLUMNS]
    numbers = PAPER.get((source, samples), ())
    paper = dict(zip(keys, numbers, strict=False))
    return Row(name, values, paper, asked.errors)
