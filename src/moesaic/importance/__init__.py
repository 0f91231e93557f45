"""Importance of neurons: who is shared. Higher is more important; ties go to the lowest index.

Each ingredient maps (profile, ffn, generator) to a score per neuron (F,).
"""

from moesaic.importance.contribution import contribution
from moesaic.importance.observability import observability
from moesaic.importance.rate import rate
from moesaic.importance.shuffled import shuffled
from moesaic.importance.variance import variance

IMPORTANCE = {
    "rate": rate,
    "contribution": contribution,
    "variance": variance,
    "observability": observability,
    "random": shuffled,
}

__all__ = ["IMPORTANCE", "contribution", "observability", "rate", "shuffled", "variance"]
