"""Figure 5: how evenly experts are used, before fine-tuning and after it."""

from __future__ import annotations

from typing import Any

from moesaic.experiments.study import LAYOUT, Study
from moesaic.experiments.table import Column, Line, Panel, Row, Table

COLUMNS = (
    Column("before", "most used expert over the mean, before", 3),
    Column("after", "the same after", 3),
    Column("dead", "experts hardly used, after", 0),
)


def run(study: Study) -> Table:
    model = study.tuned(study.converted("cmoe", LAYOUT))
    report = study.tuning_report(model)
    before = report["loads_before"]
    after = report["loads_after"]
    rows = []
    for one, other in zip(before, after, strict=True):
        values = {
            "before": one["max_over_mean"],
            "after": other["max_over_mean"],
            "dead": other["dead"],
        }
        rows.append(Row(f"layer {one['group']}", values))
    axes = ("expert, by load", "load over the mean")
    lines = [_line("before", before[-1]), _line("after", after[-1])]
    panel = Panel("last layer", *axes, lines)
    notes = [
        f"cmoe {LAYOUT}; loads on training tokens, bias moved by 0.001 a step",
        "the paper's figure has no numbers to stand beside ours",
    ]
    return Table(COLUMNS, rows, notes, [panel])


def _line(name: str, load: dict[str, Any]) -> Line:
    shares = sorted(load["share"], reverse=True)
    ranks = list(range(1, len(shares) + 1))
    over_mean = [share * len(shares) for share in shares]
    return Line(name, ranks, over_mean, is_reference=name == "before")
