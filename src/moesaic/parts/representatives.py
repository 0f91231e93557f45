"""The neuron that speaks for each expert (paper, Section 4.2, eq. 7).

Shape suffixes: T tokens, F neurons, R routed experts, M neurons of an expert.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.calibration.statistics import Statistics
from moesaic.families import DenseFFN
from moesaic.modeling import BlockConfig, Sizes, new_router
from moesaic.parts.carve import neuron_rows


def representative(
    statistics: Statistics,
    experts_RM: NDArray[np.int64],
    speaks_RM: NDArray[np.bool_] | None = None,
) -> NDArray[np.int64]:
    """The member (R,) of each expert whose activation column is nearest its centroid.

    `speaks_RM` says which members it may be; any, unless it is given.
    With S the sum of the M columns, M |c_i - S / M|^2 = M |c_i|^2 - 2 c_i.S + const:
    whole numbers, ties to the lowest index. O(q K) for all experts together.
    """
    assert statistics.active is not None
    if speaks_RM is None:
        speaks_RM = np.ones(experts_RM.shape, dtype=bool)
    active_TF = statistics.active.astype(np.int64)
    count_F = statistics.count_F
    size = experts_RM.shape[1]
    representatives = []
    for members_M, speaks_M in zip(experts_RM, speaks_RM, strict=True):
        columns_TM = active_TF[:, members_M].tocsr()
        sum_T = columns_TM.sum(axis=1)
        square_M = size * count_F[members_M]
        product_M = columns_TM.T @ sum_T
        distance_M = square_M - 2 * product_M
        nearest = int(np.argmin(distance_M[speaks_M]))
        representatives.append(members_M[speaks_M][nearest])
    return np.array(representatives)


def own_members(experts_RM: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which members (R, M) no other expert has; all of an expert that has none."""
    experts_of_F = np.bincount(experts_RM.ravel())
    is_own_RM = experts_of_F[experts_RM] == 1
    has_none_R1 = ~is_own_RM.any(axis=1, keepdims=True)
    either_RM: NDArray[np.bool_] = is_own_RM | has_none_R1
    return either_RM


def random_members(
    experts_RM: NDArray[np.int64], generator: np.random.Generator
) -> NDArray[np.int64]:
    """One member (R,) of each expert, drawn at random: the reference."""
    drawn = [generator.choice(members_M) for members_M in experts_RM]
    return np.array(drawn)


def copied_neurons(
    ffn: DenseFFN,
    neurons_R: NDArray[np.int64],
    block: BlockConfig,
    sizes: Sizes,
) -> Any:
    """A router that scores an expert by the hidden activation of one neuron (eq. 8)."""
    router: Any = new_router(block, sizes)
    router.to(ffn.up_FD.device)
    dtype = ffn.up_FD.dtype
    if router.gate_proj is not None:
        router.gate_proj.to(dtype)
    router.up_proj.to(dtype)
    rows = neuron_rows(ffn, neurons_R)
    router.load_state_dict(rows, strict=False)
    return router


def analytical_router(
    statistics: Statistics,
    experts_RM: NDArray[np.int64],
    speaks_RM: NDArray[np.bool_],
    ffn: DenseFFN,
    block: BlockConfig,
    sizes: Sizes,
) -> Any:
    """The paper's router of any experts: each one's representative scores it."""
    neurons_R = representative(statistics, experts_RM, speaks_RM)
    return copied_neurons(ffn, neurons_R, block, sizes)
