"""What a fine-tuning did: as data, and as the model card."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from moesaic.conversion.plan import public_name
from moesaic.finetune.balance import Loads
from moesaic.finetune.lora import rates_that_apply
from moesaic.finetune.prepare import TrainingInput


@dataclass
class FinetuneReport:
    """Perplexities are on held-out text, None where nothing was held out.

    `perplexity` is the trained model's as it was trained, `folded_perplexity` with its
    gates folded into the experts; `folded` says whether that is what was written.
    `teacher_perplexity` is the dense model's, where it was tuned likewise, and
    `teacher_perplexity_before` as it came, where the tuned one was converted. Of how many
    weights each was trained, `trained_weights` and `teacher_trained_weights` say:
    experts have LoRA weights each, and learn by more of them than the dense model has.
    `distill` is
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
    teacher_perplexity_before: float | None = None
    trained_weights: int = 0
    teacher_trained_weights: int | None = None
    loads_before: list[dict[str, Any]] = field(default_factory=list)
    loads_after: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def set_loads(self, before: Loads | None, after: Loads | None) -> None:
        if before is not None:
            self.loads_before = before.to_dict()
        if after is not None:
            self.loads_after = after.to_dict()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def written_perplexity(self) -> float | None:
        """Of the model as it was written: with its gates folded, if they were."""
        return self.folded_perplexity if self.folded else self.perplexity

    @property
    def public_names(self) -> tuple[str, str | None]:
        """Of the model and the one it imitates, without private paths."""
        model = public_name(self.model)
        if self.distill is None:
            return model, None
        return model, public_name(self.distill)

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
    validation = inputs.text.validation
    report = FinetuneReport(
        model=options.model,
        data=inputs.text.source,
        distill=inputs.teacher,
        teacher_tuned=options.tune_teacher,
        settings=inputs.settings.to_dict(),
        rates=rates_that_apply(
            student, inputs.settings.lora_lr, inputs.settings.scale_lr
        ),
        merged=options.merge,
        heldout=None if validation is None else validation.name,
    )
    tuned = inputs.tuned
    if tuned is not None:
        report.distill = tuned.name
        report.teacher_tuned = True
        report.teacher_perplexity = tuned.perplexity
        report.teacher_perplexity_before = tuned.perplexity_before
        report.teacher_trained_weights = tuned.trained_weights
    return report
