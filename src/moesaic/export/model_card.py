"""The card of an exported model: what stock engines run, and how close it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesaic.modeling import MoEConfig
from moesaic.output.model_card import (
    Licence,
    Row,
    build_card,
    front_matter,
    licence_row,
)


def export_card(report: Any, config: Any, licence: Licence) -> str:
    """README.md of an exported model."""
    moe: MoEConfig = config.moesaic
    base = moe.base_model
    layout = moe.layout
    base_name = Path(base).name
    method = moe.name
    about = moe.method["about"]

    title = f"{base_name}, {layout}, as {report.architecture}"
    became = "cut into shared and routed experts"
    if moe.router is None:
        sizes = moe.first_sizes
        became = f"pruned to {sizes.active} of {sizes.total} neurons"
    summary = (
        f"{base} with every dense feed-forward network {became} by moesaic, written for "
        "stock engines."
    )
    rows: list[Row] = [
        ("Base model", base),
        licence_row(licence),
        ("Architecture", f"{report.architecture}, without code of its own"),
        ("Layout", layout),
        ("Method", f"`{method}`: {about}"),
    ]
    rows += _scale_rows(report.scales)
    if report.comparison is not None:
        rows += _comparison_rows(report.comparison)
    routed = moe.router is not None
    front = front_matter(licence, base, routed=routed)
    return build_card(front, title, summary, rows)


def _scale_rows(scales: list[Any]) -> list[Row]:
    """Of the layer where each is worst; none where nothing is routed."""
    if not scales:
        return []
    error = max(scale.gate_error for scale in scales)
    changed = max(scale.changed for scale in scales)
    return [
        ("Gates", f"1 up to {error:.1e} (root mean square, worst layer)"),
        ("Tokens that run other experts", f"{changed:.2%} (worst layer)"),
    ]


def _comparison_rows(comparison: Any) -> list[Row]:
    mean = f"{comparison.mean:.1e}"
    largest = f"{comparison.largest:.1e}"
    after = f"{comparison.perplexity:.4f}"
    before = f"{comparison.original_perplexity:.4f}"
    return [
        ("Logits", f"differ by {mean} of their rms, at most {largest}"),
        ("Perplexity", f"{after}, before the export {before}"),
    ]
