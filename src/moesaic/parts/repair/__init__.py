"""Repair of the output vectors once it is known what the gates let through.

Each ingredient maps (moments, output vectors, intercept) to candidates; `choose` takes
the one that is best on tokens it was not fitted to, or none.
"""

from moesaic.parts.repair.choose import (
    Kept,
    Repair,
    choose_repairs,
    with_up_rows,
)
from moesaic.parts.repair.least_squares import TOKENS_PER_NEURON, least_squares
from moesaic.parts.repair.mean import mean_compensation
from moesaic.parts.repair.moments import Moments

__all__ = [
    "TOKENS_PER_NEURON",
    "Kept",
    "Moments",
    "Repair",
    "choose_repairs",
    "least_squares",
    "mean_compensation",
    "with_up_rows",
]
