"""A plot of rows that were measured on different days, from one JSON file.

    python benchmarks/frontier_rows.py benchmarks/results/smollm2-135m_frontier_2026-11-26.json

Writes a PNG of the same name beside it. --methods takes some of them, with semicolons between.
Rows say on how many calibration tokens and by which `undo_drift` they were made.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from moesaic.comparison.entries import METHOD, REFERENCE
from moesaic.comparison.plot import plot
from moesaic.comparison.rows import Row

# What no engine runs, and what is there to compare with.
REFERENCES = ("neuron-oracle", "oracle", "random", "static")


def name_of(row: dict[str, Any]) -> str:
    """The method, and the drift that it leaves where that is not its default."""
    if row["undo_drift"] == 0:
        return f"{row['method']}, undo_drift=0"
    return str(row["method"])


def as_row(measured: dict[str, Any], text: str) -> Row:
    """A row of a comparison: what the plot does not read is None."""
    is_reference = measured["method"] in REFERENCES
    known = {
        "method": name_of(measured),
        "role": REFERENCE if is_reference else METHOD,
        "saves": not is_reference,
        "macs": measured["macs"],
        "bytes": measured["bytes"],
        "ratio": {text: measured["over_dense"]},
        "spread": {text: measured["spread"]},
        "speed": None,
    }
    values: dict[str, Any] = dict.fromkeys(field.name for field in fields(Row))
    return Row(**values | known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--methods", help="some of them, with semicolons")
    options = parser.parse_args()
    content = json.loads(options.file.read_text())
    text = content["text"]
    rows = [as_row(measured, text) for measured in content["rows"]]
    if options.methods is not None:
        # A name may hold a comma itself.
        names = options.methods.split(";")
        rows = [row for row in rows if row.method in names]
    image = plot(content["model"], {text: content["dense"]}, rows)
    options.file.with_suffix(".png").write_bytes(image)


if __name__ == "__main__":
    main()
