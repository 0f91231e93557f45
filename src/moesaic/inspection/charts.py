"""Charts as SVG: pure functions from numbers to marked-up text.

Colours and dashes are classes of style.css, so that a page decides on light and dark.
Every mark has a title, which browsers show under the pointer and screen readers read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as xml

from markupsafe import Markup

MINUS = "\u2212"  # no line breaks after it, as after a hyphen
_WIDTH = 560
_LEFT = 64
_RIGHT = 10
_TOP = 12
_BOTTOM = 44
_HEIGHT = 260
_PALEST = 0.04  # of a heat map's cells
_ROW = 14  # of a heat map, in height
_MARK = 3.2  # half the size of a line's mark


@dataclass(frozen=True)
class Series:
    """A line of a chart: a value for each place, None where there is none.

    `look` numbers its colour, dash and mark.
    """

    name: str
    values: Sequence[float | None]
    look: int


@dataclass(frozen=True)
class _Axis:
    """From values to heights."""

    low: float
    high: float
    log: bool

    def height(self, value: float) -> float:
        low, high = self._at(self.low), self._at(self.high)
        share = (self._at(value) - low) / (high - low)
        share = min(1.0, max(0.0, share))
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def _at(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.log else value

    def ticks(self) -> list[float]:
        """Round values within the axis, five or so."""
        found = _decades(self.low, self.high) if self.log else self._steps()
        return [tick for tick in found if self.low <= tick <= self.high]

    def _steps(self) -> list[float]:
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = power * min(
            factor for factor in (1, 2, 5, 10) if factor * power >= rough
        )
        first = math.ceil(self.low / step)
        return [round(step * (first + number), 12) for number in range(7)]


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten; 1 alone where there are many powers."""
    first = math.floor(math.log10(low))
    last = math.floor(math.log10(high))
    factors = (1,) if last - first > 2 else (1, 2, 5)
    powers = range(first, last + 1)
    return [factor * 10.0**power for power in powers for factor in factors]


