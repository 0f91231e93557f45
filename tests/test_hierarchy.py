"""The two-level block against its slow twin, and what its parts promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import silu

import moesaic
from moesaic.calibration.calibration_set import Split
from moesaic.calibration.expert_inputs import ExpertInputs
from moesaic.conversion.layer_error import LayerReport
from moesaic.conversion.mixtures import merged
from moesaic.families import find_ffns
from moesaic.kernels import build
from moesaic.modeling import (
    MoesaicHierarchy,
    MoesaicNeuronCopyRouter,
    MoesaicPairProjection,
    MoesaicQuadraticRouter,
)
from moesaic.modeling.experts_moesaic import some_are_nobodys
from moesaic.parts.stack import stack_experts, unstack_expert
from tests import reference
from tests.families import CONTEXT, HIDDEN, tokens
from tests.mixtures import ACTIVE, OUTER, tiny_mixture

WINDOWS = tokens(16, CONTEXT, seed=1)
CPU = torch.device("cpu")


def converted(method: str = "cmoe", layout: str = "S3A3E8", **more: Any) -> Any:
    return moesaic.convert(tiny_mixture("qwen3_moe"), method, layout, WINDOWS, **more)[0]


def block_of(method: str, **more: Any) -> MoesaicHierarchy:
    model = converted(method, **more)
    block = model.base_model.get_submodule(model.config.moesaic.replacement_path(1))
    assert isinstance(block, MoesaicHierarchy)
    return block.requires_grad_(True)


def matrices(block: Any) -> tuple[list[Any], list[list[Any]]]:
    """Shared and routed parts as plain matrices, padding left in."""

    def of(experts: Any) -> list[Any]:
        pairs = zip(experts.gate_up_proj, experts.down_proj, strict=True)
        return [(*gate_up.chunk(2), down) for gate_up, down in pairs]

    subs, routed = of(block.experts), block.num_routed
    grouped = [subs[e * routed : (e + 1) * routed] for e in range(OUTER)]
    return of(block.shared_experts), grouped


def slow_choice(block: Any, x_D: torch.Tensor, expert: int) -> tuple[list[int], list[Any]]:
    """Sub-experts and gates of one pair, from the weights and by hand."""
    router = block.router
    copies = isinstance(router, MoesaicNeuronCopyRouter)

    def rows(part: Any, values: torch.Tensor) -> torch.Tensor:
        y = part.weight[expert, : part.outputs, : part.inputs] @ values
        return y if part.bias is None else y + part.bias[expert, : part.outputs]

    if copies:
        score_R = silu(rows(router.gate_proj, x_D)) * rows(router.up_proj, x_D)
    else:
        phi = x_D
        if isinstance(router, MoesaicQuadraticRouter):
            z = rows(router.feature_proj, x_D)
            products = [z[i] * z[j] for i in range(len(z)) for j in range(i, len(z))]
            phi = torch.cat([x_D, torch.stack(products)])
        score_R = rows(router.score_proj, phi)
    gate_R = 1 + score_R.softmax(0) * router.expert_scale[expert]
    # The paper adds the bias to probabilities, where representatives score.
    value_R = score_R.softmax(0) if copies else score_R
    biased_R = (value_R + router.selection_bias[expert]).detach()
    if expert in block.whole:
        chosen = list(range(len(score_R)))
    elif router.chooser == "topk":
        chosen = biased_R.topk(router.num_active).indices.tolist()
    else:
        (chosen,) = reference.threshold_choice(biased_R[None].numpy(), router.cap)
    return chosen, [gate_R[j] for j in chosen]


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("method", ["cmoe", "moesaic", "moesaic-dynamic"])
@pytest.mark.parametrize("whole", [False, True])
def test_outputs_and_gradients_equal_the_double_loop(
    implementation: str, method: str, whole: bool
) -> None:
    block: Any = block_of(method, **({"experts": [0, 3]} if whole else {}))
    assert block.whole == ([1, 2] if whole else [])
    block.experts.config._experts_implementation_internal = implementation
    with torch.no_grad():
        block.router.expert_scale.normal_()
        block.router.selection_bias += 0.1 * torch.randn_like(block.router.selection_bias)
        if block.output_bias is not None:
            block.output_bias.normal_()
    x = torch.randn(13, HIDDEN, requires_grad=True)
    index = torch.rand(13, OUTER).topk(ACTIVE).indices
    weight = torch.rand(13, ACTIVE, requires_grad=True)
    probe = torch.randn(13, HIDDEN)
    y = block(x, index, weight)
    (y * probe).sum().backward()
    leaves = {**dict(block.named_parameters()), "x": x, "weight": weight}
    fast = {name: leaf.grad.clone() for name, leaf in leaves.items() if leaf.grad is not None}
    for leaf in leaves.values():
        leaf.grad = None
    slow = reference.hierarchy_forward(
        x, index, weight, *matrices(block), lambda x_D, expert: slow_choice(block, x_D, expert)
    )
    if block.output_bias is not None:
        slow = slow + (weight[:, :, None] * block.output_bias[index]).sum(1)
    torch.testing.assert_close(y, slow, rtol=1e-5, atol=1e-5)
    (slow * probe).sum().backward()
    assert fast.keys() >= {"x", "weight", "experts.down_proj", "router.expert_scale"}
    for name, value in fast.items():
        torch.testing.assert_close(value, leaves[name].grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.skipif(build.library() is None, reason="needs a C++ compiler, and there is none")
@pytest.mark.parametrize("method", ["cmoe", "moesaic-dynamic"])
def test_pairs_that_run_unlike_numbers_of_sub_experts_run_by_the_kernel(method: str) -> None:
    """By thresholds, or where some outer experts stay whole."""
    block: Any = block_of(method, experts=[0, 3]).requires_grad_(False)
    x, weight = torch.randn(13, HIDDEN), torch.rand(13, ACTIVE)
    index = torch.rand(13, OUTER).topk(ACTIVE).indices
    outputs = []
    with torch.no_grad():
        for implementation in ("eager", "moesaic"):
            block.experts.config._experts_implementation_internal = implementation
            assert some_are_nobodys(block.experts, x) == (implementation == "moesaic")
            outputs.append(block(x, index, weight))
        assert block(x[:0], index[:0], weight[:0]).shape == (0, HIDDEN)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    assert block.experts.down_proj.mT.is_contiguous()


@pytest.mark.parametrize("method", ["cmoe", "moesaic-dynamic"])
def test_no_token_gives_none(method: str) -> None:
    block = block_of(method)
    none_TO = torch.zeros(0, ACTIVE, dtype=torch.long)
    weight_TO = torch.zeros(0, ACTIVE)
    x_TD = torch.zeros(0, HIDDEN)
    assert block(x_TD, none_TO, weight_TO).shape == (0, HIDDEN)
    units = block.units(x_TD, none_TO, weight_TO)
    assert units is not None
    assert len(units[0]) == 0


def test_the_outer_weight_multiplies_the_whole_mixture() -> None:
    block = block_of("moesaic-dynamic")
    x, index = torch.randn(5, HIDDEN), torch.tensor([[2]] * 5)
    one = block(x, index, torch.ones(5, 1))
    torch.testing.assert_close(block(x, index, torch.full((5, 1), 0.25)), 0.25 * one)
    assert block(x, index, torch.zeros(5, 1)).abs().max() == 0


def test_the_selection_bias_changes_who_runs_and_never_a_gate() -> None:
    block: Any = block_of("cmoe")
    x, expert = torch.randn(6, HIDDEN), torch.full((6,), 1)
    with torch.no_grad():
        block.router.expert_scale.fill_(0.5)
        before, gate = block.router(x, expert)
        scores = block.router.scores(x, expert)
        block.router.selection_bias[1, 4] = 1e6
        after, moved = block.router(x, expert)
    assert (after == 4).any(1).all()
    assert not (before == 4).any(1).all()
    torch.testing.assert_close(moved, 1 + 0.5 * scores.softmax(-1).gather(1, after))
    same = before.sort(1).values == after.sort(1).values
    assert same.any()
    block.router.selection_bias.zero_()
    block.router.selection_bias[0, 4] = 1e6  # of another expert: no difference
    assert torch.equal(block.router(x, expert)[0], before)
    assert torch.equal(block.router(x, expert)[1], gate)


def test_a_pair_projection_by_hand() -> None:
    """Each pair meets the rows of its own expert: 4 experts, 1 output, 2 inputs."""
    part = MoesaicPairProjection(4, 2, 1, bias=True, exact=True)
    part.config = config = converted().config
    with torch.no_grad():
        part.weight.zero_()
        part.weight[0, 0, :2], part.weight[3, 0, :2] = (
            torch.tensor([1.0, 2]),
            torch.tensor([3.0, 4]),
        )
        part.bias[3, 0] = 10
    x = torch.tensor([[1.0, 1], [1, 1], [0, 5]], dtype=torch.bfloat16)
    for kind in ("eager", "batched_mm", "grouped_mm"):
        config._experts_implementation_internal = kind
        y = part(x, torch.tensor([3, 0, 3]))
        assert y.dtype == torch.float32
        assert y.tolist() == [[17], [3], [30]]


@pytest.mark.parametrize("method", ["cmoe", "moesaic-dynamic", "static"])
@pytest.mark.parametrize("experts", [None, [1, 2]])
def test_stacking_is_undone_to_the_last_bit(method: str, experts: list[int] | None) -> None:
    model = converted(method, experts=experts)
    moe = model.config.moesaic
    block = model.base_model.get_submodule(moe.replacement_path(2))
    assert block.whole == moe.outer.whole_experts(2) == ([0, 3] if experts else [])
    if method == "static" and experts:  # a whole expert is wider than the others' own blocks
        one = unstack_expert(block, 1)
        width = moe.sizes_of(2).shared
        assert one.shared_expert.down_proj.weight.shape == (HIDDEN, width)
        assert width < moe.sizes_of(2).total
        return
    ones = [unstack_expert(block, expert).state_dict() for expert in range(OUTER)]
    again = stack_experts(ones, moe.block, moe.sizes_of(2), moe.outer, block.whole).state_dict()
    assert again.keys() == block.state_dict().keys()
    assert all(torch.equal(again[name], value) for name, value in block.state_dict().items())
    x, expert = torch.randn(7, HIDDEN), 2
    alone = unstack_expert(block, expert)(x)
    among = block(x, torch.full((7, 1), expert), torch.ones(7, 1))
    if expert not in block.whole:
        torch.testing.assert_close(among, alone, rtol=1e-5, atol=1e-6)


def test_tokens_are_sorted_by_expert_once_and_held_out_by_window() -> None:
    """An expert's tokens are those the router sends it, in order; windows are held out whole."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, HIDDEN, generator=generator)
    index = torch.rand(64, OUTER, generator=generator).topk(ACTIVE).indices
    index[index == 3] = 0  # an expert without tokens (and a token that has 0 twice)
    index[:, 1] = torch.where(index[:, 0] == index[:, 1], 1, index[:, 1])
    weight = torch.rand(64, ACTIVE)
    calls = list(zip(x.split(24), index.split(24), weight.split(24), strict=True))
    routed = ExpertInputs(calls, OUTER, Split.last_eighth(64, window=8), True, CPU, CPU)
    for expert in range(OUTER):
        mine = [t for t in range(64) if expert in index[t]]
        assert routed.tokens_of[expert].tolist() == mine
        if mine:
            inputs = routed.inputs(expert)
            assert torch.equal(torch.cat(list(inputs.fit())), x[[t for t in mine if t < 56]])
            assert torch.equal(torch.cat(list(inputs.heldout())), x[[t for t in mine if t >= 56]])
    assert torch.equal(torch.cat([call[0] for call in routed.all()]), x)
    assert torch.equal(torch.cat([call[1] for call in routed.all()]), index)


