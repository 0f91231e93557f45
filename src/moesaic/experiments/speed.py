"""Table 9: time of decoding by configuration, few sequences at once and many."""

from __future__ import annotations

from moesaic.experiments.study import Study
from moesaic.experiments.table import Column, Row, Table, Value

REGIMES = ("memory", "compute")

# Qwen-2.5 72B: memory-bound at 4k and 32k tokens, compute-bound (batch over 400) at both.
PAPER = {
    "S1A5E8": (1.08, 1.15, 1.12, 1.17),
    "S3A3E8": (1.06, 1.13, 1.11, 1.15),
    "S2A4E8": (1.05, 1.12, 1.10, 1.12),
    "S4A8E16": (1.02, 1.10, 1.08, 1.11),
    "S6A6E16": (1.03, 1.08, 1.07, 1.10),
    "S3A9E16": (1.02, 1.05, 1.05, 1.09),
}
_PAPER_KEYS = ("memory 0", "memory 1", "compute 0", "compute 1")


def run(study: Study) -> Table:
    scale = study.scale
    columns = []
    for regime, batch in zip(REGIMES, _ends(scale.batches), strict=True):
        for number, context in enumerate(scale.contexts):
            head = f"{regime}-bound, {context:,} tokens before, {batch} at once (x)"
            columns.append(Column(f"{regime} {number}", head, 2, timed=True))
    rows = []
    for layout in scale.layouts:
        model = study.converted("cmoe", layout)
        values: dict[str, Value] = {}
        for number, context in enumerate(scale.contexts):
            values |= _speedups(study, model, context, number)
        paper = dict(zip(_PAPER_KEYS, PAPER[layout], strict=True))
        rows.append(Row(layout, values, paper))
    notes = [
        "how many times as fast as the dense model decoding is, in transformers, medians of "
        "rounds in turn; above 1 is faster",
        "the paper timed Qwen-2.5 72B with 4k and 32k tokens before",
    ]
    return Table(columns, rows, notes)


def _ends(batches: tuple[int, ...]) -> tuple[int, int]:
    """The fewest sequences and the most."""
    return batches[0], batches[-1]


def _speedups(
    study: Study, model: str, context: int, number: int
) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for row in study.speeds(model, context):
        for regime, batch in zip(
            REGIMES, _ends(study.scale.batches), strict=True
        ):
            if row["kind"] == "decode" and row["batch"] == batch:
                found[f"{regime} {number}"] = 1 / row["ratio"]
    return found
