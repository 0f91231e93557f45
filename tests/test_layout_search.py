"""Layouts for a sparsity, and the search for the best of them or for a target ratio."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moesaic
from moesaic import load_method
from moesaic.conversion.layout_search import (
    choose_plan,
    find_plan,
    likely_budget,
    most_steps,
)
from moesaic.conversion.options import make_budget, make_options
from moesaic.conversion.plan import Plan, make_plan
from moesaic.conversion.prepare import prepare
from moesaic.errors import MoesaicError
from moesaic.families import find_ffns
from moesaic.layout import GRAINS, layouts_for
from tests.families import tiny_model, tokens


def windows(count: int = 8, length: int = 32) -> torch.Tensor:
    return torch.randint(0, 96, (count, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("sparsity", "expected"), [(0.25, "S3A3E8"), (0.5, "S2A2E8"), (0.75, "S1A1E8")]
)
def test_a_sparsity_gives_the_papers_layouts(sparsity: float, expected: str) -> None:
    assert [str(found) for found in layouts_for(sparsity, 11008, experts=8)] == [expected]


def test_layouts_of_a_7b_model() -> None:
    found = [str(layout) for layout in layouts_for(0.25, 11008, "medium")]
    assert found == ["S1A23E32", "S4A20E32", "S1A11E16", "S2A10E16"]


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0.05, 0.95),
    st.integers(16, 20_000),
    st.sampled_from([*GRAINS]),
)
def test_layouts_meet_the_sparsity_within_half_an_expert(
    sparsity: float, neurons: int, grain: str
) -> None:
    reason = ""
    try:
        found = layouts_for(sparsity, neurons, grain)
    except MoesaicError as error:
        found = []
        reason = str(error)
    assert found or "reaches it" in reason
    for layout in found:
        sizes = layout.sizes(neurons)
        assert layout.num_total <= GRAINS[grain]
        assert sizes.total == neurons
        assert abs(sizes.active - (1 - sparsity) * neurons) <= sizes.expert / 2 + 1e-6


@pytest.mark.parametrize("sparsity", [0.0, 1.0, -0.5, float("nan")])
def test_a_sparsity_outside_its_range_is_refused(sparsity: float) -> None:
    with pytest.raises(MoesaicError, match="outside"):
        layouts_for(sparsity, 768)


def test_a_sparsity_out_of_reach_is_refused() -> None:
    with pytest.raises(MoesaicError, match="reaches it"):
        layouts_for(0.99, 172, "coarse")
    with pytest.raises(MoesaicError, match="grain"):
        layouts_for(0.5, 172, "huge")


def test_the_plan_with_the_least_error_is_chosen_and_nothing_is_changed() -> None:
    model = tiny_model("llama").eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepared = prepare(make_options(model, "moesaic", None, windows(), sparsity=0.5))
    assert len(prepared.plans) > 1
    search = choose_plan(prepared, find_ffns(model), torch.device("cpu"))
    assert set(search.tried) == {str(each.layout) for each in prepared.plans}
    assert search.tried[str(search.plan.layout)] == min(search.tried.values())
    after = model.state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_the_plan_that_was_taken_is_converted_by_and_reported() -> None:
    model, report = moesaic.convert(tiny_model("llama"), calibration=windows(), sparsity=0.5)
    assert len(report.search) > 1
    assert report.search[report.layout] == min(report.search.values())
    assert model.config.moesaic.layout == report.layout


@pytest.mark.parametrize("method", ["moesaic", "moesaic-dynamic", "cmoe", "static", "random"])
def test_only_moesaic_tries_several_layouts(method: str) -> None:
    model = tiny_model("llama")
    plans = prepare(make_options(model, method, None, windows(), sparsity=0.5)).plans
    assert (len(plans) > 1) == method.startswith("moesaic")
    (given,) = prepare(make_options(model, method, "S1A3E12", windows())).plans
    assert str(given.layout) == "S1A3E12"


def plan_of(layout: Any) -> Plan:
    config = tiny_model("llama").config
    return make_plan(config, "tiny", load_method("moesaic"), make_budget(layout))


def first_plan() -> Plan:
    return plan_of("S1A3E12")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 10))
def test_the_search_finds_the_smallest_budget_within_the_target(smallest: int) -> None:
    def ratio_of(plan: Plan) -> float:
        return 1.5 if plan.layout.num_active < smallest else 1.01

    search = find_plan(first_plan(), plan_of, 1.02, ratio_of, lambda line: None)
    assert search.plan.layout.num_active == smallest
    assert len(search.tried) <= most_steps(11)


def test_losses_that_follow_a_power_are_met_in_few_steps() -> None:
    """The target lies half an expert beyond what is to be skipped of 255; halving takes 8."""
    wide, make = plan_with(256), make_with(256)
    steps = []
    for power, skipped in itertools.product((1.2, 1.6, 2.2), (1, 7, 40, 126, 200)):
        asked = []

        def ratio_of(plan: Plan, power: float = power, asked: list[int] = asked) -> float:
            asked.append(plan.layout.num_active)
            return 1 + 0.5 * ((255 - plan.layout.num_active) / 255) ** power

        target = 1 + 0.5 * ((skipped + 0.5) / 255) ** power
        search = find_plan(wide, make, target, ratio_of, lambda line: None)
        assert search.plan.layout.num_active == 255 - skipped
        steps.append(len(asked))
    assert max(steps) <= 10
    assert sum(steps) < 6 * len(steps)


def make_with(experts: int) -> Any:
    """Plans of a wider model: as many neurons as experts."""
    config = tiny_model("llama").config
    config.intermediate_size = experts
    method = load_method("moesaic")
    return lambda layout: make_plan(config, "tiny", method, make_budget(layout))


def plan_with(experts: int) -> Plan:
    plan: Plan = make_with(experts)(f"S1A3E{experts}")
    return plan


def test_a_likely_budget_by_hand() -> None:
    # Nothing known: a quarter of 100 skipped. One loss: the usual power. Two: theirs.
    assert likely_budget({}, 100, 0.1, 0, 100) == 75
    assert likely_budget({75: 0.1}, 100, 0.1 * 2**1.6, 0, 100) in (50, 51)
    assert likely_budget({75: 0.1, 50: 0.2}, 100, 0.05, 50, 100) in (87, 88)
    # Kept inside the bracket, whatever the losses say; noise below 0 is not asked.
    assert likely_budget({75: 0.1}, 100, 5.0, 40, 75) == 41
    assert likely_budget({90: -0.001}, 100, 0.1, 0, 90) == 75
    assert likely_budget({75: 0.3, 50: 0.2}, 100, 1e-6, 0, 80) == 79


def test_the_cost_is_said_before_the_search() -> None:
    said: list[str] = []
    find_plan(first_plan(), plan_of, 1.02, lambda plan: 1.01, said.append)
    assert "at most 12 conversions" in said[0]


def test_a_target_out_of_reach_says_the_best_ratio() -> None:
    with pytest.raises(MoesaicError, match=r"gives 1\.3000"):
        find_plan(first_plan(), plan_of, 1.02, lambda plan: 1.3, lambda line: None)


def test_a_budget_at_which_the_conversion_diverges_is_too_small() -> None:
    def ratio_of(plan: Plan) -> float:
        if plan.layout.num_active < 4:
            raise MoesaicError("layer 1 puts out NaN")
        return 1.01

    search = find_plan(first_plan(), plan_of, 1.02, ratio_of, lambda line: None)
    assert search.plan.layout.num_active == 4
    assert set(search.tried.values()) == {1.01}
    with pytest.raises(MoesaicError, match="NaN"):
        find_plan(first_plan(), plan_of, 1.02, never, lambda line: None)


def never(plan: Plan) -> float:
    raise MoesaicError("layer 1 puts out NaN")


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"target_ratio": 1.1, "layout": "S1A3E12"}, "no layout"),
        ({"target_ratio": 0.9}, "outside"),
        ({"target_ratio": float("nan")}, "outside"),
        ({"target_ratio": 1.1}, "held-out"),  # windows leave nothing to hold out
        ({"sparsity": 0.5, "layout": "S1A3E12"}, "give one"),
        ({"recipe": "oracle"}, "compare"),
    ],
)
def test_contradicting_choices_are_refused(choice: dict[str, Any], reason: str) -> None:
    with pytest.raises(MoesaicError, match=reason):
        moesaic.convert(tiny_model("llama"), calibration=windows(), **choice)


def test_convert_reaches_a_target_and_reports_what_it_tried() -> None:
    model = tiny_model("llama")
    ids = torch.randint(0, 96, (4000,), generator=torch.Generator().manual_seed(1))
    _, report = moesaic.convert(
        model, calibration=ids, target_ratio=1.2, samples=8, sequence_length=32
    )
    assert report.search[report.layout] <= 1.2
    assert report.active_ffn_fraction < 1


def test_a_search_that_could_not_plan_all_it_may_come_to_does_not_begin() -> None:
    ids = tokens(1, 4000).flatten()
    with pytest.raises(MoesaicError, match="cap 10 is less than the 11 experts"):
        moesaic.convert(
            tiny_model("llama"), "moesaic-dynamic", calibration=ids, target_ratio=1.5,
            samples=8, sequence_length=32, grain="coarse", settings={"cap": 10},
        )  # fmt: skip
