"""A comparison as a page of Markdown, and the columns of its tables.

Each budget has two tables: what methods are ranked by, and how they came there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.comparison.missing import CONVERSION, Missing
from moesaic.comparison.options import (
    FFN_BYTES,
    FFN_MACS,
    LAYOUT,
    SPARSITY,
    Goal,
)
from moesaic.comparison.rows import Row, by_goal

NOTHING = "-"
FAILED = "failed"
ORACLES = (
    "oracle, neuron-oracle: no model can hold them; their work is counted as if to know "
    "what to run were free"
)
_TITLES = {
    SPARSITY: "{:.4g}% of the FFN neurons skipped",
    FFN_BYTES: "FFNs read {:.4g}% of the dense FFNs' bytes",
    FFN_MACS: "FFNs do {:.4g}% of the dense FFNs' multiply-accumulates",
}


@dataclass(frozen=True)
class Column:
    """A column of a table: its head, what it means, and a row's cell as text."""

    head: str
    meaning: str
    cell: Callable[[Row], str]


def title_of(goal: Goal) -> str:
    """What all rows of a table have in common, in words."""
    if goal.equal == LAYOUT:
        return "one layout"
    assert goal.at is not None
    return _TITLES[goal.equal].format(100 * goal.at)


def ranking(rows: list[Row]) -> list[Column]:
    """The columns that methods are ranked by: what is lost, and what is saved."""
    columns = [_METHOD]
    texts = list(rows[0].ratio) if rows else []
    for text in texts:
        columns += _columns_of_text(text, rows, alone=len(texts) == 1)
    columns += _WORK
    if any(row.speed is not None for row in rows):
        columns.append(_SPEED)
    return columns


def making(rows: list[Row]) -> list[Column]:
    """The columns that say how a method came there, and what that took.

    Those of routers only where there are any.
    """
    columns = [_METHOD, *_SHAPE]
    if any(row.router_recall is not None for row in rows):
        columns.append(_RECALL)
    if any(row.load_max_over_mean is not None for row in rows):
        columns.append(_LOAD)
    if any(row.dead_experts for row in rows):
        columns.append(_DEAD)
    columns += _COST
    return columns


def meanings(rows: list[Row]) -> list[str]:
    """What the columns of both tables mean, a line each."""
    lines = {}
    for column in (*ranking(rows), *making(rows)):
        if column.meaning:
            lines[column.meaning] = f"{column.head}: {column.meaning}"
    found = list(lines.values())
    if any(not row.saves for row in rows):
        found.append(ORACLES)
    return found


def failed_cells(columns: list[Column], name: str) -> list[str]:
    """The line of a method that failed; the reason stands below the table."""
    others = [NOTHING] * (len(columns) - 2)
    return [name, FAILED, *others]


def failed_names(
    goal: Goal, rows: list[Row], missing: list[Missing]
) -> list[str]:
    """The methods that failed with every seed at a budget."""
    found = {row.method for row in rows if row.goal == goal}
    names: dict[str, None] = {}
    for lack in missing:
        is_lost = lack.step == CONVERSION and lack.goal == goal
        if is_lost and lack.method not in found:
            names[lack.method] = None
    return list(names)


def goals_of(rows: list[Row], missing: list[Missing]) -> list[Goal]:
    """Every budget that has a table, those in which all failed included."""
    goals = dict.fromkeys(row.goal for row in rows)
    goals |= dict.fromkeys(
        lack.goal for lack in missing if lack.step == CONVERSION
    )
    return list(goals)


def _columns_of_text(text: str, rows: list[Row], alone: bool) -> list[Column]:
    """Perplexity over dense on one text, before and after fine-tuning."""
    name = short_name(text, rows)
    of_text = "" if alone else f": {name}"
    columns = [
        Column(
            f"over dense: {name}",
            "perplexity over the dense model's, lower is better",
            lambda row: _with_spread(row.ratio, row.spread, text),
        )
    ]
    if any(row.tuned is not None for row in rows):
        columns += [
            Column(
                f"tuned{of_text}",
                "the same after fine-tuning, over the dense model as it came",
                lambda row: _with_spread(row.tuned, row.tuned_spread, text),
            ),
            Column(
                f"over tuned dense{of_text}",
                "after fine-tuning, over the dense model tuned on the same windows",
                lambda row: _with_spread(row.over_tuned_dense, None, text),
            ),
        ]
    return columns


def short_name(text: str, rows: list[Row]) -> str:
    """Its file's name; the whole path where another text has the same."""
    name = Path(text).name
    texts = rows[0].ratio if rows else {}
    alike = [other for other in texts if Path(other).name == name]
    return text if len(alike) > 1 else name


def _with_spread(
    values: dict[str, float] | None,
    spreads: dict[str, float | None] | None,
    text: str,
) -> str:
    if values is None:
        return NOTHING
    spread = None if spreads is None else spreads[text]
    if spread is None:
        return f"{values[text]:.3f}"
    return f"{values[text]:.3f} ± {spread:.3f}"


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return NOTHING
    return f"{value:.{digits}f}"


