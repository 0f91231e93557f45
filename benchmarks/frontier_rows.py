"""A plot of rows that were measured on different days, from one JSON file.

    python benchmarks/frontier_rows.py benchmarks/results/smollm2-135m_frontier_2026-11-26.json

Writes a PNG of the same name beside it. --methods takes some of the methods, with commas. Rows
say on how many calibration tokens and by which `undo_drift` they were made.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from moesaic.comparison.plot import plot
from moesaic.comparison.rows import Row


def as_row(measured: dict[str, Any], text: str) -> Row:
    """A row of a comparison: what the plot does not read is None."""
    values: dict[str, Any] = {}
    for field in fields(Row):
        values[field.name] = measured.get(field.name)
    values["ratio"] = {text: measured["over_dense"]}
    values["spread"] = {text: measured["spread"]}
    return Row(**values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--methods", help="some of them, with commas")
    options = parser.parse_args()
    content = json.loads(options.file.read_text())
    text = content["text"]
    rows = [as_row(measured, text) for measured in content["rows"]]
    if options.methods is not None:
        names = options.methods.split(",")
        rows = [row for row in rows if row.method in names]
    image = plot(content["model"], {text: content["dense"]}, rows)
    options.file.with_suffix(".png").write_bytes(image)


if __name__ == "__main__":
    main()
