"""What a run leaves to look at: the learning curve as CSV and PNG, loads as PNG."""

from __future__ import annotations

import csv
import io
from io import BytesIO
from typing import Any

from moesaic.finetune.balance import Loads

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
    text = io.StringIO()
    columns = [name for name in COLUMNS if any(name in row for row in history)]
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(history)
    return text.getvalue()


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Any) -> bytes:
    image = BytesIO()
    figure.savefig(image, dpi=120)
    return image.getvalue()


def curve_png(history: list[dict[str, float]]) -> bytes:
    """Each loss against the samples seen."""
    names = [name for name in LOSSES if any(name in row for row in history)]
    figure = _figure(4.5 * len(names), 3.5)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        axes.plot([row["samples"] for row in history], [row[name] for row in history])
        axes.set(xlabel="samples", title=LOSSES[name])
        axes.grid(visible=True, alpha=0.3)
    return _png(figure)


def loads_png(before: Loads, after: Loads) -> bytes:
    """Share of every expert in its layer's load, sorted, before (left) and after (right)."""
    layers = len(before.count_LR)
    figure = _figure(9, 4)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, loads, title in zip(
        panels, (before, after), ("before", "after"), strict=True
    ):
        for layer, row in enumerate(loads.to_dict()):
            shares = sorted(row["share"], reverse=True)
            even = 1 / len(shares)
            axes.plot(
                range(1, len(shares) + 1),
                [share / even for share in shares],
                color=(0.9 * layer / max(layers - 1, 1), 0.3, 0.6),
                label=f"layer {before.names[layer]}"
                if layer in (0, layers - 1)
                else None,
            )
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set(title=title, xlabel="expert, by load")
        axes.legend()
    panels[0].set_ylabel("load over the mean")
    return _png(figure)