_METHOD = Column("method", "", lambda row: row.method)
_WORK = [
    Column(
        "FFN MACs",
        "multiply-accumulates of the FFNs for one token, over the dense FFNs'; a "
        "router is a part of its FFN",
        lambda row: _number(row.ffn_macs, 3),
    ),
    Column(
        "FFN bytes",
        "bytes of weights that the FFNs read for one token, over the dense FFNs'; "
        "decoding waits for them",
        lambda row: _number(row.ffn_bytes, 3),
    ),
    Column("MACs", "of the whole model", lambda row: _number(row.macs, 3)),
    Column(
        "bytes",
        "of the whole model's weights",
        lambda row: _number(row.bytes, 3),
    ),
]
_SPEED = Column(
    "tokens/s",
    "tokens per second over the dense model's, one token at a time, on this machine",
    lambda row: _number(row.speed, 2),
)
_SHAPE = [
    Column("layout", "", lambda row: row.layout),
    Column(
        "active FFN",
        "share of the FFN neurons that a token computes",
        lambda row: f"{row.active_ffn_fraction:.1%}",
    ),
    Column(
        "layer error",
        "mean over layers of the squared error over the output's energy",
        lambda row: _number(row.layer_error, 3),
    ),
]
_RECALL = Column(
    "recall",
    "share of the best experts that the router picks, mean over layers",
    lambda row: _number(row.router_recall, 2),
)
_LOAD = Column(
    "load",
    "tokens of the most used expert, over the mean of all, in the worst layer",
    lambda row: _number(row.load_max_over_mean, 2),
)
_DEAD = Column(
    "dead",
    "experts that hardly any token runs, in all layers",
    lambda row: str(row.dead_experts or ""),
)
_COST = [
    Column(
        "seconds",
        "to convert, with measuring the layers, on this machine",
        lambda row: _number(row.seconds, 1),
    ),
    Column(
        "passes",
        "that time in forward passes of the dense model over the same calibration "
        "tokens",
        lambda row: _number(row.passes, 1),
    ),
]


def markdown(
    result: dict[str, Any], rows: list[Row], missing: list[Missing]
) -> str:
    """The comparison as a page."""
    lines = _introduction(result, rows)
    lines += [f"- {meaning}" for meaning in meanings(rows)]
    groups = by_goal(rows)
    for goal in goals_of(rows, missing):
        group = groups.get(goal, [])
        title = title_of(goal)
        failed = failed_names(goal, rows, missing)
        lines += ["", f"## {title[0].upper()}{title[1:]}", ""]
        lines += _table(ranking(rows), group, failed)
        lines += ["", *_table(making(rows), group, [])]
    lines.append("")
    for remark in result["remarks"]:
        lines.append(f"- {remark}")
    page = "\n".join(lines)
    return page.rstrip() + "\n"


def _introduction(result: dict[str, Any], rows: list[Row]) -> list[str]:
    """What was measured on what, and with which versions."""
    settings = result["settings"]
    calibration = settings["calibration"]
    length = calibration["sequence_length"]
    tokens = calibration["samples"] * length
    seeds = max((row.seeds for row in rows), default=0)
    pairs = settings["versions"].items()
    versions = ", ".join(f"{name} {version}" for name, version in pairs)
    model = Path(settings["model"]).name
    sources = " + ".join(Path(one).name for one in calibration["sources"])
    max_tokens = settings["max_tokens"]
    dtype = settings["dtype"]
    device = settings["device"]
    spread = " (mean ± standard deviation)" if seeds > 1 else ""
    plural = "s" if seeds != 1 else ""
    lines = [
        f"# {model}: methods at equal budgets and at equal work",
        "",
        f"Dense perplexity: {perplexities(result['dense'])} (windows of {length}, at "
        f"most {max_tokens:,} tokens). Calibration: {sources}, {tokens:,} tokens, "
        f"{seeds} seed{plural}{spread}. {dtype} on {device}; {versions}.",
        "",
    ]
    finetune = settings["finetune"]
    if finetune is not None:
        lines += [tuning_words(result), ""]
    return lines


def perplexities(values: dict[str, float]) -> str:
    """By text, in one line."""
    parts = [f"{Path(text).name} {value:.3f}" for text, value in values.items()]
    return ", ".join(parts)


def tuning_words(result: dict[str, Any]) -> str:
    """How rows were fine-tuned, and what the dense model gained by the same."""
    finetune = result["settings"]["finetune"]
    windows = finetune["samples"]
    length = finetune["sequence_length"]
    teacher = "the dense model is the teacher"
    if not finetune["teacher"]:
        teacher = "no teacher"
    tuned_dense = perplexities(result["tuned_dense"] or {})
    return (
        f"Fine-tuned on {windows} windows of {length} ({windows * length:,} tokens), "
        f"{teacher}. Dense perplexity after next-token training on them: {tuned_dense}."
    )


def _table(
    columns: list[Column], rows: list[Row], failed: list[str]
) -> list[str]:
    rule = "|---" * len(columns) + "|"
    heads = [column.head for column in columns]
    cells_of_lines = [heads]
    cells_of_lines += [[column.cell(row) for column in columns] for row in rows]
    cells_of_lines += [failed_cells(columns, name) for name in failed]
    head, *others = [_line(cells) for cells in cells_of_lines]
    return [head, rule, *others]


def _line(cells: list[str]) -> str:
    joined = " | ".join(cells)
    return f"| {joined} |"
