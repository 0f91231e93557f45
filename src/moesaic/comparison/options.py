"""What a comparison is asked for: made once, from the call or the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moesaic.calibration.text import place_of
from moesaic.comparison.labels import labels_of
from moesaic.errors import MoesaicError, unknown
from moesaic.finetune.options import AUTO_TEACHER
from moesaic.layout import GRAINS
from moesaic.methods.base import Method

TEXT_TOKENS = 65_536  # of each text, unless said
USUAL_SPARSITIES = (0.25, 0.5)
NEAR = (
    0.02  # of the neurons, or of the dense FFNs' work: how near counts as met
)

SPARSITY = "sparsity"
FFN_BYTES = "FFN bytes"
FFN_MACS = "FFN MACs"
LAYOUT = "layout"


@dataclass(frozen=True)
class Goal:
    """What the methods of one table have in common.

    Either the share of neurons that a token skips, or what a token costs over the dense
    FFNs, or a layout, which is no number.
    """

    equal: str
    at: float | None = None

    @property
    def words(self) -> str:
        if self.at is None:
            return "one layout"
        return f"{self.equal} {self.at:g}"

    @property
    def is_work(self) -> bool:
        return self.equal in (FFN_BYTES, FFN_MACS)


@dataclass(frozen=True)
class CompareOptions:
    """All of a comparison's input. `moesaic.compare` says what each field means."""

    model: str
    methods: tuple[Method, ...]
    references: tuple[Method, ...]
    sparsities: tuple[float, ...]
    layout: str | None
    grain: str
    calibration: tuple[str, ...]
    texts: tuple[str, ...]
    ffn_bytes: tuple[float, ...] = ()
    ffn_macs: tuple[float, ...] = ()
    seeds: int = 3
    samples: int | None = None
    sequence_length: int | None = None
    max_tokens: int = TEXT_TOKENS
    finetune: int | None = None
    distill: str = AUTO_TEACHER
    speed: bool = False
    output: Path | None = None
    resume: bool = False
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        labels_of(self.methods + self.references)
        sources = {place_of(source) for source in self.calibration}
        if not sources or len(sources) < len(self.calibration):
            listed = ", ".join(self.calibration)
            raise MoesaicError(
                f"calibration texts {listed!r}: at least one is needed, each once"
            )
        if self.seeds < 1:
            raise MoesaicError(f"seeds {self.seeds}: at least 1 seed is needed")
        if self.max_tokens < 2:
            raise MoesaicError(
                f"max tokens {self.max_tokens}: at least 2 tokens are needed"
            )
        if not self.goals:
            raise MoesaicError(
                "sparsities []: at least 1 sparsity is needed, as 0.25"
            )
        if len(set(self.goals)) < len(self.goals):
            listed = ", ".join(goal.words for goal in self.goals)
            raise MoesaicError(f"budgets {listed}: give each once")
        if self.layout is not None and len(self.goals) > 1:
            raise MoesaicError(
                f"layout {self.layout} fixes the budget; leave out sparsities and works"
            )
        if self.finetune is None and self.distill != AUTO_TEACHER:
            raise MoesaicError(
                f"distill {self.distill!r} is about fine-tuning; give finetune too, as "
                "64 windows"
            )
        if self.grain not in GRAINS:
            raise unknown("grain", self.grain, GRAINS)
        for goal in self.goals:
            if goal.is_work and not 0 < (goal.at or 0) <= 1:
                raise MoesaicError(
                    f"{goal.words} is outside (0, 1]; 0.75 is three quarters of what "
                    "the dense FFNs cost"
                )

    @property
    def goals(self) -> list[Goal]:
        """One a table, in the order of the tables."""
        goals = [] if self.layout is None else [Goal(LAYOUT)]
        goals += [Goal(SPARSITY, sparsity) for sparsity in self.sparsities]
        goals += [Goal(FFN_BYTES, share) for share in self.ffn_bytes]
        goals += [Goal(FFN_MACS, share) for share in self.ffn_macs]
        return goals
