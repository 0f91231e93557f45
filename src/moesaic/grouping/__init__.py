"""Grouping of the remaining neurons into routed experts of equal size.

Each ingredient maps (profile, candidates_N, num_routed, rounds, generator) to the neurons of
each expert (R, M), in ascending order. `none` drops them: static pruning.
"""

from moesaic.grouping.balanced_kmeans import balanced_kmeans
from moesaic.grouping.shuffled import shuffled

GROUPING = {"balanced-kmeans": balanced_kmeans, "random": shuffled, "none": None}

__all__ = ["GROUPING", "balanced_kmeans", "shuffled"]
