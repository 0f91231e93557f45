"""What a comparison knows so far, and the folder that it is kept in."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moesaic.comparison.csv_file import csv_text
from moesaic.comparison.entries import Entry
from moesaic.comparison.missing import Missing, lines_of
from moesaic.comparison.options import CompareOptions
from moesaic.comparison.page import markdown
from moesaic.comparison.plot import plot
from moesaic.comparison.rows import Cell, ranked, remarks
from moesaic.errors import MoesaicError, reason_of
from moesaic.output.atomic import write_file


@dataclass
class Results:
    """Perplexities of the dense model, before and after tuning, and finished cells.

    `missing` is what this run lacks; what failed in an earlier run is tried again.
    """

    options: CompareOptions
    settings: dict[str, Any]
    dense: dict[str, float] = field(default_factory=dict)
    tuned_dense: dict[str, float] | None = None
    dense_seconds: float | None = None
    cells: dict[str, Cell] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)

    @classmethod
    def resumed(
        cls, options: CompareOptions, settings: dict[str, Any]
    ) -> Results:
        """The cells that an earlier run finished.

        Raises MoesaicError where it had other settings.
        """
        fresh = cls(options, settings)
        if options.output is None:
            return fresh
        path = options.output / "compare.json"
        if not path.exists():
            return fresh
        if not options.resume:
            raise MoesaicError(
                f"{path} exists; pass --resume to go on with it, or choose another "
                "output"
            )
        try:
            values: dict[str, Any] = json.loads(path.read_text("utf-8"))
            earlier_settings = values["settings"]
            dense = values["dense"]
            tuned_dense = values["tuned_dense"]
            dense_seconds = values["dense_seconds"]
            cells = {
                key: Cell.from_dict(cell)
                for key, cell in values["cells"].items()
            }
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:
            raise MoesaicError(
                f"{path} cannot be resumed ({reason_of(error)}); remove it"
            ) from error
        for key, value in settings.items():
            earlier = earlier_settings.get(key)
            if earlier != value:
                raise MoesaicError(
                    f"{path} was made with {key} = {earlier}, this run has {value}; "
                    "choose another output"
                )
        whole = {
            key: cell for key, cell in cells.items() if not cell.tuning_failed
        }
        return cls(options, settings, dense, tuned_dense, dense_seconds, whole)

    def twin(self, entry: Entry, seed: int) -> Cell | None:
        """The cell of another table that the same conversion has filled."""
        ending = entry.conversion(seed)
        for key, cell in self.cells.items():
            if key.endswith(ending):
                return replace(
                    cell,
                    method=entry.label,
                    role=entry.role,
                    equal=entry.goal.equal,
                    at=entry.goal.at,
                    sparsity=entry.sparsity,
                )
        return None

    def to_dict(self) -> dict[str, Any]:
        cells = {key: cell.to_dict() for key, cell in self.cells.items()}
        missing = [row.to_dict() for row in self.missing]
        return {
            "settings": self.settings,
            "dense": self.dense,
            "tuned_dense": self.tuned_dense,
            "dense_seconds": self.dense_seconds,
            "cells": cells,
            "missing": missing,
        }

    def write(self, result: dict[str, Any] | None = None) -> None:
        values = result
        if values is None:
            values = self.to_dict()
            values["rows"] = []
        text = json.dumps(values, indent=2)
        _write(self.options.output, "compare.json", text + "\n")

    def finish(self, keys: list[str]) -> dict[str, Any]:
        """Ranks the cells of this run; writes table, page and plot."""
        cells = [self.cells[key] for key in keys if key in self.cells]
        rows = ranked(cells, self.dense, self.tuned_dense)
        result = self.to_dict()
        result["rows"] = [row.to_dict() for row in rows]
        result["remarks"] = lines_of(self.missing) + remarks(rows)
        self.write(result)
        output = self.options.output
        _write(output, "compare.csv", csv_text(rows, self.missing))
        _write(output, "compare.md", markdown(result, rows, self.missing))
        if rows:
            image = plot(self.settings["model"], self.dense, rows)
            _write(output, "compare.png", image)
        return result


def _write(output: Path | None, name: str, content: str | bytes) -> None:
    """The whole file or the old one: a killed run leaves no half."""
    if output is None:
        return
    path = output / name
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
    except OSError as error:
        raise MoesaicError(f"cannot write {path}: {error}") from error
