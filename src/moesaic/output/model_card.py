"""The model card saved beside the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from moesaic.conversion.report import ConversionReport

_LINKS = {
    "cmoe": "Pei et al., Analytical FFN-to-MoE Restructuring via Activation Pattern Analysis, "
    "ACL 2026",
}


def licence_of(folder: str | Path) -> str | None:
    """The licence in the front matter of a local model's own card, if it has one."""
    card = Path(folder) / "README.md"
    try:
        text = card.read_text()
        if not text.startswith("---"):
            return None
        front = yaml.safe_load(text.split("---")[1])
        return (
            str(front["license"])
            if isinstance(front, dict) and "license" in front
            else None
        )
    except (OSError, UnicodeDecodeError, yaml.YAMLError, IndexError):
        return None


def model_card(
    report: ConversionReport, config: Any, licence: str | None, command: str
) -> str:
    """README.md of a converted model: what it is, how it was made, what it lost."""
    base = config.moesaic["base_model"]
    front: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
    }
    if licence:
        front["license"] = licence
    if "/" in base:  # a hub id; a folder's name means nothing elsewhere
        front["base_model"] = base
    front["tags"] = ["moesaic", "mixture-of-experts"]
    versions = ", ".join(
        f"{name} {v}" for name, v in config.moesaic["versions"].items()
    )
    measured = "not measured: the calibration text left nothing to hold out"
    if report.perplexity and report.dense_perplexity:
        ratio = report.perplexity / report.dense_perplexity
        measured = (
            f"{report.perplexity:.3f}, dense {report.dense_perplexity:.3f}, ratio {ratio:.3f} "
            f"({report.heldout}, {report.heldout_tokens} tokens predicted, "
            f"windows of {report.sequence_length})"
        )
    ours, dense = report.macs, report.dense_macs
    rows = [
        ("Base model", base),
        ("Licence", licence or "as the base model's"),
        ("Recipe", f"`{report.recipe['name']}`: {report.recipe['about']}"),
        ("Layout", f"{report.layout}: {report.shape}"),
        ("Active FFN neurons", f"{report.active_ffn_fraction:.1%} per token"),
        (
            "Multiply-accumulates per token",
            f"{ours / 1e6:.4g} M (dense {dense / 1e6:.4g} M)",
        ),
        (
            "Calibration",
            f"{report.calibration}, {report.tokens} tokens, seed {report.seed}",
        ),
        ("Perplexity", measured),
        ("Made with", versions),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    outer = config.moesaic.get("num_outer")
    what = (
        f"one of its {outer} experts a layer cut into shared and routed sub-experts"
        if outer
        else "dense feed-forward network cut into shared and routed experts"
    )
    load = "router recall and expert load"
    if config.moesaic["router"]["kind"] == "gates":
        what = "dense feed-forward network made one whose neurons are chosen for each token"
        load = "and router recall"
    source = _LINKS.get(report.recipe["name"])
    method = f" Method: {source}." if source else ""
    return f"""---
{yaml.safe_dump(front, sort_keys=False).strip()}
---

# {Path(base).name}, {report.layout}

{base} with every {what} by moesaic, without
training.{method}

| | |
|---|---|
{table}

Command:

    {command}

Use, with moesaic installed (or with `trust_remote_code=True` and no moesaic):

    import moesaic
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("PATH_TO_THIS_FOLDER")
    tokenizer = AutoTokenizer.from_pretrained("PATH_TO_THIS_FOLDER")

Per-layer reconstruction error, {load} are in `moesaic_report.json`.
"""
