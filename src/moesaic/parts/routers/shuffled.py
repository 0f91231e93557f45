"""A random member of each expert as its representative: the router's reference."""

import numpy as np
from numpy.typing import NDArray

from moesaic.calibration.statistics import Profile


def shuffled(
    profile: Profile, experts_RM: NDArray[np.int64], generator: np.random.Generator
) -> NDArray[np.int64]:
    """One member (R,) of each expert, drawn at random."""
    return np.array([generator.choice(members_M) for members_M in experts_RM])
