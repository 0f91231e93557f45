"""moesaic's own kernel for experts on a CPU: against loops, and who it is for."""

from __future__ import annotations

import copy
import gc
import logging
import os
import platform
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import gelu, relu, silu
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

import moesaic
from moesaic.kernels import build
from moesaic.kernels.blocks import block_forward
from moesaic.kernels.experts import experts_forward
from moesaic.kernels.experts_fit import fits, fits_gpu
from moesaic.modeling import BlockConfig, MoesaicBlock, RouterConfig, Sizes
from moesaic.parts.products import widened_products
from tests import reference
from tests.families import tiny_model, tokens

pytestmark = pytest.mark.skipif(
    build.library() is None, reason="needs a C++ compiler, and there is none"
)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """The kernel is for inference alone."""
    with torch.no_grad():
        yield


ACTIVATIONS = {
    "silu": silu,
    "relu": relu,
    "gelu_pytorch_tanh": lambda x: gelu(x, approximate="tanh"),
}
# Of a token's outputs, against float32: h and the sums are rounded once, by 1/256 at most.
BFLOAT16 = 4e-3
# Shared neurons, of an expert, experts, that run, hidden size: few and many, odd ones,
# ones that are no whole vectors, and more neurons than are made at once.
SHAPES = [
    (12, 12, 127, 95, 576),
    (13, 5, 9, 4, 40),
    (0, 12, 5, 5, 64),
    (1, 1, 3, 2, 8),
    (70, 77, 4, 2, 72),
]


LINEAR = RouterConfig("linear", "topk")


def block_of(
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype = torch.float32,
    activation: str = "silu",
    gated: bool = True,
    router: RouterConfig = LINEAR,
) -> Any:
    """A block for inference whose router has gates and a bias, as after training."""
    torch.manual_seed(0)
    shared, neurons, routed, active, hidden = shape
    width = shared + neurons * routed
    config = BlockConfig("experts", hidden, gated, False, activation, False, router, width)
    block = MoesaicBlock(config, Sizes(shared, neurons, routed, active))
    for parameter in block.parameters():
        parameter.requires_grad_(False)
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    block.router.selection_bias.normal_(std=0.01)
    experts = block.experts
    experts.down_proj[:, :, neurons:] = 0  # neurons that fill up
    matrices = 2 if gated else 1
    experts.first_matrix.unflatten(1, (matrices, -1))[:, :, neurons:] = 0
    experts.config = SimpleNamespace(_experts_implementation="moesaic")
    block.to(dtype)
    block.router.expert_scale.data = block.router.expert_scale.float()
    block.router.selection_bias = block.router.selection_bias.float()
    return block.eval()


def matrices_of(block: Any) -> tuple[Any, list[tuple[Tensor, Tensor, Tensor]]]:
    """The shared expert's (gate, up, down), and those of the others, without filling."""
    used = block.experts.neurons
    experts = []
    for first, down in zip(block.experts.first_matrix, block.experts.down_proj, strict=True):
        gate, up = first.chunk(2)
        experts.append((gate[:used], up[:used], down[:, :used]))
    shared = block.shared_expert
    if shared is None:
        return None, experts
    return (shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight), experts


@pytest.mark.parametrize("count", [1, 2, 7, 200])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_equals_the_double_loop(shape: tuple[int, int, int, int, int], count: int) -> None:
    block = block_of(shape)
    x = torch.randn(count, shape[-1])
    index, gate = block.router(x)
    shared, experts = matrices_of(block)
    expected = reference.moe_forward(x, shared, experts, index, gate, silu)
    found = block_forward(block, x)
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(block(x), found)
    # With the router and the shared expert elsewhere, as in a stock model.
    routed = experts_forward(block.experts, x, index, gate)
    rest = reference.moe_forward(x, None, experts, index, gate, silu)
    torch.testing.assert_close(routed, rest, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("hidden", "count"),
    [
        (32, 5),  # one vector of tokens, not full
        (64, 21),  # a vector, and a few that are taken apart
        (96, 24),
        (160, 83),  # more than a panel; outputs that are no whole tiles
        (64, 600),  # more than share weights in a cache
    ],
)
def test_many_tokens_side_by_side(hidden: int, count: int, dtype: torch.dtype, gated: bool) -> None:
    """Every token has the shared expert, of more neurons than are made at once, odd in number."""
    block = block_of((141, 33, 4, 3, hidden), dtype, gated=gated)
    x = torch.randn(count, hidden).to(dtype)
    found = block_forward(block, x)
    assert found is not None
    block.experts.config._experts_implementation = "eager"
    expected = copy.deepcopy(block).float()(x.float())
    error_T = (found.float() - expected).norm(dim=1)
    bound = 1e-5 if dtype == torch.float32 else BFLOAT16
    assert (error_T < bound * expected.norm(dim=1)).all()


