"""Thresholds: loads, ties, who runs; and the block under threshold gating against a slow twin.

Shape suffixes: T tokens, R routed experts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

import moesaic
from moesaic.methods.load import load_method
from moesaic.methods.moesaic import Moesaic, MoesaicDynamic, set_thresholds
from moesaic.modeling import MoesaicLinearRouter, MoesaicQuadraticRouter
from moesaic.modeling.routers_moesaic import choose_experts
from moesaic.parts.thresholds import budget_thresholds, choice_thresholds, soft_choice
from tests import reference
from tests.families import CONTEXT, tiny_model, tokens
from tests.test_modeling import matrices

UNIFORM = {"layer_budgets": "uniform"}
BY_THRESHOLD = {
    "linear": MoesaicDynamic(directions=0, **UNIFORM),
    "dynamic": MoesaicDynamic(**UNIFORM),
    "quadratic": MoesaicDynamic(directions=24, **UNIFORM),
}
FITTED = {"top-k": Moesaic()} | BY_THRESHOLD
any_method = pytest.mark.parametrize("method", FITTED.values(), ids=FITTED)
by_threshold = pytest.mark.parametrize("method", BY_THRESHOLD.values(), ids=BY_THRESHOLD)


def exceed(score_TR: torch.Tensor, threshold_R: torch.Tensor) -> list[int]:
    """As the router decides: score + selection_bias > 0, the bias minus the threshold."""
    return ((score_TR + -threshold_R) > 0).sum(0).tolist()


# --- thresholds --------------------------------------------------------------------------------


def pairs_above(score_TR: torch.Tensor, threshold_R: torch.Tensor) -> int:
    return sum(exceed(score_TR, threshold_R))


def test_one_number_above_the_levels_by_hand() -> None:
    """Above their levels the scores stand at 3, 1, 0, -2 and 2, 0, -1, -3."""
    score_TR = torch.tensor([[13.0, 2], [11, 0], [10, -1], [8, -3]])
    level_R = torch.tensor([10.0, 0])
    threshold_R = budget_thresholds(
        score_TR, level_R, 0.75, lambda threshold_R: pairs_above(score_TR, threshold_R)
    )
    assert exceed(score_TR, threshold_R) == [2, 1]
    assert (threshold_R - level_R).tolist() == pytest.approx([0, 0], abs=1e-5)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 60), st.integers(1, 6), st.floats(0, 1), st.booleans(), st.integers(0, 10**6),
    st.sampled_from([1e-3, 1.0, 1e4]),
)  # fmt: skip
def test_budgets_are_met_from_below(
    tokens: int, experts: int, share: float, one_at_least: bool, seed: int, scale: float
) -> None:
    """As many pairs run as fit; the next one does not."""
    generator = torch.Generator().manual_seed(seed)
    ranks_TR = torch.randperm(tokens * experts, generator=generator).view(tokens, experts)
    level_R = torch.randint(-3, 4, (experts,), generator=generator) * scale
    score_TR = ranks_TR * scale + level_R
    mean_active = max(share * experts, 1.0 if one_at_least else 0.0)

    def count(threshold_R: torch.Tensor) -> int:
        runs_TR = score_TR > threshold_R
        extra = (~runs_TR.any(1)).sum() if one_at_least else 0
        return int(runs_TR.sum() + extra)

    threshold_R = budget_thresholds(score_TR, level_R, mean_active, count)
    running = pairs_above(score_TR, threshold_R)
    if running:
        assert count(threshold_R) <= mean_active * tokens
    if running < tokens * experts:
        # Half-way to the rank after the next one.
        next_R = level_R + (tokens * experts - running - 1.5) * scale
        assert pairs_above(score_TR, next_R) == running + 1
        assert count(next_R) > mean_active * tokens or mean_active >= experts


def test_the_size_and_order_of_scores_do_not_matter() -> None:
    """To rounding in float32."""
    score_TR = torch.randn(101, 4) * torch.tensor([1.0, 10.0, 0.1, 3.0])
    level_R = torch.arange(4.0)

    def runs(scores: torch.Tensor, levels: torch.Tensor) -> list[int]:
        threshold_R = budget_thresholds(
            scores, levels, 1.5, lambda threshold_R: pairs_above(scores, threshold_R)
        )
        return exceed(scores, threshold_R)

    found = runs(score_TR, level_R)
    assert sum(found) == int(1.5 * 101)
    assert runs(score_TR.flip(0), level_R) == found
    assert runs(score_TR + 1000, level_R + 1000) == found


def test_all_experts_run_where_the_budget_is_all() -> None:
    threshold_R = budget_thresholds(torch.randn(9, 3), torch.zeros(3), 3, lambda _: 0)
    assert (threshold_R == -1e30).all()


def test_a_soft_choice_by_hand() -> None:
    """A spread of 1 around 3, and a width of 0.3 of that."""
    value_TR = torch.tensor([[2.0, 4.0], [4.0, 2.0]])
    high = 1 / (1 + np.exp(-1 / 0.3))
    expected = torch.tensor([[1 - high, high], [high, 1 - high]], dtype=torch.float32)
    torch.testing.assert_close(soft_choice(value_TR, 3.0), expected)
    torch.testing.assert_close(soft_choice(value_TR * 9, 27.0), expected)


@pytest.mark.parametrize("off", [0.0, 1e-8])
def test_a_choice_among_equals_has_no_gradient(off: float) -> None:
    """It would be of the order of 1 over their spread: not finite. Other tokens keep theirs."""
    value_TR = torch.tensor([[0.5, 0.5 + off, 0.5], [0.1, 0.2, 0.4]], requires_grad=True)
    threshold_T1 = torch.tensor([[0.5], [0.15]])
    soft_choice(value_TR, threshold_T1).sum().backward()
    assert value_TR.grad is not None
    assert value_TR.grad[0].tolist() == [0, 0, 0]
    assert value_TR.grad[1].all()


# --- who runs ----------------------------------------------------------------------------------


def block_of(method: Any, family: str = "qwen3", layout: str = "S3A3E8", **more: Any) -> Any:
    calibration = tokens(4, CONTEXT, seed=1)
    changed = load_method(method, more)
    model, _ = moesaic.convert(tiny_model(family), changed, layout, calibration)
    path = model.config.moesaic.replacement_path(1)
    return model.base_model.get_submodule(path).requires_grad_(True)


def router_with(cap: int | None, experts: int = 5) -> Any:
    router = block_of(BY_THRESHOLD["dynamic"], layout="S3A1E8", cap=cap).router
    assert router.selection_bias.shape == (experts,)
    return router


@pytest.mark.parametrize("cap", [None, 1, 2, 4, 5])
def test_who_runs_equals_the_loop_over_tokens(cap: int | None) -> None:
    """Every expert above zero, the best one always, the best `cap` at most."""
    router = router_with(cap)
    score_TR = torch.randn(300, 5) * 4
    router.selection_bias.copy_(torch.tensor([-1.0, -0.5, 0.0, 0.5, -1.5]))
    biased_TR = (score_TR + router.selection_bias).double().numpy()
    expected = reference.threshold_choice(biased_TR, cap or 5)
    given_TR = router.choose(score_TR)
    assert given_TR.dtype == torch.bool
    assert [row.nonzero()[:, 0].tolist() for row in given_TR] == [sorted(row) for row in expected]
    counts = given_TR.sum(1)
    assert counts.min() == 1
    assert counts.max() == (cap or 5)
    assert ((biased_TR <= 0).all(axis=1)).any()


def test_a_score_of_exactly_zero_does_not_run() -> None:
    router = router_with(None)
    router.selection_bias.copy_(torch.tensor([0.0, 0.0, -1.0, -1.0, -1.0]))
    scores = torch.tensor([[1.0, 0.0, 1.0, 1.0, 1.0], [-1.0, 0.0, 0.0, 0.0, 0.0]])
    assert router.choose(scores).int().tolist() == [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0]]


@pytest.mark.parametrize(("routed", "cap"), [(9, 2), (37, 3), (127, 20)])
def test_one_runs_where_all_tie_below_zero(routed: int, cap: int) -> None:
    """Though the largest that `argmax` finds need not be among those that `topk` does."""
    tied_TR = torch.full((4, routed), -0.1)
    assert choose_experts(tied_TR, "threshold", 2, cap).sum(1).tolist() == [1] * 4
    assert choose_experts(-tied_TR, "threshold", 2, cap).sum(1).tolist() == [cap] * 4


def test_what_a_cap_shuts_out_is_far_below_what_scores_are_compared_with() -> None:
    """Half-way between the last that may run and the next; never below zero."""
    value_TR = torch.tensor([[2.0, 0.5, 1.0, -3.0, -4.0], [1.0, -0.5, -1.0, -3.0, -4.0]])
    assert choice_thresholds(router_with(None), value_TR) == 0
    assert choice_thresholds(router_with(1), value_TR).tolist() == [[1.5], [0.25]]
    assert choice_thresholds(router_with(2), value_TR).tolist() == [[0.75], [0.0]]


def test_a_cap_of_more_experts_than_there_are_is_no_cap() -> None:
    router = router_with(99)
    router.selection_bias.fill_(100.0)
    assert router.choose(torch.randn(4, 5)).all()


@any_method
def test_pairs_are_what_choose_says_in_order_of_tokens(method: Any) -> None:
    router = block_of(method).router
    x = torch.randn(40, 32)
    with torch.no_grad():
        router.expert_scale.normal_()
    token_P, expert_P, gate_P = router.pairs(x)
    chosen = router.choose(router.scores(x))
    assert torch.equal(torch.stack([token_P, expert_P], dim=1), chosen.nonzero())
    probability = router.scores(x).softmax(-1)
    for token, expert, gate in zip(token_P, expert_P, gate_P, strict=True):
        expected = 1 + probability[token, expert] * router.expert_scale[expert]
        torch.testing.assert_close(gate, expected)


def first_layer(method: Any, layout: str) -> tuple[Any, torch.Tensor]:
    """The first layer's router, and its scores of the tokens it was fitted to: 7 of 8 windows."""
    model, seen, windows = tiny_model("qwen3"), [], tokens(8, CONTEXT, seed=1)
    moesaic.convert(model, method, layout, windows)
    block = model.model.layers[0].mlp
    block.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(input_ids=windows)
    x = seen[0].reshape(-1, 32)[: 7 * CONTEXT]
    return block.router, block.router.scores(x).detach()


