"""Budgets of layers: what one more expert is worth, how budgets move, and models that have them."""

from __future__ import annotations

import copy
import importlib
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN

import moesaic
from moesaic import load_method
from moesaic.calibration.calibration_set import CalibrationSet
from moesaic.calibration.checks import check_on
from moesaic.calibration.hidden_states import Stream
from moesaic.conversion import layer_budgets as budgets
from moesaic.conversion.layer_budgets import (
    marginal_values,
    moved,
    share_budgets,
    whole_budgets,
)
from moesaic.conversion.next_neurons import next_neurons
from moesaic.conversion.options import make_budget
from moesaic.conversion.plan import Plan, make_plan
from moesaic.conversion.run import Run
from moesaic.conversion.trial_set import trial_set
from moesaic.errors import MoesaicError
from moesaic.evaluate.work import count_macs, meta_model
from moesaic.families import find_ffns
from moesaic.families.load import check_converted
from moesaic.finetune.balance import measure_loads, refit_thresholds
from moesaic.finetune.lora import routers_of
from moesaic.layout import Layout
from moesaic.methods.base import FFNMethod
from moesaic.methods.expert_method import Made
from moesaic.modeling import ConfigError, MoEConfig
from moesaic.output import draft as checkpoint
from moesaic.parts.partition import NO_EXPERTS, Partition
from moesaic.parts.repair import TOKENS_PER_NEURON
from moesaic.parts.thresholds import choice_thresholds, soft_choice
from tests.families import CONTEXT, HIDDEN, LAYERS, tiny_model, tokens
from tests.mixtures import tiny_mixture

convert_module = importlib.import_module("moesaic.conversion.convert")  # as its function is called
WINDOWS = tokens(16, CONTEXT, seed=1)
CPU = torch.device("cpu")
CALIBRATION = CalibrationSet(WINDOWS)
DYNAMIC = "moesaic-dynamic"
LAYOUT, ROUTED, MEAN = "S2A4E10", 8, 4


def plan_for(model: Any, layout: str = LAYOUT, name: str = DYNAMIC, **settings: Any) -> Plan:
    method = load_method(name, settings)
    return make_plan(model.config, "tiny", method, make_budget(layout))


def with_budgets(plan: Plan, found: tuple[int, ...]) -> Plan:
    return plan.with_moe(plan.moe.with_budgets(found))


def trial(ffns: Any, plan: Plan) -> list[Any]:
    """Replaces every FFN for a while; what stands in for them."""
    assert isinstance(plan.method, FFNMethod)
    stream = Stream(ffns, WINDOWS, CPU)
    run = Run(stream, plan, CALIBRATION, 0, trial=True, reported=False)
    run.replace_ffns(plan.method)
    return [ffns.replaced(layer) for layer in ffns.converted]


def uneven(layer: int, family: str = "llama") -> Any:
    """A model one of whose FFNs hardly adds anything."""
    model = tiny_model(family)
    with torch.no_grad():
        find_ffns(model).read(layer).down_DF.mul_(1e-3)
    return model


def shared(model: Any) -> tuple[Plan, list[str]]:
    lines: list[str] = []
    return share_budgets(
        model, find_ffns(model), plan_for(model), CALIBRATION, CPU, 0, lines.append
    ), lines


