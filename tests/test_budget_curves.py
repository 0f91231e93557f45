"""Budgets of layers by curves: sensitivities, what is left out, and how a budget is spent."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import moesaic
from moesaic import load_method
from moesaic.calibration.calibration_set import CalibrationSet, Split
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.conversion.budget_curves import (
    convex_hull,
    counts,
    half_way,
    measure_curve,
    sensitivities,
    spend,
)
from moesaic.conversion.layer_budgets import share_budgets
from moesaic.conversion.options import make_budget
from moesaic.conversion.plan import Plan, make_plan
from moesaic.errors import MoesaicError
from moesaic.families import find_ffns
from moesaic.finetune.lora import routers_of
from moesaic.modeling import Sizes
from tests.families import CONTEXT, HIDDEN, LAYERS, tiny_model, tokens
from tests.stock_models import tokenizer

CPU = torch.device("cpu")
WINDOWS = tokens(16, CONTEXT, seed=1)
CALIBRATION = CalibrationSet(WINDOWS)
LAYOUT, ROUTED, MEAN = "S2A4E10", 8, 4
CURVES = {"layer_budgets": "curves"}


def plan_for(model: Any, layout: str = LAYOUT, method: str = "moesaic") -> Plan:
    return make_plan(model.config, "tiny", load_method(method, CURVES), make_budget(layout))


def uneven(layer: int, family: str = "llama") -> Any:
    """A model one of whose FFNs hardly adds anything."""
    model = tiny_model(family)
    with torch.no_grad():
        find_ffns(model).read(layer).down_DF.mul_(1e-3)
    return model


# --- what a layer's error is worth -------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2"])
def test_sensitivities_are_what_nudges_of_an_output_find(family: str) -> None:
    """Every number of an FFN's output, of two tokens, moved a little either way."""
    model = tiny_model(family).double()
    probe = tokens(1, 6, seed=5)
    ffns = find_ffns(model)
    found = sensitivities(model, ffns, probe, seed=3)
    with torch.no_grad():
        p_TV = model(input_ids=probe, use_cache=False).logits[0].float().softmax(-1)
    words = torch.multinomial(p_TV, 1, generator=torch.Generator().manual_seed(3))

    def log_probability(layer: int, token: int, place: int, step: float) -> float:
        def nudge(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
            moved = output.clone()
            moved.view(-1, HIDDEN)[token, place] += step
            return moved

        handle = ffns.last_module(layer).register_forward_hook(nudge)
        with torch.no_grad():
            logits = model(input_ids=probe, use_cache=False).logits[0]
        handle.remove()
        return float(logits.log_softmax(-1).gather(1, words).sum())

    for layer, token in ((0, 2), (LAYERS - 1, 4)):
        slopes = []
        for place in range(HIDDEN):
            above = log_probability(layer, token, place, 1e-3)
            below = log_probability(layer, token, place, -1e-3)
            slopes.append((above - below) / 2e-3)
        expected = float(np.mean(np.square(slopes)))
        assert float(found[layer][token]) == pytest.approx(expected, rel=1e-3)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_gradients_that_are_not_finite_are_said() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("inf"))
    with pytest.raises((MoesaicError, RuntimeError)):
        sensitivities(model, find_ffns(model), tokens(1, 6), seed=0)


# --- what is left out --------------------------------------------------------------------------


def test_a_curve_is_what_a_loop_over_tokens_and_experts_finds() -> None:
    model = tiny_model("llama")
    ffn = find_ffns(model).read(1)
    x_TD = torch.randn(80, HIDDEN, generator=torch.Generator().manual_seed(0))
    inputs = FFNInputs([x_TD], Split(80, 60), True, CPU, CPU)
    sizes = plan_for(model).sizes
    method: Any = load_method("moesaic", {"repair_by": "none"})
    block = method.convert_ffn(ffn, inputs, sizes, np.random.default_rng(0))
    weight_T = torch.rand(20, generator=torch.Generator().manual_seed(1))
    curve = measure_curve(ffn, block, inputs, sizes, weight_T)
    assert list(curve) == [*counts(sizes), ROUTED]

    partition = block.made.partition
    down_FD = ffn.down_DF.T
    for count, value in curve.items():
        total = 0.0
        for token, x_D in enumerate(x_TD[60:]):
            h_F = ffn.hidden(x_D[None])[0]
            scores = block.router.scores(x_D[None])[0].tolist()
            left_out = sorted(range(ROUTED), key=lambda j: -scores[j])[count:]
            missing_D = torch.zeros(HIDDEN)
            for expert in left_out:
                for neuron in partition.experts_RM[expert]:
                    missing_D += h_F[neuron] * down_FD[neuron]
            total += float(weight_T[token] * missing_D.square().sum())
        assert value == pytest.approx(total / 20 / 2, rel=1e-4, abs=1e-9)


