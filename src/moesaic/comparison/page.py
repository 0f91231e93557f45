"""A comparison as a page of Markdown, and its cells as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesaic.comparison.rows import Row, by_sparsity

_EXPLAINED = (
    "MACs: multiply-accumulates per token over dense, the router's among them. load: the "
    "most used expert's over the mean, worst layer; dead: experts below 5 % of the mean, "
    "all layers. oracle and neuron-oracle are references that save nothing."
)


def headers(texts: list[str]) -> list[str]:
    """The columns of a comparison's table."""
    ratios = [f"over dense: {Path(text).name}" for text in texts]
    return [
        "method",
        "layout",
        "active FFN",
        "MACs",
        *ratios,
        "load max/mean",
        "dead",
    ]


def cells_of(row: Row) -> list[str]:
    """A row's cells as text."""
    ratios = [_ratio(row, text) for text in row.ratio]
    load = row.load_max_over_mean
    return [
        row.method,
        row.layout,
        f"{row.active_ffn_fraction:.1%}",
        f"{row.macs:.3f}" if row.saves else "",
        *ratios,
        "" if load is None else f"{load:.2f}",
        str(row.dead_experts or ""),
    ]


def _ratio(row: Row, text: str) -> str:
    spread = row.spread[text]
    if spread is None:
        return f"{row.ratio[text]:.3f}"
    return f"{row.ratio[text]:.3f} ± {spread:.3f}"


def markdown(
    settings: dict[str, Any],
    dense: dict[str, float],
    rows: list[Row],
    remarks: list[str],
) -> str:
    """The comparison as a page."""
    calibration = settings["calibration"]
    length = calibration["sequence_length"]
    tokens = calibration["samples"] * length
    seeds = rows[0].seeds if rows else 0
    bases = ", ".join(
        f"{Path(text).name} {value:.3f}" for text, value in dense.items()
    )
    versions = ", ".join(
        f"{name} {v}" for name, v in settings["versions"].items()
    )
    source = Path(calibration["source"]).name
    lines = [
        f"# {Path(settings['model']).name}: methods at equal budgets",
        "",
        f"Dense perplexity: {bases} (windows of {length}, at most "
        f"{settings['max_tokens']:,} tokens). Calibration: {source}, {tokens:,} tokens, "
        f"{seeds} seeds (mean ± standard deviation). {settings['dtype']} on "
        f"{settings['device']}; {versions}.",
        "",
        _EXPLAINED,
    ]
    for sparsity, group in by_sparsity(rows).items():
        title = "One layout" if sparsity is None else f"Sparsity {sparsity:g}"
        lines += ["", f"## {title}", "", *_table(list(dense), group)]
    lines += ["", *(f"- {line}" for line in remarks)]
    return "\n".join(lines).rstrip() + "\n"


def _table(texts: list[str], rows: list[Row]) -> list[str]:
    head = headers(texts)
    lines = [_line(head), "|---" * len(head) + "|"]
    return lines + [_line(cells_of(row)) for row in rows]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
