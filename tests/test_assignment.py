"""Exact balanced assignment against the paper's expanded matrix and against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from moesaic.parts.assignment import balanced_assignment
from tests import reference

Costs = NDArray[np.float64]


@st.composite
def costs(draw: st.DrawFn, most: int = 40, experts: tuple[int, ...] = (1, 2, 3, 4, 5, 8)) -> Costs:
    """Whole-number costs of few distinct values (many ties) or of many, also negative."""
    r = draw(st.sampled_from(experts))
    n = r * draw(st.integers(1, most // r))
    span = draw(st.sampled_from([2, 1000, 10**9]))
    return draw(hnp.arrays(np.int64, (n, r), elements=st.integers(-span, span))).astype(float)


@settings(deadline=None, max_examples=150)
@given(costs())
def test_same_objective_as_the_expanded_square_assignment(cost_NR: Costs) -> None:
    ours = reference.cost_of(cost_NR, balanced_assignment(cost_NR))
    assert ours == reference.cost_of(cost_NR, reference.balanced_assignment(cost_NR))


@settings(deadline=None)
@given(costs(most=6, experts=(2, 3)))
def test_same_objective_as_brute_force(cost_NR: Costs) -> None:
    best = min(
        reference.cost_of(cost_NR, np.array(expert_N))
        for expert_N in reference.all_balanced_assignments(*cost_NR.shape)
    )
    assert reference.cost_of(cost_NR, balanced_assignment(cost_NR)) == best


@settings(deadline=None)
@given(costs())
def test_every_expert_gets_as_many(cost_NR: Costs) -> None:
    n, r = cost_NR.shape
    expert_N = balanced_assignment(cost_NR)
    assert expert_N.shape == (n,)
    assert np.bincount(expert_N, minlength=r).tolist() == [n // r] * r


@settings(deadline=None)
@given(costs())
def test_deterministic_and_leaves_its_input_alone(cost_NR: Costs) -> None:
    before = cost_NR.copy()
    first = balanced_assignment(cost_NR)
    assert np.array_equal(first, balanced_assignment(np.asfortranarray(cost_NR)))
    assert np.array_equal(cost_NR, before)


def test_an_optimum_that_is_unique_is_found() -> None:
    """All four neurons are cheapest in expert 0; the two that lose least by it go elsewhere."""
    cost_NR = np.array([[0.0, 9.0], [0.0, 9.0], [0.0, 1.0], [5.0, 6.0]])
    expert_N = balanced_assignment(cost_NR)
    assert expert_N.tolist() == [0, 0, 1, 1]
    assert reference.is_only_optimum(cost_NR, expert_N)


def test_one_expert_takes_all() -> None:
    assert balanced_assignment(np.arange(7.0)[:, None]).tolist() == [0] * 7


@pytest.mark.parametrize(("n", "r"), [(7, 2), (1, 2), (10, 4)])
def test_an_uneven_split_is_refused(n: int, r: int) -> None:
    with pytest.raises(ValueError, match=f"{n} neurons .* {r} experts"):
        balanced_assignment(np.zeros((n, r)))


def test_squared_and_unsquared_distance_have_opposite_optima() -> None:
    """Two columns and two seeds of binary marks whose Hamming distances are 1, 8, 8 and 17.

    Squared L2 is Hamming. Appendix A.3 says that the unsquared distance gives the same
    assignment; under the balance constraint it does not: 8 + 8 < 1 + 17, but
    sqrt 8 + sqrt 8 > sqrt 1 + sqrt 17.
    """
    tokens = np.arange(17)
    column_TN = np.stack([tokens < 0, tokens < 9], axis=1).astype(np.int64)
    seed_TR = np.stack([tokens < 1, tokens >= 9], axis=1).astype(np.float64)
    squared_NR = reference.squared_distances(column_TN, seed_TR)
    assert squared_NR.tolist() == [[1, 8], [8, 17]]
    assert balanced_assignment(squared_NR).tolist() == [1, 0]
    assert balanced_assignment(np.sqrt(squared_NR)).tolist() == [0, 1]
    for cost_NR in (squared_NR, np.sqrt(squared_NR)):
        assert reference.is_only_optimum(cost_NR, balanced_assignment(cost_NR))
