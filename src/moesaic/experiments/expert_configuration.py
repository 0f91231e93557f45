"""Figure 6: accuracy by how many experts are shared, routed and there in all."""

from __future__ import annotations

from moesaic.experiments.contents import FIVE
from moesaic.experiments.rows import accuracy_row, task_columns
from moesaic.experiments.study import Study
from moesaic.experiments.table import Column, Row, Table

COLUMNS = (*task_columns(FIVE), Column("wiki", "perplexity, wiki", 3))


def run(study: Study) -> Table:
    notes = [
        "cmoe, fine-tuned, 25 % of the neurons skipped in every configuration",
        "the paper's figure has no numbers to stand beside ours",
    ]
    rows = []
    for layout in study.scale.layouts:
        model = study.tuned(study.converted("cmoe", layout))
        asked = accuracy_row(study, layout, model, FIVE, notes)
        values = dict(asked.values)
        values["wiki"] = study.perplexity(model, "wiki")
        rows.append(Row(layout, values, {}, asked.errors))
    return Table(COLUMNS, rows, notes)
