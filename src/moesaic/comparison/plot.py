"""A comparison as a plot: what is lost against the work of one token, and its time.

Perplexity over dense is drawn as its distance from 1, on a log scale: methods that lose
0.2 % and 2 % can be told apart as well as ones that lose 20 % and 200 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.comparison.entries import EQUAL_WORK, METHOD
from moesaic.comparison.rows import Row
from moesaic.plot_style import (
    GREY,
    LINE_HEIGHT,
    Look,
    looks_of,
    name_beside,
    new_figure,
    plain,
    png,
    spread_out,
)

_CAPTION = (
    "bars: standard deviation over seeds; dotted: references; arrows: beyond the upper "
    "edge, with the value at the least work"
)
_LEAST_LOSS = 1e-3  # the lowest that is drawn: seeds differ by about as much
_ROOM = 1.6  # between the last curve that is seen whole and the upper edge, as a factor
# In inches: of what stands above and below a panel, and of a usual figure.
_MARGINS = 1.3
_USUAL_HEIGHT = 6.5
_PANEL_WIDTH = 6.5


@dataclass(frozen=True)
class Point:
    """A row as it is drawn: work over dense, loss (perplexity over dense less 1)."""

    work: float
    loss: float
    spread: float


@dataclass(frozen=True)
class Curve:
    """A method through its budgets, the least work last."""

    method: str
    is_reference: bool
    points: list[Point]

    @property
    def last(self) -> Point:
        return self.points[-1]


def curves(
    rows: list[Row], text: str, work: Callable[[Row], float]
) -> list[Curve]:
    """One for each method; static pruning of another's work is static pruning."""
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        method = row.method
        if row.role == EQUAL_WORK:
            method = method.partition(",")[0]
        by_method.setdefault(method, []).append(row)
    found = []
    for method, group in by_method.items():
        points = {}
        for row in group:
            loss = max(row.ratio[text] - 1, _LEAST_LOSS)
            points[work(row)] = Point(work(row), loss, row.spread[text] or 0.0)
        ordered = [points[work] for work in sorted(points, reverse=True)]
        is_reference = not any(row.role == METHOD for row in group)
        curve = Curve(method, is_reference or not group[0].saves, ordered)
        found.append(curve)
    return found


def upper_edge(found: list[Curve]) -> float:
    """The largest loss drawn: half of the curves are seen whole.

    All of them where the others are not far above.
    """
    worst = [max(point.loss for point in curve.points) for curve in found]
    half = statistics.median_high(worst) * _ROOM
    return min(half, max(worst) * _ROOM)


def edges(panels: Iterable[list[Curve]]) -> tuple[float, float]:
    """The least and the largest loss drawn: panels share their axis."""
    found = list(panels)
    top = max(upper_edge(curves) for curves in found)
    least = min(
        point.loss
        for curves in found
        for curve in curves
        for point in curve.points
    )
    return min(least, top) / _ROOM, top


def panels_of(rows: list[Row], text: str) -> dict[str, list[Curve]]:
    """The curves of each panel, by what they are drawn against, all over dense."""
    against = {
        "multiply-accumulates for one token": curves(
            rows, text, lambda row: row.macs
        ),
        "bytes of weights read for one token": curves(
            rows, text, lambda row: row.bytes
        ),
    }
    timed = [row for row in rows if row.speed is not None]
    if timed:
        against["time of one token"] = curves(timed, text, _time_over_dense)
    return against


def _time_over_dense(row: Row) -> float:
    assert row.speed is not None
    return 1 / row.speed


def plot(model: str, dense: dict[str, float], rows: list[Row]) -> bytes:
    """PNG, on the first text: against MACs, against bytes, and against time if measured."""
    text = next(iter(dense))
    against = panels_of(rows, text)
    most = max(len(found) for found in against.values())
    # One label a line beside each panel: the more curves, the higher.
    height = max(_USUAL_HEIGHT, _MARGINS + LINE_HEIGHT * most)
    figure = new_figure(_PANEL_WIDTH * len(against), height)
    panels = figure.subplots(1, len(against), sharey=True)
    looks = looks_of(
        {
            curve.method: curve.is_reference
            for found in against.values()
            for curve in found
        }
    )
    line_height = LINE_HEIGHT / (height - _MARGINS)
    bottom, top = edges(against.values())
    for panel, (words, found) in zip(panels, against.items(), strict=True):
        _draw(panel, found, looks, line_height, bottom, top)
        panel.set_xlabel(f"{words}, over dense")
    panels[0].set_ylabel("perplexity over dense")
    model_name = Path(model).name
    text_name = Path(text).name
    figure.suptitle(f"{model_name}, {text_name}")
    figure.supxlabel(_CAPTION, fontsize=8, color=GREY)
    return png(figure)


def _draw(
    panel: Any,
    found: list[Curve],
    looks: dict[str, Look],
    line_height: float,
    bottom: float,
    top: float,
) -> None:
    """The curves of one panel, work falling to the right, and their names there."""
    panel.set_yscale("log")
    panel.set_ylim(bottom, top)
    for curve in found:
        _draw_curve(panel, curve, looks[curve.method], top)
    panel.invert_xaxis()
    if panel.get_xlim()[0] > 1:
        panel.axvline(1.0, color=GREY, linewidth=0.8)
    panel.xaxis.set_major_formatter("{x:.3g}")
    _label_losses(panel, bottom, top)
    plain(panel)
    _name_curves(panel, found, looks, bottom, top, line_height)


def _draw_curve(panel: Any, curve: Curve, look: Look, top: float) -> None:
    works = [point.work for point in curve.points]
    losses = [point.loss for point in curve.points]
    down = []
    up = []
    for point in curve.points:
        spread = point.spread if point.loss <= top else 0.0
        # A log scale knows no bar that crosses a perplexity of 1 over dense.
        down.append(min(spread, point.loss - _LEAST_LOSS))
        up.append(spread)
    panel.errorbar(
        works,
        losses,
        yerr=[down, up],
        color=look.colour,
        linestyle=look.line,
        linewidth=look.width,
        marker=look.marker,
        markersize=4,
        capsize=3,
        zorder=2 if curve.is_reference else 3,
    )
    for point in curve.points:
        if point.loss > top:
            panel.plot(
                [point.work],
                [top],
                "^",
                color=look.colour,
                clip_on=False,
                zorder=4 if curve.is_reference else 5,
            )


def _label_losses(panel: Any, bottom: float, top: float) -> None:
    """The axis says perplexity over dense, not the distance from 1."""
    ticks = []
    for exponent in range(-4, 4):
        ticks += [first * 10.0**exponent for first in (1, 2, 5)]
    shown = [tick for tick in ticks if bottom <= tick <= top]
    names = [f"{1 + tick:.4g}" for tick in shown]
    panel.set_yticks(shown, names)
    panel.set_yticks([], minor=True)


def _name_curves(
    panel: Any,
    found: list[Curve],
    looks: dict[str, Look],
    bottom: float,
    top: float,
    line_height: float,
) -> None:
    """Each name beside the panel, with a thin line to the end of its curve."""
    scale = math.log(top / bottom)
    heights = [math.log(curve.last.loss / bottom) / scale for curve in found]
    placed = spread_out(heights, line_height)
    for curve, height in zip(found, placed, strict=True):
        name = curve.method
        if curve.last.loss > top:
            name = f"{name} \N{UPWARDS ARROW} {1 + curve.last.loss:.3g}"
        end = (curve.last.work, min(curve.last.loss, top))
        name_beside(panel, name, end, height, looks[curve.method].colour)
