"""A comparison's cells as ranked rows, and what is worth remarking about them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from moesaic.comparison.entries import EQUAL_WORK, METHOD

NEAR = 0.02  # of the neurons: how near a budget counts as met
DEAD = 0.05  # of the mean load, below which an expert counts as dead


@dataclass(frozen=True)
class Cell:
    """One conversion, evaluated: a method at a budget with one seed."""

    method: str  # as it is shown
    role: str
    saves: bool  # False for a reference that no model can hold
    routes: bool
    repairs: bool
    sparsity: float | None
    seed: int
    layout: str
    shape: str
    active_ffn_fraction: float
    macs: float  # over the dense model's
    perplexity: dict[str, float]
    relative_error: list[float]
    better_static: list[int]
    load_max_over_mean: float | None
    dead_experts: int
    notes: list[str]
    seconds: float

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cell:
        """From JSON. Raises KeyError where it was written by another version."""
        return cls(**{one.name: values[one.name] for one in fields(cls)})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Row:
    """A method at a budget: means over seeds, and standard deviations as `spread`."""

    method: str
    role: str
    saves: bool
    routes: bool
    repairs: bool
    sparsity: float | None
    layout: str
    active_ffn_fraction: float
    macs: float
    ratio: dict[str, float]
    spread: dict[str, float | None]
    seeds: int
    load_max_over_mean: float | None
    dead_experts: int
    notes: list[str]
    better_static: list[int]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def ranked(cells: list[Cell], dense: dict[str, float]) -> list[Row]:
    """One row per sparsity and method, best first on the first text."""
    groups: dict[tuple[float | None, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.sparsity, cell.method), []).append(cell)
    rows = [_row(group, dense) for group in groups.values()]
    text = next(iter(dense))
    return sorted(rows, key=lambda row: (row.sparsity or 0, row.ratio[text]))


def _row(cells: list[Cell], dense: dict[str, float]) -> Row:
    first = cells[0]
    ratios = {
        text: [cell.perplexity[text] / base for cell in cells]
        for text, base in dense.items()
    }
    loads = [
        cell.load_max_over_mean for cell in cells if cell.load_max_over_mean
    ]
    notes = {note for cell in cells for note in cell.notes}
    behind = {layer for cell in cells for layer in cell.better_static}
    return Row(
        method=first.method,
        role=first.role,
        saves=first.saves,
        routes=first.routes,
        repairs=first.repairs,
        sparsity=first.sparsity,
        layout=first.layout,
        active_ffn_fraction=first.active_ffn_fraction,
        macs=first.macs,
        ratio={
            text: statistics.mean(values) for text, values in ratios.items()
        },
        spread={text: _spread(values) for text, values in ratios.items()},
        seeds=len(cells),
        load_max_over_mean=max(loads, default=None),
        dead_experts=max(cell.dead_experts for cell in cells),
        notes=sorted(notes),
        better_static=sorted(behind),
        seconds=statistics.mean(cell.seconds for cell in cells),
    )


def _spread(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def by_sparsity(rows: list[Row]) -> dict[float | None, list[Row]]:
    """The rows of each budget, in their order."""
    groups: dict[float | None, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.sparsity, []).append(row)
    return groups


def remarks(rows: list[Row]) -> list[str]:
    """What conversions noted, and where routing does not beat static pruning."""
    lines = []
    for row in rows:
        if row.saves:
            lines += [
                f"{row.method} {row.layout}: {note}" for note in row.notes
            ]
    for sparsity, here in by_sparsity(rows).items():
        lines += _remarks_at(sparsity, here)
    return lines


def _remarks_at(sparsity: float | None, rows: list[Row]) -> list[str]:
    static = [place for place, row in enumerate(rows) if _is_static_rival(row)]
    reference = [place for place in static if rows[place].role != EQUAL_WORK]
    if not reference:
        return []
    where = "" if sparsity is None else f"at sparsity {sparsity:g} "
    lines = []
    for row in rows:
        if sparsity is not None and row.role != EQUAL_WORK:
            distance = abs(row.active_ffn_fraction - (1 - sparsity))
            if distance > NEAR and (row.routes or row.repairs):
                lines.append(
                    f"{where}{row.method} runs {row.active_ffn_fraction:.1%}: its "
                    "experts fit no nearer"
                )
    for place in static:
        behind = [row.method for row in rows[place + 1 :] if _competes(row)]
        if behind:
            lines.append(
                f"{where}{rows[place].method} beats {', '.join(behind)}"
            )
    for row in rows[: reference[0]]:
        if row.better_static and row.saves:
            layers = ", ".join(map(str, row.better_static))
            lines.append(
                f"{where}static pruning beats {row.method} in layer {layers}"
            )
    return lines


def _is_static_rival(row: Row) -> bool:
    """Static pruning with repair, at equal neurons or at equal work."""
    return not row.routes and row.repairs


def _competes(row: Row) -> bool:
    """Whether to lose against static pruning is worth a line."""
    asked_for = row.routes and row.role == METHOD
    return asked_for or not row.saves
