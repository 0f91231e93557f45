"""A comparison as CSV: one line a row, for spreadsheets and plots of one's own."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from io import StringIO
from typing import Any

from moesaic.comparison.missing import Missing
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
    "layer_error",
    "router_recall",
    "load_max_over_mean",
    "dead_experts",
    "seconds",
    "passes",
    "speed",
)
# Fields with a value for each text, and what their columns are called.
_BY_TEXT = {
    "ratio": "ratio",
    "spread": "spread",
    "tuned": "tuned",
    "tuned_spread": "tuned spread",
    "over_tuned_dense": "over tuned dense",
}


def csv_text(rows: list[Row], missing: list[Missing]) -> str:
    """The rows as ranked, then what is missing, whose `reason` says why.

    After the fields come those of each text. What is not known is empty. Numbers are
    written in full, as in compare.json. A row's `reason` is why it was not fine-tuned.
    """
    texts = list(rows[0].ratio) if rows else []
    by_text = [
        f"{words} {text}" for text in texts for words in _BY_TEXT.values()
    ]
    file = StringIO()
    writer = csv.DictWriter(
        file,
        [*_FIELDS, *by_text, "step", "reason"],
        restval="",
        lineterminator="\n",
    )
    writer.writeheader()
    for row in rows:
        writer.writerow(_cells(row, texts))
    for lack in missing:
        cells = {
            "equal": lack.equal,
            "at": lack.at,
            "method": lack.method,
            "role": lack.role,
            "step": lack.step,
            "reason": lack.reason,
        }
        writer.writerow(cells)
    return file.getvalue()


def _cells(row: Row, texts: list[str]) -> dict[str, Any]:
    cells = {name: getattr(row, name) for name in _FIELDS}
    for name, words in _BY_TEXT.items():
        values: Mapping[str, Any] = getattr(row, name) or {}
        for text in texts:
            cells[f"{words} {text}"] = values.get(text)
    cells["reason"] = row.untuned
    return cells