def lines(
    title: str,
    places: Sequence[int],
    series: Sequence[Series],
    *,
    log: bool = False,
) -> Markup:
    """Values by layer, a line for each series.

    Log axes leave out what is not above 0. Empty where there is no value.
    """
    values = [
        value for one in series for value in one.values if value is not None
    ]
    if log:
        values = [value for value in values if value > 0]
    if not values:
        return Markup("")
    axis = _axis(values, log)
    svg = _canvas(title, _HEIGHT)
    _draw_ticks(svg, axis)
    _draw_places(svg, places)
    _draw_name(svg, "layer")
    for one in series:
        points = [
            (_across(number, len(places)), axis.height(value), place, value)
            for number, (place, value) in enumerate(
                zip(places, one.values, strict=True)
            )
            if value is not None and (value > 0 or not log)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
        _add(svg, "polyline", {"points": path, "class": f"line look{one.look}"})
        for x, y, place, value in points:
            mark = _add(svg, "path", _mark(one.look, x, y))
            _title(mark, f"layer {place}, {one.name}: {short(value)}")
    return _text(svg)


def heat(
    title: str,
    rows: Sequence[tuple[int, Sequence[tuple[str, float]]]],
    low: float,
    high: float,
) -> Markup:
    """A row for each layer, a cell for each share with its words.

    Shares of `low` are pale, of `high` dark.
    """
    if not rows:
        return Markup("")
    columns = max(len(cells) for _, cells in rows)
    height = _TOP + _ROW * len(rows) + 8
    svg = _canvas(title, height)
    every = math.ceil(len(rows) / 12)
    for number, (layer, cells) in enumerate(rows):
        y = _TOP + number * _ROW
        if number % every == 0:
            label = _add(
                svg,
                "text",
                {"x": f"{_LEFT - 6}", "y": f"{y + 11}", "class": "end"},
            )
            label.text = str(layer)
        width = (_WIDTH - _LEFT - _RIGHT) / columns
        for place, (words, share) in enumerate(cells):
            cell = _add(
                svg,
                "rect",
                {
                    "x": f"{_LEFT + place * width:.1f}",
                    "y": f"{y}",
                    "width": f"{max(width - 0.6, 0.4):.1f}",
                    "height": f"{_ROW - 1}",
                    "fill-opacity": f"{_depth(share, low, high):.2f}",
                    "class": "heat",
                },
            )
            _title(cell, f"layer {layer}, {words}: {100 * share:.1f} %")
    return _text(svg)


def _depth(share: float, low: float, high: float) -> float:
    """How dark a cell is; the palest can still be seen."""
    return _PALEST + (1 - _PALEST) * (share - low) / (high - low)


def bars(
    title: str,
    counts: Sequence[int],
    names: Sequence[str],
    label: str,
    edge: str,
) -> Markup:
    """A histogram; heights are logarithmic, since few bins hold nearly all.

    `names` are those of bins, whose first word stands at the edge.
    """
    if not counts or not max(counts):
        return Markup("")
    axis = _Axis(0.5, 1.2 * max(counts), log=True)
    svg = _canvas(title, _HEIGHT)
    _draw_ticks(svg, axis)
    _draw_name(svg, edge)
    width = (_WIDTH - _LEFT - _RIGHT) / len(counts)
    bottom = _HEIGHT - _BOTTOM
    for number, (count, name) in enumerate(zip(counts, names, strict=True)):
        x = _LEFT + number * width
        if count:
            top = axis.height(count)
            bar = _add(
                svg,
                "rect",
                {
                    "x": f"{x + 1:.1f}",
                    "y": f"{top:.1f}",
                    "width": f"{width - 2:.1f}",
                    "height": f"{bottom - top:.1f}",
                    "class": "bar",
                },
            )
            _title(bar, f"{name}: {count:,} {label}")
        if number % 4 == 0:
            text = _add(svg, "text", {"x": f"{x:.1f}", "y": f"{bottom + 16}"})
            text.text = name.split(" ")[0]
    return _text(svg)


def short(value: float) -> str:
    """A number with three digits that matter."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = f"{value:.3g}".replace("e-0", "e-")
    return digits.replace("-", MINUS)


def _axis(values: Sequence[float], log: bool) -> _Axis:
    low, high = min(values), max(values)
    if log:
        return _Axis(low / 1.3, high * 1.3, log=True)
    room = 0.08 * (high - low) or 0.05
    return _Axis(max(0.0, low - room), high + room, log=False)


def _across(number: int, count: int) -> float:
    inner = _WIDTH - _LEFT - _RIGHT
    return _LEFT + inner * (number + 0.5) / count


def _canvas(title: str, height: int) -> xml.Element:
    svg = xml.Element(
        "svg",
        {"viewBox": f"0 0 {_WIDTH} {height}", "role": "img", "class": "chart"},
    )
    svg.set("aria-label", title)
    return svg


def _draw_ticks(svg: xml.Element, axis: _Axis) -> None:
    for tick in axis.ticks():
        y = axis.height(tick)
        _add(
            svg,
            "line",
            {
                "x1": f"{_LEFT}",
                "x2": f"{_WIDTH - _RIGHT}",
                "y1": f"{y:.1f}",
                "y2": f"{y:.1f}",
                "class": "grid",
            },
        )
        label = _add(
            svg,
            "text",
            {"x": f"{_LEFT - 6}", "y": f"{y + 4:.1f}", "class": "end"},
        )
        label.text = _tick_words(tick)


def _tick_words(tick: float) -> str:
    """Short enough for the room beside an axis."""
    if 0 < tick < 0.001:
        return f"{tick:.0e}".replace("e-0", f"e{MINUS}")
    return short(tick)


def _draw_places(svg: xml.Element, places: Sequence[int]) -> None:
    every = math.ceil(len(places) / 16)
    for number, place in enumerate(places):
        if number % every:
            continue
        x = _across(number, len(places))
        y = _HEIGHT - _BOTTOM + 16
        label = _add(
            svg, "text", {"x": f"{x:.1f}", "y": f"{y}", "class": "middle"}
        )
        label.text = str(place)


def _draw_name(svg: xml.Element, words: str) -> None:
    """What stands along the lower edge."""
    name = _add(
        svg,
        "text",
        {
            "x": f"{(_LEFT + _WIDTH - _RIGHT) / 2:.1f}",
            "y": f"{_HEIGHT - 3}",
            "class": "middle quiet",
        },
    )
    name.text = words


def _mark(look: int, x: float, y: float) -> dict[str, str]:
    """Circle, square, triangle or diamond: series differ without their colours."""
    size = _MARK
    shapes = (
        f"M{x - size:.1f},{y:.1f}a{size},{size} 0 1,0 {2 * size},0"
        f"a{size},{size} 0 1,0 {-2 * size},0z",
        f"M{x - size:.1f},{y - size:.1f}h{2 * size}v{2 * size}h{-2 * size}z",
        f"M{x:.1f},{y - size:.1f}l{size},{2 * size}h{-2 * size}z",
        f"M{x:.1f},{y - size:.1f}l{size},{size}l{-size},{size}l{-size},{-size}z",
    )
    return {"d": shapes[look % len(shapes)], "class": f"mark look{look}"}


def _add(
    parent: xml.Element, tag: str, attributes: dict[str, str]
) -> xml.Element:
    return xml.SubElement(parent, tag, attributes)


def _title(element: xml.Element, words: str) -> None:
    title = xml.SubElement(element, "title")
    title.text = words


def _text(svg: xml.Element) -> Markup:
    # ElementTree escapes what it writes.
    return Markup(xml.tostring(svg, encoding="unicode"))
