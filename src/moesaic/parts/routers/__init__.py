"""Routers: who runs for a token.

`representative` and `random` choose one neuron per expert, whose weights the router copies:
(profile, experts_RM, generator) -> (R,). `linear` and `quadratic` are fitted to the experts'
energies, `gates` to those of single neurons. `oracle` knows them.
"""

from moesaic.parts.routers.gates import sketch_up
from moesaic.parts.routers.linear import linear, mean_of
from moesaic.parts.routers.oracle import expert_energies, expert_grams, oracle
from moesaic.parts.routers.quadratic import directions
from moesaic.parts.routers.representative import representative
from moesaic.parts.routers.shuffled import shuffled

REPRESENTATIVE = {"representative": representative, "random": shuffled}
FITTED = ("linear", "quadratic")
ROUTERS = (*REPRESENTATIVE, *FITTED, "gates", "oracle", "none")

__all__ = [
    "FITTED",
    "REPRESENTATIVE",
    "ROUTERS",
    "directions",
    "expert_energies",
    "expert_grams",
    "linear",
    "mean_of",
    "oracle",
    "representative",
    "shuffled",
    "sketch_up",
]
