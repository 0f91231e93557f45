"""Fitted routers against numpy: ridge, scoring steps, principal directions; simulated energies.

Shape suffixes: T tokens, D hidden_size, P features, R routed experts, C directions.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moesaic.calibration.share import Rows
from moesaic.parts import ridge_router
from moesaic.parts.directions import directions
from moesaic.parts.ridge_router import RIDGE, STEPS, Ridge, fit_linear_router, log_energy
from tests import reference

Array = NDArray[np.float64]
either = pytest.mark.parametrize("absolute", [True, False])


def rows_of(phi: Array | torch.Tensor, size: int = 1000) -> Rows:
    return Rows(lambda: torch.as_tensor(phi).float().split(size))


def energies(tokens: int, experts: int, seed: int, tail: float = 1.0) -> tuple[Array, Array]:
    """Features, and energies that depend on them, on the token and on the expert, with noise."""
    random = np.random.default_rng(seed)
    phi_TP = random.normal(size=(tokens, 7)) + random.normal(size=7)
    score_TR = phi_TP @ random.normal(size=(7, experts)) * 0.3 + random.normal(size=experts)
    score_TR += random.normal(size=(tokens, 1))
    energy_TR = np.exp(score_TR) * random.gamma(1 / tail, tail, size=score_TR.shape)
    return phi_TP.astype(np.float32).astype(float), energy_TR.astype(np.float32).astype(float)


def fitted(phi_TP: Array, energy_TR: Array, absolute: bool, size: int = 1000) -> Array:
    energy = torch.from_numpy(energy_TR).float()
    weight_RP = fit_linear_router(rows_of(phi_TP, size), energy, absolute)
    assert weight_RP.shape == (energy_TR.shape[1], phi_TP.shape[1])
    assert torch.isfinite(weight_RP).all()
    return weight_RP.double().numpy()


def after(steps: int, phi_TP: Array, energy_TR: Array, absolute: bool) -> Array:
    """The weights after so many scoring steps; 0 is ridge regression on log energies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ridge_router, "STEPS", steps)
        return fitted(phi_TP, energy_TR, absolute)


def deviance(phi_TP: Array, energy_TR: Array, weight_RP: Array, absolute: bool) -> float:
    return reference.gamma_deviance(energy_TR, phi_TP @ weight_RP.T, absolute)[0]


# --- ridge -------------------------------------------------------------------------------------


@either
@pytest.mark.parametrize("ridge", [RIDGE, 1.0])
def test_ridge_equals_lstsq_on_the_augmented_system(absolute: bool, ridge: float) -> None:
    phi_TP, target_TR = energies(80, 5, seed=0)
    solver = Ridge.of(rows_of(phi_TP), centre=absolute, ridge=ridge)
    given = solver.solve(rows_of(phi_TP), torch.from_numpy(target_TR).float())
    if absolute:
        phi_TP = phi_TP - phi_TP.mean(axis=0)
    damping = ridge * float((phi_TP**2).sum(axis=0).mean())
    expected = reference.damped_lstsq(phi_TP, target_TR, damping)
    np.testing.assert_allclose(given.numpy(), expected, rtol=1e-4, atol=1e-5)
    mean_P = 0.0 if solver.mean_P is None else solver.mean_P.numpy()
    scores = solver.scores(rows_of(phi_TP + mean_P), given)
    np.testing.assert_allclose(scores.numpy(), phi_TP @ expected, rtol=1e-3, atol=1e-4)


@either
def test_the_first_step_is_ridge_regression_on_log_energies(absolute: bool) -> None:
    phi_TP, energy_TR = energies(80, 5, seed=1)
    expected = reference.linear_router(phi_TP, energy_TR, absolute, steps=0)
    given = after(0, phi_TP, energy_TR, absolute)
    np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-5)


def test_log_energies_by_hand() -> None:
    """Mean 1, so 0.1 is added before the log."""
    energy_TR = torch.tensor([[0.9, 1.9], [0.0, 1.2]])
    log = torch.log(torch.tensor([[1.0, 2.0], [0.1, 1.3]]))
    torch.testing.assert_close(log_energy(energy_TR), log)


# --- scoring steps -----------------------------------------------------------------------------


@either
@pytest.mark.parametrize("seed", range(4))
def test_same_weights_as_the_loops_in_float64(absolute: bool, seed: int) -> None:
    phi_TP, energy_TR = energies(300, 6, seed, tail=0.5)
    expected = reference.linear_router(phi_TP, energy_TR, absolute, STEPS)
    given = fitted(phi_TP, energy_TR, absolute)
    np.testing.assert_allclose(given, expected, rtol=1e-3, atol=1e-4)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0.2, 1.0, 5.0]), st.integers(2, 200))
