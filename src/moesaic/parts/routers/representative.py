"""The representative neuron of each expert (paper, Section 4.2, eq. 7).

Shape suffixes: T tokens, R routed experts, M neurons of an expert.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moesaic.calibration.statistics import Profile


def representative(
    profile: Profile, experts_RM: NDArray[np.int64], generator: np.random.Generator
) -> NDArray[np.int64]:
    """The member (R,) of each expert whose activation column is nearest its centroid.

    With S the sum of the M columns, M |c_i - S / M|^2 = M |c_i|^2 - 2 c_i.S + const: whole
    numbers, ties to the lowest index. O(q K) for all experts together.
    """
    assert profile.active is not None
    size = experts_RM.shape[1]
    chosen = []
    for members_M in experts_RM:
        columns_TM = profile.active.astype(np.int64)[:, members_M].tocsr()
        sum_T = columns_TM.sum(axis=1)
        distance_M = size * profile.count_F[members_M] - 2 * (columns_TM.T @ sum_T)
        chosen.append(members_M[int(np.argmin(distance_M))])
    return np.array(chosen)
