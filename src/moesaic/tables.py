"""What the command line prints of counts and reports."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moesaic.flops import Macs
from moesaic.report import ConversionReport

out = Console(soft_wrap=True)


def folded(*cells: str) -> list[Text]:
    """Cells that break over lines in a narrow terminal instead of losing their end."""
    return [Text(cell, overflow="fold") for cell in cells]


def macs_table(title: str, dense: Macs | None, ours: Macs, tokens: int) -> None:
    """Multiply-accumulates before (where given) and after."""
    columns = ["GMACs", "converted"] if dense is None else ["GMACs", "dense", "converted"]
    table = Table(*columns, title=f"{title} ({tokens} token{'s' * (tokens > 1)})")
    parts = ["attention", "ffn", "router", "head", "total", "scores"]
    for part in parts:
        counts = [getattr(macs, part) / 1e9 for macs in (dense, ours) if macs is not None]
        name = "attention scores (not in total)" if part == "scores" else part
        table.add_row(
            name, *(f"{count:.4g}" if count < 100 else f"{count:.1f}" for count in counts)
        )
    out.print(table)
    share = f"active FFN neurons {ours.active_ffn_fraction:.1%}"
    if dense is not None:
        share += f", multiply-accumulates {ours.total / dense.total - 1:+.1%}"
    out.print(share)


def report_tables(report: ConversionReport) -> None:
    """A conversion's layers, perplexities and totals."""
    table = Table(
        "layer", "relative error", "router recall", "mass kept", "oracle's mass", "load max/mean",
        "seconds", title=f"{report.model}, {report.recipe['name']} {report.layout}: {report.shape}",
    )  # fmt: skip
    for layer in report.layers:
        load = layer.expert_load
        spread = f"{max(load) * len(load) / sum(load):.2f}" if load else ""
        cells = [layer.relative_error, layer.router_recall, layer.mass_kept, layer.oracle_mass]
        table.add_row(
            str(layer.layer), *("" if cell is None else f"{cell:.4f}" for cell in cells), spread,
            "" if layer.seconds is None else f"{layer.seconds:.2f}",
        )  # fmt: skip
    out.print(table)
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
