"""Figure 4: quality and time over the number of fine-tuning windows."""

from __future__ import annotations

from moesaic.experiments.rows import accuracy_row, task_columns
from moesaic.experiments.study import LAYOUT, Study
from moesaic.experiments.table import Column, Line, Panel, Row, Table

COLUMNS = (
    Column("wiki", "perplexity, wiki", 3),
    *task_columns(["piqa"]),
    Column("minutes", "construction and fine-tuning (min)", 2, timed=True),
)


def run(study: Study) -> Table:
    made = study.converted("cmoe", LAYOUT)
    construction = study.seconds_of(made)
    notes = [
        f"cmoe {LAYOUT}, fine-tuned by next tokens; the learning rate fits the length of "
        "the run",
        "the paper's figure has no numbers to stand beside ours",
    ]
    rows = []
    for windows in study.scale.efficiency:
        model = study.tuned(made, windows)
        name = f"{windows} windows"
        asked = accuracy_row(study, name, model, ["piqa"], notes)
        values = dict(asked.values)
        values["wiki"] = study.perplexity(model, "wiki")
        tuning = study.seconds_of(model) if windows > 0 else 0.0
        if construction is not None and tuning is not None:
            values["minutes"] = (construction + tuning) / 60
        rows.append(Row(name, values, {}, asked.errors))
    return Table(COLUMNS, rows, notes, _panels(study, rows))


def _panels(study: Study, rows: list[Row]) -> list[Panel]:
    panels = []
    for column in COLUMNS[:2]:
        x = []
        y = []
        spread = []
        for windows, row in zip(study.scale.efficiency, rows, strict=True):
            value = row.values.get(column.key)
            if isinstance(value, float):
                x.append(windows)
                y.append(value)
                spread.append(row.errors.get(column.key) or 0.0)
        if y:
            line = Line("cmoe", x, y, spread)
            panels.append(Panel("", "fine-tuning windows", column.head, [line]))
    return panels
