"""A comparison as a plot: perplexity over dense against work per token."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from moesaic.comparison.entries import METHOD
from moesaic.comparison.rows import Row


def plot(model: str, dense: dict[str, float], rows: list[Row]) -> bytes:
    """PNG with a line per method, on the first text; references are dotted."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    text = next(iter(dense))
    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colour_map = colormaps["tab20"]
    colours = [colour_map(number) for number in range(20)]
    axes.set_prop_cycle(color=colours)
    # Legend in the order of the last budget's ranking, best first.
    methods = [row.method for row in reversed(rows)]
    for method in dict.fromkeys(methods):
        group = [row for row in rows if row.method == method]
        first = group[0]
        dotted = first.role != METHOD or not first.saves
        macs_percent = [100 * row.macs for row in group]
        ratios = [row.ratio[text] for row in group]
        spreads = [row.spread[text] or 0.0 for row in group]
        axes.errorbar(
            macs_percent,
            ratios,
            yerr=spreads,
            marker="o",
            capsize=3,
            label=method,
            linestyle=":" if dotted else "-",
        )
    axes.axhline(1.0, color="grey", linewidth=0.8)
    model_name = Path(model).name
    text_name = Path(text).name
    axes.set(
        xlabel="multiply-accumulates per token, router included, over dense (%)",
        ylabel="perplexity over dense",
        title=f"{model_name}, {text_name}",
        yscale="log",
    )
    axes.yaxis.set_major_formatter("{x:.2f}")
    axes.yaxis.set_minor_formatter("{x:.2f}")
    axes.grid(visible=True, which="both", alpha=0.3)
    figure.legend(loc="outside right upper")
    image = BytesIO()
    figure.savefig(image, dpi=120)
    return image.getvalue()