# --- one more expert ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [DYNAMIC, "moesaic"])
def test_marginal_values_are_what_a_loop_over_gates_finds(name: str) -> None:
    """Every gate of every token a leaf of its own; bumps expert by expert.

    Around 0 where thresholds choose, else half-way between the last that runs and the next.
    """
    model, probe = tiny_model("llama"), tokens(3, 12, seed=5)
    with torch.no_grad():
        wanted = [model(input_ids=ids, use_cache=False).logits for ids in probe.split(1)]
    ffns, plan = find_ffns(model), plan_for(model, name=name)
    with ffns.restored():
        blocks = trial(ffns, plan)
        seen: list[list[Any]] = [[] for _ in blocks]

        def leaf(layer: int, values: Any, gate_TR: torch.Tensor) -> torch.Tensor:
            gate_TR = gate_TR.detach().requires_grad_(True)
            seen[layer].append((gate_TR, values().detach()))
            return gate_TR

        for layer, block in enumerate(blocks):
            block.view = lambda _, values, gate_TR, layer=layer: leaf(layer, values, gate_TR)
        expected_loss = 0.0
        for ids, target in zip(probe.split(1), wanted, strict=True):
            log_q = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
            for position in range(ids.shape[1]):
                log_p = target[0, position].log_softmax(-1)
                kl = (log_p.exp() * (log_p - log_q[0, position])).sum() / probe.numel()
                kl.backward(retain_graph=True)
                expected_loss += float(kl.detach())
        expected = []
        for calls in seen:
            worth = weight = 0.0
            for gate_TR, score_TR in calls:
                for row, gradient in zip(score_TR, gate_TR.grad, strict=True):
                    if name == "moesaic":
                        best = row.sort(descending=True).values
                        row = row - (best[MEAN - 1] + best[MEAN]) / 2
                    for score, slope in zip(row, gradient, strict=True):
                        soft = torch.sigmoid(score / (0.3 * row.std(unbiased=False))).detach()
                        worth -= float(soft * (1 - soft) * slope) * probe.numel()
                        weight += float(soft * (1 - soft))
            expected.append(worth / weight)
        model.zero_grad()
        found = marginal_values(model, blocks, probe, wanted)
        value_L, loss = found.value_L, found.divergence
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    assert value_L.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-7)
    assert len(set(value_L.tolist())) == LAYERS
    assert all(p.requires_grad for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_values_of_neurons_that_were_left_out_are_what_a_loop_over_them_finds() -> None:
    """Each of the next neurons added to each token by a factor that is a leaf of its own."""
    model, probe = tiny_model("llama"), tokens(2, 8, seed=5)
    ffns, plan = find_ffns(model), plan_for(model, name="static-repaired")
    dense = [ffns.read(layer) for layer in range(LAYERS)]
    activation = ACT2FN[model.config.hidden_act]
    with torch.no_grad():
        wanted = [model(input_ids=ids, use_cache=False).logits for ids in probe.split(1)]
    with ffns.restored():
        blocks = trial(ffns, plan)
        pairs = zip(dense, blocks, strict=True)
        following = [next_neurons(ffn, block.made) for ffn, block in pairs]
        factors: list[list[torch.Tensor]] = [[] for _ in blocks]

        def add(layer: int, block: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            x_TD, ffn = inputs[0][0], following[layer]
            added = torch.zeros_like(output)
            for j in range(ffn.intermediate_size):
                for t in range(len(x_TD)):
                    factor = torch.zeros((), requires_grad=True)
                    factors[layer].append(factor)
                    gate = activation(ffn.gate_FD[j] @ x_TD[t].detach() + ffn.gate_bias_F[j])
                    h = gate * (ffn.up_FD[j] @ x_TD[t].detach() + ffn.up_bias_F[j])
                    one = torch.zeros_like(output)
                    one[0, t] = h * ffn.down_DF[:, j]
                    added = added + factor * one
            return output + added

        hooks = [
            block.register_forward_hook(partial(add, layer)) for layer, block in enumerate(blocks)
        ]
        loss = 0.0
        for ids, target in zip(probe.split(1), wanted, strict=True):
            log_q = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
            log_p = target.log_softmax(-1)
            kl = (log_p.exp() * (log_p - log_q)).sum()
            kl.backward()
            loss += float(kl.detach()) / probe.numel()
        for hook in hooks:
            hook.remove()
        expected = [-sum(float(one.grad) for one in found) / len(found) for found in factors]
        model.zero_grad()
        found = marginal_values(model, blocks, probe, wanted, following)
    assert found.divergence == pytest.approx(loss, rel=1e-4)
    assert found.value_L.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-7)
    assert all(p.grad is None for p in model.parameters())


def test_the_next_neurons_are_the_best_of_those_left_out() -> None:
    ffn = find_ffns(tiny_model("llama")).read(0)
    neurons = ffn.intermediate_size
    energy = np.arange(neurons, dtype=np.float64)
    kept = np.array([neurons - 1, neurons - 3])
    made = Made(partition=Partition(kept, NO_EXPERTS), energy_F=energy)
    found = next_neurons(ffn, made)
    count = math.ceil(neurons / 10)
    assert found.intermediate_size == count
    assert torch.equal(found.up_FD[0], ffn.up_FD[neurons - 2])
    assert torch.equal(found.up_FD[1], ffn.up_FD[neurons - 4])
    made.partition = Partition(np.arange(neurons), NO_EXPERTS)
    assert next_neurons(ffn, made).intermediate_size == 0


def test_pruned_layers_share_a_budget_too(tmp_path: Path) -> None:
    """A layer that adds nothing keeps fewer neurons; as many are kept in all."""
    settings = {"layer_budgets": "gradient"}
    output = tmp_path / "out"
    model, report = moesaic.convert(
        uneven(1), "static-repaired", LAYOUT, WINDOWS, settings=settings, output=output
    )
    sizes = model.config.moesaic.sizes
    widths = [row.shared for row in sizes]
    equal = load_method("static").sizes(Layout.parse(LAYOUT), sizes[0].total).shared
    assert sum(widths) == equal * LAYERS
    assert widths[1] == min(widths) < equal
    assert str(min(widths)) in report.shape
    again = AutoModelForCausalLM.from_pretrained(output)
    ids = tokens(2, 12, seed=3)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_nobody_can_be_added_where_all_run() -> None:
    router = SimpleNamespace(chooser="topk", num_active=4)
    value_TR = torch.randn(5, 4)
    soft_TR = soft_choice(value_TR, choice_thresholds(router, value_TR))
    assert torch.equal(soft_TR, torch.ones(5, 4))


def test_layers_of_the_k_best_share_a_budget_too(tmp_path: Path) -> None:
    """A layer that adds nothing runs fewer experts; the model is saved and loaded so."""
    model = uneven(1)
    dense = tmp_path / "dense"
    model.save_pretrained(dense)
    output = tmp_path / "out"
    settings = {"layer_budgets": "gradient"}
    _, report = moesaic.convert(dense, "moesaic", LAYOUT, WINDOWS, settings=settings, output=output)
    found = report.budgets
    assert sum(found) == MEAN * LAYERS
    assert found[1] == min(found) < MEAN
    again = AutoModelForCausalLM.from_pretrained(output)
    assert again.config.moesaic.budgets == found
    ids = tokens(2, 12, seed=3)
    with torch.no_grad():
        assert torch.isfinite(again(ids).logits).all()


# --- how budgets move --------------------------------------------------------------------------


def test_a_round_by_hand() -> None:
    """Values 1 and 3: each is half of their mean away from it, so half of STEP."""
    share_L = torch.tensor([0.5, 0.5], dtype=torch.float64)
    found = moved(share_L, torch.tensor([1.0, 3.0], dtype=torch.float64), 0.1)
    assert found.tolist() == pytest.approx([0.4, 0.6])
    assert moved(share_L, torch.ones(2).double(), 0.1).tolist() == pytest.approx([0.5, 0.5])
    assert moved(share_L, torch.tensor([1.0, 3.0]).double(), 0.48).tolist() == pytest.approx(
        [0.48, 0.52]
    )


def test_whole_budgets_by_hand() -> None:
    share_L = torch.tensor([0.26, 0.51, 0.73], dtype=torch.float64)
    assert whole_budgets(share_L, 10, 15) == (3, 5, 7)
    assert whole_budgets(torch.tensor([0.01, 0.99]), 4, 4) == (1, 3)
    assert whole_budgets(torch.tensor([1.0, 1.0]), 4, 8) == (4, 4)


@settings(deadline=None)
@given(st.data())
def test_budgets_keep_their_sum_and_bounds(data: st.DataObject) -> None:
    layers, routed = data.draw(st.integers(2, 9)), data.draw(st.integers(2, 40))
    mean = data.draw(st.integers(1, routed))
    most = data.draw(st.integers(mean, routed))
    least = max(min(budgets.LEAST, mean / routed / 2), 1 / routed)
    share_L = torch.full((layers,), mean / routed, dtype=torch.float64)
    for _ in range(3):
        values = st.floats(-5, 5, allow_nan=False)
        value_L = torch.tensor(
            data.draw(st.lists(values, min_size=layers, max_size=layers)), dtype=torch.float64
        )
        share_L = moved(share_L, value_L, least, most / routed)
        assert float(share_L.mean()) == pytest.approx(mean / routed, abs=1e-9)
        assert float(share_L.min()) >= least
        assert float(share_L.max()) <= most / routed
        found = whole_budgets(share_L, routed, mean * layers, most)
        assert sum(found) == mean * layers
        assert all(1 <= budget <= most for budget in found)
        exact_L = share_L * routed
        assert all(abs(b - float(e)) < 1 for b, e in zip(found, exact_L, strict=True))


# --- sharing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_a_layer_that_adds_little_gives_its_experts_to_others(layer: int, family: str) -> None:
    plan, lines = shared(uneven(layer, family))
    found = plan.moe.budgets
    assert sum(found) == MEAN * LAYERS
    assert found[layer] == min(found) < MEAN
    assert 2 <= len(lines) == len(set(lines)) <= 1 + budgets.ROUNDS


def test_the_last_trial_is_judged_and_moves_nothing() -> None:
    plan = plan_for(uneven(1))
    asked: list[str] = []

    def measure(found: budgets.Budgets) -> budgets.Trial:
        asked.append("values")
        value_L = torch.arange(LAYERS, dtype=torch.float64) * len(asked)
        return budgets.Trial(value_L, 1 / len(asked))

    def judge(found: budgets.Budgets) -> budgets.Trial:
        asked.append("divergence")
        return budgets.Trial(None, 0.1)

    best = budgets.search_budgets(plan, measure, judge, lambda line: None)
    assert asked == ["values"] * budgets.ROUNDS + ["divergence"]
    assert sum(best) == MEAN * LAYERS
    assert best[0] < best[-1]


def test_the_best_round_is_taken_and_the_dense_model_left_alone() -> None:
    model = uneven(1)
    before = copy.deepcopy(model.state_dict())
    plan, lines = shared(model)
    losses = [float(line.split()[-1]) for line in lines]
    chosen = lines[losses.index(min(losses))]
    assert chosen.startswith(f"experts per token {', '.join(map(str, plan.moe.budgets))}:")
    assert min(losses) < losses[0]
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("samples", "tried", "expected"),
    [
        (16, 8, [12, 13, 14, 15]),  # the trial is fitted to windows 0 to 6
        (10, 8, [7, 8, 9]),
        (8, 8, [7]),
        (2, 2, [1]),
        (1, 1, [0]),  # nothing is held out
    ],
)
def test_rounds_are_judged_on_windows_that_they_are_not_fitted_to(
    samples: int, tried: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = torch.arange(samples)[:, None].expand(samples, 10)
    calibration = CalibrationSet(windows)
    trial_set = calibration.fewer(tried)
    monkeypatch.setattr(budgets, "PROBE_TOKENS", 40)
    probe = budgets._probe_windows(calibration, trial_set)
    assert probe[:, 0].tolist() == expected
    last = trial_set.heldout_samples
    fitted = trial_set.windows_NL[: trial_set.samples - last]
    if samples > 1:
        assert not set(fitted[:, 0].tolist()) & set(expected)


@pytest.mark.parametrize("length", [4, 7, 100])
@pytest.mark.parametrize("texts", [1, 3])
def test_a_trial_has_tokens_enough_for_least_squares(length: int, texts: int) -> None:
    """On all neurons that are held, though fewer run: those are what is fitted."""
    sets = [CalibrationSet(tokens(400, length, seed=text)) for text in range(texts)]
    calibration = CalibrationSet.joined(sets) if texts > 1 else sets[0]
    few = trial_set(calibration, 16, neurons=44)
    assert few.split.first_heldout >= TOKENS_PER_NEURON * 44
    smaller = calibration.fewer(few.samples - 1)
    assert smaller.split.first_heldout < TOKENS_PER_NEURON * 44
    assert trial_set(calibration, 16, neurons=0).samples == math.ceil(16 / length)
    assert trial_set(calibration.fewer(2), 16, neurons=10**6).samples == 2


@pytest.mark.parametrize("method", ["static-repaired", "moesaic"])
def test_trials_of_budgets_are_repaired_as_the_model_will_be(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "TRIAL_TOKENS", 1)
    model = tiny_model("llama")
    calibration = CalibrationSet(tokens(64, 8))
    plan = plan_for(model, name=method)
    trials = budgets._trials(model, find_ffns(model), plan, calibration, CPU, 0)
    neurons = model.config.intermediate_size
    assert trials.calibration.split.first_heldout >= TOKENS_PER_NEURON * neurons


def test_equal_budgets_stay_where_nothing_is_to_be_shared() -> None:
    model = tiny_model("llama")
    ffns, plan = find_ffns(model), plan_for(model, layer_budgets="uniform")
    assert share_budgets(model, ffns, plan, CALIBRATION, CPU, 0) is plan
    all_run = plan_for(model, "S2A8E10")
    assert share_budgets(model, ffns, all_run, CALIBRATION, CPU, 0) is all_run
    mixture = tiny_mixture("mixtral")
    lines: list[str] = []
    plan = plan_for(mixture, "S1A2E4")
    ffns = find_ffns(mixture)
    assert share_budgets(mixture, ffns, plan, CALIBRATION, CPU, 0, lines.append) is plan
    assert lines == ["the layers of a model that is a mixture already keep equal budgets"]
    _, report = moesaic.convert(mixture, DYNAMIC, "S1A2E4", WINDOWS)
    assert report.budgets == []
    _, report = moesaic.convert(
        tiny_model("llama"), DYNAMIC, LAYOUT, WINDOWS, dense_layers=list(range(1, LAYERS))
    )
    assert report.budgets == []


@pytest.mark.parametrize(
    ("method", "strategy", "shares"),
    [
        (DYNAMIC, {}, True),
        (DYNAMIC, {"layer_budgets": "uniform"}, False),
        ("moesaic-neurons", {}, False),
        ("moesaic-neurons", {"layer_budgets": "gradient"}, True),
    ],
)
def test_who_shares_budgets(method: str, strategy: dict[str, str], shares: bool) -> None:
    model, report = moesaic.convert(uneven(0), method, LAYOUT, WINDOWS, settings=strategy)
    assert bool(report.budgets) == shares
    assert report.budgets == model.config.moesaic.budgets


def test_a_layer_whose_experts_all_run_is_worth_what_the_others_are() -> None:
    model, probe = tiny_model("llama"), WINDOWS[-2:]
    with torch.no_grad():
        wanted = [model(input_ids=ids, use_cache=False).logits for ids in probe.split(1)]
    ffns, plan = find_ffns(model), with_budgets(plan_for(model), (ROUTED, 3, 1))
    with ffns.restored(), torch.no_grad():  # also where the caller wants no gradients
        value_L = marginal_values(model, trial(ffns, plan), probe, wanted).value_L
    assert float(value_L[0]) == pytest.approx(float(value_L[1:].mean()))
    assert float(value_L[1]) != float(value_L[2])


@pytest.mark.parametrize("activation", ["relu", "sigmoid", "silu"])
def test_gradients_pass_gated_ffns_of_any_activation(activation: str) -> None:
    model = uneven(1)
    for layer in model.model.layers:
        layer.mlp.act_fn = ACT2FN[activation]
    model.config.hidden_act = activation
    plan, _ = shared(model)
    assert plan.moe.budgets[1] < MEAN


def test_figures_that_are_not_finite_are_said() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(1e30)
        model.model.norm.weight.mul_(1e30)
    with pytest.raises(MoesaicError, match=r"the KL divergence from the dense model is nan"):
        shared(model)


def test_inference_mode_has_no_gradients() -> None:
    model = tiny_model("llama")
    with torch.inference_mode(), pytest.raises(MoesaicError, match="convert outside of it"):
        shared(model)


def test_a_device_without_a_number_is_the_one_the_model_is_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As "cuda" is "cuda:0": here the other way round, since a CPU has no number."""
    model = tiny_model("llama")
    monkeypatch.setattr(torch, "empty", lambda *_, device: torch.zeros(0))
    check_on(model, torch.device("cuda"), "this needs")


def test_a_model_that_is_not_on_the_device_in_whole_is_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(MoesaicError, match=r"differentiates the whole .*layer_budgets=uniform"):
        share_budgets(
            model, find_ffns(model), plan_for(model), CALIBRATION, torch.device("meta"), 0
        )


# --- converted models --------------------------------------------------------------------------


def test_layers_run_their_budgets_saved_loaded_and_fine_tuned(tmp_path: Path) -> None:
    model, report = moesaic.convert(uneven(0), DYNAMIC, LAYOUT, WINDOWS, output=tmp_path / "out")
    found = report.budgets
    assert found[0] < MEAN
    assert [router.num_active for router in routers_of(model)] == found
    assert model.config.moesaic.budgets == found
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
    other = with_budgets(equal, (1, 3, 8))
    assert sum(other.moe.sizes_of(layer).active for layer in range(3)) == 3 * equal.sizes.active
    assert equal.moe.sizes_of(2) == equal.sizes
    assert other.moe.budgets == [1, 3, 8]
    assert other.moe.uniform_sizes is None
    assert equal.moe.budgets == []
    assert equal.moe.uniform_sizes == equal.sizes
    assert with_budgets(equal, (4, 4, 4)) == equal
    assert count_macs(meta_model(other.config), 1) == equal.macs


def test_budgets_are_of_the_converted_layers() -> None:
    model, report = moesaic.convert(uneven(1), DYNAMIC, LAYOUT, WINDOWS, dense_layers=[0])
    assert report.budgets[0] < MEAN < report.budgets[1]
    assert [router.num_active for router in routers_of(model)] == report.budgets
    again = type(model)(model.config)
    assert [router.num_active for router in routers_of(again)] == report.budgets


@pytest.mark.parametrize(
    ("found", "named"),
    [([0, 4, 8], "num_active"), ([4, 4, 9], "num_active"), ([4, 4, 4.0], "num_active"),
     ([-1, 4, 9], "num_active"), ([4, None, 4], "num_active"), ([4, 4], "sizes")],
)  # fmt: skip
def test_budgets_that_contradict_the_configuration(found: list[Any], named: str) -> None:
    plan = with_budgets(plan_for(tiny_model("llama")), (3, 4, 5))
    check_converted(plan.config, "tiny")
    values = plan.moe.to_dict()
    values["sizes"] = [
        sizes | {"num_active": active}
        for sizes, active in zip(values["sizes"], found, strict=False)
    ]
    with pytest.raises(ConfigError, match=rf"contradicts itself: {named} "):
        MoEConfig.from_dict(values).check(HIDDEN, LAYERS)
    plan.config.moesaic = values
    with pytest.raises(MoesaicError, match=rf"config\.json of tiny contradicts itself: {named}"):
        check_converted(plan.config, "tiny")


def test_a_mixture_has_equal_budgets() -> None:
    plan = plan_for(tiny_mixture("mixtral"), "S1A2E4")
    plan.moe.check(HIDDEN, LAYERS)
    with pytest.raises(ConfigError, match="num_active"):
        plan.moe.with_budgets((1, 2, 3)).check(HIDDEN, LAYERS)


def test_a_resumed_run_keeps_the_budgets_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uneven(0).save_pretrained(tmp_path / "dense")

    def convert(name: str, **more: Any) -> Any:
        return moesaic.convert(
            tmp_path / "dense", DYNAMIC, LAYOUT, WINDOWS, output=tmp_path / name,
            command="x", **more,
        )  # fmt: skip

    _, report = convert("calm")
    assert min(report.budgets) < MEAN
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "finish", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert("out")
    monkeypatch.setattr(convert_module, "share_budgets", _interrupted)
    _, resumed = convert("out", resume=True)
    assert resumed.budgets == report.budgets
    names = sorted(path.name for path in (tmp_path / "calm").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "out").iterdir())
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "calm" / name).read_bytes()


def _interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt
