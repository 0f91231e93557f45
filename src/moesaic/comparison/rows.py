"""A comparison's cells as ranked rows, and what is worth remarking about them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from moesaic.comparison.entries import EQUAL_WORK, METHOD
from moesaic.comparison.options import FFN_BYTES, NEAR, Goal

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
    seconds: float  # to convert, measuring the layers included
    router_recall: float | None = None  # mean of layers
    passes: float = (
        0.0  # dense forward passes of the calibration set in that time
    )
    tuned_perplexity: dict[str, float] | None = None  # after fine-tuning
    untuned: str | None = None  # why it was not fine-tuned
    tuning_failed: bool = False  # a later run may do better
    speed: float | None = None  # tokens per second over the dense model's

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
    passes: float
    layer_error: float | None
    router_recall: float | None
    tuned: dict[str, float] | None  # over the dense model as it came
    tuned_spread: dict[str, float | None] | None
    over_tuned_dense: dict[str, float] | None
    untuned: str | None
    speed: float | None

    @property
    def goal(self) -> Goal:
        return Goal(self.equal, self.at)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def ranked(
    cells: list[Cell],
    dense: dict[str, float],
    tuned_dense: dict[str, float] | None = None,
) -> list[Row]:
    """One row per goal and method: goals as they come, then best first.

    Best is on the first text, before fine-tuning. `tuned_dense` are the perplexities
    of the dense model after fine-tuning, where methods were fine-tuned.
    """
    groups: dict[tuple[Goal, str], list[Cell]] = {}
    goals: dict[Goal, int] = {}
    for cell in cells:
        goal = Goal(cell.equal, cell.at)
        goals.setdefault(goal, len(goals))
        groups.setdefault((goal, cell.method), []).append(cell)
    rows = [_row(group, dense, tuned_dense) for group in groups.values()]
    first_text = next(iter(dense))

    def rank(row: Row) -> tuple[int, float]:
        return goals[row.goal], row.ratio[first_text]

    return sorted(rows, key=rank)


def _row(
    cells: list[Cell],
    dense: dict[str, float],
    tuned_dense: dict[str, float] | None,
) -> Row:
    first = cells[0]
    perplexities = [cell.perplexity for cell in cells]
    means, spreads = _over(perplexities, dense)
    tuned_perplexities = [
        cell.tuned_perplexity
        for cell in cells
        if cell.tuned_perplexity is not None
    ]
    tuned = None
    tuned_spread = None
    over_tuned_dense = None
    if tuned_perplexities and tuned_dense is not None:
        tuned, tuned_spread = _over(tuned_perplexities, dense)
        over_tuned_dense, _ = _over(tuned_perplexities, tuned_dense)
    loads = []
    notes: set[str] = set()
    better_static: set[int] = set()
    for cell in cells:
        if cell.load_max_over_mean:
            loads.append(cell.load_max_over_mean)
        notes.update(cell.notes)
        better_static.update(cell.better_static)
    seconds = [cell.seconds for cell in cells]
    passes = [cell.passes for cell in cells]
    errors = [error for cell in cells for error in cell.relative_error]
    untuned = [cell.untuned for cell in cells if cell.untuned is not None]
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
        macs=statistics.mean(cell.macs for cell in cells),
        bytes=statistics.mean(cell.bytes for cell in cells),
        ffn_macs=statistics.mean(cell.ffn_macs for cell in cells),
        ffn_bytes=statistics.mean(cell.ffn_bytes for cell in cells),
        ratio=means,
        spread=spreads,
        seeds=len(cells),
        load_max_over_mean=max(loads, default=None),
        dead_experts=max(cell.dead_experts for cell in cells),
        notes=sorted(notes),
        better_static=sorted(better_static),
        seconds=statistics.mean(seconds),
        passes=statistics.mean(passes),
        layer_error=_mean(errors),
        router_recall=_mean([cell.router_recall for cell in cells]),
        tuned=tuned,
        tuned_spread=tuned_spread,
        over_tuned_dense=over_tuned_dense,
        untuned=untuned[0] if untuned else None,
        speed=_mean([cell.speed for cell in cells]),
    )


def _over(
    perplexities: list[dict[str, float]], base: dict[str, float]
) -> tuple[dict[str, float], dict[str, float | None]]:
    """By text, the mean over a base's perplexity and its spread over the seeds."""
    means = {}
    spreads = {}
    for text, base_perplexity in base.items():
        ratios = [values[text] / base_perplexity for values in perplexities]
        means[text] = statistics.mean(ratios)
        spreads[text] = _spread(ratios)
    return means, spreads


