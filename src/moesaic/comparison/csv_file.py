"""A comparison as CSV: one line a row, for spreadsheets and plots of one's own."""

from __future__ import annotations

import csv
from io import StringIO

from moesaic.comparison.rows import Row

# Fields of a row that are one value each, in the order of the columns.
_FIELDS = (
    "equal",
    "at",
    "method",
    "role",
    "saves",
    "layout",
    "sparsity",
    "active_ffn_fraction",
    "macs",
    "bytes",
    "ffn_macs",
    "ffn_bytes",
    "seeds",
    "load_max_over_mean",
    "dead_experts",
    "seconds",
)


def csv_text(rows: list[Row]) -> str:
    """The rows as ranked; after the fields, ratio and spread of each text.

    What is not known is empty. Numbers are written in full, as in compare.json.
    """
    texts = list(rows[0].ratio) if rows else []
    columns = list(_FIELDS)
    for text in texts:
        columns += [f"ratio {text}", f"spread {text}"]
    file = StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells = [getattr(row, name) for name in _FIELDS]
        for text in texts:
            cells += [row.ratio[text], row.spread[text]]
        writer.writerow(cells)
    return file.getvalue()