def test_numbers_of_experts_that_are_measured() -> None:
    assert counts(Sizes(0, 1, 20, 10)) == [2, 4, 5, 6, 8, 10, 12, 14, 16, 18, 19]
    assert counts(Sizes(0, 1, 4, 1)) == [1, 2, 3]
    assert min(counts(Sizes(0, 1, 100, 6))) == 3


# --- how a budget is spent ---------------------------------------------------------------------


def test_a_hull_by_hand() -> None:
    assert convex_hull({1: 6.0, 2: 5.5, 3: 1.0, 4: 0.0}) == [(1, 6.0), (3, 1.0), (4, 0.0)]
    assert convex_hull({1: 3.0, 2: 1.0, 3: 0.0}) == [(1, 3.0), (2, 1.0), (3, 0.0)]
    assert convex_hull({1: 2.0, 2: 1.0, 3: 0.0}) == [(1, 2.0), (3, 0.0)]


def test_spending_by_hand() -> None:
    """The first layer's experts take 5, 1 off; the second's 2, 2."""
    curves = [{1: 6.0, 2: 1.0, 3: 0.0}, {1: 4.0, 3: 0.0}]
    assert spend(curves, 2) == (1, 1)
    assert spend(curves, 3) == (2, 1)
    assert spend(curves, 4) == (2, 2)
    assert spend(curves, 5) == (2, 3)
    assert spend(curves, 6) == (3, 3)


@settings(deadline=None)
@given(st.data())
def test_no_other_budgets_cost_less_on_convex_curves(data: st.DataObject) -> None:
    routed = 4
    curves = []
    for _ in range(3):
        steps = data.draw(st.lists(st.integers(0, 9), min_size=routed - 1, max_size=routed - 1))
        steps.sort()
        values = [0, *itertools.accumulate(steps)]
        curves.append({routed - place: float(value) for place, value in enumerate(values)})
    total = data.draw(st.integers(3, 3 * routed))
    found = spend(curves, total)
    assert sum(found) == total

    def cost(budgets: tuple[int, ...]) -> float:
        return sum(curve[budget] for curve, budget in zip(curves, budgets, strict=True))

    others = itertools.product(range(1, routed + 1), repeat=3)
    assert cost(found) == min(cost(other) for other in others if sum(other) == total)


def test_half_way_by_hand() -> None:
    assert half_way((8, 2, 2), 4) == (6, 3, 3)
    assert half_way((8, 1, 3), 4) == (6, 2, 4)  # 6, 2 1/2, 3 1/2
    assert half_way((4, 4), 4) == (4, 4)


@given(st.data())
def test_half_way_keeps_the_sum_and_lies_between(data: st.DataObject) -> None:
    mean = data.draw(st.integers(1, 20))
    moves = data.draw(st.lists(st.integers(0, mean - 1), min_size=1, max_size=8))
    budgets = [mean - move for move in moves] + [mean + move for move in moves]
    found = half_way(budgets, mean)
    assert sum(found) == sum(budgets)
    assert all(abs(2 * half - mean - best) <= 1 for half, best in zip(found, budgets, strict=True))


# --- models ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["moesaic", "moesaic-dynamic"])
@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_a_layer_that_adds_little_gives_its_experts_to_others(
    layer: int, family: str, method: str
) -> None:
    model = uneven(layer, family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lines: list[str] = []
    plan = share_budgets(
        model, find_ffns(model), plan_for(model, method=method), CALIBRATION, CPU, 0, lines.append
    )
    found = plan.moe.budgets
    assert sum(found) == MEAN * LAYERS
    assert found[layer] == min(found) < MEAN
    assert len(lines) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_moesaic_runs_and_keeps_its_budgets_and_no_stock_layout_holds_them(
    tmp_path: Path,
) -> None:
    model, report = moesaic.convert(
        uneven(1, "qwen3"), "moesaic", LAYOUT, WINDOWS, settings=CURVES, tokenizer=tokenizer(),
        output=tmp_path / "out",
    )  # fmt: skip
    found = report.budgets
    assert found[1] == min(found) < MEAN
    assert [router.num_active for router in routers_of(model)] == found
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = tokens(2, 20, seed=3)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    with pytest.raises(MoesaicError, match="convert with --set layer_budgets=uniform") as refusal:
        moesaic.export(str(tmp_path / "out"), "glm4_moe", tmp_path / "stock")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "stock").exists()


def test_moesaic_keeps_equal_budgets_unless_asked() -> None:
    _, report = moesaic.convert(uneven(1), "moesaic", LAYOUT, WINDOWS)
    assert report.budgets == []


def test_dense_layers_have_no_budget() -> None:
    _, report = moesaic.convert(
        uneven(1), "moesaic", LAYOUT, WINDOWS, settings=CURVES, dense_layers=[0]
    )
    assert sum(report.budgets) == MEAN * (LAYERS - 1)
    assert report.budgets[0] < MEAN
