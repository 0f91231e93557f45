"""How large the tables are made: smoke, small, or as in the paper."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from moesaic.errors import MoesaicError, unknown


@dataclass(frozen=True)
class Scale:
    """Numbers of one scale. Windows are of `length` tokens.

    `samples` windows calibrate and `tuning` ones fine-tune (`efficiency` in Figure 4). A
    perplexity takes `tokens` tokens. Each task asks `questions` (None: all), or as many as
    `fewer` says, with `shots` where not the paper's. Engines time `rounds` rounds of
    `contexts` tokens of a prompt and `decode` after it, for `batches` sequences at once.
    """

    name: str
    says: str
    samples: int
    length: int
    tokens: int | None
    tuning: int
    efficiency: tuple[int, ...]
    calibrations: tuple[int, ...]
    questions: int | None
    layouts: tuple[str, ...]
    sixteenths: tuple[int, ...]  # experts of 16 that are skipped
    contexts: tuple[int, ...]
    decode: int
    batches: tuple[int, ...]
    rounds: int
    shots: dict[str, int] = field(default_factory=dict)
    fewer: dict[str, int] = field(default_factory=dict)

    def questions_of(self, task: str) -> int | None:
        """How many of a task's questions are asked; None: all."""
        return self.fewer.get(task, self.questions)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: lists instead of tuples."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values


PAPER_LAYOUTS = (
    "S1A5E8",
    "S3A3E8",
    "S2A4E8",
    "S4A8E16",
    "S6A6E16",
    "S3A9E16",
)

SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "smoke",
            "It shows that the table runs, offline, and that a second run gives the same "
            "numbers. It says nothing about the paper's models. Texts are sources and "
            "documentation of Python but for those that --text gave, and questions are made "
            "up unless --task-data was given.",
            samples=8,
            length=128,
            tokens=4096,
            tuning=16,
            efficiency=(0, 8, 16),
            calibrations=(8, 32, 64),
            questions=16,
            layouts=PAPER_LAYOUTS,
            sixteenths=(2, 4, 6, 8, 10, 12),
            contexts=(64,),
            decode=8,
            batches=(1, 16),
            rounds=1,
            shots={"mmlu": 1, "gsm8k": 1},
        ),
        Scale(
            "small",
            "It shows how methods compare on a model of 0.1 to 1 billion weights, with few "
            "tokens of fine-tuning and few questions: a difference of some points of "
            "accuracy is noise. It says little about models of 7 billion.",
            samples=8,
            length=512,
            tokens=16_384,
            tuning=16,
            efficiency=(0, 8, 16, 32),
            calibrations=(8, 32, 64),
            questions=60,
            layouts=PAPER_LAYOUTS,
            sixteenths=(4, 8, 12),
            contexts=(512,),
            decode=32,
            batches=(1, 8),
            rounds=3,
            fewer={"mmlu": 57, "gsm8k": 20, "humaneval": 20},
        ),
        Scale(
            "paper",
            "The paper's numbers of windows, tokens and questions.",
            samples=8,
            length=2048,
            tokens=None,
            tuning=2048,
            efficiency=(0, 256, 512, 1024, 2048),
            calibrations=(8, 32, 64),
            questions=None,
            layouts=PAPER_LAYOUTS,
            sixteenths=(2, 4, 6, 8, 10, 12),
            contexts=(4096, 32_000),
            decode=128,
            batches=(1, 512),
            rounds=5,
        ),
    )
}


def scale_of(name: str) -> Scale:
    """The scale of that name. Raises MoesaicError where there is none."""
    if name not in SCALES:
        raise unknown("scale", name, SCALES)
    return SCALES[name]


def with_prompts_within(scale: Scale, context: int) -> Scale:
    """The scale with prompts that leave room for the tokens after them.

    And for the last one's own answer, as `bench` wants.
    """
    longest = context - scale.decode - 1
    prompts = [min(tokens, longest) for tokens in scale.contexts]
    distinct = tuple(dict.fromkeys(prompts))
    return replace(scale, contexts=distinct)


def check_length(scale: Scale, model: str, context: int) -> None:
    """Raises MoesaicError where the model reads fewer tokens than a window has."""
    if scale.length > context:
        raise MoesaicError(
            f"--scale {scale.name} has windows of {scale.length:,} tokens, and the "
            f"context of {model} holds {context:,}; take a smaller scale"
        )
