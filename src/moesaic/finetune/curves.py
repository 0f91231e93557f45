"""What a run leaves to look at: the learning curve as CSV and PNG, loads as PNG."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from moesaic.finetune.balance import Loads
from moesaic.plot_style import new_figure, png

COLUMNS = (
    "step",
    "samples",
    "loss",
    "lm",
    "logits",
    "ffn",
    "learning_rate",
    "grad_norm",
)

LOSSES = {
    "lm": "next token (nats)",
    "logits": "KL of the logits (nats)",
    "ffn": "relative error of the FFNs",
}


def curve_csv(history: list[dict[str, float]]) -> str:
    """One line per logged step; losses are means since the line before."""
    columns = _logged(COLUMNS, history)
    text = io.StringIO()
    writer = csv.DictWriter(
        text, columns, extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(history)
    return text.getvalue()


def _logged(names: Iterable[str], history: list[dict[str, float]]) -> list[str]:
    """Those of the names that any line of the history has."""
    logged: set[str] = set()
    for row in history:
        logged.update(row)
    return [name for name in names if name in logged]


def curve_png(history: list[dict[str, float]]) -> bytes:
    """Each loss against the samples seen."""
    names = _logged(LOSSES, history)
    count = len(names)
    figure = new_figure(4.5 * count, 3.5)
    panels = figure.subplots(1, count, squeeze=False)[0]
    samples = [row["samples"] for row in history]
    for axes, name in zip(panels, names, strict=True):
        losses = [row[name] for row in history]
        axes.plot(samples, losses)
        axes.set(xlabel="samples", title=LOSSES[name])
        axes.grid(visible=True, alpha=0.3)
    return png(figure)


def loads_png(before: Loads, after: Loads) -> bytes:
    """Every expert's load over its layer's mean, sorted; before left, after right."""
    figure = new_figure(9, 4)
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_loads(left, before, "before")
    _draw_loads(right, after, "after")
    left.set_ylabel("load over the mean")
    return png(figure)


def _draw_loads(axes: Any, loads: Loads, title: str) -> None:
    """One line for each layer, from blue to red; the first and the last are named."""
    rows = loads.to_dict()
    last = len(rows) - 1
    for layer, row in enumerate(rows):
        shares = sorted(row["share"], reverse=True)
        count = len(shares)
        over_mean = [share * count for share in shares]
        ranks = range(1, count + 1)
        red = 0.9 * layer / max(last, 1)
        colour = (red, 0.3, 0.6)
        label = None
        if layer in (0, last):
            label = f"layer {loads.names[layer]}"
        axes.plot(ranks, over_mean, color=colour, label=label)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(title=title, xlabel="expert, by load")
    axes.legend()