def test_scoring_steps_never_raise_the_deviance(
    seed: int, absolute: bool, tail: float, tokens: int
) -> None:
    """Heavy tails and few tokens included, for which a full step overshoots."""
    phi_TP, energy_TR = energies(tokens, 4, seed, tail)
    energy_TR = energy_TR.clip(min=1e-12)
    found = [
        deviance(phi_TP, energy_TR, after(steps, phi_TP, energy_TR, absolute), absolute)
        for steps in range(STEPS + 1)
    ]
    assert all(b <= a + 1e-4 * (1 + abs(a)) for a, b in itertools.pairwise(found))


@either
def test_scoring_steps_lower_the_deviance_where_there_is_something_to_learn(
    absolute: bool,
) -> None:
    phi_TP, energy_TR = energies(2000, 6, seed=3)
    before = deviance(phi_TP, energy_TR, after(0, phi_TP, energy_TR, absolute), absolute)
    assert deviance(phi_TP, energy_TR, fitted(phi_TP, energy_TR, absolute), absolute) < before


@either
@pytest.mark.parametrize("shape", [1.0, 0.5])
def test_a_known_log_linear_model_is_recovered(absolute: bool, shape: float) -> None:
    """Exponential and gamma energies of mean exp(V phi + expert + token): V up to what is free.

    Top-k sees differences between experts only, and needs many of them: the level of a token is
    estimated from its own experts' noise. A threshold sees every expert on its own.
    """
    random = np.random.default_rng(5)
    r = 5 if absolute else 60
    phi_TP, true_RP = random.normal(size=(20_000, 6)), random.normal(size=(r, 6)) * 0.3
    mean_TR = np.exp(phi_TP @ true_RP.T)
    if absolute:
        mean_TR *= np.exp(random.normal(size=r))
    else:
        mean_TR *= np.exp(random.normal(size=(len(phi_TP), 1)))
        true_RP = true_RP - true_RP.mean(axis=0)
    energy_TR = mean_TR * random.gamma(shape, 1 / shape, size=mean_TR.shape)
    given = fitted(phi_TP, energy_TR, absolute)
    assert np.abs(given - true_RP).max() < 0.08
    assert np.abs(given - true_RP).mean() < 0.02
    start = after(0, phi_TP, energy_TR, absolute)
    assert np.abs(given - true_RP).mean() < 0.5 * np.abs(start - true_RP).mean()


def test_what_all_experts_of_a_token_share_does_not_matter_to_top_k() -> None:
    phi_TP, energy_TR = energies(300, 5, seed=6)
    scale_T1 = np.exp(np.random.default_rng(0).normal(size=(300, 1)))
    near, far = (
        reference.linear_router(phi_TP, energy_TR * scale, False, STEPS) for scale in (1, scale_T1)
    )
    given = fitted(phi_TP, energy_TR * scale_T1, absolute=False)
    assert np.abs(given - given.mean(axis=0)).max() > 0.05
    np.testing.assert_allclose(given.sum(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(given, far, rtol=1e-3, atol=1e-4)
    assert np.corrcoef(near.ravel(), far.ravel())[0, 1] > 0.97


# --- invariants --------------------------------------------------------------------------------


@either
@pytest.mark.parametrize("size", [1, 7, 299, 1000])
def test_any_block_size_gives_the_same_weights(absolute: bool, size: int) -> None:
    phi_TP, energy_TR = energies(300, 5, seed=7)
    expected = fitted(phi_TP, energy_TR, absolute)
    given = fitted(phi_TP, energy_TR, absolute, size)
    np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-5)


@either
def test_permuted_tokens_give_the_same_weights(absolute: bool) -> None:
    phi_TP, energy_TR = energies(300, 5, seed=8)
    order = np.random.default_rng(0).permutation(300)
    given = fitted(phi_TP[order], energy_TR[order], absolute)
    expected = fitted(phi_TP, energy_TR, absolute)
    np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-5)


@either
def test_the_scale_of_all_energies_does_not_matter(absolute: bool) -> None:
    phi_TP, energy_TR = energies(300, 5, seed=9)
    expected = fitted(phi_TP, energy_TR, absolute)
    for scale in (1e-12, 1e12):
        given = fitted(phi_TP, energy_TR * scale, absolute)
        np.testing.assert_allclose(given, expected, rtol=1e-3, atol=1e-4)


def test_features_that_are_centred_already_are_not_centred_again() -> None:
    phi_TP, energy_TR = energies(300, 5, seed=9)
    energy = torch.from_numpy(energy_TR).float()
    expected = fit_linear_router(rows_of(phi_TP), energy, True)
    given = fit_linear_router(rows_of(phi_TP - phi_TP.mean(axis=0)), energy, True, True)
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


# --- degenerate input --------------------------------------------------------------------------


@either
@pytest.mark.parametrize("dead", [[0], [0, 1, 2, 3], [0, 1, 2, 3, 4]])
def test_dead_experts_leave_the_weights_finite(absolute: bool, dead: list[int]) -> None:
    phi_TP, energy_TR = energies(200, 5, seed=10)
    energy_TR[:, dead] = 0
    weight_RP = fitted(phi_TP, energy_TR, absolute)
    if len(dead) == 5:  # nothing to learn
        np.testing.assert_allclose(weight_RP, 0, atol=1e-6)
    if len(dead) == 1 and not absolute:  # never preferred
        assert (phi_TP @ weight_RP.T).argmin(axis=1).mean() < 1


