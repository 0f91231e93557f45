"""What the command line prints of counts and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from moesaic.conversion.advice import loss_ratio, next_steps

if TYPE_CHECKING:
    from moesaic.conversion.layer_error import LayerReport
    from moesaic.conversion.report import ConversionReport
    from moesaic.evaluate.weight_bytes import WeightBytes
    from moesaic.evaluate.work import Macs

# Names of files and models are printed as they are, whatever brackets they have.
out = Console(soft_wrap=True, markup=False, emoji=False)

BILLION = 1e9
MILLION = 1e6

# Lines of the table of work, with the words for those that do not explain themselves.
MACS_PARTS = {
    "attention": "attention",
    "ffn": "ffn",
    "router": "router",
    "sub_router": "routers of experts",
    "head": "head",
    "total": "total",
    "scores": "attention scores (not in total)",
}

# References of a layer, as column heads.
REFERENCE_HEADS = {
    "static": "static",
    "static-repaired": "static\n+repair",
    "random": "random",
    "oracle": "oracle",
    "neuron-oracle": "neuron\noracle",
}

# Of tables with many columns.
NARROW: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}

# What columns mean that stand in several tables.
PERPLEXITY = (
    "perplexity: how unsure the model is of the next token, lower is better"
)
ACTIVE_FFN = (
    "active FFN: planned share of the FFN neurons that a token computes; where thresholds "
    "choose, a text may run more or less"
)
DEAD = "dead: experts that hardly any token runs"

# What a task may be measured by.
TASK_METRICS = {
    "acc": "acc: the answer to which the model gives the highest probability is right",
    "acc_norm": "acc_norm: the right answer is the likeliest once log probabilities are "
    "divided by the answers' lengths",
    "exact_match": "exact_match: the number that the model writes after #### is right",
    "pass@1": "pass@1: the program that the model writes passes its tests",
}

# What the columns of a conversion's layers mean.
MEANING = {
    "error": "error: of the layer's output over the output's energy, on held-out tokens "
    "(on those that neurons were chosen by, where a method fits no weights); a repair that "
    "undoes drift has more of it, and loses less in the end",
    "static": "static: keeps the best neurons and routes nothing",
    "static-repaired": "static+repair: static, with refitted output weights",
    "random": "random: random neurons for each token",
    "oracle": "oracle: these experts, each token runs its best, as many for every token",
    "neuron-oracle": "neuron oracle: each token runs its best neurons",
    "recall": "recall: share of the oracle's experts that the router picks too",
    "load": "load: tokens of the most used expert, over the mean of all",
    "ridge": "ridge: how strongly the repair is held near the old weights",
}


def explained(
    *columns: str | Column, meanings: Sequence[str], **looks: Any
) -> Table:
    """An empty table, below which stands what its columns mean, a line each."""
    caption = Text("\n".join(meanings))
    return Table(*columns, caption=caption, caption_justify="left", **looks)


def folded(*cells: str) -> list[Text]:
    """Cells that break over lines in a narrow terminal instead of losing their end."""
    return [Text(cell, overflow="fold") for cell in cells]


def macs_table(title: str, dense: Macs | None, ours: Macs, tokens: int) -> None:
    """Multiply-accumulates before (where given) and after."""
    models = [ours] if dense is None else [dense, ours]
    heads = ["converted"] if dense is None else ["as it is", "converted"]
    plural = "s" if tokens > 1 else ""
    table = explained(
        "GMACs",
        *heads,
        title=f"{title} ({tokens} token{plural})",
        meanings=[
            "GMACs: billions of multiplications with a weight, each with an addition",
            "router: chooses the experts",
            "head: scores every word that could come next",
        ],
    )
    for part, words in MACS_PARTS.items():
        if part == "sub_router" and not ours.sub_router:
            continue
        counts = [getattr(macs, part) / BILLION for macs in models]
        table.add_row(words, *(_count(count) for count in counts))
    out.print(table)
    share = f"active FFN neurons {ours.active_ffn_fraction:.1%}"
    if dense is not None:
        share += f", multiply-accumulates {ours.total / dense.total - 1:+.1%}"
    out.print(share)
    if ours.sub_router:
        without = (ours.total - ours.sub_router) / BILLION
        out.print(
            f"without the routers of experts, as the paper counts: {without:.5g} GMACs"
        )


def bytes_lines(dense: WeightBytes | None, ours: WeightBytes) -> None:
    """Bytes of weights read for one token before (where given) and after."""
    total = _megabytes(ours.total, None if dense is None else dense.total)
    ffn = _megabytes(ours.ffn, None if dense is None else dense.ffn)
    out.print(f"weights read for one token: {total}")
    out.print(f"of them in FFNs, with their routers: {ffn}")


def _megabytes(ours: float, dense: float | None) -> str:
    megabytes = f"{ours / MILLION:,.1f} MB"
    if dense is None:
        return megabytes
    change = ours / dense - 1
    return f"{megabytes}, dense {dense / MILLION:,.1f} MB ({change:+.1%})"


def _count(billions: float) -> str:
    return f"{billions:.4g}" if billions < 100 else f"{billions:.1f}"


def report_tables(report: ConversionReport, output: str) -> None:
    """A conversion's layers, perplexities and totals, and what to do next."""
    if report.layers:
        out.print(_layer_table(report))
    else:
        out.print(f"{report.model}, {report.method['name']}: {report.shape}")
    _print_notes(report)
    _print_warnings(report)
    _print_choices(report)
    _print_totals(report)
    if report.recovery is not None:
        _print_recovery(report, report.recovery)
        return
    steps = next_steps(report, output)
    if steps:
        out.print("if that is too much loss, try one of:")
    for step in steps:
        out.print(f"  - {step}", highlight=False)


