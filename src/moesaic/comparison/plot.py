"""A comparison as a plot: what is lost against the work of one token, twice.

Perplexity over dense is drawn as its distance from 1, on a log scale: methods that lose
0.2 % and 2 % can be told apart as well as ones that lose 20 % and 200 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from moesaic.comparison.entries import EQUAL_WORK, METHOD
from moesaic.comparison.rows import Row

_GREY = "0.5"
_CAPTION = (
    "bars: standard deviation over seeds; dotted: references; arrows: beyond the upper "
    "edge, with the value at the least work"
)
_LEAST_LOSS = 1e-3  # the lowest that is drawn: seeds differ by about as much
_ROOM = 1.6  # between the last curve that is seen whole and the upper edge, as a factor
# In inches: of a label, of what stands above and below a panel, and of a usual figure.
_LINE_HEIGHT = 0.24
_MARGINS = 1.3
_USUAL_HEIGHT = 6.5
_MARKERS = ("o", "s", "D", "v")  # colours come again after nine curves


@dataclass(frozen=True)
class Point:
    """A row as it is drawn: work over dense, loss (perplexity over dense less 1)."""

    work: float
    loss: float
    spread: float


@dataclass(frozen=True)
class _Look:
    colour: Any
    marker: str


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


def spread_out(
    heights: list[float], least: float, most: float = 1.0
) -> list[float]:
    """Heights of labels in [0, most], at least so far apart, in the same order.

    Moved up from the lowest on, then down from the highest.
    """
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    placed = list(heights)
    below = -least
    for index in order:
        placed[index] = max(placed[index], below + least)
        below = placed[index]
    above = most + least
    for index in reversed(order):
        placed[index] = min(placed[index], above - least)
        above = placed[index]
    return placed


def plot(model: str, dense: dict[str, float], rows: list[Row]) -> bytes:
    """PNG of two panels, on the first text: against MACs and against bytes."""
    from matplotlib import color_sequences
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    text = next(iter(dense))
    against_macs = curves(rows, text, lambda row: row.macs)
    against_bytes = curves(rows, text, lambda row: row.bytes)
    # One label a line beside each panel: the more curves, the higher.
    height = max(_USUAL_HEIGHT, _MARGINS + _LINE_HEIGHT * len(against_macs))
    figure = Figure(figsize=(13, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    # The eighth is a grey, which references have.
    palette = [*color_sequences["tab10"][:7], *color_sequences["tab10"][8:]]
    looks = _looks(against_macs, palette)
    line_height = _LINE_HEIGHT / (height - _MARGINS)
    works = {
        "multiply-accumulates": against_macs,
        "bytes of weights read": against_bytes,
    }
    for panel, (words, found) in zip(panels, works.items(), strict=True):
        _draw(panel, found, looks, line_height)
        panel.set_xlabel(f"{words} for one token, over dense")
    panels[0].set_ylabel("perplexity over dense")
    model_name = Path(model).name
    text_name = Path(text).name
    figure.suptitle(f"{model_name}, {text_name}")
    figure.supxlabel(_CAPTION, fontsize=8, color=_GREY)
    image = BytesIO()
    figure.savefig(image, dpi=120)
    return image.getvalue()


def _looks(found: list[Curve], palette: Any) -> dict[str, _Look]:
    """A colour and a marker for each method; references are grey."""
    looks: dict[str, _Look] = {}
    for curve in found:
        number = sum(look.colour != _GREY for look in looks.values())
        colour = palette[number % len(palette)]
        marker = _MARKERS[number // len(palette) % len(_MARKERS)]
        if curve.is_reference:
            colour = _GREY
            marker = "o"
        looks[curve.method] = _Look(colour, marker)
    return looks


def _draw(
    panel: Any,
    found: list[Curve],
    looks: dict[str, _Look],
    line_height: float,
) -> None:
    """The curves of one panel, work falling to the right, and their names there."""
    top = upper_edge(found)
    least = min(point.loss for curve in found for point in curve.points)
    bottom = min(least, top) / _ROOM
    panel.set_yscale("log")
    panel.set_ylim(bottom, top)
    for curve in found:
        _draw_curve(panel, curve, looks[curve.method], top)
    panel.invert_xaxis()
    if panel.get_xlim()[0] > 1:
        panel.axvline(1.0, color=_GREY, linewidth=0.8)
    panel.xaxis.set_major_formatter("{x:.3g}")
    _label_losses(panel, bottom, top)
    panel.grid(visible=True, alpha=0.25)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    _name_curves(panel, found, looks, bottom, top, line_height)


def _draw_curve(panel: Any, curve: Curve, look: _Look, top: float) -> None:
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
        linestyle=":" if curve.is_reference else "-",
        linewidth=1.2 if curve.is_reference else 1.8,
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
    looks: dict[str, _Look],
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
        panel.annotate(
            name,
            end,
            (1.03, height),
            xycoords="data",
            textcoords="axes fraction",
            color=looks[curve.method].colour,
            fontsize=9,
            verticalalignment="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "relpos": (0, 0.5),
                "color": looks[curve.method].colour,
                "linewidth": 0.5,
                "alpha": 0.6,
            },
        )
