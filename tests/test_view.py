"""A replacement under a mask computes what it computes when it runs; and the oracle.

Shape suffixes: T tokens, D hidden_size, F neurons, R routed experts, M neurons of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import moesaic
from moesaic import Method, load_method
from moesaic.calibration.calibration_set import Split
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.conversion.mixtures import MixtureParts, WholeFFN
from moesaic.conversion.options import make_budget
from moesaic.conversion.plan import make_plan
from moesaic.families import DenseFFN, find_ffns
from moesaic.methods.references import BestNeurons, OracleRouter
from moesaic.modeling import (
    BlockConfig,
    MoesaicBlock,
    MoesaicReplacement,
    RouterConfig,
    Sizes,
    as_they_are,
)
from moesaic.parts.energies import expert_energies, expert_grams
from tests import reference
from tests.families import CONTEXT, FAMILIES, tiny_model, tokens

# Without, both sides of a comparison would be computed under a mask.
pytestmark = pytest.mark.usefixtures("gathers")

CPU = torch.device("cpu")
WINDOWS = tokens(4, CONTEXT, seed=1)
# Biases everywhere, fused, without a gate and Conv1D, inlined, biases without a gate.
SOME = ["llama", "phi3", "gpt2", "opt", "gemma2"]
EQUAL = {"layer_budgets": "uniform"}
METHODS: dict[str, Method] = {
    "moesaic": load_method("moesaic"),
    "dynamic": load_method("moesaic-dynamic", EQUAL),
    "capped": load_method("moesaic-dynamic", EQUAL | {"cap": 7}),
    "linear": load_method("moesaic-dynamic", EQUAL | {"directions": 0}),
    "quadratic": load_method("moesaic", {"directions": 24}),
    "cmoe": load_method("cmoe"),
    "cmoe-code": load_method("cmoe-code"),
    "random": load_method("random"),
}


def converted(family: str, method: Any, layout: str) -> Any:
    """The replacement in layer 1, trained a little, so that no gate is exactly 1."""
    model, _ = moesaic.convert(tiny_model(family), method, layout, WINDOWS)
    moe = model.config.moesaic
    replacement = model.base_model.get_submodule(moe.replacement_path(1))
    assert isinstance(replacement, MoesaicReplacement)
    assert replacement.view is None  # as a user gets it
    for router in replacement.router_modules().values():
        # Where all are to run, all exceed their thresholds by as much, and the first is anyone.
        some_rest = moe.first_sizes.num_active < moe.first_sizes.num_routed
        if getattr(method, "cap", None) is not None and some_rest:
            router.cap = 1  # so that it bites, whatever the layout
        if hasattr(router, "expert_scale"):
            with torch.no_grad():
                router.expert_scale.normal_()
    return replacement


def check_view(replacement: Any, hidden_size: int = 32) -> None:
    """Outputs are the same with a view and without, whatever the leading shape."""
    x = torch.randn(3, 20, hidden_size)
    results: list[torch.Tensor] = []
    for view in (None, as_they_are):
        replacement.view = view
        with torch.no_grad():
            y, first = replacement(x), replacement(x[0])
        torch.testing.assert_close(first, y[0], rtol=1e-5, atol=1e-5)
        results.append(y)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_view_computes_what_the_replacement_computes(family: str) -> None:
    replacement = converted(family, METHODS["dynamic"], "S3A3E8")
    assert replacement.output_bias is not None
    assert replacement.experts.neurons == 6  # of 8 that are stored
    check_view(replacement)


@pytest.mark.parametrize("layout", ["S3A3E8", "S0A3E3", "S0A1E13", "S1A7E8"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("family", SOME)
def test_under_every_router_and_layout(family: str, method: Method, layout: str) -> None:
    check_view(converted(family, method, layout))


@pytest.mark.parametrize("layout", ["S3A3E8", "S0A52E52"])
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "qwen3"])
def test_neuron_by_neuron(family: str, layout: str) -> None:
    """Also for the two tokens whose pairs run one by one."""
    method = load_method("moesaic-neurons", EQUAL | {"prompts": "each"})
    replacement = converted(family, method, layout)
    check_view(replacement)
    x = torch.randn(2, 32)
    with torch.no_grad():
        masked = replacement(x)
        replacement.view = None
        torch.testing.assert_close(replacement(x), masked, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["static", "static-repaired"])
@pytest.mark.parametrize("family", SOME)
def test_without_experts(family: str, method: str) -> None:
    replacement = converted(family, method, "S3A3E8")
    assert replacement.router is None
    assert replacement.shared_expert.up_proj.out_features == 40
    check_view(replacement)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_who_is_chosen_is_who_has_a_gate(method: Method) -> None:
    """And a view is told the selection values, without a way back to the input."""
    replacement = converted("llama", method, "S3A3E8")
    x = torch.randn(30, 32, requires_grad=True)
    told: list[Any] = []

    def look(
        router: Any, values: Callable[[], torch.Tensor], gate_TR: torch.Tensor
    ) -> torch.Tensor:
        told.append((router, values(), gate_TR))
        return gate_TR

    replacement.view = look
    replacement(x)
    ((router, value_TR, gate_TR),) = told
    assert router is replacement.router
    chosen_TR = replacement.chosen(x)
    assert torch.equal(gate_TR != 0, chosen_TR)
    assert torch.equal(router.gates(router.scores(x))[chosen_TR], gate_TR[chosen_TR])
    assert torch.equal(value_TR, router.biased(router.scores(x)))
    if value_TR.requires_grad:
        assert torch.autograd.grad(value_TR.sum(), x, allow_unused=True) == (None,)


@pytest.mark.parametrize("method", ["moesaic", "cmoe"])
def test_gradients_under_a_view_are_those_of_running(method: str) -> None:
    """Of the input and every weight; gates of experts that do not run are constants."""
    replacement = converted("llama", method, "S3A3E8").requires_grad_(True)
    x, probe = torch.randn(9, 32, requires_grad=True), torch.randn(9, 32)
    leaves = dict(replacement.named_parameters()) | {"x": x}
    found = []
    for view in (None, as_they_are):
        replacement.view = view
        y = (replacement(x) * probe).sum()
        found.append(torch.autograd.grad(y, list(leaves.values()), allow_unused=True))
    for name, one, other in zip(leaves, *found, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5, msg=name)


def test_a_view_makes_of_the_gates_what_it_wants() -> None:
    replacement = converted("llama", "moesaic", "S3A3E8")
    x = torch.randn(5, 32)
    with torch.no_grad():
        replacement.view = lambda router, values, gate_TR: torch.zeros_like(gate_TR)
        shared = replacement.shared_expert(x) + replacement.output_bias
        torch.testing.assert_close(replacement(x), shared, rtol=1e-5, atol=1e-5)
        replacement.view = lambda router, values, gate_TR: torch.ones_like(gate_TR)
        replacement.router.num_active = 5
        replacement.router.expert_scale.zero_()
        every = replacement(x)
        replacement.view = None
        torch.testing.assert_close(replacement(x), every, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_view_leaves_inputs_and_weights_as_they_are(method: Method) -> None:
    replacement = converted("llama", method, "S0A3E8")
    before = {name: value.clone() for name, value in replacement.state_dict().items()}
    replacement.view, x = as_they_are, torch.randn(9, 32)
    kept = x.clone()
    first = replacement(x)
    assert torch.equal(replacement(x), first)
    assert torch.equal(x, kept)
    after = replacement.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_block_by_hand() -> None:
    """One shared neuron and two experts of two: h is x, every output vector its own axis."""
    block = BlockConfig(
        "experts", 5, False, False, "linear", output_bias=True,
        router=RouterConfig("linear", "topk"),
    )  # fmt: skip
    made = MoesaicBlock(block, Sizes(1, 2, 2, 1))
    state = {name: torch.zeros_like(value) for name, value in made.state_dict().items()}
    state["output_bias"] += 0.5
    state["shared_expert.up_proj.weight"][0, 0] = state["shared_expert.down_proj.weight"][0, 0] = 1
    for expert, axes in enumerate([(1, 2), (3, 4)]):
        for neuron, axis in enumerate(axes):
            state["experts.up_proj"][expert, neuron, axis] = 1
            state["experts.down_proj"][expert, axis, neuron] = 1
    state["router.score_proj.weight"][0, 1] = 1  # the second entry for the first expert
    state["router.selection_bias"][1] = 4  # who else would never be chosen
    made.load_state_dict(state)
    x = torch.arange(1.0, 11).view(2, 5)
    for view in (None, as_they_are):
        made.view = view
        assert made(x).tolist() == [[1.5, 0.5, 0.5, 4.5, 5.5], [6.5, 7.5, 8.5, 0.5, 0.5]]
    made.view = lambda router, values, gate_TR: torch.ones_like(gate_TR)
    assert made(x).tolist() == (x + 0.5).tolist()


def test_the_experts_of_a_mixture_side_by_side() -> None:
    """Each meets its own tokens, times the weights that the outer router gives them."""
    ffns = [find_ffns(tiny_model("qwen3", seed)).read(0) for seed in range(3)]
    parts = MixtureParts([WholeFFN(ffn) for ffn in ffns])
    x, weight_TO = torch.randn(7, 32), torch.rand(7, 2)
    index_TO = torch.tensor([[0, 2], [2, 0], [0, 1], [1, 2], [2, 1], [0, 1], [1, 0]])
    for index in (index_TO, index_TO.clamp(max=1)):  # the second uses no third expert
        expected = torch.stack([
            sum(
                weight_TO[t, slot] * ffns[e].output(ffns[e].hidden(x[t]))
                for slot, e in enumerate(index[t].tolist())
            )
            for t in range(7)
        ])  # fmt: skip
        torch.testing.assert_close(parts(x, index, weight_TO), expected, rtol=1e-5, atol=1e-5)


# --- parts of an FFN ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", SOME)
def test_a_subset_is_the_ffn_of_these_neurons_in_this_order(family: str) -> None:
    ffn, x = find_ffns(tiny_model(family)).read(0), torch.randn(5, 32)
    index = torch.tensor([50, 3, 3, 17])
    part = ffn.subset(index)
    assert part.intermediate_size == 4
    torch.testing.assert_close(part.hidden(x), ffn.hidden(x)[:, index])
    rest = 0 if ffn.down_bias_D is None else ffn.down_bias_D
    expected = ffn.hidden(x)[:, index] @ ffn.down_DF[:, index].T + rest
    torch.testing.assert_close(part.output(part.hidden(x)), expected)


def test_all_neurons_in_another_order_are_the_same_ffn() -> None:
    ffn, x = find_ffns(tiny_model("llama")).read(0), torch.randn(5, 32)
    part = ffn.subset(torch.randperm(52))
    expected = ffn.output(ffn.hidden(x))
    torch.testing.assert_close(part.output(part.hidden(x)), expected, rtol=1e-5, atol=1e-5)


# --- the oracle --------------------------------------------------------------------------------


def experts_of(neurons: int, r: int) -> torch.Tensor:
    return torch.randperm(neurons)[: r * (neurons // r)].view(r, -1)


@pytest.mark.parametrize("r", [1, 3, 52])
def test_energies_are_squared_norms_of_the_experts_outputs(r: int) -> None:
    ffn, x = find_ffns(tiny_model("llama")).read(0), torch.randn(30, 32)
    experts_RM = experts_of(52, r)
    given = expert_energies(ffn.hidden(x), experts_RM, expert_grams(ffn, experts_RM))
    expected = reference.expert_energies(
        ffn.hidden(x).double().numpy(), ffn.down_DF.double().numpy(), experts_RM.numpy()
    )
    assert given.shape == (30, r)
    np.testing.assert_allclose(given.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_energies_that_cancel_are_not_negative() -> None:
    """Two neurons with opposite output vectors: nothing is left but rounding."""
    down_D = torch.randn(16)
    ffn = DenseFFN(torch.randn(2, 8), torch.stack([down_D, -down_D], dim=1), "linear")
    ffn = replace(ffn, up_FD=ffn.up_FD[[0, 0]] * 37.7)
    experts_RM = torch.tensor([[0, 1]])
    h_TF = ffn.hidden(torch.randn(200, 8))
    assert (expert_energies(h_TF, experts_RM, expert_grams(ffn, experts_RM)) >= 0).all()


@pytest.mark.parametrize("num_active", [1, 2, 4])
def test_the_oracle_runs_the_experts_of_largest_output(num_active: int) -> None:
    ffn, x = find_ffns(tiny_model("llama")).read(0), torch.randn(30, 32)
    experts_RM = experts_of(52, 4)
    energy_TR = reference.expert_energies(
        ffn.hidden(x).double().numpy(), ffn.down_DF.double().numpy(), experts_RM.numpy()
    )
    router = OracleRouter(ffn, experts_RM, num_active)
    chosen = router.choose(router.scores(x))
    assert chosen.dtype == torch.bool
    assert torch.equal(router.gates_of_all(x), chosen.float())
    index_TK, gate_TK = router(x)
    assert torch.equal(torch.zeros(30, 4).scatter(1, index_TK, gate_TK), chosen.float())
    for chosen_R, energy_R in zip(chosen, energy_TR, strict=True):
        best = sorted(range(4), key=lambda j: -energy_R[j])[:num_active]
        assert chosen_R.nonzero()[:, 0].tolist() == sorted(best)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("layout", ["S3A3E8", "S0A4E4"])
def test_the_oracle_is_a_block_of_moesaic_with_another_router(family: str, layout: str) -> None:
    """It computes the chosen experts of the dense FFN, in both ways to run a block."""
    model = tiny_model(family)
    oracle: Any = load_method("oracle", {"repair_by": "none"})
    plan = make_plan(model.config, "tiny", oracle, make_budget(layout))
    ffns = find_ffns(model)
    ffn = ffns.read(1)
    x = torch.randn(200, 32)
    inputs = FFNInputs([x], Split.last_eighth(200), False, CPU, CPU)
    replacement = oracle.convert_ffn(ffn, inputs, plan.sizes, np.random.default_rng(0))
    partition = replacement.made.partition
    energy_TR = reference.expert_energies(
        ffn.hidden(x).double().numpy(), ffn.down_DF.double().numpy(), partition.experts_RM
    )
    best_TK = (-energy_TR).argsort(axis=1)[:, : plan.sizes.num_active]
    mask_TF = torch.zeros(200, 52)
    mask_TF[:, partition.shared_S] = 1
    for token, best_K in enumerate(best_TK):
        mask_TF[token, partition.experts_RM[best_K].reshape(-1)] = 1
    expected = ffn.output(ffn.hidden(x) * mask_TF)
    for view in (None, as_they_are):
        replacement.view = view
        torch.testing.assert_close(replacement(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", SOME)
def test_the_neuron_oracle_runs_the_largest_contributions(family: str) -> None:
    ffn, x = find_ffns(tiny_model(family)).read(0), torch.randn(2, 9, 32)
    best = BestNeurons(ffn, 7)
    h_TF = ffn.hidden(x.view(18, 32))
    norm_F = ffn.down_DF.norm(dim=0)
    for t, y_D in enumerate(best(x).view(18, 32)):
        kept = sorted(range(52), key=lambda f: -float(h_TF[t, f].abs() * norm_F[f]))[:7]
        expected = ffn.down_DF[:, kept] @ h_TF[t, kept]
        if ffn.down_bias_D is not None:
            expected = expected + ffn.down_bias_D
        torch.testing.assert_close(y_D, expected, rtol=1e-4, atol=1e-5)
