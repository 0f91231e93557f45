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
    active = f"{row.active_ffn_fraction:.1%}"
    macs = f"{row.macs:.3f}" if row.saves else ""
    ratios = [_ratio(row, text) for text in row.ratio]
    load = ""
    if row.load_max_over_mean is not None:
        load = f"{row.load_max_over_mean:.2f}"
    dead = str(row.dead_experts or "")
    return [row.method, row.layout, active, macs, *ratios, load, dead]


def _ratio(row: Row, text: str) -> str:
    ratio = row.ratio[text]
    spread = row.spread[text]
    if spread is None:
        return f"{ratio:.3f}"
    return f"{ratio:.3f} ± {spread:.3f}"


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
    texts = list(dense)
    perplexities = []
    for text, value in dense.items():
        text_name = Path(text).name
        perplexities.append(f"{text_name} {value:.3f}")
    dense_perplexity = ", ".join(perplexities)
    pairs = settings["versions"].items()
    versions = ", ".join(f"{name} {version}" for name, version in pairs)
    model = Path(settings["model"]).name
    source = Path(calibration["source"]).name
    max_tokens = settings["max_tokens"]
    dtype = settings["dtype"]
    device = settings["device"]
    lines = [
        f"# {model}: methods at equal budgets",
        "",
        f"Dense perplexity: {dense_perplexity} (windows of {length}, at most "
        f"{max_tokens:,} tokens). Calibration: {source}, {tokens:,} tokens, "
        f"{seeds} seeds (mean ± standard deviation). {dtype} on {device}; {versions}.",
        "",
        _EXPLAINED,
    ]
    for sparsity, group in by_sparsity(rows).items():
        title = "One layout" if sparsity is None else f"Sparsity {sparsity:g}"
        table = _table(texts, group)
        lines += ["", f"## {title}", "", *table]
    lines.append("")
    for remark in remarks:
        lines.append(f"- {remark}")
    page = "\n".join(lines)
    return page.rstrip() + "\n"


def _table(texts: list[str], rows: list[Row]) -> list[str]:
    columns = headers(texts)
    rule = "|---" * len(columns) + "|"
    lines = [_line(columns), rule]
    for row in rows:
        cells = cells_of(row)
        lines.append(_line(cells))
    return lines


def _line(cells: list[str]) -> str:
    joined = " | ".join(cells)
    return f"| {joined} |"
