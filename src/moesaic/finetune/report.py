"""What a fine-tuning did."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moesaic.finetune.balance import Loads


@dataclass
class FinetuneReport:
    """Perplexities are on held-out text, None where nothing was held out.

    `perplexity` is the trained model's as it was trained, `folded_perplexity` with its gates
    folded into the experts; `folded` says whether that is what was written.
    """

    model: str
    data: str
    distill: str | None
    settings: dict[str, Any]
    rates: dict[str, float]  # learning rates
    merged: bool
    heldout: str | None
    heldout_tokens: int = 0
    perplexity_before: float | None = None
    perplexity: float | None = None
    folded_perplexity: float | None = None
    folded: bool = False
    teacher_tuned: bool = False
    teacher_perplexity: float | None = (
        None  # of the dense model, where it was tuned likewise
    )
    loads_before: list[dict[str, Any]] = field(default_factory=list)
    loads_after: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def loads(self, before: Loads | None, after: Loads | None) -> None:
        self.loads_before = before.to_dict() if before is not None else []
        self.loads_after = after.to_dict() if after is not None else []

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def public_names(self) -> tuple[str, str | None]:
        """Of the model and the one it imitates, without private paths."""
        names = [
            name and (Path(name).name if Path(name).exists() else name)
            for name in (self.model, self.distill)
        ]
        return names[0] or "", names[1]

    def recipe(self) -> dict[str, Any]:
        """What the configuration of the model keeps."""
        names = ("data", "distill", "teacher_tuned", "settings", "folded")
        kept = {name: value for name, value in self.to_dict().items() if name in names}
        return kept | {"distill": self.public_names[1]}
