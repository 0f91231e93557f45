"""A table or figure as data: rows beside the paper's, and what its plot shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Value = float | int | str | None


@dataclass(frozen=True)
class Column:
    """What stands in a column, with its unit; `timed` numbers differ from run to run."""

    key: str
    head: str
    digits: int = 2
    timed: bool = False


@dataclass(frozen=True)
class Row:
    """Values by column, standard errors where known, and the paper's own numbers."""

    name: str
    values: Mapping[str, Value]
    paper: Mapping[str, Value] = field(default_factory=dict)
    errors: Mapping[str, float | None] = field(default_factory=dict)
    is_reference: bool = False


@dataclass(frozen=True)
class Line:
    """A curve of a panel, with bars of `spread` where known."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] | None = None
    is_reference: bool = False


@dataclass(frozen=True)
class Panel:
    """Curves on one pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_y: bool = False


@dataclass(frozen=True)
class Table:
    """What an experiment gives. Without panels its plot shows the columns, a dot a row."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    panels: Sequence[Panel] = ()

    def numbers(self) -> dict[str, Any]:
        """All that two runs have in common, as plain data."""
        kept = [column.key for column in self.columns if not column.timed]
        return {
            "columns": [asdict(column) for column in self.columns],
            "rows": [_row(row, kept) for row in self.rows],
            "notes": list(self.notes),
            "panels": [asdict(panel) for panel in self.panels],
        }

    def times(self) -> dict[str, dict[str, Value]]:
        """By row, what was timed."""
        timed = [column.key for column in self.columns if column.timed]
        return {
            row.name: {key: row.values.get(key) for key in timed}
            for row in self.rows
            if timed
        }


def _row(row: Row, keys: list[str]) -> dict[str, Any]:
    return {
        "name": row.name,
        "values": {key: row.values.get(key) for key in keys},
        "errors": dict(row.errors),
        "paper": dict(row.paper),
    }