def _layer_table(report: ConversionReport) -> Table:
    """A line for each layer: its error, and what the same budget loses otherwise."""
    layers = report.layers
    references = [
        name
        for name in REFERENCE_HEADS
        if any(name in layer.references for layer in layers)
    ]
    # Neurons as experts are too many to list. Static pruning has no experts.
    has_loads = any(layer.expert_load for layer in layers)
    load_column = ["load"] if has_loads else []
    columns = ["error", *references, "recall", *load_column, "ridge"]
    table = explained(
        "layer",
        "error",
        *(REFERENCE_HEADS[name] for name in references),
        "recall",
        *load_column,
        "ridge",
        title=f"{report.model}, {report.method['name']} {report.layout}: "
        f"{report.shape}",
        meanings=[MEANING[column] for column in columns],
        **NARROW,
    )
    for layer in layers:
        cells = [_cell(layer.relative_error, 3)]
        cells += [_cell(layer.references.get(name), 3) for name in references]
        cells.append(_cell(layer.router_recall, 2))
        if has_loads:
            cells.append(_cell(_load_spread(layer), 2))
        cells.append(_short(layer.repair))
        table.add_row(str(layer.layer), *cells)
    return table


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _load_spread(layer: LayerReport) -> float | None:
    """How many times the mean load the most used expert has."""
    load = layer.expert_load
    if not load:
        return None
    return max(load) * len(load) / sum(load)


def _short(repair: str | None) -> str:
    """What fits a narrow column: the ridge, or mean, or none."""
    words = (repair or "").split()
    if not words:
        return ""
    return words[0] if words[0] == "mean" else words[-1]


def _print_notes(report: ConversionReport) -> None:
    """Each note once, with the layers that it is of."""
    notes = {note for layer in report.layers for note in layer.notes}
    for note in sorted(notes):
        where = [
            str(layer.layer) for layer in report.layers if note in layer.notes
        ]
        out.print(f"layers {', '.join(where)}: {note}")


