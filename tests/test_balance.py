"""Loads, and the bias that evens them: hand-worked steps, bounds, counting once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moesaic
from moesaic.finetune.balance import (
    Balancer,
    hooked,
    measure_loads,
    moved,
    refit_thresholds,
    run,
    selection_values,
)
from moesaic.finetune.lora import routers_of
from tests.families import CONTEXT, tiny_model, tokens

WINDOWS = tokens(8, CONTEXT, seed=2)


def converted(recipe: str = "moesaic", layout: str = "S2A3E8", family: str = "qwen3") -> Any:
    settings = {"layer_budgets": "uniform"} if recipe == "moesaic-dynamic" else None
    model, _ = moesaic.convert(
        tiny_model(family), recipe, layout, tokens(8, CONTEXT, seed=1), settings=settings
    )
    return model


def balancer(model: Any, rate: float) -> Balancer:
    centre = [router.selection_bias.clone() for router in routers_of(model)]
    loads = measure_loads(model, WINDOWS)
    assert loads is not None
    return Balancer(model, rate, centre, loads.spread_L)


def test_a_step_goes_against_the_load_and_stays_within_the_bound() -> None:
    """Loads 0.9, 0.5, 0.1 against a target of 0.5; the last bias is at its bound already."""
    bias = torch.tensor([0.0, 0.3, 0.5])
    load = torch.tensor([0.9, 0.5, 0.1])
    found = moved(bias, load, 0.5, 0.1, torch.tensor([0.0, 0.3, 0.0]), 0.5)
    torch.testing.assert_close(found, torch.tensor([-0.1, 0.3, 0.5]))


def test_representatives_choose_by_probability_plus_bias() -> None:
    """Scores 2, 1, 0 have probabilities 0.665, 0.245, 0.090: 0.2 lifts the last over the middle,
    where added to the scores it would not; the gates do not change."""
    router = routers_of(converted("cmoe", "S5A1E8"))[0]
    score = torch.tensor([[2.0, 1.0, 0.0]])
    assert router.ranks_by_probability
    router.selection_bias = torch.tensor([0.0, 0.0, 0.2])
    assert router.biased(score).argsort(descending=True).tolist() == [[0, 2, 1]]
    router.selection_bias = torch.tensor([0.0, 0.0, 0.1])
    assert router.biased(score).argsort(descending=True).tolist() == [[0, 1, 2]]


def test_without_a_bias_probabilities_that_underflow_do_not_tie() -> None:
    router = routers_of(converted("cmoe", "S5A1E8"))[0]
    router.selection_bias = torch.zeros(3)
    score = torch.tensor([[-500.0, 0.0, -400.0]])
    assert router.biased(score).argsort(descending=True).tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("recipe", ["moesaic", "moesaic-dynamic"])
def test_linear_routers_add_the_bias_to_the_score(recipe: str) -> None:
    router = routers_of(converted(recipe))[0]
    score = torch.randn(5, 6)
    router.selection_bias = torch.randn(6)
    torch.testing.assert_close(router.biased(score), score + router.selection_bias)


@pytest.mark.parametrize("recipe", ["moesaic", "cmoe", "moesaic-dynamic"])
def test_loads_are_what_a_loop_counts(recipe: str) -> None:
    model = converted(recipe)
    loads = measure_loads(model, WINDOWS)
    expected = torch.zeros_like(loads.count_LR)
    spread: list[list[float]] = [[] for _ in routers_of(model)]

    def look(layer: int, router: Any, args: Any) -> None:
        score_TR = router.scores(args[0])
        for token, chosen in enumerate(router.choose(score_TR)):
            for expert in range(6):
                expected[layer, expert] += int(chosen[expert])
            values = selection_values(router, args[0])[token]
            spread[layer].append(float((values - values.mean()).square().mean()))

    with torch.no_grad(), hooked(routers_of(model), look, before=True):
        run(model, WINDOWS)
    assert torch.equal(loads.count_LR, expected)
    assert loads.tokens_L.tolist() == [WINDOWS.numel()] * 3
    for layer, found in enumerate(spread):
        assert float(loads.spread_L[layer]) == pytest.approx((sum(found) / len(found)) ** 0.5, 1e-4)


def test_micro_batches_count_like_one_batch() -> None:
    model = converted()
    whole, parts = balancer(model, 0.1), balancer(model, 0.1)
    for batches in ([WINDOWS], WINDOWS.split(3)):
        with torch.no_grad():
            for batch in batches:
                both = whole if len(batches) == 1 else parts
                with both.forward():
                    model(batch)
    assert whole.tokens == parts.tokens == [torch.tensor([WINDOWS.numel()])] * 3
    assert all(torch.equal(a, b) for a, b in zip(whole.count, parts.count, strict=True))
    model(WINDOWS)  # outside `forward`: an evaluation, or activations computed again
    assert parts.tokens == [torch.tensor([WINDOWS.numel()])] * 3
    load = parts.step()
    torch.testing.assert_close(torch.cat(load).sum(1), torch.full((3,), 3.0))
    assert parts.tokens == [torch.tensor([0])] * 3


@pytest.mark.parametrize("recipe", ["moesaic", "cmoe"])
def test_steps_even_the_loads_within_the_scores_spread(recipe: str) -> None:
    """A skew of half the bound is made up for; a bias cannot leave its bound, whatever the skew."""
    model = converted(recipe)
    routers = routers_of(model)
    worker = balancer(model, 0.02 if recipe == "moesaic" else 0.005)
    with torch.no_grad():
        for router, bound in zip(routers, worker.bound_L, strict=True):
            router.selection_bias[0] += bound / 2
        before = measure_loads(model, WINDOWS)
        assert all(row["max_over_mean"] > 1.25 for row in before.to_dict())
        for _ in range(150):
            with worker.forward():
                model(WINDOWS)
            worker.step()
    after = measure_loads(model, WINDOWS)
    assert all(row["max_over_mean"] < 1.25 for row in after.to_dict())
    for router, bound in zip(routers, worker.bound_L, strict=True):
        assert router.selection_bias.abs().max() <= bound + 1e-6


def test_thresholds_are_fitted_again_to_the_budget() -> None:
    """Those of a layer move alike."""
    model = converted("moesaic-dynamic")
    routers = routers_of(model)
    with torch.no_grad():
        for router in routers:
            router.selection_bias += torch.randn(6)
    before = [router.selection_bias.clone() for router in routers]
    refit_thresholds(model, WINDOWS)
    for row in measure_loads(model, WINDOWS).to_dict():
        assert row["experts_per_token"] == pytest.approx(3, abs=6 / WINDOWS.numel() * 2)
    for router, old_R in zip(routers, before, strict=True):
        moved_R = router.selection_bias - old_R
        assert torch.allclose(moved_R, moved_R[0].expand(6), atol=1e-5)


def test_steps_hold_the_budget_of_thresholds_and_no_more() -> None:
    """All of a layer move alike, against the mean load."""
    model = converted("moesaic-dynamic")
    routers = routers_of(model)
    routers[0].selection_bias += 0.2
    routers[1].selection_bias -= 0.2
    worker = balancer(model, 0.01)
    before = [router.selection_bias.clone() for router in routers]
    with torch.no_grad():
        with worker.forward():
            model(WINDOWS)
        loads = worker.step()
    assert any(len(set(load_GR[0].tolist())) > 1 for load_GR in loads)
    for router, old_R, load_GR in zip(routers, before, loads, strict=True):
        step = -0.01 if load_GR.mean() > 0.5 else 0.01
        torch.testing.assert_close(router.selection_bias - old_R, torch.full((6,), step))


def test_static_pruning_has_no_loads() -> None:
    assert measure_loads(converted("static"), WINDOWS) is None
