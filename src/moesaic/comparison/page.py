"""A comparison as a page of Markdown, and its cells as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesaic.comparison.options import (
    FFN_BYTES,
    FFN_MACS,
    LAYOUT,
    SPARSITY,
    Goal,
)
from moesaic.comparison.rows import Row, by_goal

# What the columns mean, a line each: below tables in a terminal and above those of a page.
MEANINGS = (
    "active FFN: share of the FFN neurons that a token computes",
    "MACs: multiply-accumulates for one token, over the dense model's",
    "bytes: of weights read for one token, over the dense model's; decoding waits for them",
    "FFN MACs, FFN bytes: the same of the FFNs alone, over the dense FFNs'; a router is a "
    "part of its FFN",
    "over dense: perplexity over the dense model's, lower is better",
    "load max/mean: tokens of the most used expert, over the mean of all, in the worst "
    "layer",
    "dead: experts that hardly any token runs, in all layers",
    "oracle, neuron-oracle: no model can hold them; their work is counted as if to know "
    "what to run were free",
)
_TITLES = {
    SPARSITY: "{:.0%} of the FFN neurons skipped",
    FFN_BYTES: "FFNs read {:.1%} of the dense FFNs' bytes",
    FFN_MACS: "FFNs do {:.1%} of the dense FFNs' multiply-accumulates",
}


def title_of(goal: Goal) -> str:
    """What all rows of a table have in common, in words."""
    if goal.equal == LAYOUT:
        return "one layout"
    return _TITLES[goal.equal].format(goal.at)


def headers(texts: list[str]) -> list[str]:
    """The columns of a comparison's table."""
    ratios = [f"over dense: {Path(text).name}" for text in texts]
    return [
        "method",
        "layout",
        "active FFN",
        "MACs",
        "bytes",
        "FFN MACs",
        "FFN bytes",
        *ratios,
        "load max/mean",
        "dead",
    ]


def cells_of(row: Row) -> list[str]:
    """A row's cells as text."""
    active = f"{row.active_ffn_fraction:.1%}"
    works = (row.macs, row.bytes, row.ffn_macs, row.ffn_bytes)
    works_over_dense = [f"{work:.3f}" for work in works]
    ratios = [_ratio(row, text) for text in row.ratio]
    load = ""
    if row.load_max_over_mean is not None:
        load = f"{row.load_max_over_mean:.2f}"
    dead = str(row.dead_experts or "")
    return [
        row.method,
        row.layout,
        active,
        *works_over_dense,
        *ratios,
        load,
        dead,
    ]


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
        f"# {model}: methods at equal budgets and at equal work",
        "",
        f"Dense perplexity: {dense_perplexity} (windows of {length}, at most "
        f"{max_tokens:,} tokens). Calibration: {source}, {tokens:,} tokens, "
        f"{seeds} seeds (mean ± standard deviation). {dtype} on {device}; {versions}.",
        "",
    ]
    lines += [f"- {meaning}" for meaning in MEANINGS]
    for goal, group in by_goal(rows).items():
        title = title_of(goal)
        table = _table(texts, group)
        lines += ["", f"## {title[0].upper()}{title[1:]}", "", *table]
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
