"""Budgets of layers: what one more expert is worth, how budgets move, and models that have them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import moesaic
from moesaic import budgets
from moesaic.adapters import find_ffns
from moesaic.budgets import marginal_values, moved, share_budgets, whole_budgets, with_budgets
from moesaic.errors import MoesaicError
from moesaic.finetune.balance import measure_loads, refit_thresholds
from moesaic.finetune.lora import routers_of
from moesaic.layers import convert_layers
from moesaic.plan import Plan, make_plan
from moesaic.stream import Stream
from tests.families import CONTEXT, LAYERS, tiny_model, tokens
from tests.mixtures import tiny_mixture

WINDOWS = tokens(16, CONTEXT, seed=1)
CPU = torch.device("cpu")
LAYOUT, ROUTED, MEAN = "S2A4E10", 8, 4


def plan_for(model: Any, recipe: str = "moesaic-budgets") -> Plan:
    return make_plan(model.config, "tiny", recipe, LAYOUT)


def uneven(layer: int, family: str = "llama") -> Any:
    """A model one of whose FFNs hardly adds anything."""
    model = tiny_model(family)
    with torch.no_grad():
        find_ffns(model).read(layer).down_DF.mul_(1e-3)
    return model


def shared(model: Any) -> tuple[Plan, list[str]]:
    lines: list[str] = []
    return share_budgets(
        model, find_ffns(model), plan_for(model), WINDOWS, CPU, 0, lines.append
    ), lines


# --- one more expert ---------------------------------------------------------------------------


def test_marginal_values_are_what_a_loop_over_gates_finds() -> None:
    """Every gate of every token a leaf of its own; bumps expert by expert."""
    model, probe = tiny_model("llama"), tokens(3, 12, seed=5)
    with torch.no_grad():
        wanted = [model(input_ids=ids, use_cache=False).logits for ids in probe.split(1)]
    ffns, plan = find_ffns(model), plan_for(model)
    with ffns.restored():
        convert_layers(Stream(ffns, WINDOWS, CPU), plan, 0, {}, trial=True)
        blocks: list[Any] = [ffns.replaced(layer) for layer in ffns.converted]
        chooses = [block.choose for block in blocks]
        seen: list[list[Any]] = [[] for _ in blocks]

        def leaf(layer: int, x_TD: torch.Tensor) -> torch.Tensor:
            gate_TR = chooses[layer](x_TD).float().requires_grad_(True)
            seen[layer].append((gate_TR, blocks[layer].scores(x_TD)))
            return gate_TR

        for layer, block in enumerate(blocks):
            block.choose = lambda x_TD, layer=layer: leaf(layer, x_TD)
        expected_loss = 0.0
        for ids, target in zip(probe.split(1), wanted, strict=True):
            log_q = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
            for position in range(ids.shape[1]):
                log_p = target[0, position].log_softmax(-1)
                kl = (log_p.exp() * (log_p - log_q[0, position])).sum() / probe.numel()
                kl.backward(retain_graph=True)
                expected_loss += float(kl.detach())
        expected = []
        for found in seen:
            worth = weight = 0.0
            for gate_TR, score_TR in found:
                for row, gradient in zip(score_TR, gate_TR.grad, strict=True):
                    for score, slope in zip(row, gradient, strict=True):
                        soft = torch.sigmoid(score / (0.3 * row.std(unbiased=False))).detach()
                        worth -= float(soft * (1 - soft) * slope) * probe.numel()
                        weight += float(soft * (1 - soft))
            expected.append(worth / weight)
        for block, choose in zip(blocks, chooses, strict=True):
            block.choose = choose
        model.zero_grad()
        value_L, loss = marginal_values(model, blocks, probe, wanted)
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    assert value_L.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-7)
    assert len(set(value_L.tolist())) == LAYERS
    assert all(p.requires_grad for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())


# --- how budgets move --------------------------------------------------------------------------


def test_a_round_by_hand() -> None:
    """Values 1 and 3: each is half of their mean away from it, so half of STEP."""
    share_L = torch.tensor([0.5, 0.5], dtype=torch.float64)
    found = moved(share_L, torch.tensor([1.0, 3.0], dtype=torch.float64), 0.1)
    assert found.tolist() == pytest.approx([0.45, 0.55])
    assert moved(share_L, torch.ones(2).double(), 0.1).tolist() == pytest.approx([0.5, 0.5])
    assert moved(share_L, torch.tensor([1.0, 3.0]).double(), 0.48).tolist() == pytest.approx(
        [0.48, 0.52]
    )


def test_whole_budgets_by_hand() -> None:
    share_L = torch.tensor([0.26, 0.51, 0.73], dtype=torch.float64)
    assert whole_budgets(share_L, 10, 15) == [3, 5, 7]
    assert whole_budgets(torch.tensor([0.01, 0.99]), 4, 4) == [1, 3]
    assert whole_budgets(torch.tensor([1.0, 1.0]), 4, 8) == [4, 4]


@settings(deadline=None)
@given(st.data())
def test_budgets_keep_their_sum_and_bounds(data: st.DataObject) -> None:
    layers, routed = data.draw(st.integers(2, 9)), data.draw(st.integers(2, 40))
    mean = data.draw(st.integers(-(-routed // 10), routed))
    share_L = torch.full((layers,), mean / routed, dtype=torch.float64)
    for _ in range(3):
        values = st.floats(-5, 5, allow_nan=False)
        value_L = torch.tensor(
            data.draw(st.lists(values, min_size=layers, max_size=layers)), dtype=torch.float64
        )
        share_L = moved(share_L, value_L, max(budgets.LEAST, 1 / routed))
        assert float(share_L.mean()) == pytest.approx(mean / routed, abs=1e-9)
        assert float(share_L.min()) >= max(budgets.LEAST, 1 / routed)
        assert float(share_L.max()) <= 1
        found = whole_budgets(share_L, routed, mean * layers)
        assert sum(found) == mean * layers
        assert all(1 <= budget <= routed for budget in found)
        exact_L = share_L * routed
        assert all(abs(b - float(e)) < 1 for b, e in zip(found, exact_L, strict=True))


# --- sharing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_a_layer_that_adds_little_gives_its_experts_to_others(layer: int, family: str) -> None:
    plan, lines = shared(uneven(layer, family))
    found = plan.config.moesaic["budgets"]
    assert sum(found) == MEAN * LAYERS
    assert found[layer] == min(found) < MEAN
    assert len(lines) == 1 + budgets.ROUNDS


def test_the_best_round_is_taken_and_the_dense_model_left_alone() -> None:
    model = uneven(1)
    before = copy.deepcopy(model.state_dict())
    plan, lines = shared(model)
    losses = [float(line.split()[-1]) for line in lines]
    chosen = lines[losses.index(min(losses))]
    assert chosen.startswith(
        f"experts per token {', '.join(map(str, plan.config.moesaic['budgets']))}:"
    )
    assert min(losses) < losses[0]
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def test_equal_budgets_stay_where_nothing_is_to_be_shared() -> None:
    model = tiny_model("llama")
    ffns, plan = find_ffns(model), plan_for(model, "moesaic-dynamic")
    assert share_budgets(model, ffns, plan, WINDOWS, CPU, 0) is plan
    mixture = tiny_mixture("mixtral")
    _, report = moesaic.convert(mixture, "moesaic-budgets", "S1A2E4", WINDOWS)
    assert report.budgets == []
    _, report = moesaic.convert(
        tiny_model("llama"), "moesaic-budgets", LAYOUT, WINDOWS,
        dense_layers=list(range(1, LAYERS)),
    )  # fmt: skip
    assert report.budgets == []


def test_a_model_that_is_not_on_the_device_in_whole_is_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(MoesaicError, match=r"differentiates the whole model, .* on meta in whole"):
        share_budgets(model, find_ffns(model), plan_for(model), WINDOWS, torch.device("meta"), 0)


# --- converted models --------------------------------------------------------------------------


def test_layers_run_their_budgets_saved_loaded_and_fine_tuned(tmp_path: Path) -> None:
    model, report = moesaic.convert(
        uneven(0), "moesaic-budgets", LAYOUT, WINDOWS, output=tmp_path / "out"
    )
    found = report.budgets
    assert found[0] < MEAN
    assert model.config.moesaic["budgets"] == found
    assert (
        f"on average {MEAN} ({min(found)} to {max(found)} in a layer) of {ROUTED}" in report.shape
    )
    # The layers were fitted to seven eighths of these windows.
    for budget, row in zip(found, measure_loads(model, WINDOWS[:14]).to_dict(), strict=True):
        assert row["experts_per_token"] == pytest.approx(budget, rel=0.02)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert [router.num_active for router in routers_of(loaded)] == found
    ids = tokens(2, 20, seed=3)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
        for router in routers_of(loaded):
            router.selection_bias += 0.3 * torch.randn(ROUTED)
    refit_thresholds(loaded, WINDOWS)
    for budget, row in zip(found, measure_loads(loaded, WINDOWS).to_dict(), strict=True):
        assert row["experts_per_token"] == pytest.approx(budget, rel=0.02)


def test_work_is_that_of_equal_budgets() -> None:
    model = tiny_model("llama")
    equal = plan_for(model)
    other = with_budgets(equal, [1, 3, 8])
    assert sum(other.sizes_of(layer).active for layer in range(3)) == 3 * equal.sizes.active
    assert equal.sizes_of(2) == equal.sizes
    assert equal.macs == plan_for(model, "moesaic-dynamic").macs
    assert "budgets" not in equal.config.moesaic
