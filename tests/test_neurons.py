"""Experts of one neuron: chosen by copies of their rows, or by gates and a sketch of W_up."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN

import moesaic
from moesaic import load_method
from moesaic.comparison.entries import METHOD, Entry, _static_of_equal_work
from moesaic.comparison.options import SPARSITY, Goal
from moesaic.conversion.advice import note_on_copies
from moesaic.conversion.options import make_budget
from moesaic.conversion.plan import Plan, make_plan
from moesaic.errors import MoesaicError
from moesaic.evaluate.work import count_macs, meta_model
from moesaic.export.stock import common_reasons
from moesaic.families import DenseFFN, find_ffns
from moesaic.families.load import check_converted
from moesaic.finetune.balance import refit_thresholds
from moesaic.finetune.lora import merge, neuron_routers_of, parameter_groups, wrap
from moesaic.finetune.masked import masked
from moesaic.finetune.options import Machine, Settings
from moesaic.finetune.train import train
from moesaic.modeling import (
    GROUP,
    ConfigError,
    MoEConfig,
    MoesaicNeurons,
    MoesaicThresholdedLinear,
    RouterConfig,
    Sizes,
    as_they_are,
    chosen_for_each_token,
)
from moesaic.parts.sketches import sketch_up
from moesaic.parts.thresholds import single_threshold
from tests import reference
from tests.families import CONTEXT, FAMILIES, HIDDEN, LAYERS, NEURONS, tiny_model, tokens
from tests.mixtures import tiny_mixture

WINDOWS = tokens(16, CONTEXT, seed=1)
UNGATED = {"gpt2", "opt", "gpt_neox", "phi", "starcoder2", "nemotron"}
NAME = "moesaic-neurons"
NEURON_METHOD = load_method(NAME)
EQUAL: Any = load_method(NAME, {"prompts": "each"})
SHARED: Any = load_method(NAME, {"layer_budgets": "gradient", "prompts": "each"})
ALL_EXACT: Any = replace(EQUAL, exact=1.0)
SKETCH: Any = replace(EQUAL, choose_by="sketch")
BOTH = pytest.mark.parametrize("method", [EQUAL, SKETCH], ids=["copies", "sketch"])


def plan_for(family: str, method: Any = NEURON_METHOD, **budget: Any) -> Plan:
    config = tiny_model(family).config
    return make_plan(config, "tiny", method, make_budget(**({"layout": None} | budget)))


def converted(family: str = "llama", sparsity: float = 0.5, method: Any = EQUAL) -> Any:
    return moesaic.convert(tiny_model(family), method, sparsity=sparsity, calibration=WINDOWS)[0]


def neurons_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, MoesaicNeurons)]


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def runs_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Mean number of neurons that run, by layer (L,)."""
    counts: list[list[torch.Tensor]] = [[] for _ in neurons_of(model)]

    def keep(kept: list[torch.Tensor]) -> Any:
        return lambda module, args, score_TF: kept.append((score_TF > 0).sum(1))

    handles = [
        router.register_forward_hook(keep(kept))
        for router, kept in zip(neuron_routers_of(model), counts, strict=True)
    ]
    logits(model.eval(), ids)
    for handle in handles:
        handle.remove()
    return torch.stack([torch.cat(kept).float().mean() for kept in counts])


def random_ffn(seed: int = 0, neurons: int = 24, hidden: int = 12) -> tuple[DenseFFN, torch.Tensor]:
    """An FFN with biases, and inputs of unequal variance around a mean."""
    torch.manual_seed(seed)
    ffn = DenseFFN(
        torch.randn(neurons, hidden), torch.randn(hidden, neurons), "silu",
        torch.randn(neurons, hidden), torch.randn(neurons), torch.randn(neurons),
    )  # fmt: skip
    x_TD = torch.randn(400, hidden) * torch.linspace(0.2, 2, hidden) + torch.randn(hidden)
    return ffn, x_TD


# --- the block ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])  # with biases, without, with gelu
@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_the_block_is_the_loop_over_tokens_and_neurons(family: str, count: int) -> None:
    model = converted(family, method=SKETCH)
    torch.manual_seed(1)
    for block in neurons_of(model):
        x_TD = torch.randn(count, HIDDEN)
        router = block.router
        y_TD, runs_TF = reference.neurons_block(
            x_TD,
            weights_of(block),
            biases_of(block),
            (router.sketch_out.weight, router.sketch_in.weight, router.sketch_out.bias),
            router.up_variance,
            router.selection_bias,
            ACT2FN[model.config.moesaic.block.activation],
        )
        check_block(block, x_TD, y_TD, runs_TF)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
@pytest.mark.parametrize("count", [1, 2, 3, 40])
@pytest.mark.parametrize("exact", [0.0, 0.5, 1.0])
def test_the_block_of_copies_is_the_loop_too(family: str, count: int, exact: float) -> None:
    """Neurons are skipped, run on their copies, or read their exact rows."""
    model = converted(family, method=replace(EQUAL, exact=exact))
    torch.manual_seed(1)
    for block in neurons_of(model):
        x_TD = torch.randn(count, HIDDEN)
        router = block.router
        copies = [
            reference.copied_rows(copy.planes, copy.scales, HIDDEN, GROUP)
            for copy in (router.gate_copy, router.up_copy)
        ]
        y_TD, kind_TF = reference.copied_neurons_block(
            x_TD,
            weights_of(block),
            biases_of(block),
            (copies[0], copies[1]),
            router.selection_bias,
            float(router.exact_margin),
            ACT2FN[model.config.moesaic.block.activation],
        )
        check_block(block, x_TD, y_TD, kind_TF > 0)
        found = {float(kind) for kind in np.unique(kind_TF)}
        assert (1.0 in found) == (exact < 1)
        assert exact == 0 or 2.0 in found


def test_a_prompt_runs_all_neurons_and_an_answer_those_chosen() -> None:
    """Up to four tokens at once are chosen for; more run exactly, as a dense FFN would."""
    model = converted("qwen3", method=replace(EQUAL, prompts="all", exact=0.5))
    model.eval()
    torch.manual_seed(1)
    for block in neurons_of(model):
        x_TD = torch.randn(9, HIDDEN)
        gate, up, down_DF = weights_of(block)
        h_TF = block.act_fn(linear(x_TD, gate)) * linear(x_TD, up)
        dense_TD = linear(h_TF, down_DF, block.down_proj.bias)
        with torch.no_grad():
            torch.testing.assert_close(block(x_TD), dense_TD, rtol=1e-4, atol=1e-5)
            with chosen_for_each_token(block):
                chosen_TD = block(x_TD)
            for few in (1, 4):
                torch.testing.assert_close(block(x_TD[:few]), chosen_TD[:few], rtol=1e-4, atol=1e-5)
            assert not torch.allclose(chosen_TD, dense_TD, rtol=1e-2)
        trained_TD = block(x_TD)  # gradients are on: as it is chosen for each
        torch.testing.assert_close(trained_TD, chosen_TD, rtol=1e-4, atol=1e-5)


def test_perplexity_is_of_answers_and_not_of_prompts(tmp_path: Path) -> None:
    """Measured with neurons chosen for each token, also of a model that was saved."""
    model = converted("qwen3", method=replace(EQUAL, prompts="all"))
    ids = WINDOWS.flatten()[:64]
    measured, _ = moesaic.perplexity(model, ids, 16)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.moesaic.block.all_in_prompts
    assert moesaic.perplexity(loaded, ids, 16)[0] == pytest.approx(measured, rel=1e-6)
    each = converted("qwen3", method=EQUAL)
    assert moesaic.perplexity(each, ids, 16)[0] == pytest.approx(measured, rel=1e-6)
    as_prompts = logits(model, ids[None])
    as_answers = logits(each, ids[None])
    assert not torch.allclose(as_prompts, as_answers, rtol=1e-3)


def weights_of(block: Any) -> Any:
    return (block.gate_proj.weight, block.up_proj.weight, block.down_proj.weight.T)


def biases_of(block: Any) -> Any:
    """Of gate, up and down; zeros where the family has none."""
    zero_F = torch.zeros(NEURONS)
    biases = [b if b is not None else zero_F for b in (block.gate_proj.bias, block.up_proj.bias)]
    return (*biases, block.down_proj.bias)


def check_block(block: Any, x_TD: torch.Tensor, y_TD: Any, runs_TF: Any) -> None:
    """All paths: pairs one by one, all under a mask, and under a view."""
    with torch.no_grad():
        assert np.array_equal(block.chosen(x_TD).numpy(), runs_TF)
        assert block._pairs_pay(x_TD) == (len(x_TD) <= 2)
        np.testing.assert_allclose(block(x_TD).numpy(), y_TD, rtol=1e-4, atol=1e-5)
    assert not block._pairs_pay(x_TD)
    np.testing.assert_allclose(block(x_TD).detach().numpy(), y_TD, rtol=1e-4, atol=1e-5)
    block.view = as_they_are
    np.testing.assert_allclose(block(x_TD).detach().numpy(), y_TD, rtol=1e-4, atol=1e-5)
    block.view = None
    assert 0.2 < runs_TF.mean() < 0.8