@either
def test_tokens_without_any_energy_leave_the_weights_finite(absolute: bool) -> None:
    phi_TP, energy_TR = energies(200, 5, seed=11)
    energy_TR[::2] = 0
    fitted(phi_TP, energy_TR, absolute)
    energy_TR[1:] = 0
    fitted(phi_TP, energy_TR, absolute)


@either
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_fewer_tokens_than_features_leave_the_weights_finite(absolute: bool, tokens: int) -> None:
    fitted(*energies(tokens, 5, seed=12), absolute)


@either
@pytest.mark.parametrize("constant", [0.0, 1.0, 3.3, 1000.1])
def test_constant_features_leave_the_weights_finite(absolute: bool, constant: float) -> None:
    """A singular Gram matrix: one constant feature, two equal ones, then all constant."""
    phi_TP, energy_TR = energies(500, 5, seed=13)
    phi_TP[:, 0] = constant
    phi_TP[:, 2] = phi_TP[:, 1]
    fitted(phi_TP, energy_TR, absolute)
    fitted(np.full_like(phi_TP, constant), energy_TR, absolute)


# --- principal directions ----------------------------------------------------------------------


def simulated_inputs(tokens: int = 500) -> Array:
    random = np.random.default_rng(14)
    scales_D = np.array([5.0, 3.0, 2.0, 1.0, 0.5, 0.1])
    return random.normal(size=(tokens, 6)) * scales_D @ random.normal(size=(6, 6)) + 2.0


@pytest.mark.parametrize("count", [1, 3, 6])
@pytest.mark.parametrize("size", [17, 1000])
def test_directions_are_numpy_s_principal_axes_at_unit_variance(count: int, size: int) -> None:
    x_TD = simulated_inputs().astype(np.float32).astype(float)
    weight_CD, bias_C = directions(rows_of(x_TD, size), count)
    _, _, axes_DD = np.linalg.svd(x_TD - x_TD.mean(axis=0), full_matrices=False)
    z_TC = x_TD @ weight_CD.double().numpy().T + bias_C.double().numpy()
    np.testing.assert_allclose(z_TC.mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(z_TC.T @ z_TC / len(x_TD), np.eye(count), atol=5e-3)
    for found_D, axis_D in zip(weight_CD.double().numpy(), axes_DD, strict=False):
        found_D = found_D / np.linalg.norm(found_D)
        assert abs(found_D @ axis_D) == pytest.approx(1, abs=1e-4)
        assert found_D[np.abs(found_D).argmax()] > 0


def test_axes_without_variance_are_zero() -> None:
    """Two directions of variance in six dimensions; the rest would only amplify rounding."""
    x_TD = simulated_inputs()
    flat_TD = np.zeros_like(x_TD)
    flat_TD[:, 1], flat_TD[:, 4] = x_TD[:, 1], x_TD[:, 4]
    weight_CD, bias_C = directions(rows_of(flat_TD), 4)
    assert (weight_CD.norm(dim=1) > 0).tolist() == [True, True, False, False]
    assert (bias_C[2:] == 0).all()


@pytest.mark.parametrize("x_TD", [np.zeros((50, 6)), np.full((50, 6), 3.3), np.ones((1, 6))])
def test_inputs_that_never_vary_give_finite_directions(x_TD: Array) -> None:
    weight_CD, bias_C = directions(rows_of(x_TD), 3)
    assert torch.isfinite(weight_CD).all()
    assert torch.isfinite(bias_C).all()


def test_products_of_directions_follow_energies_that_no_linear_score_can() -> None:
    """Energies even in x: linear scores keep what chance keeps, quadratic ones nearly the best."""
    random = np.random.default_rng(15)
    x_TD, axes_RD = random.normal(size=(4000, 6)), random.normal(size=(8, 6))
    energy_TR = torch.from_numpy((x_TD @ axes_RD.T) ** 2).float()
    x_TD = torch.from_numpy(x_TD).float()
    weight_CD, bias_C = directions(rows_of(x_TD), 6)
    z_TC = x_TD @ weight_CD.T + bias_C
    i, j = np.triu_indices(6)
    quadratic_TP = torch.cat([x_TD, z_TC[:, i] * z_TC[:, j]], dim=1)

    def kept(phi_TP: torch.Tensor) -> float:
        score_TR = phi_TP @ fit_linear_router(rows_of(phi_TP), energy_TR, absolute=False).T
        chosen_TK = score_TR.topk(2, dim=1).indices
        best = energy_TR.topk(2, dim=1).values.sum()
        return float(energy_TR.gather(1, chosen_TK).sum() / best)

    assert kept(x_TD) < 0.6
    assert kept(quadratic_TP) > 0.85
