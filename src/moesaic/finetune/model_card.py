"""The card of a fine-tuned model or adapter: its training, and what it regained."""

from __future__ import annotations

from pathlib import Path

from moesaic.finetune.report import FinetuneReport
from moesaic.output.model_card import (
    Licence,
    Row,
    build_card,
    code,
    front_matter,
)


def finetune_card(
    report: FinetuneReport, licence: Licence, command: str | None
) -> str:
    """README.md of a fine-tuned model or adapter."""
    library = "transformers" if report.merged else "peft"
    routed = bool(report.loads_before)
    kind = "mixture of experts" if routed else "model"
    what = f"A {kind}"
    if not report.merged:
        what = f"A PEFT adapter for a {kind}"
    title = f"{Path(report.model).name}, fine-tuned"
    summary = f"{what} made by moesaic, recovered by light fine-tuning."
    front = front_matter(licence, library=library, routed=routed)
    rows = _setting_rows(report) + _perplexity_rows(report)
    sections = _sections(report, command)
    return build_card(front, title, summary, rows, sections)


def recovery_rows(report: FinetuneReport) -> list[Row]:
    """The training in the card of a model that was converted in the same run.

    That card says already which model it was and on what it is measured.
    """
    elsewhere = ("Converted model", "Perplexity before", "Measured on")
    rows = _setting_rows(report) + _perplexity_rows(report)
    kept = {name: value for name, value in rows if name not in elsewhere}
    renamed = {
        "Text": "Recovered on",
        "Perplexity after": "Perplexity, recovered",
    }
    return [(renamed.get(name, name), value) for name, value in kept.items()]


def _setting_rows(report: FinetuneReport) -> list[Row]:
    values = report.settings
    model, imitated = report.public_names
    text = (
        f"{report.data}: {values['samples']} x {values['sequence_length']} tokens, "
        f"{values['epochs']} epoch(s)"
    )
    imitates = imitated or "nothing: next-token loss alone"
    if report.teacher_tuned:
        imitates += ", tuned on the same windows first"
    rates = [f"{kind} {rate:.3g}" for kind, rate in report.rates.items()]
    return [
        ("Converted model", model),
        ("Text", text),
        ("Imitates", imitates),
        ("LoRA", f"rank {values['rank']}, alpha {values['alpha']:g}"),
        ("Learning rates", "; ".join(rates)),
    ]


def _perplexity_rows(report: FinetuneReport) -> list[Row]:
    rows: list[Row] = [
        ("Perplexity before", _shown(report.perplexity_before)),
        ("Perplexity after", _shown(report.perplexity)),
    ]
    if report.teacher_perplexity_before is not None:
        before = _shown(report.teacher_perplexity_before)
        rows.append(("Dense model, as it came", before))
    if report.teacher_perplexity is not None:
        rows.append(
            ("Dense model, tuned likewise", _shown(report.teacher_perplexity))
        )
    if report.folded_perplexity is not None:
        outcome = "written"
        if not report.folded:
            outcome = "not written: it loses too much"
        folded = f"{report.folded_perplexity:.4f} ({outcome})"
        rows.append(("With gates folded", folded))
    if report.heldout:
        measured_on = f"{report.heldout}, {report.heldout_tokens} tokens"
        rows.append(("Measured on", measured_on))
    return rows


def _shown(perplexity: float | None) -> str:
    if perplexity is None:
        return "not measured: nothing was held out"
    return f"{perplexity:.4f}"


def _sections(report: FinetuneReport, command: str | None) -> list[str]:
    sections = []
    if command:
        sections += ["Command:", code(command)]
    sections += ["Use, with moesaic installed:", code(_use(report))]
    files = (
        "The losses are in `learning_curve.csv`, the settings in "
        "`moesaic_finetune.json`."
    )
    if report.loads_after:
        loads = (
            "Loads of the experts before and after are in `moesaic_finetune.json` and "
            "`loads.png`."
        )
        files = f"{loads}\n{files}"
    sections.append(files)
    return sections


def _use(report: FinetuneReport) -> str:
    lines = [
        "import moesaic",
        "from transformers import AutoModelForCausalLM",
        _load(report),
    ]
    return "\n".join(lines)


def _load(report: FinetuneReport) -> str:
    folder = '"PATH_TO_THIS_FOLDER"'
    if report.merged:
        return f"model = AutoModelForCausalLM.from_pretrained({folder})"
    base, _ = report.public_names
    return (
        "from peft import PeftModel\n\n"
        f"base = AutoModelForCausalLM.from_pretrained({base!r})\n"
        f"model = PeftModel.from_pretrained(base, {folder})"
    )