@pytest.mark.parametrize("method", [ALL_EXACT, SKETCH], ids=["copies", "sketch"])
def test_a_token_that_runs_nothing_and_one_that_runs_all(method: Any) -> None:
    block = neurons_of(converted(method=method))[0]
    x_TD = torch.randn(2, HIDDEN)
    with torch.no_grad():
        block.router.selection_bias.fill_(-1e6)
        assert torch.equal(block(x_TD), block.down_proj.bias.expand(2, -1))
        block.router.selection_bias.fill_(1e6)
        h_TF = block.act_fn(block.gate_proj(x_TD)) * block.up_proj(x_TD)
        torch.testing.assert_close(block(x_TD), block.down_proj(h_TF), rtol=1e-5, atol=1e-5)


@BOTH
def test_all_neurons_and_no_repair_are_the_dense_model(method: Any) -> None:
    ids = tokens(2, 40, seed=3)
    whole = replace(method, repair_by="none", intercept=False, up_steps=0)
    model, _ = moesaic.convert(tiny_model("llama"), whole, f"S0A{NEURONS}E{NEURONS}", WINDOWS)
    assert all((runs == NEURONS).all() for runs in runs_of(model, ids))
    expected = logits(tiny_model("llama"), ids)
    torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-4)


def test_copies_know_better_than_chance_and_the_more_bits_the_better() -> None:
    """The share of the best neurons that run; the copies have the biases of llama's FFN."""
    recalls = []
    for bits in (2, 3, 4):
        method = replace(ALL_EXACT, bits=bits, repair_by="none", intercept=False, up_steps=0)
        _, report = moesaic.convert(tiny_model("llama"), method, sparsity=0.75, calibration=WINDOWS)
        recalls.append(sum(layer.router_recall or 0 for layer in report.layers) / LAYERS)
    assert 0.5 < recalls[0] < recalls[1] < recalls[2]
    assert recalls[2] > 0.85


@pytest.mark.parametrize("exact", [0.0, 0.3, 1.0])
def test_so_many_neurons_are_exact(exact: float) -> None:
    model = converted("qwen3", 0.5, replace(EQUAL, exact=exact))
    block = neurons_of(model)[0]
    assert block.router.num_exact == round(exact * NEURONS / 2)
    inputs: list[torch.Tensor] = []
    handle = block.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    logits(model, WINDOWS[:14])
    handle.remove()
    x_TD = torch.cat(inputs).flatten(0, -2)
    with torch.no_grad():
        exact_T = (block.scores(x_TD) > block.router.exact_margin).sum(1).float()
    assert exact_T.mean() == pytest.approx(block.router.num_exact, rel=0.02, abs=0.2)


@pytest.mark.parametrize(
    ("change", "rule"),
    [({"bits": 5}, "4 is the most"), ({"bits": 1}, ">= 2"), ({"exact": 1.5}, "at most 1"),
     ({"exact": -0.1}, ">= 0"), ({"choose_by": "chance"}, "unknown choose_by")],
)  # fmt: skip
def test_settings_of_copies_that_make_no_sense(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(MoesaicError, match=rule):
        load_method(NAME, change)


# --- the sketch and the threshold --------------------------------------------------------------


@pytest.mark.parametrize("directions", [1, 3, 8, 12])
def test_no_sketch_of_its_rank_is_nearer(directions: int) -> None:
    ffn, x_TD = random_ffn()
    sketch = sketch_up(x_TD, ffn, directions)
    assert sketch.in_CD.shape == (directions, 12)
    up_TF = x_TD @ ffn.up_FD.T + ffn.up_bias_F
    guess_TF = x_TD @ sketch.in_CD.T @ sketch.out_FC.T + sketch.bias_F
    energy_F = ffn.gates(x_TD).square().mean(0)
    weight_F = energy_F * ffn.down_DF.square().sum(0)
    found = float(((up_TF - guess_TF).square().mean(0) * weight_F).sum())
    least = reference.sketch_error(x_TD, ffn.up_FD, weight_F, directions)
    scale = reference.sketch_error(x_TD, ffn.up_FD, weight_F, 0)
    assert found == pytest.approx(least, rel=1e-3, abs=1e-4 * scale)
    gate_TF = ffn.gates(x_TD)
    left_F = (gate_TF * (up_TF - guess_TF)).square().mean(0) / energy_F
    torch.testing.assert_close(sketch.variance_F, left_F, rtol=1e-3, atol=1e-4)


@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 2**20))
@settings(deadline=None)
def test_the_threshold_lets_as_many_through_as_the_budget_says(
    tokens_: int, experts: int, seed: int
) -> None:
    score_TR = torch.randn(tokens_, experts, generator=torch.Generator().manual_seed(seed))
    for mean in range(1, experts + 1):
        assert int((score_TR > single_threshold(score_TR, mean)).sum()) == mean * tokens_