def _mean(values: Sequence[float | None]) -> float | None:
    """Of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return statistics.mean(known)


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
    """What conversions noted, and where routing does not beat static pruning.

    Also which rows were not fine-tuned where others were, and why.
    """
    lines = _untuned(rows)
    for row in rows:
        if row.saves:
            label = f"{row.method} {row.layout}"
            lines += [f"{label}: {note}" for note in row.notes]
    for goal, group in by_goal(rows).items():
        lines += _remarks_at(goal, group)
    return list(dict.fromkeys(lines))


def _untuned(rows: list[Row]) -> list[str]:
    """A line for each reason, with the methods that it keeps from fine-tuning."""
    methods: dict[str, list[str]] = {}
    for row in rows:
        if row.untuned is not None:
            named = methods.setdefault(row.untuned, [])
            if row.method not in named:
                named.append(row.method)
    return [
        f"not fine-tuned: {', '.join(named)} ({reason})"
        for reason, named in methods.items()
    ]


def _remarks_at(goal: Goal, rows: list[Row]) -> list[str]:
    """Of the rows of one table, best first."""
    lines = []
    for row in rows:
        missed = _missed(goal, row)
        if missed is not None:
            lines.append(missed)
    rivals = [rank for rank, row in enumerate(rows) if _is_static_rival(row)]
    equal_neurons = [rank for rank in rivals if rows[rank].role != EQUAL_WORK]
    if not equal_neurons:
        return lines
    where = _where(goal)
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


def _where(goal: Goal) -> str:
    """A table's budget, as a line begins with it; nothing for one layout."""
    return "" if goal.at is None else f"at {goal.words} "


def _missed(goal: Goal, row: Row) -> str | None:
    """A line where a row is not near its table's budget; else None.

    At equal work too: experts of a mixture that see too few tokens stay whole, which no
    plan knows.
    """
    if goal.at is None or row.role == EQUAL_WORK:
        return None
    if goal.is_work:
        reads = goal.equal == FFN_BYTES
        work = row.ffn_bytes if reads else row.ffn_macs
        if abs(work - goal.at) <= NEAR:
            return None
        what = "bytes" if reads else "multiply-accumulates"
        return (
            f"{_where(goal)}{row.method} takes {work:.1%} of the dense FFNs' {what}: "
            "it comes no nearer"
        )
    active = row.active_ffn_fraction
    if active == 1 and row.ffn_macs < 1:
        # Whole blocks are gone, or all layers are narrower.
        if abs(row.ffn_macs - (1 - goal.at)) <= NEAR:
            return None
        return (
            f"{_where(goal)}{row.method} runs {row.ffn_macs:.1%} of the FFNs' "
            "multiply-accumulates: it comes no nearer"
        )
    distance = abs(active - (1 - goal.at))
    if distance <= NEAR or not (row.routes or row.repairs):
        return None
    return f"{_where(goal)}{row.method} runs {active:.1%}: its experts fit no nearer"


def _is_static_rival(row: Row) -> bool:
    """Static pruning with repair, at equal neurons or at equal work."""
    return not row.routes and row.repairs


def _competes(row: Row) -> bool:
    """Whether to lose against static pruning is worth a line."""
    routed_method = row.routes and row.role == METHOD
    return routed_method or not row.saves
