"""Grouping of the remaining neurons into routed experts of equal size.

Each ingredient maps (profile, ffn, candidates_N, num_routed, rounds, generator) to the neurons of
each expert (R, M), in ascending order. `none` drops them: static pruning.
`neurons` makes an expert of every neuron.
"""

from moesaic.parts.grouping.balanced_kmeans import balanced_kmeans
from moesaic.parts.grouping.contribution_kmeans import contribution_kmeans
from moesaic.parts.grouping.reassign import reassign
from moesaic.parts.grouping.shuffled import shuffled, single_neurons

GROUPING = {
    "balanced-kmeans": balanced_kmeans,
    "contribution-kmeans": contribution_kmeans,
    "random": shuffled,
    "neurons": single_neurons,
    "none": None,
}

__all__ = [
    "GROUPING",
    "balanced_kmeans",
    "contribution_kmeans",
    "reassign",
    "shuffled",
    "single_neurons",
]
