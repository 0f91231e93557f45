"""Importance of neurons: who is shared. Higher is more important; ties go to the lowest index.

Each ingredient maps (profile, ffn, generator) to a score per neuron (F,).
"""

from moesaic.importance.contribution import contribution
from moesaic.importance.rate import rate
from moesaic.importance.shuffled import shuffled

IMPORTANCE = {"rate": rate, "contribution": contribution, "random": shuffled}

__all__ = ["IMPORTANCE", "contribution", "rate", "shuffled"]
