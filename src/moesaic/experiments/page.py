"""A table as a page of Markdown, each number beside the paper's."""

from __future__ import annotations

from moesaic.experiments.contents import Experiment
from moesaic.experiments.scales import Scale
from moesaic.experiments.table import Column, Row, Table, Value

NOTHING = "-"


def markdown(
    experiment: Experiment,
    table: Table,
    model: str,
    scale: Scale,
    paper_model: str,
) -> str:
    """The page of one table or figure."""
    label = experiment.label
    lines = [
        f"# {label}: {experiment.title}",
        "",
        f"Model: {model}, scale: {scale.name}. {scale.says}",
        "",
        f"The paper (arXiv 2502.04416, {label}, {paper_model}) says: {experiment.claim} "
        "Its method is `cmoe` here. Its numbers stand in brackets.",
        "",
    ]
    if table.columns:
        lines += _table(table)
        lines.append("")
    lines += [f"- {note}" for note in table.notes]
    timed = [column.head for column in table.columns if column.timed]
    if timed:
        lines.append(
            f"- times, which differ from run to run: {', '.join(timed)}"
        )
    lines += ["", f"![{label}]({experiment.name}.png)"]
    return "\n".join(lines) + "\n"


def _table(table: Table) -> list[str]:
    heads = ["", *(column.head for column in table.columns)]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for row in table.rows:
        cells = [_cell(row, column) for column in table.columns]
        lines.append(_line([row.name, *cells]))
    return lines


def _line(cells: list[str]) -> str:
    safe = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(safe)} |"


def _cell(row: Row, column: Column) -> str:
    """Ours, its standard error, and the paper's in brackets."""
    cell = _number(row.values.get(column.key), column.digits)
    error = row.errors.get(column.key)
    if error is not None:
        cell = f"{cell} ± {error:.{column.digits}f}"
    paper = row.paper.get(column.key)
    if paper is None:
        return cell
    return f"{cell} ({_number(paper, column.digits)})"


def _number(value: Value, digits: int) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, str):
        return value
    return f"{value:,.{digits}f}"