# --- conversions -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in UNGATED])
def test_every_gated_family_converts_loads_and_generates(family: str, tmp_path: Path) -> None:
    model, report = moesaic.convert(
        tiny_model(family), NAME, sparsity=0.25, calibration=WINDOWS, output=tmp_path / "out"
    )
    ids = tokens(2, 40, seed=3)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    check_converted(loaded.config, "mine")
    assert report.active_ffn_fraction == pytest.approx(0.75, abs=0.01)
    out = loaded.generate(ids[:1, :4], max_new_tokens=4, do_sample=False)
    assert out.shape == (1, 8)
    # One token's pairs one by one, all of them under a mask: the same greedy tokens.
    with chosen_for_each_token(loaded):
        for place in range(4, 8):
            assert out[0, place] == logits(loaded, out[:, :place])[0, -1].argmax()


@pytest.mark.parametrize("family", sorted(UNGATED))
def test_an_ffn_without_a_gate_is_refused(family: str) -> None:
    with pytest.raises(MoesaicError, match=r"by their gates .* has FFNs without a gate; take"):
        moesaic.convert(tiny_model(family), NAME, sparsity=0.25, calibration=WINDOWS)


def test_a_mixture_is_refused() -> None:
    with pytest.raises(MoesaicError, match="has experts of a mixture; take another method"):
        moesaic.convert(tiny_mixture("qwen3_moe"), NAME, sparsity=0.25, calibration=WINDOWS)


def test_a_sparsity_that_skips_nothing_and_an_unknown_grain_are_refused() -> None:
    for sparsity in (0.001, 0.999):
        with pytest.raises(MoesaicError, match=f"of {NEURONS} neurons would run"):
            plan_for("llama", sparsity=sparsity)
    with pytest.raises(MoesaicError, match="unknown grain 'dust'"):
        plan_for("llama", sparsity=0.5, grain="dust")


def test_exact_rows_follow_the_budget() -> None:
    """A quarter up to two thirds of the neurons; then in a straight line to all at all."""
    router = RouterConfig("copies", "threshold", bits=4, exact=0.25)
    found = [router.num_exact(Sizes(0, 1, 600, active, 0)) for active in (120, 400, 462, 599, 600)]
    assert found == [30, 100, 223, 597, 600]
    assert RouterConfig("gates", "threshold", 4).num_exact(Sizes(0, 1, 600, 120, 0)) == 120


@BOTH
@pytest.mark.parametrize("sparsity", [0.25, 0.5, 0.75])
def test_the_budget_holds_where_it_was_fitted(sparsity: float, method: Any) -> None:
    model = converted("qwen3", sparsity, method)
    active = model.config.moesaic.uniform_sizes.num_active
    assert active == round((1 - sparsity) * NEURONS)
    torch.testing.assert_close(
        runs_of(model, WINDOWS[:14]), torch.full((LAYERS,), float(active)), rtol=0.02, atol=0.2
    )


def test_a_layout_gives_its_budget_and_a_sparsity_its_own() -> None:
    plan = plan_for("llama", layout="S3A3E8")
    assert str(plan.layout) == f"S0A{NEURONS - 2 * 6}E{NEURONS}"  # two experts of six do not run
    run = f"on average {NEURONS - 12} of {NEURONS} neurons"
    assert plan.words == f"{run}, copies of all in 4 bits, 48% of those that run exact"
    assert plan_for("llama", layout="S3A1E8").words.endswith(" 25% of those that run exact")
    assert plan_for("llama", ALL_EXACT, layout="S3A3E8").words == f"{run}, copies of all in 4 bits"
    assert plan_for("llama", SKETCH, layout="S3A3E8").words == f"{run}, gates of all"
    assert plan_for("llama", sparsity=0.5).sizes.active == NEURONS // 2
    for wrong in (0.0, 1.0, -1.0):
        with pytest.raises(MoesaicError, match="outside"):
            plan_for("llama", sparsity=wrong)