def _print_warnings(report: ConversionReport) -> None:
    """Where the conversion gained nothing."""
    experts = [expert for layer in report.layers for expert in layer.experts]
    if experts and all("whole" in expert for expert in experts):
        out.print(
            "no expert was converted, and the model computes what it did before; take "
            "more --samples or a lower --min-tokens"
        )
    behind = [layer for layer in report.layers if layer.better_static]
    if behind:
        which = ", ".join(
            f"{layer.layer} ({layer.better_static})" for layer in behind
        )
        out.print(
            f"routing does not beat static pruning at the same budget in layers {which}"
        )
    if report.macs < report.dense_macs:
        return
    if report.unit == "neurons" and report.bytes < report.dense_bytes:
        out.print(
            "this model reads fewer bytes for a token than the dense one, and computes "
            "more: it saves time for one sequence at a time at best"
        )
        return
    cheaper = "" if report.unit == "neurons" else "a coarser grain or "
    out.print(
        "this layout computes more than the dense model: its router costs more "
        f"than the skipped neurons; take {cheaper}a lower budget"
    )


def _print_choices(report: ConversionReport) -> None:
    """What was chosen for the user: experts by layer, and the layout."""
    if report.budgets:
        budgets = ", ".join(str(budget) for budget in report.budgets)
        out.print(f"{report.unit} per token by layer: {budgets}")
    if report.search:
        tried = [f"{name} {value:.4f}" for name, value in report.search.items()]
        out.print(f"layouts tried: {', '.join(tried)}")


def _print_totals(report: ConversionReport) -> None:
    ratio = loss_ratio(report)
    if ratio is not None:
        out.print(
            f"perplexity {report.perplexity:.3f}, dense {report.dense_perplexity:.3f}, "
            f"ratio {ratio:.3f} ({report.heldout}, {report.heldout_tokens} tokens)"
        )
    macs_change = report.macs / report.dense_macs - 1
    bytes_change = report.bytes / report.dense_bytes - 1
    out.print(
        f"active FFN neurons {report.active_ffn_fraction:.1%}; for one token "
        f"multiply-accumulates {macs_change:+.1%}, bytes of weights read "
        f"{bytes_change:+.1%}; {report.seconds:.1f} s in all"
    )


def _print_recovery(report: ConversionReport, recovery: dict[str, Any]) -> None:
    """What conversion and training each changed, on the same held-out text."""
    settings = recovery["settings"]
    tokens = settings["samples"] * settings["sequence_length"]
    out.print(f"recovered on {tokens:,} tokens in {recovery['seconds']:.0f} s")
    dense = report.dense_perplexity
    written = recovery["perplexity"]
    if recovery["folded"]:
        written = recovery["folded_perplexity"]
    if dense is None or report.perplexity is None or written is None:
        return
    lost = report.perplexity / dense
    left = written / dense
    out.print(
        f"perplexity: dense {dense:.3f} -> converted {report.perplexity:.3f} (ratio "
        f"{lost:.3f}) -> recovered {written:.3f} (ratio {left:.3f})"
    )
    came = recovery.get("teacher_perplexity_before")
    if came is not None:
        out.print(
            f"the dense model came with {came:.3f}; the one above was trained on the "
            "same tokens, and converted then"
        )
        return
    out.print(
        "the dense model has not trained on this text, and would gain by it too"
    )


def comparison_table(result: dict[str, Any]) -> None:
    """A comparison's rows, best first: two tables per budget, and what they mean."""
    from moesaic.comparison.missing import Missing
    from moesaic.comparison.page import (
        failed_cells,
        failed_names,
        goals_of,
        making,
        meanings,
        perplexities,
        ranking,
        title_of,
        tuning_words,
    )
    from moesaic.comparison.rows import Row, by_goal

    rows = [Row(**row) for row in result["rows"]]
    missing = [Missing.from_dict(row) for row in result["missing"]]
    groups = by_goal(rows)
    for goal in goals_of(rows, missing):
        group = groups.get(goal, [])
        columns = ranking(rows)
        table = Table(
            *_heads(columns), title=title_of(goal), title_style="bold", **NARROW
        )
        for row in group:
            table.add_row(*folded(*[column.cell(row) for column in columns]))
        for name in failed_names(goal, rows, missing):
            table.add_row(*folded(*failed_cells(columns, name)))
        out.print(table)
        columns = making(rows)
        table = Table(*_heads(columns), **NARROW)
        for row in group:
            table.add_row(*folded(*[column.cell(row) for column in columns]))
        out.print(table)
    for meaning in meanings(rows):
        out.print(meaning, style="dim", highlight=False)
    out.print(f"dense perplexity: {perplexities(result['dense'])}")
    if result["settings"]["finetune"] is not None:
        out.print(tuning_words(result))
    for line in result["remarks"]:
        out.print(line)


