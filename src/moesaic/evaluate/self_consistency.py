"""Self-consistency: several answers are drawn for a question, and they vote.

Wang et al., Self-Consistency Improves Chain of Thought Reasoning in Language Models,
arXiv:2203.11171; the paper's Table 11 names neither temperature nor how an answer to a
choice is drawn. Here a choice is drawn with the probability that the model gives it
among the choices of the question. Of a task whose metric divides by the length
(acc_norm) these are log probabilities a character, times the mean length. What is written
(gsm8k) is sampled at temperature 0.7. Votes of the first k answers are counted, so that
several k come from one set of samples; of equals the one that was drawn first wins.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.errors import MoesaicError

TEMPERATURE = 0.7  # of what is written
MOST_SAMPLES = 1000


@dataclass(frozen=True)
class Voting:
    """How many answers vote: one result for each number of `counts`."""

    counts: tuple[int, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        listed = ", ".join(map(str, self.counts))
        in_range = all(1 <= count <= MOST_SAMPLES for count in self.counts)
        if not self.counts or not in_range:
            raise MoesaicError(
                f"--self-consistency {listed}: numbers of answers from 1 to "
                f"{MOST_SAMPLES:,}, as 1,3,5"
            )
        if self.seed < 0:
            raise MoesaicError(
                f"--seed {self.seed} is negative; take 0 or more"
            )

    @property
    def samples(self) -> int:
        """Answers drawn for a question."""
        return max(self.counts)


def probabilities(
    log_probabilities: Sequence[float], lengths: Sequence[int] | None = None
) -> list[float]:
    """Of each choice among the choices of a question.

    `lengths` are their characters where the metric divides by them; the choice of the
    largest probability is then the one that acc_norm takes.
    """
    scores = list(log_probabilities)
    if lengths is not None:
        mean_length = sum(lengths) / len(lengths)
        scores = [
            score / max(length, 1) * mean_length
            for score, length in zip(scores, lengths, strict=True)
        ]
    best = max(scores)
    weights = [math.exp(score - best) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def draw(
    chances: Sequence[float], samples: int, generator: np.random.Generator
) -> list[int]:
    """So many choices, each drawn by itself."""
    drawn = generator.choice(len(chances), size=samples, p=chances)
    return [int(choice) for choice in drawn]


def majority(votes: Sequence[int]) -> int:
    """The choice drawn most often; of equals the one drawn first."""
    [(winner, _)] = Counter(votes).most_common(1)
    return winner
