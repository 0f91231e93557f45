"""What the command line prints of counts and reports."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moesaic.comparison.rows import cells_of, headers
from moesaic.conversion.report import ConversionReport
from moesaic.evaluate.work import Macs

out = Console(soft_wrap=True)


def folded(*cells: str) -> list[Text]:
    """Cells that break over lines in a narrow terminal instead of losing their end."""
    return [Text(cell, overflow="fold") for cell in cells]


def macs_table(title: str, dense: Macs | None, ours: Macs, tokens: int) -> None:
    """Multiply-accumulates before (where given) and after."""
    columns = (
        ["GMACs", "converted"] if dense is None else ["GMACs", "dense", "converted"]
    )
    table = Table(*columns, title=f"{title} ({tokens} token{'s' * (tokens > 1)})")
    parts = ["attention", "ffn", "router", "sub_router", "head", "total", "scores"]
    if not ours.sub_router:
        parts.remove("sub_router")
    for part in parts:
        counts = [
            getattr(macs, part) / 1e9 for macs in (dense, ours) if macs is not None
        ]
        longer = {
            "scores": "attention scores (not in total)",
            "sub_router": "routers of experts",
        }
        name = longer.get(part, part)
        table.add_row(
            name,
            *(f"{count:.4g}" if count < 100 else f"{count:.1f}" for count in counts),
        )
    out.print(table)
    share = f"active FFN neurons {ours.active_ffn_fraction:.1%}"
    if dense is not None:
        share += f", multiply-accumulates {ours.total / dense.total - 1:+.1%}"
    out.print(share)
    if ours.sub_router:
        out.print(
            f"without the routers of experts, as the paper counts: "
            f"{(ours.total - ours.sub_router) / 1e9:.5g} GMACs"
        )


def report_tables(report: ConversionReport) -> None:
    """A conversion's layers, perplexities and totals."""
    names = {
        "static": "static",
        "static-repaired": "static\n+repair",
        "random": "random",
        "oracle": "oracle",
        "neuron-oracle": "neuron\noracle",
    }
    shown = [n for n in names if any(n in layer.references for layer in report.layers)]
    # Neurons as experts are too many to list, and what is not routed has no loads.
    load_column = ["load"] if any(layer.expert_load for layer in report.layers) else []
    table = Table(
        "layer",
        "error",
        *(names[name] for name in shown),
        "recall",
        *load_column,
        "ridge",
        title=f"{report.model}, {report.recipe['name']} {report.layout}: {report.shape}",
        caption="error of the layer's output on held-out tokens over its energy, and what the "
        "same budget loses otherwise; "
        f"{'load: most used expert over the mean; ' * bool(load_column)}ridge: of the repair",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for layer in report.layers:
        load = layer.expert_load
        spread = [f"{max(load) * len(load) / sum(load):.2f}" if load else ""]
        cells = [layer.relative_error, *(layer.references.get(name) for name in shown)]
        table.add_row(
            str(layer.layer),
            *("" if cell is None else f"{cell:.3f}" for cell in cells),
            "" if layer.router_recall is None else f"{layer.router_recall:.2f}",
            *(spread if load_column else []),
            _short(layer.repair),
        )
    out.print(table)
    for note in sorted({note for layer in report.layers for note in layer.notes}):
        where = [str(layer.layer) for layer in report.layers if note in layer.notes]
        out.print(f"layers {', '.join(where)}: {note}")
    experts = [row for layer in report.layers for row in layer.experts]
    if experts and all("whole" in row for row in experts):
        out.print(
            "no expert was converted, and the model computes what it did before; take more "
            "--samples or a lower --min-tokens"
        )
    if behind := [layer for layer in report.layers if layer.better_static]:
        which = ", ".join(f"{layer.layer} ({layer.better_static})" for layer in behind)
        out.print(
            f"routing does not beat static pruning at the same budget in layers {which}"
        )
    alone = report.recipe["router"] == "gates"
    cheaper = "fewer features in a recipe file" if alone else "a coarser grain"
    if report.macs >= report.dense_macs:
        out.print(
            "this layout computes more than the dense model: its router costs more than the "
            f"skipped neurons; take {cheaper} or a lower budget"
        )
    if report.budgets:
        what = "neurons" if alone else "experts"
        out.print(f"{what} per token by layer: {', '.join(map(str, report.budgets))}")
    if report.search:
        tried = ", ".join(
            f"{name} {value:.4f}" for name, value in report.search.items()
        )
        out.print(f"layouts tried: {tried}")
    if report.dense_perplexity and report.perplexity:
        ratio = report.perplexity / report.dense_perplexity
        out.print(
            f"perplexity {report.perplexity:.3f}, dense {report.dense_perplexity:.3f}, ratio "
            f"{ratio:.3f} ({report.heldout}, {report.heldout_tokens} tokens)"
        )
    out.print(
        f"active FFN neurons {report.active_ffn_fraction:.1%}, multiply-accumulates per token "
        f"{report.macs / report.dense_macs - 1:+.1%}, {report.seconds:.1f} s in all"
    )


def _short(repair: str | None) -> str:
    """What fits a narrow column: the ridge, or mean, or none."""
    words = (repair or "").split()
    return "" if not words else words[0] if words[0] == "mean" else words[-1]


def comparison_table(result: dict[str, Any]) -> None:
    """A comparison's rows, best first, a table per budget."""
    texts = list(result["dense"])
    for sparsity in dict.fromkeys(row["sparsity"] for row in result["rows"]):
        title = (
            "one layout"
            if sparsity is None
            else f"{sparsity:.0%} of the FFN neurons skipped"
        )
        table = Table(*headers(texts), title=title)
        for row in result["rows"]:
            if row["sparsity"] == sparsity:
                table.add_row(*folded(*cells_of(row)))
        out.print(table)
    bases = ", ".join(f"{text} {value:.3f}" for text, value in result["dense"].items())
    out.print(f"dense perplexity: {bases}")
    for line in result["remarks"]:
        out.print(line)