def _heads(columns: Sequence[Any]) -> list[Column]:
    """Table heads, a word a line. Numbers stay in one piece; names may break."""
    heads = [
        Column(column.head.replace(" ", "\n"), no_wrap=True)
        for column in columns
    ]
    heads[0].no_wrap = False
    return heads


def tasks_table(result: dict[str, Any]) -> None:
    """Scores of one model, and of another beside it where there is one."""
    rows = result["tasks"]
    other = result.get("against")
    heads = ["score"]
    meanings = [
        TASK_METRICS[metric]
        for metric in TASK_METRICS
        if any(row["metric"] == metric for row in rows.values())
    ]
    meanings += [
        "shots: questions with their answers shown before each question",
        "questions: how many were asked, of how many there are",
        "score: percent of the questions, and its standard error",
    ]
    if any("self_consistency" in row for row in rows.values()):
        meanings.append("k vote: so many answers are drawn, and they vote")
    if other is not None:
        heads = ["score", "against", "difference"]
        meanings += [
            f"against: {other['model']}",
            "difference: on the same questions, and its standard error",
        ]
    table = explained(
        Column("task", no_wrap=True),
        "metric",
        "shots",
        "questions",
        *heads,
        title=result["model"],
        meanings=meanings,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for task, row in rows.items():
        table.add_row(
            task,
            row["metric"],
            str(row["shots"]),
            f"{row['questions']:,}/{row['of']:,}",
            *_scores(result, ("tasks", task)),
        )
        for count in row.get("self_consistency", {}):
            place = ("tasks", task, "self_consistency", count)
            scores = _scores(result, place)
            table.add_row("", f"{count} vote", "", "", *scores)
    if "mean" in result:
        scores = _scores(result, ("mean",))
        table.add_row("mean of five", "", "", "", *scores)
    out.print(table)
    for part in (result, other or {}):
        _print_lengths(part)


def _scores(result: dict[str, Any], place: tuple[str, ...]) -> list[str]:
    """A model's score, the other's, and the difference, as far as there are any."""
    cells = [_percent(_at(result, place))]
    if "against" in result:
        cells.append(_percent(_at(result["against"], place)))
        difference = _at(result["difference"], place)
        sign_and_error = "" if difference is None else _percent(difference, "+")
        cells.append(sign_and_error)
    return cells


def _at(values: Any, place: tuple[str, ...]) -> Any:
    """What stands there; None where nothing does."""
    for key in place:
        if values is None:
            return None
        values = values.get(key)
    return values


def _percent(row: dict[str, Any], sign: str = "") -> str:
    score = format(100 * row["score"], f"{sign}.1f")
    error = row["standard_error"]
    if error is None:
        return score
    return f"{score} ± {100 * error:.1f}"


def _print_lengths(part: dict[str, Any]) -> None:
    """Says where prompts did not fit the context, and where nothing was skipped."""
    for task, row in part.get("tasks", {}).items():
        if row["cut"]:
            out.print(
                f"{task}: {row['cut']:,} prompts did not fit the {part['context']:,} "
                f"tokens that {part['model']} reads; their beginning was cut off"
            )
        if row["whole"]:
            out.print(
                f"{task}: {row['whole']:,} of {row['questions']:,} questions were "
                f"answered as by the dense model: {part['model']} runs all neurons over "
                "a prompt, and they are no longer than that"
            )
