"""The card of a converted model: what it is, how it was made, what it lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesaic.conversion.report import ConversionReport
from moesaic.output.model_card import Row, build_card, code, front_matter

_PAPERS = {
    "cmoe": "Pei et al., Analytical FFN-to-MoE Restructuring via Activation Pattern Analysis, "
    "ACL 2026",
}

_USE = """import moesaic
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH_TO_THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("PATH_TO_THIS_FOLDER")"""


def model_card(
    report: ConversionReport, config: Any, licence: str | None, command: str
) -> str:
    """README.md of a converted model."""
    base: str = config.moesaic["base_model"]
    versions: dict[str, str] = config.moesaic["versions"]
    outer: int | None = config.moesaic.get("num_outer")
    by_gates: bool = config.moesaic["router"]["kind"] == "gates"

    title = f"{Path(base).name}, {report.layout}"
    what = _what(outer, by_gates)
    method = _method(report.recipe["name"])
    summary = f"{base} with every {what} by moesaic, without training.{method}"
    measured = "and router recall" if by_gates else "router recall and expert load"
    sections = [
        "Command:",
        code(command),
        "Use, with moesaic installed (or with `trust_remote_code=True` and no moesaic):",
        code(_USE),
        f"Per-layer reconstruction error, {measured} are in `moesaic_report.json`.",
    ]
    front = front_matter(licence, base)
    rows = _rows(report, base, versions, licence)
    return build_card(front, title, summary, rows, sections)


def _what(outer: int | None, by_gates: bool) -> str:
    if by_gates:
        return "dense feed-forward network made one whose neurons are chosen for each token"
    if outer is not None:
        return (
            f"one of its {outer} experts a layer cut into shared and routed sub-experts"
        )
    return "dense feed-forward network cut into shared and routed experts"


def _method(recipe: str) -> str:
    paper = _PAPERS.get(recipe)
    return "" if paper is None else f" Method: {paper}."


def _rows(
    report: ConversionReport, base: str, versions: dict[str, str], licence: str | None
) -> list[Row]:
    recipe = report.recipe
    work = f"{report.macs / 1e6:.4g} M (dense {report.dense_macs / 1e6:.4g} M)"
    text = f"{report.calibration}, {report.tokens} tokens, seed {report.seed}"
    made_with = [f"{name} {version}" for name, version in versions.items()]
    return [
        ("Base model", base),
        ("Licence", licence or "as the base model's"),
        ("Recipe", f"`{recipe['name']}`: {recipe['about']}"),
        ("Layout", f"{report.layout}: {report.shape}"),
        ("Active FFN neurons", f"{report.active_ffn_fraction:.1%} per token"),
        ("Multiply-accumulates per token", work),
        ("Calibration", text),
        ("Perplexity", _perplexity(report)),
        ("Made with", ", ".join(made_with)),
    ]


def _perplexity(report: ConversionReport) -> str:
    if not report.perplexity or not report.dense_perplexity:
        return "not measured: the calibration text left nothing to hold out"
    ratio = report.perplexity / report.dense_perplexity
    return (
        f"{report.perplexity:.3f}, dense {report.dense_perplexity:.3f}, ratio {ratio:.3f} "
        f"({report.heldout}, {report.heldout_tokens} tokens predicted, "
        f"windows of {report.sequence_length})"
    )
