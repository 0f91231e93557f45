"""Exact balanced assignment: n neurons to R experts of equal size at the least total cost."""

from __future__ import annotations

import warnings

import numpy as np
import ot
from numpy.typing import NDArray


def balanced_assignment(cost_NR: NDArray[np.float64]) -> NDArray[np.int64]:
    """The expert of each neuron (N,) such that every expert gets N / R and the sum is least.

    The paper (Appendix A.3) repeats every column N / R times and solves an N x N assignment in
    O(N^3). The same optimum is a transportation problem with R sinks of capacity N / R, which
    network simplex solves on the N x R matrix; its vertex solutions are integral. Integer costs
    make the result exact, hence independent of the order of the calibration tokens.

    Raises ValueError where R does not divide N, RuntimeError where the solver gives up.
    Cost: about 0.02 s for 6,880 x 5.
    """
    n, r = cost_NR.shape
    if n % r:
        raise ValueError(f"{n} neurons cannot be split evenly over {r} experts")
    if r == 1:
        return np.zeros(n, dtype=np.int64)
    supply, capacity = np.ones(n), np.full(r, n // r, dtype=np.float64)
    # Only differences within a row and within a column matter; small numbers keep more bits.
    cost_NR = cost_NR - cost_NR.min(axis=1, keepdims=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            plan_NR = ot.emd(
                supply,
                capacity,
                np.ascontiguousarray(cost_NR),
                numItermax=50_000_000,
            )
        except UserWarning as warning:
            raise RuntimeError(
                f"balanced assignment of {n} x {r} failed: {warning}"
            ) from warning
    assigned_N: NDArray[np.int64] = plan_NR.argmax(axis=1)
    if not np.array_equal(np.bincount(assigned_N, minlength=r), capacity):
        raise RuntimeError(
            f"balanced assignment of {n} x {r} gave a solution that is not integral"
        )
    return assigned_N