def test_experts_are_fitted_on_what_the_router_really_sends_them() -> None:
    """Energies by expert of a first layer equal those of its own tokens, found by a hook."""
    model = tiny_mixture("mixtral")
    seen: list[Any] = []
    handle = model.model.layers[0].mlp.experts.register_forward_pre_hook(
        lambda module, args: seen.append(args)
    )
    with torch.no_grad():
        model(input_ids=WINDOWS, use_cache=False)
    handle.remove()
    x, index, _ = seen[0]
    counts = [int((index == expert).sum()) for expert in range(OUTER)]
    _, report = moesaic.convert(model, "cmoe", "S3A3E8", WINDOWS)
    assert [row["tokens"] for row in report.layers[0].experts] == counts
    assert len(x) == WINDOWS.numel()


def test_means_of_a_layer_weigh_experts_by_their_tokens() -> None:
    def report(error: float) -> LayerReport:
        return LayerReport(0, None, 10, True, error, {"static": 2 * error}, notes=["odd"])

    found = merged(5, {0: report(0.1), 2: report(0.5)}, [30, 7, 10], {1: "not asked for"})
    assert found.layer == 5
    assert found.relative_error == pytest.approx((3 * 0.1 + 0.5) / 4)
    assert found.references == {"static": pytest.approx((3 * 0.2 + 1.0) / 4)}
    assert found.notes == ["experts 1: stay whole (not asked for)", "experts 0, 2: odd"]
    assert [row["tokens"] for row in found.experts] == [30, 7, 10]
    assert found.experts[1]["whole"] == "not asked for"


def test_conversion_is_sequential_through_converted_experts() -> None:
    """Which experts later layers are sent tokens by depends on the layers before."""
    one, two = tiny_mixture("mixtral"), tiny_mixture("mixtral")
    reports = [
        moesaic.convert(m, method, "S1A1E8", WINDOWS)[1]
        for m, method in ((one, "random"), (two, "static"))
    ]
    counts = [[[row["tokens"] for row in layer.experts] for layer in r.layers] for r in reports]
    assert counts[0][0] == counts[1][0]
    assert counts[0][1] != counts[1][1]


def test_all_of_an_experts_weights_are_found() -> None:
    model = tiny_mixture("qwen2_moe")
    found: Any = find_ffns(model)
    assert (found.num_outer, found.outer_active, found.converted) == (OUTER, ACTIVE, (0, 2))
    assert found.ffn_path == "mlp.experts"
