"""A comparison's cells as ranked rows, as Markdown and as a plot."""

from __future__ import annotations

import statistics
from io import BytesIO
from pathlib import Path
from typing import Any

ORACLES = ("oracle", "neuron-oracle")


def ranked(
    cells: dict[str, dict[str, Any]], dense: dict[str, float]
) -> list[dict[str, Any]]:
    """One row per sparsity and recipe, best first: mean and spread over seeds of the ratios."""
    groups: dict[tuple[Any, str], list[dict[str, Any]]] = {}
    for cell in cells.values():
        groups.setdefault((cell["sparsity"], cell["recipe"]), []).append(cell)
    rows = []
    for (sparsity, recipe), found in groups.items():
        ratios = {
            text: [cell["perplexity"][text] / base for cell in found]
            for text, base in dense.items()
        }
        loads = [
            cell["load_max_over_mean"] for cell in found if cell["load_max_over_mean"]
        ]
        rows.append(
            {
                "sparsity": sparsity,
                "recipe": recipe,
                "layout": found[0]["layout"],
                "active_ffn_fraction": found[0]["active_ffn_fraction"],
                "macs": found[0]["macs"],
                "ratio": {
                    text: statistics.mean(values) for text, values in ratios.items()
                },
                "spread": {
                    text: statistics.stdev(values) if len(values) > 1 else None
                    for text, values in ratios.items()
                },
                "seeds": len(found),
                "load_max_over_mean": max(loads, default=None),
                "dead_experts": max(cell["dead_experts"] for cell in found),
                "notes": sorted({note for cell in found for note in cell["notes"]}),
                "better_static": sorted(
                    {i for cell in found for i in cell["better_static"]}
                ),
            }
        )
    text = next(iter(dense))
    return sorted(rows, key=lambda row: (row["sparsity"] or 0, row["ratio"][text]))


def cells_of(row: dict[str, Any]) -> list[str]:
    """A row's cells as text."""
    ratios = []
    for text, ratio in row["ratio"].items():
        spread = row["spread"][text]
        ratios.append(f"{ratio:.3f}" + ("" if spread is None else f" ± {spread:.3f}"))
    load = row["load_max_over_mean"]
    saves = "" if row["recipe"] in ORACLES else f"{row['macs']:.3f}"
    return [
        row["recipe"],
        row["layout"],
        f"{row['active_ffn_fraction']:.1%}",
        saves,
        *ratios,
        "" if load is None else f"{load:.2f}",
        str(row["dead_experts"] or ""),
    ]


def headers(texts: list[str]) -> list[str]:
    names = [f"over dense: {Path(text).name}" for text in texts]
    return ["recipe", "layout", "active FFN", "MACs", *names, "load max/mean", "dead"]


def remarks(rows: list[dict[str, Any]]) -> list[str]:
    """What conversions noted, and where routing does not beat static pruning: whole or by layer."""
    lines = []
    for row in rows:
        of = f"{row['recipe']} {row['layout']}"
        lines += [
            f"{of}: {note}" for note in row["notes"] if row["recipe"] not in ORACLES
        ]
    for sparsity in dict.fromkeys(row["sparsity"] for row in rows):
        here = [row for row in rows if row["sparsity"] == sparsity]
        names = [row["recipe"] for row in here]
        if "static-repaired" not in names:
            continue
        static = names.index("static-repaired")
        where = "" if sparsity is None else f"at sparsity {sparsity:g} "
        for row in here:
            active = row["active_ffn_fraction"]
            if (
                sparsity
                and abs(active - (1 - sparsity)) > 0.02
                and "MACs" not in row["recipe"]
            ):
                lines.append(
                    f"{where}{row['recipe']} runs {active:.1%}: its experts fit no nearer"
                )
        for name in [name for name in names if name.startswith("static-repaired")]:
            behind = [
                other
                for other in names[names.index(name) + 1 :]
                if not other.startswith(("static", "random"))
            ]
            if behind:
                lines.append(f"{where}{name} beats {', '.join(behind)}")
        for row in here[:static]:
            if row["better_static"] and row["recipe"] not in ORACLES:
                layers = ", ".join(map(str, row["better_static"]))
                lines.append(
                    f"{where}static pruning beats {row['recipe']} in layer {layers}"
                )
    return lines


def markdown(result: dict[str, Any]) -> str:
    """The comparison as a page."""
    settings, dense, rows = result["settings"], result["dense"], result["rows"]
    calibration = settings["calibration"]
    tokens = calibration["samples"] * calibration["sequence_length"]
    seeds = rows[0]["seeds"] if rows else 0
    bases = ", ".join(f"{Path(text).name} {value:.3f}" for text, value in dense.items())
    versions = ", ".join(f"{name} {v}" for name, v in settings["versions"].items())
    head = headers(list(dense))
    lines = [
        f"# {Path(settings['model']).name}: recipes at equal budgets",
        "",
        f"Dense perplexity: {bases} (windows of {calibration['sequence_length']}, at most "
        f"{settings['max_tokens']:,} tokens). Calibration: {Path(calibration['source']).name}, "
        f"{tokens:,} tokens, {seeds} seeds (mean ± standard deviation). {settings['dtype']} on "
        f"{settings['device']}; {versions}.",
        "",
        "MACs: multiply-accumulates per token over dense, the router's among them. load: the most "
        "used expert's over the mean, worst layer; dead: experts below 5 % of the mean, all "
        "layers. oracle and neuron-oracle are references that save nothing.",
    ]
    for sparsity in dict.fromkeys(row["sparsity"] for row in rows):
        here = [row for row in rows if row["sparsity"] == sparsity]
        lines += [
            "",
            "## " + ("One layout" if sparsity is None else f"Sparsity {sparsity:g}"),
            "",
        ]
        lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        lines += ["| " + " | ".join(cells_of(row)) + " |" for row in here]
    lines += ["", *(f"- {line}" for line in result["remarks"])]
    return "\n".join(lines).rstrip() + "\n"


def plot(result: dict[str, Any]) -> bytes:
    """PNG: perplexity over dense against multiply-accumulates, a line per recipe, first text."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    text = next(iter(result["dense"]))
    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_prop_cycle(color=[colormaps["tab20"](i) for i in range(20)])
    # Legend in the order of the last budget's ranking, best first.
    for recipe in dict.fromkeys(row["recipe"] for row in reversed(result["rows"])):
        rows = [row for row in result["rows"] if row["recipe"] == recipe]
        axes.errorbar(
            [100 * row["macs"] for row in rows],
            [row["ratio"][text] for row in rows],
            yerr=[row["spread"][text] or 0.0 for row in rows],
            marker="o",
            capsize=3,
            label=recipe,
            linestyle=":" if recipe in (*ORACLES, "random") else "-",
        )
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(
        xlabel="multiply-accumulates per token, router included, over dense (%)",
        ylabel="perplexity over dense",
        title=f"{Path(result['settings']['model']).name}, {Path(text).name}",
        yscale="log",
    )
    axes.yaxis.set_major_formatter("{x:.2f}")
    axes.yaxis.set_minor_formatter("{x:.2f}")
    axes.grid(visible=True, which="both", alpha=0.3)
    figure.legend(loc="outside right upper")
    image = BytesIO()
    figure.savefig(image, dpi=120)
    return image.getvalue()
