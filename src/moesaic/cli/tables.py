"""What the command line prints of counts and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from moesaic.cli.advice import loss_ratio, next_steps

if TYPE_CHECKING:
    from moesaic.conversion.layer_error import LayerReport
    from moesaic.conversion.report import ConversionReport
    from moesaic.evaluate.work import Macs

out = Console(soft_wrap=True)

BILLION = 1e9

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

# What columns mean that stand in several tables.
PERPLEXITY = (
    "perplexity: how unsure the model is of the next token, lower is better"
)
ACTIVE_FFN = "active FFN: share of the FFN neurons that a token computes"
MAX_LOAD = "load max/mean: tokens of the most used expert, over the mean of all"
DEAD = "dead: experts that hardly any token runs"

# What the columns of a conversion's layers mean.
MEANING = {
    "error": "error: of the layer's output on held-out tokens, over the output's energy",
    "static": "static: keeps the best neurons and routes nothing",
    "static-repaired": "static+repair: static, with refitted output weights",
    "random": "random: random neurons for each token",
    "oracle": "oracle: these experts, each token runs its best",
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
    heads = ["converted"] if dense is None else ["dense", "converted"]
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


def _count(billions: float) -> str:
    return f"{billions:.4g}" if billions < 100 else f"{billions:.1f}"


def report_tables(report: ConversionReport, output: str) -> None:
    """A conversion's layers, perplexities and totals, and what to do next."""
    out.print(_layer_table(report))
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
        out.print(f"  - {step}", highlight=False, markup=False)


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
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
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
    if report.macs >= report.dense_macs:
        cheaper = "a coarser grain"
        if report.unit == "neurons":
            cheaper = "fewer directions (--set directions=8)"
        out.print(
            "this layout computes more than the dense model: its router costs more "
            f"than the skipped neurons; take {cheaper} or a lower budget"
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
    change = report.macs / report.dense_macs - 1
    out.print(
        f"active FFN neurons {report.active_ffn_fraction:.1%}, multiply-accumulates "
        f"per token {change:+.1%}, {report.seconds:.1f} s in all"
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
    out.print(
        "the dense model has not trained on this text, and would gain by it too"
    )


def comparison_table(result: dict[str, Any]) -> None:
    """A comparison's rows, best first, a table per budget."""
    from moesaic.comparison.page import cells_of, headers
    from moesaic.comparison.rows import Row

    texts = list(result["dense"])
    sparsities = dict.fromkeys(row["sparsity"] for row in result["rows"])
    for sparsity in sparsities:
        title = "one layout"
        if sparsity is not None:
            title = f"{sparsity:.0%} of the FFN neurons skipped"
        table = explained(
            *headers(texts),
            title=title,
            meanings=[
                ACTIVE_FFN,
                "MACs: multiply-accumulates over the dense model's, routers included",
                "over dense: perplexity over the dense model's, lower is better",
                MAX_LOAD,
                DEAD,
            ],
        )
        for row in result["rows"]:
            if row["sparsity"] == sparsity:
                table.add_row(*folded(*cells_of(Row(**row))))
        out.print(table)
    bases = ", ".join(
        f"{text} {value:.3f}" for text, value in result["dense"].items()
    )
    out.print(f"dense perplexity: {bases}")
    for line in result["remarks"]:
        out.print(line)
