"""A table as PNG: its own panels, or a panel of dots for each column.

Axes are cut to where the values lie. Where the paper has numbers, they stand in panels
of their own below, since its models are others. A name stands beside its dot or curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from moesaic.experiments.table import Column, Line, Panel, Row, Table
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

_MARGINS = 1.2
_PANEL_WIDTH = 3.2
_CURVES_WIDTH = 5.5
_CURVES_HEIGHT = 4.2
_MOST_COLUMNS = 7


def draw(table: Table, title: str) -> bytes:
    """The figure's bytes. Tables without any number give an empty one that says so."""
    if table.panels:
        return _curves(table.panels, title)
    columns = [
        column for column in table.columns if _has_numbers(table, column)
    ]
    if not columns:
        return _empty(title)
    return _dots(table.rows, columns[:_MOST_COLUMNS], title)


def _empty(title: str) -> bytes:
    figure = new_figure(5, 1)
    figure.suptitle(f"{title}: no numbers", fontsize=10)
    return png(figure)


def _has_numbers(table: Table, column: Column) -> bool:
    values = [row.values.get(column.key) for row in table.rows]
    return any(isinstance(value, float | int) for value in values)


def _dots(rows: Sequence[Row], columns: list[Column], title: str) -> bytes:
    in_paper = [row for row in rows if row.paper]
    bands = [("here", list(rows))]
    if in_paper:
        bands.append(("in the paper", in_paper))
    heights = [_MARGINS + LINE_HEIGHT * len(band) for _, band in bands]
    width = 2 + _PANEL_WIDTH * len(columns)
    figure = new_figure(width, sum(heights))
    grid = figure.subplots(
        len(bands), len(columns), squeeze=False, height_ratios=heights
    )
    for line, (where, band) in zip(grid, bands, strict=True):
        of_paper = where != "here"
        for panel, column in zip(line, columns, strict=True):
            values = [_value(row, column, of_paper) for row in band]
            panel.set_visible(any(value is not None for value in values))
            _dot_panel(panel, band, column, of_paper)
            panel.set_xlabel(f"{column.head}, {where}")
        for panel in line[1:]:
            panel.set_yticklabels([])
    figure.suptitle(title, fontsize=11)
    return png(figure)


def _value(row: Row, column: Column, of_paper: bool) -> float | None:
    """A number of a row, ours or the paper's; None for text and where there is none."""
    values = row.paper if of_paper else row.values
    value = values.get(column.key)
    return float(value) if isinstance(value, float | int) else None


def _dot_panel(
    panel: Any, rows: list[Row], column: Column, of_paper: bool
) -> None:
    """A dot a row, the first row on top, with bars of one standard error."""
    looks = looks_of({row.name: row.is_reference for row in rows})
    for place, row in enumerate(rows):
        value = _value(row, column, of_paper)
        if value is None:
            continue
        if row.is_reference and not of_paper:
            panel.axvline(value, color=GREY, linestyle=":", linewidth=1.2)
        error = None if of_paper else row.errors.get(column.key)
        panel.errorbar(
            [value],
            [place],
            xerr=error,
            color="black" if of_paper else looks[row.name].colour,
            marker="o",
            markersize=5,
            markerfacecolor="none" if of_paper else None,
            capsize=3,
        )
    panel.set_yticks(range(len(rows)), [row.name for row in rows])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.margins(x=0.15)
    plain(panel)


def _curves(panels: Sequence[Panel], title: str) -> bytes:
    most = max(len(panel.lines) for panel in panels)
    height = max(_CURVES_HEIGHT, _MARGINS + LINE_HEIGHT * most)
    figure = new_figure(_CURVES_WIDTH * len(panels), height)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, content in zip(axes, panels, strict=True):
        _curve_panel(panel, content, LINE_HEIGHT / (height - _MARGINS))
    figure.suptitle(title, fontsize=11)
    return png(figure)


def _curve_panel(panel: Any, content: Panel, line_height: float) -> None:
    looks = looks_of({line.name: line.is_reference for line in content.lines})
    for line in content.lines:
        _curve(panel, line, looks[line.name])
    if content.log_y:
        panel.set_yscale("log", nonpositive="clip")
        _label_log(panel)
        panel.set_ylim(bottom=_least(content.lines) / 1.5)
    panel.set(
        title=content.title,
        xlabel=content.x_label,
        ylabel=content.y_label,
    )
    plain(panel)
    bottom, top = panel.get_ylim()
    ends = [_end(line) for line in content.lines]
    heights = [_share(y, bottom, top, content.log_y) for _, y in ends]
    placed = spread_out(heights, line_height)
    for line, end, height in zip(content.lines, ends, placed, strict=True):
        name_beside(panel, line.name, end, height, looks[line.name].colour)


def _least(lines: Sequence[Line]) -> float:
    """The least value above 0: what is 0 goes below the panel."""
    shown = [y for line in lines for y in line.y if y > 0]
    return min(shown, default=1.0)


def _label_log(panel: Any) -> None:
    """Plain numbers at 1, 2 and 5 of every power of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter(NullFormatter())


def _end(line: Line) -> tuple[float, float]:
    """The last point above 0: a log scale shows no other."""
    points = zip(line.x, line.y, strict=True)
    shown = [point for point in points if point[1] > 0]
    return shown[-1] if shown else (line.x[-1], line.y[-1])


def _curve(panel: Any, line: Line, look: Look) -> None:
    few = len(line.x) <= 24
    panel.errorbar(
        line.x,
        line.y,
        yerr=line.spread,
        color=look.colour,
        linestyle=look.line,
        linewidth=look.width,
        marker=look.marker if few else None,
        markersize=4,
        capsize=3,
    )


def _share(value: float, bottom: float, top: float, is_log: bool) -> float:
    """How high a value stands between two others."""
    if is_log:
        value, bottom, top = (math.log(one) for one in (value, bottom, top))
    return (value - bottom) / (top - bottom)