def test_the_largest_expected_energies_of_all_run() -> None:
    """Scores that tell energies but for a factor of each expert's: so many of the largest."""
    score_TR = torch.randn(40, 5)
    energy_TR = (score_TR + torch.tensor([-3.0, 0, 1, 2, 9])).exp()
    router = SimpleNamespace(scores=None, selection_bias=torch.zeros(5))
    router.choose = lambda score_TR: score_TR + router.selection_bias > 0
    inputs = SimpleNamespace(map=lambda _: SimpleNamespace(whole=lambda: score_TR))
    fit: Any = SimpleNamespace(inputs=inputs, sizes=SimpleNamespace(num_active=2))
    set_thresholds(router, fit, energy_TR)
    least = energy_TR.flatten().topk(2 * 40).values[-1]
    assert torch.equal(router.choose(score_TR), energy_TR >= least)


@pytest.mark.parametrize("layout", ["S3A3E8", "S1A1E8", "S0A1E13", "S0A6E13"])
@by_threshold
def test_the_mean_number_of_experts_is_the_budget(method: Any, layout: str) -> None:
    """Counting those that run because no expert passes its threshold: a token runs one at least."""
    router, score_TR = first_layer(method, layout)
    counts_T = router.choose(score_TR).sum(1).float()
    assert counts_T.min() >= 1
    assert counts_T.mean() == pytest.approx(router.num_active, rel=0.01)


# --- scores ------------------------------------------------------------------------------------


def test_linear_scores_are_a_matrix_product() -> None:
    router = block_of("moesaic").router
    x = torch.randn(9, 32)
    assert type(router) is MoesaicLinearRouter
    torch.testing.assert_close(router.scores(x), x @ router.score_proj.weight.T)


def test_quadratic_features_are_products_of_pairs_after_the_input() -> None:
    router = block_of(BY_THRESHOLD["quadratic"], directions=5).router
    assert type(router) is MoesaicQuadraticRouter
    x = torch.randn(9, 32)
    z = x @ router.feature_proj.weight.T + router.feature_proj.bias
    products = [z[:, i] * z[:, j] for i in range(5) for j in range(i, 5)]
    expected = torch.cat([x, torch.stack(products, dim=1)], dim=1)
    torch.testing.assert_close(router.features(x), expected)
    torch.testing.assert_close(router.scores(x), expected @ router.score_proj.weight.T)


def test_bfloat16_scores_are_computed_in_float32() -> None:
    router = block_of(BY_THRESHOLD["quadratic"]).router
    x = torch.randn(9, 32).bfloat16()
    router.score_proj.bfloat16()
    router.feature_proj.bfloat16()
    scores = router.scores(x)
    assert scores.dtype == torch.float32
    router.score_proj.float()
    router.feature_proj.float()
    torch.testing.assert_close(scores, router.scores(x.float()), rtol=1e-6, atol=1e-6)


# --- the block ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("gathers")
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("count", [1, 2, 17])
@by_threshold
def test_outputs_and_gradients_equal_the_loop_over_tokens(
    method: Any, implementation: str, count: int
) -> None:
    block = block_of(method, cap=4)
    block.experts.config._experts_implementation_internal = implementation
    with torch.no_grad():
        block.router.expert_scale.normal_()
    x = torch.randn(count, 32, requires_grad=True)
    probe = torch.randn(count, 32)
    (block(x) * probe).sum().backward()
    fast = {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}
    block.zero_grad()
    twin_x = x.detach().clone().requires_grad_(True)
    scores = block.router.scores(twin_x)
    biased = (scores + block.router.selection_bias).detach().double().numpy()
    index = [torch.tensor(sorted(row)) for row in reference.threshold_choice(biased, 4)]
    gates = 1 + scores.softmax(-1) * block.router.expert_scale
    chosen_gates = [gate_R[index_K] for gate_R, index_K in zip(gates, index, strict=True)]
    shared, experts = matrices(block)
    y = reference.moe_forward(twin_x, shared, experts, index, chosen_gates, silu)
    y = y + block.output_bias
    torch.testing.assert_close(block(x), y, rtol=1e-5, atol=1e-5)
    (y * probe).sum().backward()
    slow = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    assert fast.keys() == slow.keys()
    assert {"router.expert_scale", "router.score_proj.weight", "output_bias"} <= fast.keys()
    for name, value in fast.items() | {("x", x.grad)}:
        expected = twin_x.grad if name == "x" else slow[name]
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, msg=name)


def test_tokens_run_different_numbers_of_experts() -> None:
    """Else the tests above would check top-k again."""
    router = block_of(BY_THRESHOLD["dynamic"]).router
    counts = router.choose(router.scores(torch.randn(200, 32))).sum(1)
    assert len(set(counts.tolist())) >= 3


def test_the_twin_of_the_choice_by_hand() -> None:
    biased = np.array([[1.0, 3.0, 2.0, -1.0], [-2.0, -1.0, -3.0, -4.0], [5.0, 6.0, 7.0, 8.0]])
    assert reference.threshold_choice(biased, 4) == [[1, 2, 0], [1], [3, 2, 1, 0]]
    assert reference.threshold_choice(biased, 2) == [[1, 2], [1], [3, 2]]
