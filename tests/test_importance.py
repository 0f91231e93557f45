"""Statistics of an FFN and the importance of its neurons, by hand and against brute force.

Shape suffixes: T tokens, D hidden_size, F neurons.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moesaic.calibration.statistics import Statistics, StatisticsKind, compute_statistics
from moesaic.families import DenseFFN
from moesaic.parts.importance import (
    RIDGE,
    by_importance,
    contribution,
    observability,
    output_norms,
    variance,
)
from tests import reference

GRAM = StatisticsKind(gram=True)
IMPORTANCE = {"contribution": contribution, "variance": variance, "observability": observability}


def random_ffn(hidden: int = 6, neurons: int = 10) -> DenseFFN:
    return DenseFFN(
        up_FD=torch.randn(neurons, hidden),
        down_DF=torch.randn(hidden, neurons),
        activation="silu",
        gate_FD=torch.randn(neurons, hidden),
    )


def diagonal_ffn(scales: list[float], norms: list[float]) -> DenseFFN:
    """h_i is scale_i x_i, and ||w_i|| is norm_i."""
    return DenseFFN(torch.diag(torch.tensor(scales)), torch.diag(torch.tensor(norms)), "linear")


def profiled(x_TD: torch.Tensor, ffn: DenseFFN) -> tuple[Statistics, NDArray[np.float64]]:
    statistics = compute_statistics([x_TD], ffn, GRAM)
    return statistics, reference.hidden(x_TD, ffn.gate_FD, ffn.up_FD)


# --- statistics --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 50])
def test_sums_and_gram_matrix_for_any_block_size(size: int) -> None:
    ffn, x_TD = random_ffn(), torch.randn(50, 6)
    h_TF = reference.hidden(x_TD, ffn.gate_FD, ffn.up_FD)
    statistics = compute_statistics(x_TD.split(size), ffn, GRAM)
    assert statistics.tokens == 50
    np.testing.assert_allclose(statistics.sum_F, h_TF.sum(axis=0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(statistics.energy_F, (h_TF**2).sum(axis=0), rtol=1e-4)
    np.testing.assert_allclose(statistics.gram_FF.numpy(), h_TF.T @ h_TF, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [1, 3, 7, 64])
@pytest.mark.parametrize(("tokens", "stride"), [(10, 1), (11, 2), (20, 2), (64, 7)])
def test_the_sample_is_evenly_spaced_and_bounded(
    monkeypatch: pytest.MonkeyPatch, size: int, tokens: int, stride: int
) -> None:
    """Whatever the blocks; and h is the hidden state, not its absolute value that marks read."""
    monkeypatch.setattr("moesaic.calibration.statistics.SAMPLE_TOKENS", 10)
    ffn, x_TD = random_ffn(), torch.randn(tokens, 6)
    statistics = compute_statistics(x_TD.split(size), ffn, StatisticsKind(3, sample=True), tokens)
    expected = x_TD[::stride]
    assert len(expected) <= 10
    torch.testing.assert_close(statistics.sample_x_SD, expected, rtol=0, atol=0)
    torch.testing.assert_close(statistics.sample_h_SF, ffn.hidden(expected), rtol=1e-5, atol=1e-5)
    assert statistics.sample_h_SF.min() < 0


def test_what_is_not_asked_for_is_none() -> None:
    statistics = compute_statistics([torch.randn(5, 6)], random_ffn())
    assert statistics.active is None
    assert statistics.gram_FF is None
    assert statistics.sample_x_SD is None
    assert statistics.sample_h_SF is None


# --- importance --------------------------------------------------------------------------------


def test_variance_by_hand() -> None:
    """h: (1, 3), (2, 2), (0, -4) and (0, 0); variances 1, 0, 4 and 0, times squared norms."""
    x_TD = torch.tensor([[1.0, 2.0, 0.0, 0.0], [3.0, 2.0, -4.0, 0.0]])
    ffn = diagonal_ffn([1.0, 1.0, 1.0, 1.0], [2.0, 5.0, 0.5, 1.0])
    statistics, _ = profiled(x_TD, ffn)
    assert variance(statistics, ffn) == pytest.approx([4, 0, 1, 0])
    assert contribution(statistics, ffn) == pytest.approx([20, 100, 2, 0])


def test_variance_is_what_a_mean_bias_leaves() -> None:
    ffn, x_TD = random_ffn(), torch.randn(60, 6)
    statistics, h_TF = profiled(x_TD, ffn)
    lost_F = [
        np.mean(np.sum((np.outer(h_T - h_T.mean(), ffn.down_DF[:, i].numpy())) ** 2, axis=1))
        for i, h_T in enumerate(h_TF.T)
    ]
    np.testing.assert_allclose(variance(statistics, ffn), lost_F, rtol=1e-3)


def test_variance_of_a_constant_neuron_is_never_negative() -> None:
    ffn = diagonal_ffn([1.0, 1.0], [1.0, 1.0])
    statistics, _ = profiled(torch.full((999, 2), 3.3), ffn)
    assert (variance(statistics, ffn) >= 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_observability_is_what_refitting_the_others_cannot_make_up_for(seed: int) -> None:
    """Brute force: neuron by neuron, damped least squares of h_i on all the other columns."""
    torch.manual_seed(seed)
    ffn, x_TD = random_ffn(), torch.randn(80, 6)
    statistics, h_TF = profiled(x_TD, ffn)
    q = len(h_TF)
    ridge = RIDGE * float((h_TF**2).sum(axis=0).mean()) / q
    expected = []
    for i in range(10):
        others = np.delete(h_TF, i, axis=1)
        c = reference.damped_lstsq(others, h_TF[:, [i]], ridge * q)
        left = float(((h_TF[:, [i]] - others @ c) ** 2).sum() / q + ridge * (1 + (c**2).sum()))
        expected.append(left * float(ffn.down_DF[:, i].double().square().sum()))
    np.testing.assert_allclose(observability(statistics, ffn), expected, rtol=1e-3)


def test_a_neuron_that_another_can_stand_in_for_is_not_observable() -> None:
    """Neurons 0 and 1 are the same up to scale; 3 is dead; contribution is blind to the first."""
    ffn = DenseFFN(
        up_FD=torch.tensor([[1.0, 0, 0], [2.0, 0, 0], [0, 1.0, 0], [0, 0, 0]]),
        down_DF=torch.eye(3, 4) + torch.eye(3, 4).roll(1, 1),
        activation="linear",
    )
    statistics = compute_statistics([torch.randn(500, 3)], ffn, GRAM)
    seen = observability(statistics, ffn)
    assert np.isfinite(seen).all()
    assert seen[1] < 0.1 * seen[2]
    assert seen[0] < 0.1 * seen[2]
    assert seen[3] < 0.1 * seen[2]
    energy = contribution(statistics, ffn)
    assert energy[1] > energy[2] > energy[3] == 0


@pytest.mark.parametrize("name", ["contribution", "variance", "observability"])
def test_an_ffn_that_is_dead_has_no_importance_and_no_error(name: str) -> None:
    ffn = diagonal_ffn([0.0] * 4, [1.0] * 4)
    statistics = compute_statistics([torch.randn(20, 4)], ffn, GRAM)
    np.testing.assert_allclose(IMPORTANCE[name](statistics, ffn), 0, atol=1e-20)


@pytest.mark.parametrize("name", ["contribution", "variance", "observability"])
def test_token_order_does_not_matter(name: str) -> None:
    ffn, x_TD = random_ffn(), torch.randn(70, 6)
    one, two = (
        IMPORTANCE[name](compute_statistics(x.split(9), ffn, GRAM), ffn)
        for x in (x_TD, x_TD.flip(0))
    )
    np.testing.assert_allclose(one, two, rtol=1e-3)


def test_output_norms_and_the_order_of_importance_by_hand() -> None:
    """Ties go to the lowest index."""
    ffn = DenseFFN(torch.eye(3), torch.tensor([[3.0, 0, 1], [4.0, 2, 0]]), "linear")
    assert output_norms(ffn).tolist() == [25, 4, 1]
    assert by_importance(np.array([1.0, 3.0, 0.0, 3.0, 1.0])).tolist() == [1, 3, 0, 4, 2]
