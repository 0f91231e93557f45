"""What a fine-tuning did: as data, and as the model card."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from moesaic.finetune.balance import Loads
from moesaic.finetune.lora import learning_rates, neuron_routers_of
from moesaic.finetune.options import Settings
from moesaic.finetune.prepare import TrainingInput


@dataclass
class FinetuneReport:
    """Perplexities are on held-out text, None where nothing was held out.

    `perplexity` is the trained model's as it was trained, `folded_perplexity` with its
    gates folded into the experts; `folded` says whether that is what was written.
    `teacher_perplexity` is the dense model's, where it was tuned likewise. `distill` is
    the teacher's name or path, None where there was none. `rates` are learning rates.
    """

    model: str
    data: str
    distill: str | None
    settings: dict[str, Any]
    rates: dict[str, float]
    merged: bool
    heldout: str | None
    heldout_tokens: int = 0
    perplexity_before: float | None = None
    perplexity: float | None = None
    folded_perplexity: float | None = None
    folded: bool = False
    teacher_tuned: bool = False
    teacher_perplexity: float | None = None
    loads_before: list[dict[str, Any]] = field(default_factory=list)
    loads_after: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def set_loads(self, before: Loads | None, after: Loads | None) -> None:
        self.loads_before = [] if before is None else before.to_dict()
        self.loads_after = [] if after is None else after.to_dict()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def public_names(self) -> tuple[str, str | None]:
        """Of the model and the one it imitates, without private paths."""
        teacher = None if self.distill is None else _public_name(self.distill)
        return _public_name(self.model), teacher

    def recipe(self) -> dict[str, Any]:
        """What the configuration of the model keeps."""
        _, teacher = self.public_names
        return {
            "data": self.data,
            "distill": teacher,
            "settings": self.settings,
            "folded": self.folded,
            "teacher_tuned": self.teacher_tuned,
        }


def new_report(inputs: TrainingInput, student: Any) -> FinetuneReport:
    """What is known before training."""
    options = inputs.options
    return FinetuneReport(
        model=options.model,
        data=inputs.source,
        distill=inputs.teacher,
        teacher_tuned=options.tune_teacher,
        settings=inputs.settings.to_dict(),
        rates=_rates(student, inputs.settings),
        merged=options.merge,
        heldout=inputs.heldout_name,
    )


def _rates(model: Any, settings: Settings) -> dict[str, float]:
    """Learning rates, as far as the model has such weights."""
    rates = learning_rates(model, settings.lora_lr, settings.scale_lr)
    if neuron_routers_of(model):
        first = next(iter(rates))
        return {first: rates[first]}
    return rates


def _public_name(model: str) -> str:
    """A folder's name without the folders it lies in; a hub id as it is."""
    path = Path(model)
    return path.name if path.exists() else model


def finetune_card(
    report: FinetuneReport, licence: str | None, command: str | None
) -> str:
    """README.md of a fine-tuned model or adapter."""
    values = report.settings
    name = Path(report.model).name
    front: dict[str, Any] = {
        "library_name": "transformers" if report.merged else "peft"
    }
    front |= {
        "pipeline_tag": "text-generation",
        "tags": ["moesaic", "mixture-of-experts"],
    }
    front |= {"license": licence} if licence else {}

    def shown(value: float | None) -> str:
        return "not measured: nothing was held out" if value is None else f"{value:.4f}"

    rows = [
        ("Converted model", report.public_names[0]),
        (
            "Text",
            f"{report.data}: {values['samples']} x {values['sequence_length']} tokens, "
            f"{values['epochs']} epoch(s)",
        ),
        (
            "Imitates",
            (report.public_names[1] or "nothing: next-token loss alone")
            + (", tuned on the same windows first" if report.teacher_tuned else ""),
        ),
        ("LoRA", f"rank {values['rank']}, alpha {values['alpha']:g}"),
        (
            "Learning rates",
            "; ".join(f"{what} {v:.3g}" for what, v in report.rates.items()),
        ),
        ("Perplexity before", shown(report.perplexity_before)),
        ("Perplexity after", shown(report.perplexity)),
    ]
    if report.teacher_perplexity is not None:
        rows.append(("Dense model, tuned likewise", shown(report.teacher_perplexity)))
    if report.folded_perplexity is not None:
        kept = "written" if report.folded else "not written: it loses too much"
        rows.append(("With gates folded", f"{report.folded_perplexity:.4f} ({kept})"))
    if report.heldout:
        rows.append(
            ("Measured on", f"{report.heldout}, {report.heldout_tokens} tokens")
        )
    table = "\n".join(f"| {key} | {value} |" for key, value in rows)
    load = 'model = AutoModelForCausalLM.from_pretrained("PATH_TO_THIS_FOLDER")'
    if not report.merged:
        load = (
            "from peft import PeftModel\n\n"
            f"    base = AutoModelForCausalLM.from_pretrained({report.public_names[0]!r})\n"
            '    model = PeftModel.from_pretrained(base, "PATH_TO_THIS_FOLDER")'
        )
    what = (
        "A mixture of experts"
        if report.merged
        else "A PEFT adapter for a mixture of experts"
    )
    kept = "Loads of the experts before and after are in `moesaic_finetune.json` and `loads.png`.\n"
    loads = kept if report.loads_after else ""
    how = f"\nCommand:\n\n    {command}\n" if command else ""
    return f"""---
{yaml.safe_dump(front, sort_keys=False).strip()}
---

# {name}, fine-tuned

{what} made by moesaic, recovered by light fine-tuning.

| | |
|---|---|
{table}
{how}
Use, with moesaic installed:

    import moesaic
    from transformers import AutoModelForCausalLM
    {load}

{loads}The losses are in `learning_curve.csv`, the settings in `moesaic_finetune.json`.
"""
