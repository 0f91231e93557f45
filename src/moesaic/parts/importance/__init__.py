"""Importance of neurons: who is shared. Higher is more important; ties go to the lowest index.

Each ingredient maps (profile, ffn, generator) to a score per neuron (F,).
"""

from moesaic.parts.importance.contribution import contribution
from moesaic.parts.importance.observability import observability
from moesaic.parts.importance.rate import rate
from moesaic.parts.importance.shuffled import shuffled
from moesaic.parts.importance.variance import variance

IMPORTANCE = {
    "rate": rate,
    "contribution": contribution,
    "variance": variance,
    "observability": observability,
    "random": shuffled,
}

__all__ = [
    "IMPORTANCE",
    "contribution",
    "observability",
    "rate",
    "shuffled",
    "variance",
]
