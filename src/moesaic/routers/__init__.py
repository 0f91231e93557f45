"""Routers: who runs for a token.

Each ingredient maps (profile, experts_RM, generator) to one representative neuron per expert
(R,), whose weights the router copies.
"""

from moesaic.routers.representative import representative
from moesaic.routers.shuffled import shuffled

ROUTERS = {"representative": representative, "random": shuffled, "none": None}

__all__ = ["ROUTERS", "representative", "shuffled"]