@pytest.mark.parametrize("method", [ALL_EXACT, SKETCH], ids=["copies", "sketch"])
def test_no_repair_worsens_the_error_and_static_pruning_loses_more(method: Any) -> None:
    windows = tokens(64, CONTEXT, seed=1)
    _, report = moesaic.convert(tiny_model("qwen3"), method, sparsity=0.75, calibration=windows)
    assert any(layer.repair != "none" for layer in report.layers)
    for layer in report.layers:
        assert layer.relative_error <= layer.references["unrepaired"]
        assert layer.relative_error < layer.references["static-repaired"]
        assert layer.references["oracle"] == pytest.approx(layer.references["neuron-oracle"])
        assert layer.expert_load == []
        assert layer.router_recall is not None
        assert layer.router_recall > 0.6


@BOTH
def test_the_same_seed_gives_the_same_weights(method: Any) -> None:
    first, second = (converted("qwen3", method=method).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_sketch_in_float16_is_in_range() -> None:
    ffn, x_TD = random_ffn()
    for scale in (1e-4, 1.0, 0.0):
        sketch = sketch_up(scale * x_TD, ffn, 8)
        for tensor in (sketch.in_CD, sketch.out_FC, sketch.bias_F):
            assert torch.isfinite(tensor.half()).all()
        torch.testing.assert_close(torch.linalg.vector_norm(sketch.in_CD, dim=1), torch.ones(8))


def test_static_pruning_of_equal_work_is_compared() -> None:
    """Which gets the multiply-accumulates of the gates and the sketch, in neurons."""
    plan = plan_for("qwen3", sparsity=0.75)
    goal = Goal(SPARSITY, 0.75)
    entry = Entry(NAME, METHOD, goal, 0.75, plan)
    static = _static_of_equal_work([entry], tiny_model("qwen3").config, goal)
    assert static is not None
    assert static.label == f"static-repaired, MACs of {NAME}"
    neuron = LAYERS * 3 * HIDDEN
    assert 0 <= static.plan.macs.total - plan.macs.total < neuron


def test_with_a_target_ratio_layers_keep_equal_budgets(tmp_path: Path) -> None:
    from tests.stock_models import dense_model, tokenizer

    source = tmp_path / "dense"
    dense_model("qwen3").save_pretrained(source)
    tokenizer().save_pretrained(source)
    text = tmp_path / "text.txt"
    text.write_text("the cat sat in a hat and the rat in a bin. a dog ran on the mat. " * 150)
    _, report = moesaic.convert(
        str(source), SHARED, target_ratio=1.05, calibration=str(text), samples=8,
        sequence_length=64, output=tmp_path / "out",
    )  # fmt: skip
    assert report.budgets == []
    assert report.perplexity is not None
    assert report.dense_perplexity is not None
    assert report.perplexity / report.dense_perplexity <= 1.05
    assert report.search[report.layout] <= 1.05


def test_pairs_are_left_alone_where_weights_are_elsewhere() -> None:
    model, ids = converted("qwen3"), tokens(1, 1)
    expected = logits(model, ids)
    with torch.no_grad(), torch.inference_mode():
        program = torch.export.export(model.model.layers[0].mlp, (torch.randn(1, 1, HIDDEN),))
    assert "sampled_addmm" not in str(program.graph)
    offloaded = cpu_offload(model)
    torch.testing.assert_close(logits(offloaded, ids), expected, rtol=1e-5, atol=1e-5)


def test_layers_share_a_budget() -> None:
    model = tiny_model("qwen3")
    with torch.no_grad():
        find_ffns(model).read(0).down_DF.mul_(1e-3)
    moesaic.convert(model, SHARED, sparsity=0.5, calibration=WINDOWS)
    budgets = model.config.moesaic.budgets
    assert sum(budgets) == LAYERS * NEURONS // 2
    assert budgets[0] < NEURONS // 2
    assert [block.router.num_active for block in neurons_of(model)] == budgets
    torch.testing.assert_close(
        runs_of(model, WINDOWS[:14]), torch.tensor(budgets).float(), rtol=0.05, atol=0.5
    )


def test_a_resumed_run_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moesaic.conversion import run as loop

    def run(name: str, **more: Any) -> None:
        output = tmp_path / name
        moesaic.convert(tiny_model("qwen3"), NAME, "S1A3E8", WINDOWS, output=output, **more)

    run("whole")
    save, calls = loop.save_layer, []

    def die(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        save(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_layer", die)
        with pytest.raises(KeyboardInterrupt):
            run("killed")
    run("killed", resume=True)
    names = {path.name for path in (tmp_path / "whole").glob("*.safetensors")}
    assert names
    for name in names:
        ours, theirs = ((tmp_path / k / name).read_bytes() for k in ("killed", "whole"))
        assert ours == theirs


def test_work_per_token_counts_gates_of_all_and_the_sketch() -> None:
    plan = plan_for("qwen3", SKETCH, sparsity=0.5)
    directions = min(SKETCH.directions, HIDDEN)
    assert plan.macs.ffn == LAYERS * HIDDEN * (NEURONS + 2 * NEURONS // 2)
    assert plan.macs.router == LAYERS * directions * (HIDDEN + NEURONS)
    check_work(plan, SKETCH)
    for block in neurons_of(converted("qwen3", method=SKETCH)):
        numbers = HIDDEN * (NEURONS + 2 * NEURONS // 2) + directions * (HIDDEN + NEURONS)
        assert block.weight_bytes() == 4 * numbers


@pytest.mark.parametrize("exact", [0.25, 1.0])
def test_work_per_token_counts_copies_in_full(exact: float) -> None:
    """Every neuron's copies, exact rows of gate and up, and of down where a neuron runs."""
    method = replace(EQUAL, exact=exact)
    plan = plan_for("qwen3", method, sparsity=0.5)
    running = NEURONS // 2
    rows = 2 * round(exact * running) + running
    assert plan.macs.ffn == LAYERS * HIDDEN * rows
    assert plan.macs.router == LAYERS * 2 * HIDDEN * NEURONS
    check_work(plan, method)
    scales = 2 * NEURONS * -(-HIDDEN // GROUP)
    for block in neurons_of(converted("qwen3", method=method)):
        codes = 2 * NEURONS * HIDDEN
        assert block.weight_bytes() == 4 * HIDDEN * rows + codes / 2 + 4 * scales
        halved = block.to(torch.bfloat16)
        assert halved.weight_bytes() == 2 * HIDDEN * rows + codes / 2 + 2 * scales


def check_work(plan: Plan, method: Any) -> None:
    assert plan.macs.active_ffn_fraction == 0.5
    same = plan.dense_macs
    assert (plan.macs.attention, plan.macs.head) == (same.attention, same.head)
    again = count_macs(meta_model(converted("qwen3", method=method).config), 1)
    assert again == plan.macs


def test_a_thresholded_linear_layer_reads_its_share_of_the_bytes() -> None:
    linear = MoesaicThresholdedLinear(8, 6, bias=True, share=0.25)
    assert linear.weight_bytes() == 0.25 * 8 * 6 * 4
    assert linear.to(torch.bfloat16).weight_bytes() == 0.25 * 8 * 6 * 2


def test_no_stock_architecture_holds_it() -> None:
    for method, kind in ((EQUAL, "copies"), (SKETCH, "gates")):
        reasons = common_reasons(converted("qwen3", method=method).config)
        assert any(f"its router is {kind}" in reason for reason in reasons)


@BOTH
def test_a_bf16_model_keeps_its_dtype(method: Any, tmp_path: Path) -> None:
    dense = tiny_model("qwen3").to(torch.bfloat16)
    dense.save_pretrained(tmp_path / "dense")
    model, _ = moesaic.convert(
        tmp_path / "dense", method, sparsity=0.25, calibration=WINDOWS, output=tmp_path / "out"
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for block in (*neurons_of(model), *neurons_of(loaded)):
        router = block.router
        kept = dict(block.named_parameters()) | dict(block.named_buffers())
        floats = {name for name in kept if kept[name].dtype == torch.float32}
        assert floats == {f"router.{name}" for name in router.float32_names}
        whole = {name for name in kept if kept[name].dtype == torch.uint8}
        assert whole == {name for name in kept if name.endswith("planes")}
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(logits(loaded.eval(), WINDOWS[:1]), logits(model, WINDOWS[:1]))
    assert torch.isfinite(logits(model, tokens(1, 8))).all()
    kept = runs_of(model, WINDOWS[:14])
    torch.testing.assert_close(kept, torch.full((LAYERS,), 39.0), rtol=0.02, atol=0.5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"shared": 1, "num_routed": NEURONS - 1}, "expert"),
        ({"expert": 2, "num_routed": NEURONS // 2}, "expert"),
        ({"num_active": 60}, "num_active"),
        ({"intermediate": NEURONS + 1}, "intermediate"),
        ({"padded_size": 8}, "is damaged"),
    ],
)
def test_sizes_that_contradict_themselves(change: dict[str, Any], named: str) -> None:
    check_refused(lambda values: values["sizes"][1].update(change), named)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"gated": False}, "router kind"),
        ({"router": None}, "router"),
        ({"replacement": "experts"}, "router kind"),
        ({"router": {"kind": "copies", "chooser": "threshold", "exact": 1.0}}, "router bits"),
        ({"router": {"kind": "copies", "chooser": "threshold", "bits": 4}}, "router exact"),
        ({"router": {"kind": "gates", "chooser": "threshold", "bits": 4}}, "router bits"),
    ],
)
def test_blocks_that_contradict_themselves(change: dict[str, Any], named: str) -> None:
    check_refused(lambda values: values["block"].update(change), named)


def check_refused(change: Callable[[dict[str, Any]], None], named: str) -> None:
    values = plan_for("qwen3", sparsity=0.5).moe.to_dict()
    MoEConfig.from_dict(values).check(HIDDEN, LAYERS)
    change(values)
    with pytest.raises(ConfigError, match=named):
        MoEConfig.from_dict(values).check(HIDDEN, LAYERS)


@pytest.mark.parametrize("change", [{"groups": "random"}, {"chooser": "topk"}, {"cap": 3}])
def test_settings_that_it_does_not_have(change: dict[str, Any]) -> None:
    with pytest.raises(MoesaicError, match=f"unknown setting of method {NAME}"):
        load_method(NAME, change)


def test_of_quantised_weights_one_note_says_what_copies_cost_and_gain() -> None:
    """At 50 %: 26 of 52 neurons run, 6 of them exact. Copies alone are 2/3 of 4 / bits."""
    moe = plan_for("qwen3", EQUAL, sparsity=0.5).moe
    rows = (6 + 6 + 26) / (3 * 52)
    assert note_on_copies(moe) is None
    assert note_on_copies(replace(moe, source="read from a.gguf (BF16)")) is None
    for kind, bits in (("Q4_1", 4), ("IQ3_XS", 3), ("Q8_0", 8)):
        note = note_on_copies(replace(moe, source=f"dequantised from a.gguf ({kind})"))
        assert note is not None
        assert "\n" not in note
        assert f"{2 / 3 * 4 / bits + rows:.2f} of the FFNs' bytes" in note
        assert f"it reads {2 / 3 * 4 / 16 + rows:.2f}" in note
    sketch = plan_for("qwen3", SKETCH, sparsity=0.5).moe
    assert note_on_copies(replace(sketch, source="dequantised from a.gguf (Q4_1)")) is None


# --- fine-tuning -------------------------------------------------------------------------------


def test_training_computes_the_same_and_its_gradient_reaches_the_choice() -> None:
    """As if a choice were a sigmoid of its score: against autograd through that sigmoid."""
    model = converted("qwen3", method=SKETCH)
    block, x_TD = neurons_of(model)[0], torch.randn(20, HIDDEN)
    assert model.model.layers[0].mlp is block
    names = ["gate_proj.weight", "up_proj.weight", "router.sketch_in.weight"]
    weights = [dict(block.named_parameters())[name] for name in names]
    expected_TD = block(x_TD)
    with masked(model):
        y_TD = block(x_TD)
        found = torch.autograd.grad(y_TD.square().sum(), weights)
    torch.testing.assert_close(y_TD, expected_TD, rtol=1e-5, atol=1e-5)
    assert block.view is None

    gate_TF = block.act_fn(block.gate_proj(x_TD))
    score_TF = block.router(x_TD, gate_TF)
    runs_TF = (score_TF > 0).float()
    up_TF = block.up_proj(x_TD)
    slope_TD = 2 * y_TD.detach()
    slope_TF = slope_TD @ block.down_proj.weight.T
    chosen = (slope_TF * gate_TF * up_TF * runs_TF).sum()  # the experts' own gradient
    choice = (
        slope_TF * (gate_TF * up_TF).detach() * (score_TF / block.router.choice_width).sigmoid()
    ).sum()
    twin = torch.autograd.grad(chosen + choice, weights)
    for ours, theirs in zip(found, twin, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_with_copies_the_gradient_goes_through_rows_copies_and_choices() -> None:
    """To the inputs, and to the rows of exact neurons; the copies themselves stay."""
    model = converted("qwen3", method=replace(EQUAL, exact=0.5))
    block = neurons_of(model)[0]
    router = block.router
    x_TD = torch.randn(20, HIDDEN, requires_grad=True)
    wanted = [x_TD, block.gate_proj.weight, block.up_proj.weight]
    expected_TD = block(x_TD)
    with masked(model):
        y_TD = block(x_TD)
        found = torch.autograd.grad(y_TD.square().sum(), wanted)
    torch.testing.assert_close(y_TD, expected_TD, rtol=1e-5, atol=1e-5)

    told_TF = block.act_fn(router.gate_copy(x_TD)) * router.up_copy(x_TD)
    score_TF = router(x_TD, told_TF)
    exact_TF = (score_TF > router.exact_margin).float()
    runs_TF = (score_TF > 0).float()
    rows_TF = block.act_fn(block.gate_proj(x_TD)) * block.up_proj(x_TD)
    h_TF = exact_TF * rows_TF + (1 - exact_TF) * told_TF
    slope_TF = 2 * y_TD.detach() @ block.down_proj.weight.T
    chosen = (slope_TF * h_TF * runs_TF).sum()
    soft_TF = (score_TF / router.choice_width).sigmoid()
    choice = (slope_TF * h_TF.detach() * soft_TF).sum()
    twin = torch.autograd.grad(chosen + choice, wanted)
    for ours, theirs in zip(found, twin, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert not list(router.parameters())


@BOTH
def test_what_is_trained_and_merged(method: Any) -> None:
    model = converted("qwen3", method=method)
    ids = tokens(4, CONTEXT, seed=5)
    before = logits(model, ids)
    wrapped = wrap(model, 4, 8, freeze_router=False)
    torch.testing.assert_close(logits(wrapped, ids), before, rtol=1e-5, atol=1e-5)
    trained = {name for name, p in wrapped.named_parameters() if p.requires_grad}
    parts = ["gate_proj.lora_A", "up_proj.lora_B", "down_proj.lora_A", "q_proj"]
    if method is SKETCH:
        parts.append("sketch_in")
    for part in parts:
        assert sum(part in name for name in trained) >= LAYERS
    grouped = sum(len(group["params"]) for group in parameter_groups(wrapped, 1e-3, 1e-3))
    assert grouped == len(trained)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if name in trained:
                parameter.add_(0.02 * torch.randn_like(parameter))
    moved = logits(wrapped, ids)
    assert not torch.allclose(moved, before, atol=1e-3)
    merged = merge(wrapped)
    assert not isinstance(merged, PeftModel)
    torch.testing.assert_close(logits(merged, ids), moved, rtol=1e-3, atol=1e-3)
    frozen = wrap(converted("qwen3", method=method), 4, 8, freeze_router=True)
    assert not any(p.requires_grad for r in neuron_routers_of(frozen) for p in r.parameters())


@BOTH
def test_fine_tuning_lowers_the_loss_and_keeps_the_budget(method: Any) -> None:
    model = converted("qwen3", 0.5, method)
    copies = copies_of(model)
    wanted = float(model.config.moesaic.uniform_sizes.num_active)
    windows = tokens(48, CONTEXT, seed=1)
    settings_ = Settings(samples=48, sequence_length=CONTEXT, batch_size=8, epochs=2, lora_lr=3e-3)
    done = train(model, windows, settings_, Machine(use_cpu=True))
    assert done.history[-1]["loss"] < done.history[0]["loss"]
    assert done.loads_before is None
    with torch.no_grad():
        refit_thresholds(done.model, windows)
    merged = merge(done.model)
    runs = runs_of(merged, windows)
    torch.testing.assert_close(runs, torch.full((LAYERS,), wanted), rtol=0.01, atol=0.1)
    after = copies_of(merged)
    assert copies.keys() == after.keys()
    assert bool(copies) == (method is EQUAL)
    assert all(torch.equal(copies[name], after[name]) for name in copies)


def copies_of(model: Any) -> dict[str, torch.Tensor]:
    """What copies hold: fine-tuning leaves it as it is."""
    return {name: value.clone() for name, value in model.state_dict().items() if "_copy." in name}


@BOTH
def test_an_adapter_comes_back_with_its_router(method: Any, tmp_path: Path) -> None:
    ids = tokens(4, CONTEXT, seed=5)
    wrapped = wrap(converted("qwen3", method=method), 4, 8, freeze_router=False)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))
        refit_thresholds(wrapped, WINDOWS)
    wrapped.save_pretrained(tmp_path)
    with warnings.catch_warnings():  # PEFT finds out about transposed modules one by one
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        again = PeftModel.from_pretrained(converted("qwen3", method=method), tmp_path)
    for ours, theirs in zip(neuron_routers_of(again), neuron_routers_of(wrapped), strict=True):
        ours_state, theirs_state = ours.state_dict(), theirs.state_dict()
        assert ours_state.keys() == theirs_state.keys()
        assert all(torch.equal(ours_state[name], theirs_state[name]) for name in ours_state)
    torch.testing.assert_close(logits(again, ids), logits(wrapped, ids), rtol=1e-5, atol=1e-5)
