"""A comparison's cells as ranked rows, and what is worth remarking about them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from moesaic.comparison.entries import EQUAL_WORK, METHOD
from moesaic.comparison.options import NEAR, SPARSITY, Goal

DEAD = 0.05  # of the mean load, below which an expert counts as dead


@dataclass(frozen=True)
class Cell:
    """One conversion, evaluated: a method at a budget with one seed."""

    method: str  # as it is shown
    role: str
    saves: bool  # False for a reference that no model can hold
    routes: bool
    repairs: bool
    equal: str  # what the rows of its table have in common: a Goal
    at: float | None
    sparsity: float | None  # that it was planned with
    seed: int
    layout: str
    shape: str
    active_ffn_fraction: float
    macs: float  # over the dense model's
    bytes: float
    ffn_macs: float  # over the dense FFNs'
    ffn_bytes: float
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
        names = [field.name for field in fields(cls)]
        return cls(**{name: values[name] for name in names})

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
    equal: str
    at: float | None
    sparsity: float | None
    layout: str
    active_ffn_fraction: float
    macs: float
    bytes: float
    ffn_macs: float
    ffn_bytes: float
    ratio: dict[str, float]
    spread: dict[str, float | None]
    seeds: int
    load_max_over_mean: float | None
    dead_experts: int
    notes: list[str]
    better_static: list[int]
    seconds: float

    @property
    def goal(self) -> Goal:
        return Goal(self.equal, self.at)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def ranked(cells: list[Cell], dense: dict[str, float]) -> list[Row]:
    """One row per goal and method: goals as they come, then best first.

    Best is on the first text.
    """
    groups: dict[tuple[Goal, str], list[Cell]] = {}
    goals: dict[Goal, int] = {}
    for cell in cells:
        goal = Goal(cell.equal, cell.at)
        goals.setdefault(goal, len(goals))
        groups.setdefault((goal, cell.method), []).append(cell)
    rows = [_row(group, dense) for group in groups.values()]
    first_text = next(iter(dense))

    def rank(row: Row) -> tuple[int, float]:
        return goals[row.goal], row.ratio[first_text]

    return sorted(rows, key=rank)


def _row(cells: list[Cell], dense: dict[str, float]) -> Row:
    first = cells[0]
    means = {}
    spreads = {}
    for text, dense_perplexity in dense.items():
        ratios = [cell.perplexity[text] / dense_perplexity for cell in cells]
        means[text] = statistics.mean(ratios)
        spreads[text] = _spread(ratios)
    loads = []
    notes: set[str] = set()
    better_static: set[int] = set()
    for cell in cells:
        if cell.load_max_over_mean:
            loads.append(cell.load_max_over_mean)
        notes.update(cell.notes)
        better_static.update(cell.better_static)
    seconds = [cell.seconds for cell in cells]
    return Row(
        method=first.method,
        role=first.role,
        saves=first.saves,
        routes=first.routes,
        repairs=first.repairs,
        equal=first.equal,
        at=first.at,
        sparsity=first.sparsity,
        layout=first.layout,
        active_ffn_fraction=first.active_ffn_fraction,
        macs=first.macs,
        bytes=first.bytes,
        ffn_macs=first.ffn_macs,
        ffn_bytes=first.ffn_bytes,
        ratio=means,
        spread=spreads,
        seeds=len(cells),
        load_max_over_mean=max(loads, default=None),
        dead_experts=max(cell.dead_experts for cell in cells),
        notes=sorted(notes),
        better_static=sorted(better_static),
        seconds=statistics.mean(seconds),
    )


def _spread(values: list[float]) -> float | None:
    """The standard deviation; None for one value."""
    if len(values) == 1:
        return None
    return statistics.stdev(values)


def by_goal(rows: list[Row]) -> dict[Goal, list[Row]]:
    """The rows of each table, in their order."""
    groups: dict[Goal, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.goal, []).append(row)
    return groups


def remarks(rows: list[Row]) -> list[str]:
    """What conversions noted, and where routing does not beat static pruning."""
    lines = []
    for row in rows:
        if row.saves:
            label = f"{row.method} {row.layout}"
            lines += [f"{label}: {note}" for note in row.notes]
    for goal, group in by_goal(rows).items():
        lines += _remarks_at(goal, group)
    return lines


def _remarks_at(goal: Goal, rows: list[Row]) -> list[str]:
    """Of the rows of one table, best first."""
    rivals = [rank for rank, row in enumerate(rows) if _is_static_rival(row)]
    equal_neurons = [rank for rank in rivals if rows[rank].role != EQUAL_WORK]
    if not equal_neurons:
        return []
    where = "" if goal.at is None else f"at {goal.words} "
    lines = []
    for row in rows:
        if goal.equal == SPARSITY and row.role != EQUAL_WORK:
            active = row.active_ffn_fraction
            distance = abs(active - (1 - (goal.at or 0)))
            if distance > NEAR and (row.routes or row.repairs):
                lines.append(
                    f"{where}{row.method} runs {active:.1%}: its experts fit no nearer"
                )
    for rank in rivals:
        rival = rows[rank]
        worse = rows[rank + 1 :]
        beaten = [row.method for row in worse if _competes(row)]
        if beaten:
            names = ", ".join(beaten)
            lines.append(f"{where}{rival.method} beats {names}")
    better = rows[: equal_neurons[0]]
    for row in better:
        if row.better_static and row.saves:
            layers = ", ".join(str(layer) for layer in row.better_static)
            lines.append(
                f"{where}static pruning beats {row.method} in layer {layers}"
            )
    return lines


def _is_static_rival(row: Row) -> bool:
    """Static pruning with repair, at equal neurons or at equal work."""
    return not row.routes and row.repairs


def _competes(row: Row) -> bool:
    """Whether to lose against static pruning is worth a line."""
    routed_method = row.routes and row.role == METHOD
    return routed_method or not row.saves
