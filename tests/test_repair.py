"""Repairs of the output vectors against numpy.linalg.lstsq and by hand.

Shape suffixes: T tokens, D hidden_size, F neurons, N neurons that are kept.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moesaic.parts.repair import Moments, least_squares, mean_compensation
from moesaic.parts.repair.least_squares import RIDGES
from tests import reference

Array = NDArray[np.float64]
CPU = torch.device("cpu")
module = importlib.import_module("moesaic.parts.repair.least_squares")  # as its function is called
intercepts = pytest.mark.parametrize("intercept", [True, False])


def moments_of(h_TN: Any, r_TD: Any, size: int = 1000) -> Moments:
    h_TN, r_TD = torch.as_tensor(h_TN).float(), torch.as_tensor(r_TD).float()
    moments = Moments(h_TN.shape[1], r_TD.shape[1], CPU)
    for h, r in zip(h_TN.split(size), r_TD.split(size), strict=True):
        moments.add(h, r)
    return moments


def sums_of(h_TN: Any, r_TD: Any, size: int = 1000) -> tuple[Moments, torch.Tensor]:
    """The sums of h and of y = r + h W, and output vectors W: r is what they leave."""
    h_TN, r_TD = torch.as_tensor(h_TN).double(), torch.as_tensor(r_TD).double()
    down_ND = torch.linspace(-1, 1, h_TN.shape[1] * r_TD.shape[1]).view(h_TN.shape[1], -1)
    return moments_of(h_TN, r_TD + h_TN @ down_ND.double(), size), down_ND


def regression(tokens: int = 200, neurons: int = 6, seed: int = 0) -> tuple[Array, Array]:
    """Sparse hidden states with a mean, as a gate leaves them, and what they should explain."""
    random = np.random.default_rng(seed)
    h_TN = (random.normal(size=(tokens, neurons)) + 0.5) * (random.random((tokens, neurons)) < 0.7)
    r_TD = h_TN @ random.normal(size=(neurons, 4)) + random.normal(size=(tokens, 4)) + 1.0
    return h_TN.astype(np.float32).astype(float), r_TD.astype(np.float32).astype(float)


# --- moments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 200])
def test_moments_are_sums_over_tokens_for_any_block_size(size: int) -> None:
    h_TN, r_TD = regression()
    moments = moments_of(h_TN, r_TD, size)
    assert moments.tokens == 200
    for found, expected in (
        (moments.gram_NN, sum(np.outer(h, h) for h in h_TN)),
        (moments.cross_ND, sum(np.outer(h, r) for h, r in zip(h_TN, r_TD, strict=True))),
        (moments.sum_N, sum(h_TN)),
        (moments.sum_D, sum(r_TD)),
        (moments.mean_N, h_TN.mean(axis=0)),
        (moments.mean_D, r_TD.mean(axis=0)),
    ):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-4)


def test_the_gram_matrix_and_its_product_with_a_vector_panel_by_panel() -> None:
    """600 neurons: two whole panels of rows and a part of one."""
    h_TN = torch.from_numpy(regression(tokens=50, neurons=600)[0])
    moments = moments_of(h_TN, h_TN[:, :3])
    gram_NN = h_TN.T @ h_TN
    torch.testing.assert_close(moments.gram_NN, gram_NN, rtol=1e-5, atol=1e-4)
    vector_N = torch.linspace(-1, 1, 600, dtype=torch.float64)
    product_N = moments.gram_times(vector_N)
    torch.testing.assert_close(product_N, gram_NN @ vector_N, rtol=1e-5, atol=1e-3)


# --- least squares -----------------------------------------------------------------------------


@intercepts
@pytest.mark.parametrize("seed", range(3))
def test_least_squares_equals_lstsq_on_the_augmented_system(intercept: bool, seed: int) -> None:
    """With an intercept: a column of ones that no ridge touches, by centring; then added back."""
    h_TN, r_TD = regression(seed=seed)
    found = least_squares(*sums_of(h_TN, r_TD), intercept)
    assert len(found) == len(RIDGES)
    mean_N, mean_D = h_TN.mean(axis=0) * intercept, r_TD.mean(axis=0) * intercept
    for candidate, ridge in zip(found, RIDGES, strict=True):
        damping = ridge * float(((h_TN - mean_N) ** 2).sum(axis=0).mean())
        expected = reference.damped_lstsq(h_TN - mean_N, r_TD - mean_D, damping)
        np.testing.assert_allclose(candidate.delta_ND.numpy(), expected, rtol=1e-3, atol=1e-4)
        assert (candidate.intercept_D is not None) == intercept
        if intercept:
            bias_D = mean_D - mean_N @ expected
            np.testing.assert_allclose(candidate.intercept_D.numpy(), bias_D, rtol=1e-3, atol=1e-4)
        output_TD = candidate.output(torch.from_numpy(h_TN).float()).double().numpy()
        plain_TD = (h_TN - mean_N) @ expected + mean_D
        np.testing.assert_allclose(output_TD, plain_TD, rtol=1e-3, atol=1e-3)


def test_an_intercept_is_the_ones_column_of_plain_least_squares() -> None:
    h_TN, r_TD = regression(tokens=500)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RIDGES", (1e-9,))
        (candidate,) = least_squares(*sums_of(h_TN, r_TD), intercept=True)
    expected = np.linalg.lstsq(np.c_[h_TN, np.ones(500)], r_TD, rcond=None)[0]
    np.testing.assert_allclose(candidate.delta_ND.numpy(), expected[:-1], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(candidate.intercept_D.numpy(), expected[-1], rtol=1e-3, atol=1e-3)


@intercepts
@pytest.mark.parametrize("size", [1, 33])
def test_block_size_and_token_order_do_not_matter(intercept: bool, size: int) -> None:
    h_TN, r_TD = regression()
    order = np.random.default_rng(0).permutation(200)
    expected = least_squares(*sums_of(h_TN, r_TD), intercept)
    for sums in (sums_of(h_TN, r_TD, size), sums_of(h_TN[order], r_TD[order])):
        for a, b in zip(least_squares(*sums, intercept), expected, strict=True):
            torch.testing.assert_close(a.delta_ND, b.delta_ND, rtol=1e-4, atol=1e-5)


@intercepts
def test_a_singular_gram_matrix_and_dead_neurons(intercept: bool) -> None:
    """Neurons 0 and 1 are equal, 2 is dead, 3 is constant: all finite, the dead one untouched."""
    h_TN, r_TD = regression()
    h_TN[:, 1], h_TN[:, 2], h_TN[:, 3] = h_TN[:, 0], 0.0, 2.0
    found = least_squares(*sums_of(h_TN, r_TD), intercept)
    assert len(found) == len(RIDGES)
    for candidate in found:
        assert torch.isfinite(candidate.delta_ND).all()
        equal_D, other_D = candidate.delta_ND[:2]
        torch.testing.assert_close(equal_D, other_D, rtol=1e-3, atol=1e-3)
        assert candidate.delta_ND[2].abs().max() < 1e-12  # of (lambda W) / lambda


@intercepts
def test_neurons_that_are_all_dead_offer_nothing_that_is_not_finite(intercept: bool) -> None:
    r_TD = regression()[1]
    sums = sums_of(np.zeros((200, 6)), r_TD)
    found = least_squares(*sums, intercept) + mean_compensation(*sums, intercept)
    for candidate in found:
        assert candidate.delta_ND is None or torch.isfinite(candidate.delta_ND).all()
        assert candidate.intercept_D is None or torch.isfinite(candidate.intercept_D).all()


@intercepts
@pytest.mark.parametrize("constant", [3.3, 1000.1])
def test_neurons_that_are_all_constant(intercept: bool, constant: float) -> None:
    """The centred Gram matrix is rounding errors of either sign."""
    r_TD = regression()[1]
    for candidate in least_squares(*sums_of(np.full((200, 6), constant), r_TD), intercept):
        output_TD = candidate.output(torch.full((1, 6), constant))
        assert torch.isfinite(output_TD).all()
        expected = torch.from_numpy(r_TD.mean(axis=0)).float()
        torch.testing.assert_close(output_TD[0], expected, rtol=0, atol=0.15)


# --- mean compensation -------------------------------------------------------------------------


def test_mean_compensation_by_hand() -> None:
    """u = mean h = (1, 1), so h.u = 1 and 3: (1 * 2 + 3 * 4) / (1 + 9) = 1.4 along u."""
    sums = sums_of([[1.0, 0.0], [1.0, 2.0]], [[2.0], [4.0]])
    (candidate,) = mean_compensation(*sums, intercept=False)
    assert candidate.intercept_D is None
    torch.testing.assert_close(candidate.delta_ND, torch.tensor([[1.4], [1.4]]))
    (candidate,) = mean_compensation(*sums, intercept=True)
    assert candidate.delta_ND is None
    assert candidate.intercept_D.tolist() == [3.0]
    assert candidate.output(torch.ones(1, 2)).tolist() == [3.0]


def test_mean_compensation_is_the_best_multiple_of_the_mean() -> None:
    h_TN, r_TD = regression()
    mean_N = h_TN.mean(axis=0)
    (candidate,) = mean_compensation(*sums_of(h_TN, r_TD), intercept=False)
    along_D = np.linalg.lstsq((h_TN @ mean_N)[:, None], r_TD, rcond=None)[0]
    expected = mean_N[:, None] @ along_D
    np.testing.assert_allclose(candidate.delta_ND.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_no_mean_and_no_compensation() -> None:
    assert mean_compensation(*sums_of([[1.0], [-1.0]], [[2.0], [4.0]]), False) == []
    assert mean_compensation(*sums_of([[0.0], [0.0]], [[2.0], [4.0]]), False) == []
