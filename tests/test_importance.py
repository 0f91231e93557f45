"""Statistics of an FFN and the importance of its neurons, by hand and against brute force.

Shape suffixes: T tokens, D hidden_size, F neurons.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moesaic.calibration.statistics import Profile, profile_ffn
from moesaic.families import DenseFFN
from moesaic.parts.importance import IMPORTANCE, contribution, observability, variance
from moesaic.parts.importance.observability import RIDGE
from tests import reference

GENERATOR = np.random.default_rng(0)


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


def profiled(x_TD: torch.Tensor, ffn: DenseFFN) -> tuple[Profile, NDArray[np.float64]]:
    profile = profile_ffn([x_TD], ffn, gram=True)
    return profile, reference.hidden(x_TD, ffn.gate_FD, ffn.up_FD)


# --- statistics --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 50])
def test_sums_and_gram_matrix_for_any_block_size(size: int) -> None:
    ffn, x_TD = random_ffn(), torch.randn(50, 6)
    h_TF = reference.hidden(x_TD, ffn.gate_FD, ffn.up_FD)
    profile = profile_ffn(x_TD.split(size), ffn, gram=True)
    assert profile.tokens == 50
    np.testing.assert_allclose(profile.sum_F, h_TF.sum(axis=0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(profile.energy_F, (h_TF**2).sum(axis=0), rtol=1e-4)
    np.testing.assert_allclose(profile.gram_FF.numpy(), h_TF.T @ h_TF, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [1, 3, 7, 64])
@pytest.mark.parametrize(("tokens", "stride"), [(10, 1), (11, 2), (20, 2), (64, 7)])
def test_the_sample_is_evenly_spaced_and_bounded(
    monkeypatch: pytest.MonkeyPatch, size: int, tokens: int, stride: int
) -> None:
    """Whatever the blocks; and h is the hidden state, not its absolute value that marks read."""
    monkeypatch.setattr("moesaic.calibration.statistics.SAMPLE_TOKENS", 10)
    ffn, x_TD = random_ffn(), torch.randn(tokens, 6)
    profile = profile_ffn(x_TD.split(size), ffn, activation_top_k=3, sample_of=tokens)
    expected = x_TD[::stride]
    assert len(expected) <= 10
    torch.testing.assert_close(profile.sample_x_SD, expected, rtol=0, atol=0)
    torch.testing.assert_close(profile.sample_h_SF, ffn.hidden(expected), rtol=1e-5, atol=1e-5)
    assert profile.sample_h_SF.min() < 0


def test_what_is_not_asked_for_is_none() -> None:
    profile = profile_ffn([torch.randn(5, 6)], random_ffn())
    assert profile.active is None
    assert profile.gram_FF is None
    assert profile.sample_x_SD is None
    assert profile.sample_h_SF is None


# --- importance --------------------------------------------------------------------------------


def test_variance_by_hand() -> None:
    """h: (1, 3), (2, 2), (0, -4) and (0, 0); variances 1, 0, 4 and 0, times squared norms."""
    x_TD = torch.tensor([[1.0, 2.0, 0.0, 0.0], [3.0, 2.0, -4.0, 0.0]])
    ffn = diagonal_ffn([1.0, 1.0, 1.0, 1.0], [2.0, 5.0, 0.5, 1.0])
    profile, _ = profiled(x_TD, ffn)
    assert variance(profile, ffn, GENERATOR) == pytest.approx([4, 0, 1, 0])
    assert contribution(profile, ffn, GENERATOR) == pytest.approx([20, 100, 2, 0])


def test_variance_is_what_a_mean_bias_leaves() -> None:
    ffn, x_TD = random_ffn(), torch.randn(60, 6)
    profile, h_TF = profiled(x_TD, ffn)
    lost_F = [
        np.mean(np.sum((np.outer(h_T - h_T.mean(), ffn.down_DF[:, i].numpy())) ** 2, axis=1))
        for i, h_T in enumerate(h_TF.T)
    ]
    np.testing.assert_allclose(variance(profile, ffn, GENERATOR), lost_F, rtol=1e-3)


def test_variance_of_a_constant_neuron_is_never_negative() -> None:
    ffn = diagonal_ffn([1.0, 1.0], [1.0, 1.0])
    profile, _ = profiled(torch.full((999, 2), 3.3), ffn)
    assert (variance(profile, ffn, GENERATOR) >= 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_observability_is_what_refitting_the_others_cannot_make_up_for(seed: int) -> None:
    """Brute force: neuron by neuron, damped least squares of h_i on all the other columns."""
    torch.manual_seed(seed)
    ffn, x_TD = random_ffn(), torch.randn(80, 6)
    profile, h_TF = profiled(x_TD, ffn)
    q = len(h_TF)
    ridge = RIDGE * float((h_TF**2).sum(axis=0).mean()) / q
    expected = []
    for i in range(10):
        others = np.delete(h_TF, i, axis=1)
        c = reference.damped_lstsq(others, h_TF[:, [i]], ridge * q)
        left = float(((h_TF[:, [i]] - others @ c) ** 2).sum() / q + ridge * (1 + (c**2).sum()))
        expected.append(left * float(ffn.down_DF[:, i].double().square().sum()))
    np.testing.assert_allclose(observability(profile, ffn, GENERATOR), expected, rtol=1e-3)


def test_a_neuron_that_another_can_stand_in_for_is_not_observable() -> None:
    """Neurons 0 and 1 are the same up to scale; 3 is dead; contribution is blind to the first."""
    ffn = DenseFFN(
        up_FD=torch.tensor([[1.0, 0, 0], [2.0, 0, 0], [0, 1.0, 0], [0, 0, 0]]),
        down_DF=torch.eye(3, 4) + torch.eye(3, 4).roll(1, 1),
        activation="linear",
    )
    profile = profile_ffn([torch.randn(500, 3)], ffn, gram=True)
    seen = observability(profile, ffn, GENERATOR)
    assert np.isfinite(seen).all()
    assert seen[1] < 0.1 * seen[2]
    assert seen[0] < 0.1 * seen[2]
    assert seen[3] < 0.1 * seen[2]
    energy = contribution(profile, ffn, GENERATOR)
    assert energy[1] > energy[2] > energy[3] == 0


@pytest.mark.parametrize("name", ["contribution", "variance", "observability"])
def test_an_ffn_that_is_dead_has_no_importance_and_no_error(name: str) -> None:
    ffn = diagonal_ffn([0.0] * 4, [1.0] * 4)
    profile = profile_ffn([torch.randn(20, 4)], ffn, gram=True)
    np.testing.assert_allclose(IMPORTANCE[name](profile, ffn, GENERATOR), 0, atol=1e-20)


@pytest.mark.parametrize("name", ["contribution", "variance", "observability"])
def test_token_order_does_not_matter(name: str) -> None:
    ffn, x_TD = random_ffn(), torch.randn(70, 6)
    one, two = (
        IMPORTANCE[name](profile_ffn(x.split(9), ffn, gram=True), ffn, GENERATOR)
        for x in (x_TD, x_TD.flip(0))
    )
    np.testing.assert_allclose(one, two, rtol=1e-3)