def thresholds_of(
    shape: tuple[int, int, int, int, int],
    kind: str,
    cap: int | None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A block whose tokens run unlike numbers of experts."""
    directions = 3 if kind == "quadratic" else 0
    router = RouterConfig(kind, "threshold", directions=directions, cap=cap)
    block = block_of(shape, dtype, router=router)
    block.router.selection_bias.normal_(-0.5, 0.3)
    return block


def thresholds_by_loop(block: Any, x: Tensor) -> Tensor:
    """What such a block puts out, a token after the other."""
    scores = block.router.scores(x)
    biased = scores + block.router.selection_bias  # of copies of neurons too
    chosen = reference.threshold_choice(biased.double().numpy(), block.router.cap)
    gates = block.router.gates(scores)
    gate = [gates[token, ran] for token, ran in enumerate(chosen)]
    index = [torch.tensor(ran) for ran in chosen]
    shared, experts = matrices_of(block)
    return reference.moe_forward(x, shared, experts, index, gate, silu)


@pytest.mark.parametrize("cap", [None, 3])
@pytest.mark.parametrize("kind", ["linear", "quadratic", "neuron-copies"])
@pytest.mark.parametrize("shape", [(13, 12, 37, 4, 64), (0, 5, 300, 9, 40), (12, 12, 3, 1, 64)])
@pytest.mark.parametrize("count", [1, 3, 70])
def test_thresholds_equal_the_double_loop(
    count: int, shape: tuple[int, int, int, int, int], kind: str, cap: int | None
) -> None:
    """The last token passes none, and runs the first expert alone."""
    block = thresholds_of(shape, kind, cap)
    x = torch.randn(count, shape[-1])
    x[-1] = 0
    block.router.selection_bias.clamp_(max=-1e-3)
    found = block_forward(block, x)
    assert found is not None
    torch.testing.assert_close(found, thresholds_by_loop(block, x), rtol=1e-4, atol=1e-4)
    assert torch.equal(found, block(x))


def test_who_watches_a_router_of_thresholds_sees_it_run() -> None:
    """The experts still run by the kernel."""
    block = thresholds_of((13, 12, 37, 4, 64), "linear", 3)
    x = torch.randn(9, 64)
    seen: list[int] = []
    handle = block.router.register_forward_pre_hook(lambda *_: seen.append(1))
    assert block_forward(block, x) is None
    watched = block(x)
    assert seen == [1]
    handle.remove()
    torch.testing.assert_close(watched, block(x), rtol=1e-4, atol=1e-4)


def test_routers_that_the_kernel_would_misread_run_by_torch() -> None:
    shape = (13, 12, 37, 4, 64)
    x = torch.randn(9, 64)
    block = thresholds_of(shape, "linear", None)
    expected = block(x)
    block.router.cap = 400  # no cap to torch
    assert block_forward(block, x) is None
    torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-4)
    block.router.chooser = "by someone else"
    assert block_forward(block, x) is None
    block = thresholds_of(shape, "quadratic", None)
    assert block_forward(block, x) is not None
    block.router.feature_proj.weight.data = block.router.feature_proj.weight[:, :32]
    assert block_forward(block, x) is None
    with pytest.raises(RuntimeError, match="shape"):
        block(x)


def test_experts_that_learn_by_lora_run_by_torch_under_thresholds() -> None:
    block = thresholds_of((13, 12, 37, 4, 64), "linear", None)
    x = torch.randn(9, 64)
    expected = block(x)
    config = LoraConfig(target_parameters=["experts.gate_up_proj"], target_modules=[])
    get_peft_model(block, config)
    torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["linear", "quadratic"])
@pytest.mark.parametrize("count", [1, 9, 130])
def test_thresholds_in_bfloat16(count: int, kind: str, threads: int) -> None:
    """Scores are in float32, so the same experts run."""
    block = thresholds_of((13, 12, 37, 4, 64), kind, None, torch.bfloat16)
    x = torch.randn(count, 64).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = block_forward(block, x)
    finally:
        torch.set_num_threads(before)
    assert found is not None
    expected = thresholds_by_loop(copy.deepcopy(block).float(), x.float())
    error_T = (found.float() - expected).norm(dim=1)
    assert (error_T < BFLOAT16 * expected.norm(dim=1)).all()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3, 9, 130])
def test_experts_chosen_by_copies_of_neurons(
    count: int, dtype: torch.dtype, gated: bool, absolute: bool, biased: bool
) -> None:
    """With a bias by probability, without one by score, as the slow way does."""
    router = RouterConfig("neuron-copies", "topk", absolute=absolute)
    block = block_of((13, 12, 37, 4, 64), dtype, gated=gated, router=router)
    block.router.selection_bias.mul_(5 if biased else 0)
    x = torch.randn(count, 64).to(dtype)
    found = block_forward(block, x)
    assert found is not None
    exact = copy.deepcopy(block).float()
    exact.experts.config._experts_implementation = "eager"
    error_T = (found.float() - exact(x.float())).norm(dim=1)
    bound = 1e-5 if dtype == torch.float32 else BFLOAT16
    assert (error_T < bound * exact(x.float()).norm(dim=1)).all()


def test_copies_of_neurons_with_other_parts_run_as_before() -> None:
    kind = RouterConfig("neuron-copies", "topk")
    x = torch.randn(5, 40)
    block = block_of((13, 12, 9, 4, 40), router=kind)
    assert block_forward(block, x) is not None
    block.router.absolute = True  # seen, though the block is known
    by_size = block_forward(block, x)
    assert by_size is not None
    kind_by_size = RouterConfig("neuron-copies", "topk", absolute=True)
    fresh = block_of((13, 12, 9, 4, 40), router=kind_by_size)
    assert torch.equal(by_size, block_forward(fresh, x))
    block.router.act_fn = torch.nn.ReLU()
    assert block_forward(block, x) is None
    block = block_of((13, 12, 9, 4, 40), router=kind)
    block.router.up_proj = torch.nn.Linear(40, 9)  # with a bias
    assert block_forward(block, x) is None
    block = block_of((13, 12, 9, 4, 40), router=kind)
    block.router.gate_proj = None
    assert block_forward(block, x) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((13, 24, 70, 26, 128), 200),  # h of some experts in lines of all tokens
        ((1, 17, 40, 13, 128), 1100),  # more tokens than a thread takes at once
        ((0, 1, 33, 30, 64), 100),  # units that hold one neuron
        ((300, 70, 6, 1, 96), 250),  # h of all experts but the shared one in lines of their own
        ((5, 7, 60, 45, 64), 1586),  # all experts for all tokens, more than go together
        ((5, 7, 60, 45, 64), 18),  # the same where threads share neurons out
    ],
)
def test_small_experts_of_many_tokens(
    shape: tuple[int, int, int, int, int], count: int, gated: bool, dtype: torch.dtype
) -> None:
    block = block_of(shape, dtype, gated=gated)
    x = torch.randn(count, shape[-1]).to(dtype)
    before = torch.get_num_threads()
    index, gate = block.router(x)
    try:
        torch.set_num_threads(3)
        assert block_forward(block, x) is not None
        routed = experts_forward(block.experts, x, index, gate)
    finally:
        torch.set_num_threads(before)
    experts = copy.deepcopy(block.experts).float()
    experts.config._experts_implementation = "eager"
    expected = experts(x.float(), index, gate.float())
    error_T = (routed.float() - expected).norm(dim=1)
    bound = 1e-5 if dtype == torch.float32 else BFLOAT16
    assert (error_T < bound * expected.norm(dim=1) + 1e-6).all()


def test_experts_that_most_tokens_run_beside_others() -> None:
    """By thresholds: some run for all tokens, with gates of zero, others for their own."""
    block = thresholds_of((5, 7, 60, 45, 64), "linear", None)
    block.router.selection_bias[:20] = 5.0
    block.router.selection_bias[20:30] = -5.0
    x = torch.randn(333, 64)
    x[99] = torch.nan  # is nothing to the others
    found = block_forward(block, x)
    others = torch.arange(333) != 99
    expected = thresholds_by_loop(block, x[others])
    torch.testing.assert_close(found[others], expected, rtol=1e-4, atol=1e-4)
    assert found[99].isnan().all()


@pytest.mark.parametrize("active", [1, 30, 59])
def test_of_equal_values_the_first_run(active: int) -> None:
    """Minus infinity comes last, and first what is no number, as torch ranks it."""
    block = block_of((0, 3, 60, active, 32))
    block.router.score_proj.weight.zero_()
    block.router.expert_scale.zero_()
    block.router.selection_bias.zero_()
    block.router.selection_bias[40] = torch.nan
    block.router.selection_bias[41] = -torch.inf
    block.router.selection_bias[50] = 1.0
    ranked = [40, 50, *range(40), *range(42, 50), *range(51, 60), 41]
    x = torch.randn(3, 32)
    index = torch.tensor(ranked[:active]).expand(3, -1)
    gate = torch.ones(3, active)
    expected = experts_forward(block.experts, x, index, gate)
    torch.testing.assert_close(block_forward(block, x), expected)


def test_zero_equals_minus_zero() -> None:
    """Neurons that rest, times products with W_up of either sign."""
    router = RouterConfig("neuron-copies", "topk")
    block = block_of((0, 3, 20, 7, 32), activation="relu", router=router)
    block.router.expert_scale.zero_()
    block.router.selection_bias.fill_(-0.0)
    x = torch.rand(3, 32) + 0.1
    block.router.gate_proj.weight.fill_(-1)
    block.router.up_proj.weight.fill_(1)
    block.router.up_proj.weight[::2] = -1  # scores of -0, 0, -0, ...
    index = torch.arange(7).expand(3, -1)
    expected = experts_forward(block.experts, x, index, torch.ones(3, 7))
    torch.testing.assert_close(block_forward(block, x), expected)


@pytest.mark.parametrize(
    ("capability", "count", "takes"),
    [("AVX2", 15, True), ("AVX2", 16, False), ("AVX512", 16, True)],
)
def test_large_experts_on_avx2_are_left_to_mkl(
    monkeypatch: pytest.MonkeyPatch, capability: str, count: int, takes: bool
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    experts = block_of((0, 1024, 2, 1, 1024)).experts
    assert fits(experts, torch.randn(count, 1024)) == takes
    small = block_of((0, 12, 2, 1, 1024)).experts
    assert fits(small, torch.randn(count, 1024))
    assert fits(experts.bfloat16(), torch.randn(count, 1024).bfloat16())


def test_products_that_are_widened_leave_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.parts.products.is_emulated", lambda dtype: True)
    block = block_of((13, 12, 9, 4, 64), torch.bfloat16)
    x = torch.randn(40, 64).bfloat16()
    alone = block_forward(block, x)
    with widened_products(torch.bfloat16, x.device):
        within = block_forward(block, x)
    assert alone is not None
    assert within is not None
    assert torch.equal(alone, within)


@pytest.mark.parametrize("count", [1, 9, 130])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_gates_and_formats(
    dtype: torch.dtype, activation: str, gated: bool, count: int
) -> None:
    block = block_of((13, 12, 9, 4, 96), dtype, activation, gated)
    x = torch.randn(count, 96).to(dtype)
    found = block_forward(block, x)
    assert found is not None
    block.experts.config._experts_implementation = "eager"
    expected = copy.deepcopy(block).float()(x.float())
    size = expected.norm()
    assert (found.float() - expected).norm() < size * (1e-5 if dtype == torch.float32 else BFLOAT16)
    assert not torch.allclose(found.float(), torch.zeros_like(expected))


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_any_number_of_threads_gives_the_same(threads: int) -> None:
    block = block_of((13, 12, 9, 4, 40))
    before = torch.get_num_threads()
    for count in (1, 3, 64 * threads):
        x = torch.randn(count, 40)
        try:
            torch.set_num_threads(1)
            alone = block_forward(block, x)
            torch.set_num_threads(threads)
            together = block_forward(block, x)
        finally:
            torch.set_num_threads(before)
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_may_lie_anywhere(dtype: torch.dtype) -> None:
    """As those of a file, which begin at any number of bytes; where it matters they move once."""
    block = block_of((13, 12, 9, 4, 64), dtype)
    x = torch.randn(40, 64).to(dtype)
    expected = block_forward(block, x)
    for parameter in block.parameters():
        room = torch.empty(parameter.numel() + 4, dtype=parameter.dtype)
        parameter.data = room[4:].view_as(parameter).copy_(parameter)
    found = block_forward(block, x)
    assert torch.equal(found, expected)
    places = [parameter.data_ptr() for parameter in block.parameters()]
    kernels = build.library()
    assert kernels is not None
    moves = dtype == torch.bfloat16 and kernels.moesaic_has_tiles()
    is_on_line = block.experts.first_matrix.data_ptr() % 64 == 0
    assert is_on_line == bool(moves)
    assert torch.equal(block_forward(block, x), expected)
    assert places == [parameter.data_ptr() for parameter in block.parameters()]


def test_no_token_and_what_is_no_number() -> None:
    block = block_of((13, 12, 9, 4, 40))
    empty = block_forward(block, torch.zeros(0, 40))
    assert empty is not None
    assert empty.shape == (0, 40)
    x = torch.randn(3, 40)
    x[1] = torch.nan
    found = block_forward(block, x)
    assert found is not None
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_what_was_no_number_is_gone_in_the_next_call() -> None:
    """Memory is kept between calls, for neurons that fill up too."""
    block = block_of((0, 24, 69, 60, 128), torch.bfloat16)
    x = torch.randn(40, 128).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        clean = block_forward(block, x)
        assert clean is not None
        assert clean.isfinite().all()
        block_forward(block, torch.full_like(x, torch.nan))
        assert torch.equal(block_forward(block, x), clean)
    finally:
        torch.set_num_threads(before)


def test_what_is_no_number_passes_relu() -> None:
    """Without gates that are no numbers themselves, as after a conversion."""
    block = block_of((13, 12, 9, 4, 40), activation="relu", gated=False)
    block.router.expert_scale.zero_()
    x = torch.randn(3, 40)
    x[1] = torch.nan
    found = block_forward(block, x)
    assert found is not None
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


@pytest.mark.usefixtures("unasked_kernel")
def test_nothing_is_held_twice_or_changed(tmp_path: Path) -> None:
    windows = tokens(8, 32, seed=1)
    folder = tmp_path / "dense"
    tiny_model("qwen3").save_pretrained(folder)
    moesaic.convert(folder, layout="S1A2E4", calibration=windows, output=tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert model.config._experts_implementation == "moesaic"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        expected = model(windows[:2]).logits
    down = model.model.layers[0].mlp.experts.down_proj
    assert down.mT.is_contiguous()
    assert not down.is_contiguous()
    assert down.untyped_storage().nbytes() == down.nbytes
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        assert torch.equal(again(windows[:2]).logits, expected)


@torch.no_grad()
def test_a_stock_model_takes_it_by_one_call() -> None:
    config = Glm4MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        n_routed_experts=6,
        num_experts_per_tok=2,
        first_k_dense_replace=0,
        n_group=1,
        topk_group=1,
    )
    torch.manual_seed(0)
    model = Glm4MoeForCausalLM(config).eval()
    ids = torch.arange(40).view(2, 20)
    model.set_experts_implementation("eager")
    expected = model(ids).logits
    model.set_experts_implementation("moesaic")
    experts = model.model.layers[0].mlp.experts
    assert fits(experts, torch.zeros(1, 32))
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert experts.down_proj.mT.is_contiguous()  # it has run by the kernel


def test_hooks_formats_and_other_routers_run_as_before() -> None:
    block = block_of((13, 12, 9, 4, 40))
    x = torch.randn(5, 40)
    assert block_forward(block, x) is not None
    seen: list[int] = []
    handle = block.router.register_forward_hook(lambda *_: seen.append(1))
    assert block_forward(block, x) is None
    block(x)
    assert seen == [1]
    handle.remove()
    handle = register_module_forward_hook(lambda *_: seen.append(2))
    assert block_forward(block, x) is None
    handle.remove()
    handle = block.experts.act_fn.register_forward_hook(lambda *_: seen.append(3))
    assert block_forward(block, x) is None
    assert not fits(block.experts, x)
    handle.remove()
    assert fits(block.experts, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert block_forward(block, x) is None
    assert block_forward(block, x.double()) is None
    assert block_forward(block.bfloat16(), x.bfloat16()) is None  # vectors of float32 too
    block = block_of((13, 12, 9, 4, 40))
    config = LoraConfig(target_parameters=["score_proj.weight"], target_modules=[])
    get_peft_model(block, config)
    assert block_forward(block, x) is None


def test_a_block_that_was_changed_is_looked_at_again() -> None:
    """What was found fit is remembered; another part, weight or number of experts is seen."""
    shape = (13, 12, 9, 4, 40)
    block = block_of(shape)
    x = torch.randn(5, 40)
    first = block_forward(block, x)
    assert first is not None
    assert torch.equal(block_forward(copy.deepcopy(block), x), first)

    block.router.num_active = 3
    fewer = block_forward(block, x)
    assert fewer is not None
    assert not torch.allclose(fewer, first)
    block.router.num_active = 4
    assert torch.equal(block_forward(block, x), first)
    block.router.chooser = "threshold"
    above_zero = block_forward(block, x)
    block.router.cap = 1
    capped = block_forward(block, x)
    assert above_zero is not None
    assert capped is not None
    assert not torch.allclose(above_zero, first)
    assert not torch.allclose(capped, above_zero)
    block.router.cap = 9
    block.router.chooser = "topk"

    up = block.shared_expert.up_proj
    up.weight.data = up.weight.data * 2
    doubled = block_forward(block, x)
    block.experts.config._experts_implementation = "eager"
    torch.testing.assert_close(doubled, block(x), rtol=1e-4, atol=1e-4)
    block.experts.config._experts_implementation = "moesaic"

    block.shared_expert.up_proj = torch.nn.Sequential(up)
    assert block_forward(block, x) is None
    block.shared_expert.up_proj = up
    assert torch.equal(block_forward(block, x), doubled)
    down = block.shared_expert.down_proj.weight
    gate = block.shared_expert.gate_proj.weight
    for weight in (gate, up.weight):
        weight.data = weight.data[:6]  # where it was
    down.data = down.data[:, :6]
    narrow = block_forward(block, x)
    assert torch.equal(narrow, block_forward(copy.deepcopy(block), x))

    other = block_of((0, *shape[1:]))
    assert block_forward(other, x) is not None
    other.shared_expert = block.shared_expert
    assert torch.equal(block_forward(other, x), block_forward(copy.deepcopy(other), x))
    compiled = torch.compile(other, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), other(x), rtol=1e-4, atol=1e-4)

    block.experts.train()
    with torch.enable_grad():
        assert block_forward(block, x) is None
    assert block_forward(block, x) is None  # it has learnt


def test_experts_turn_away_an_input_as_wide_as_their_neurons() -> None:
    experts = block_of((0, 24, 4, 2, 40), gated=False).experts
    assert fits(experts, torch.randn(3, 40))
    assert not fits(experts, torch.randn(3, 24))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use
def test_what_torch_counts_batches_or_differentiates_runs_as_before() -> None:
    """FlopCounterMode, vmap and forward-mode gradients see torch's operations alone."""
    shape = (13, 12, 9, 4, 40)
    shared, *_, hidden = shape
    block = block_of(shape)
    x = torch.randn(5, hidden)
    with FlopCounterMode(display=False) as counter:
        block(x)
    least = 2 * 5 * 3 * hidden * shared  # of the shared expert alone
    assert counter.get_total_flops() > least
    assert block_forward(block, x) is not None

    taken: list[bool] = []

    def watch(row: Tensor) -> Tensor:
        taken.append(block_forward(block, row[None]) is not None)
        return row

    torch.vmap(watch)(x)
    with forward_ad.dual_level():
        watch(forward_ad.make_dual(x[0], torch.ones(hidden)))
    assert taken == [False, False]


def test_what_learns_runs_as_before_and_stays_as_it_lies() -> None:
    block = block_of((13, 12, 9, 4, 40))
    down = block.experts.down_proj
    x = torch.randn(5, 40)
    index, gate = block.router(x)
    with torch.enable_grad():
        assert block_forward(block, x) is None  # in evaluation: nothing is remembered
        y = experts_forward(block.experts, x, index, gate.requires_grad_())
        y.sum().backward()  # a router may learn alone
    assert gate.grad is not None
    block.train()
    with torch.enable_grad():
        block(x)
    block.eval()
    assert block_forward(block, x) is None
    assert down.is_contiguous()
    other = block_of((13, 12, 9, 4, 40))
    with torch.inference_mode():
        assert block_forward(other, x) is not None
    assert not other.experts.down_proj.is_inference()
    other.experts.down_proj.requires_grad_()
    with torch.enable_grad():
        other(x).sum().backward()
    assert other.experts.down_proj.grad is not None


@pytest.mark.parametrize("part", ["experts", "shared_expert"])
def test_what_learns_in_evaluation_stays_as_it_lies(part: str) -> None:
    """Dropout is often switched off so; the first backward pass tells."""
    block = block_of((13, 12, 9, 4, 40))
    x = torch.randn(5, 40)
    learning = getattr(block, part)
    learning.requires_grad_()
    with torch.enable_grad():
        block(x).sum().backward()
    block.zero_grad(set_to_none=True)
    assert block_forward(block, x) is None
    assert block.experts.down_proj.is_contiguous()
    assert block.shared_expert.down_proj.weight.is_contiguous()
    copied = copy.deepcopy(block)
    assert block_forward(copied, x) is None


def test_a_block_that_ran_can_be_freed() -> None:
    """What is known of it is kept beside it, and must not hold it."""
    block = block_of((13, 12, 9, 4, 40))
    assert block_forward(block, torch.randn(5, 40)) is not None
    reference = weakref.ref(block)
    weight = weakref.ref(block.experts.down_proj)
    del block
    gc.collect()
    assert reference() is None
    assert weight() is None


def test_an_index_beyond_the_experts_is_nobodys() -> None:
    block = block_of((13, 12, 9, 4, 40))
    x = torch.randn(5, 40)
    index, gate = block.router(x)
    fewer = experts_forward(block.experts, x, index[:, 1:], gate[:, 1:])
    index[:, 0] = torch.tensor([9, -1, 10**9, -(10**9), 9])
    torch.testing.assert_close(experts_forward(block.experts, x, index, gate), fewer)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_activations_of_large_numbers(activation: str) -> None:
    """e^-x is nothing there, and not no number."""
    block = block_of((0, 8, 2, 2, 16), activation=activation, gated=False)
    block.router.expert_scale.zero_()
    block.experts.up_proj.fill_(1)
    for size in (1e4, 1e5, 1e13, 1e20):
        x = torch.full((5, 16), size / 16)
        found = block_forward(block, x)
        assert found is not None
        expected = size * block.experts.down_proj[:, :, :8].sum(dim=(0, 2))
        torch.testing.assert_close(found, expected.expand(5, -1), rtol=1e-3, atol=0)


def test_an_expert_that_is_no_number_stays_with_its_tokens() -> None:
    block = block_of((0, 24, 3, 1, 64), torch.bfloat16)
    block.experts.first_matrix[1].fill_(torch.nan)
    x = torch.randn(40, 64).bfloat16()
    index, gate = block.router(x)
    index[:] = torch.arange(40)[:, None] % 2  # half of them
    found = experts_forward(block.experts, x, index, gate)
    assert torch.equal(found.isnan().any(dim=1), index[:, 0] == 1)


@pytest.mark.parametrize("shape", [(0, 24, 4, 3, 64), (0, 300, 9, 1, 64)])
def test_an_expert_that_is_there_twice_counts_twice(shape: tuple[int, int, int, int, int]) -> None:
    block = block_of(shape, torch.bfloat16)
    x = torch.randn(70, 64).bfloat16()
    index, gate = block.router(x)
    once = experts_forward(block.experts, x, index[:, :1], gate[:, :1])
    both = torch.cat([index[:, :1]] * 2, dim=1)
    twice = experts_forward(block.experts, x, both, torch.cat([gate[:, :1]] * 2, dim=1))
    torch.testing.assert_close(twice.float(), 2 * once.float(), rtol=2e-2, atol=2e-3)


def test_without_a_compiler_it_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    build.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            block = block_of((13, 12, 9, 4, 40))
            x = torch.randn(5, 40)
            assert block_forward(block, x) is None
            block(x)
        (line,) = [record.getMessage() for record in caplog.records]
        assert "no C++ compiler was found; install g++" in line
    finally:
        build.library.cache_clear()


def test_a_compiler_that_fails_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x: error: no" >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    cache = tmp_path / "cache"
    with pytest.raises(subprocess.CalledProcessError) as failure:
        build._compiled(cache)
    assert build.reason_of(failure.value) == f"{broken}: x: error: no"
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build._compiled(build.cache_folder())
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build._compiled(build.cache_folder()) == built


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86-64")
def test_it_compiles_for_avx512_without_bfloat16(tmp_path: Path) -> None:
    """GCC 12 has crashed on what it optimised for that alone."""
    flags = [flag for flag in build.FLAGS if flag != "-march=native"]
    sources = map(str, build.SOURCES)
    output = str(tmp_path / "library.so")
    subprocess.run(
        [build._compiler(), *flags, "-march=skylake-avx512", *sources, "-o", output],
        check=True,
    )


@pytest.mark.parametrize(
    ("flag", "value"),
    [("is_transposed", True), ("is_concatenated", False), ("has_post_expert_norm", True)],
)
def test_experts_whose_weights_lie_otherwise_run_by_torch(flag: str, value: bool) -> None:
    experts = block_of((0, 12, 9, 4, 40)).experts
    x_TD = torch.randn(3, 40)
    assert fits(experts, x_TD)
    assert fits_gpu(experts, x_TD)
    setattr(experts, flag, value)
    assert not fits(experts, x_TD)
    assert not fits_gpu(experts, x_TD)


def test_experts_with_a_gate_of_their_own_run_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else tells them from others."""
    experts = block_of((0, 12, 9, 4, 40)).experts
    x_TD = torch.randn(3, 40)
    monkeypatch.setattr(type(experts), "_apply_gate", lambda self, gate_up: gate_up.chunk(2)[0])
    assert not fits(experts, x_TD)
    assert not fits_gpu(experts, x_TD)


def test_a_shared_expert_that_the_kernel_would_misread_runs_by_torch() -> None:
    shape = (12, 12, 9, 4, 40)
    x_TD = torch.randn(3, 40)
    assert block_forward(block_of(shape), x_TD) is not None
    other_activation = block_of(shape)
    other_activation.shared_expert.act_fn = torch.nn.ReLU()
    assert block_forward(other_activation, x_TD) is None
    by_columns = block_of(shape)
    weight = by_columns.shared_expert.up_proj.weight
    weight.data = weight.data.mT.contiguous().mT
    assert block_forward(by_columns, x_TD) is None


def test_code_is_not_loaded_from_a_folder_that_others_may_write_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(OSError, match="not yours alone"):
        build._compiled(tmp_path)
    assert not list(tmp_path.iterdir())


def test_more_threads_than_their_sums_have_room_for() -> None:
    """Then tokens go in pieces, each by all threads; here 63 and 2 of them."""
    block = block_of((0, 8, 4, 2, 4160))
    x_TD = torch.randn(65, 4160)
    before = torch.get_num_threads()
    torch.set_num_threads(64)
    try:
        found_TD = block_forward(block, x_TD)
    finally:
        torch.set_num_threads(before)
    assert found_TD is not None
    torch.testing.assert_close(found_TD, block_forward(block, x_TD), rtol=1e-4, atol=1e-5)


def test_a_model_that_was_made_in_inference_mode() -> None:
    """Its weights are inference tensors, and take no memory of another kind."""
    with torch.inference_mode():
        block = block_of(SHAPES[1])
        x_TD = torch.randn(3, 40)
        first_TD = block_forward(block, x_TD)
        again_TD = block_forward(copy.deepcopy(block), x_TD)
    assert first_TD is not None
    assert again_TD is not None
    torch.testing.assert_close(again_TD, first_TD)


def test_memory_of_several_processes_stays_theirs() -> None:
    block = block_of(SHAPES[1]).share_memory()
    assert block_forward(block, torch.randn(3, 40)) is None
    assert all(parameter.is_shared() for parameter in block.parameters())


def test_without_memory_it_is_an_error_as_torchs() -> None:
    """In a process whose address space is limited once everything is loaded."""
    script = """
import resource
import torch
from moesaic.kernels.blocks import block_forward
from tests.test_kernels import SHAPES, block_of
with torch.no_grad():
    block = block_of(SHAPES[1])
    block_forward(block, torch.zeros(1000, 40))
    x_TD = torch.zeros(4_000_000, 40)
    used = 4096 * int(open("/proc/self/statm").read().split()[0])
    room = used + x_TD.nbytes + 2**25
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    try:
        block_forward(block, x_TD)
    except RuntimeError as error:
        print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[1], env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert "no memory for 4,000,000 tokens at once" in run.stdout, run.stderr
