"""Balanced k-means on binary activation columns (paper, Section 4.1 and Appendix A.3).

Shape suffixes: T tokens, N neurons to group, R routed experts, M = N / R.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moesaic.calibration.statistics import Profile
from moesaic.families import DenseFFN
from moesaic.parts.assignment import balanced_assignment


def balanced_kmeans(
    profile: Profile,
    ffn: DenseFFN,
    candidates_N: NDArray[np.int64],
    num_routed: int,
    rounds: int,
    generator: np.random.Generator,
) -> NDArray[np.int64]:
    """Neurons of each expert (R, M): squared-L2 k-means whose every round is an exact assignment.

    Seeds are the R most active candidates; stops when an assignment repeats, after `rounds` at
    the latest. The squared distance of column c_i to the centroid S_j / M, S_j the sum of the
    expert's M columns, is |c_i|^2 - 2 c_i.S_j / M + |S_j / M|^2. Where every neuron is assigned
    once and every expert gets M neurons, a term of the row, a term of the column and a positive
    factor leave the best assignment as it is, so -c_i.S_j serves: whole numbers, which neither
    rounding nor the order of tokens can change.

    Cost per round: O(q K R) for the sparse products, then one N x R transportation problem.
    """
    assert profile.active is not None
    columns = profile.active.astype(np.int64)[:, candidates_N].tocsr()
    rows = columns.T.tocsr()
    seeds_R = np.argsort(-profile.count_F[candidates_N], kind="stable")[:num_routed]
    sums_TR = columns[:, seeds_R].toarray()
    expert_N = np.full(len(candidates_N), -1)
    for _ in range(rounds):
        previous_N = expert_N
        expert_N = balanced_assignment(-(rows @ sums_TR).astype(np.float64))
        if np.array_equal(expert_N, previous_N):
            break
        sums_TR = columns @ np.eye(num_routed, dtype=np.int64)[expert_N]
    order_N = np.argsort(expert_N, kind="stable")
    return candidates_N[order_N].reshape(num_routed, -1)
