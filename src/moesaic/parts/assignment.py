"""Exact balanced assignment: neurons to experts of equal size, at least cost.

Shape suffixes: N neurons, R experts.
"""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray

MOST_ITERATIONS = 50_000_000  # of network simplex


def balanced_assignment(cost_NR: NDArray[np.float64]) -> NDArray[np.int64]:
    """The expert of each neuron (N,): every expert gets N / R, the sum is least.

    The paper (Appendix A.3) repeats every column N / R times and solves an N x N
    assignment in O(N^3). The same optimum is a transportation problem with R sinks
    of capacity N / R, which network simplex solves on the N x R matrix; its vertex
    solutions are integral. Integer costs make the result exact, hence independent
    of the order of the calibration tokens.

    Raises ValueError where R does not divide N, RuntimeError where the solver gives
    up. Cost: about 0.02 s for 6,880 x 5.
    """
    neurons, experts = cost_NR.shape
    if neurons % experts:
        raise ValueError(
            f"{neurons} neurons cannot be split evenly over {experts} experts"
        )
    if experts == 1:
        return np.zeros(neurons, dtype=np.int64)

    # Here, not above: it brings scikit-learn and pandas, a fifth of what every command
    # would take to start.
    import ot

    size = neurons // experts
    supply_N = np.ones(neurons)
    capacity_R = np.full(experts, size, dtype=np.float64)
    # Only differences within a row and within a column matter; small numbers
    # keep more bits.
    least_N1 = cost_NR.min(axis=1, keepdims=True)
    cost_NR = np.ascontiguousarray(cost_NR - least_N1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            plan_NR = ot.emd(
                supply_N,
                capacity_R,
                cost_NR,
                numItermax=MOST_ITERATIONS,
            )
        except UserWarning as warning:
            raise RuntimeError(
                f"balanced assignment of {neurons} x {experts} failed: "
                f"{warning}"
            ) from warning

    expert_N: NDArray[np.int64] = plan_NR.argmax(axis=1)
    load_R = np.bincount(expert_N, minlength=experts)
    if not np.array_equal(load_R, capacity_R):
        raise RuntimeError(
            f"balanced assignment of {neurons} x {experts} gave a solution "
            "that is not integral"
        )
    return expert_N
