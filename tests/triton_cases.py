"""Kernels in Triton, read line by line on a CPU: test_triton_kernels.py runs this."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from moesaic.kernels import experts_fit, gpu, prompts_triton
from moesaic.kernels.experts import experts_forward
from moesaic.kernels.gathered_triton import gathering_pays, rows_of
from moesaic.kernels.gpu import FEW_TOKENS
from moesaic.kernels.inputs import ACTIVATIONS
from moesaic.kernels.neurons import neurons_forward
from moesaic.modeling import GROUP, RouterConfig
from tests import reference
from tests.random_neurons import inputs_of, neurons_of, set_thresholds
from tests.test_kernels import block_of, matrices_of, thresholds_by_loop, thresholds_of

assert os.environ["TRITON_INTERPRET"] == "1"  # or nothing here would run by Triton
# NumPy minds an infinity on the way to a sigmoid of 0, a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

block_forward: Any = experts_forward.block  # type: ignore[attr-defined]

# Hidden size, neurons: whole groups of 64 inputs and blocks of 32 neurons, or not.
SHAPES = [(64, 64), (7, 3), (72, 45), (136, 33)]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
# Of an expert, experts, that run, hidden size.
EXPERTS = [(12, 9, 4, 40), (1, 3, 2, 8), (34, 4, 2, 72), (260, 2, 1, 8)]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def nothing_fails(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Every result is Triton's own: no other way was taken unseen."""
    monkeypatch.setattr(gpu, "_failed", set())
    with caplog.at_level(logging.WARNING, "moesaic.kernels.gpu"):
        yield
    assert not gpu._failed
    assert not caplog.get_records("call")


# --- neurons -----------------------------------------------------------------------------------


def by_triton(neurons: Any, x_TD: Tensor) -> Tensor:
    y_TD = neurons_forward(neurons, x_TD)
    assert y_TD is not None
    assert y_TD.dtype == x_TD.dtype
    return y_TD


def biases(neurons: Any) -> Any:
    count = neurons.sizes.num_routed
    gate = neurons.gate_proj.bias
    if gate is None:
        return torch.zeros(count), torch.zeros(count), neurons.down_proj.bias
    return gate, neurons.up_proj.bias, neurons.down_proj.bias


@pytest.mark.parametrize(("shape", "tokens"), [*zip(SHAPES, [4, 2, 3, 1], strict=True)])
def test_copies_equal_the_loop(shape: tuple[int, int], tokens: int) -> None:
    bits = 2 + tokens % 3
    neurons: Any = neurons_of(*shape, bits=bits, bias=tokens > 2)
    router = neurons.router
    if tokens > 2:  # the loop knows no biases of the copies' own
        router.gate_copy.bias.copy_(neurons.gate_proj.bias)
        router.up_copy.bias.copy_(neurons.up_proj.bias)
        set_thresholds(neurons, neurons.sizes.num_active)
    x_TD = inputs_of(neurons, 32)[:tokens]
    copies = [
        reference.copied_rows(copy.planes, copy.scales, shape[0], GROUP)
        for copy in (router.gate_copy, router.up_copy)
    ]
    weights = (neurons.gate_proj.weight, neurons.up_proj.weight, neurons.down_proj.weight.T)
    expected, kind_TF = reference.copied_neurons_block(
        x_TD,
        weights,
        biases(neurons),
        (copies[0], copies[1]),
        router.selection_bias,
        float(router.exact_margin),
    )
    assert len(set(kind_TF.flatten())) == 3 or shape == (7, 3)  # skipped, copied, exact
    found = by_triton(neurons, x_TD)
    torch.testing.assert_close(found.double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("shape", "tokens"), [*zip(SHAPES, [1, 3, 2, 4], strict=True)])
def test_gates_equal_the_loop(shape: tuple[int, int], tokens: int) -> None:
    neurons: Any = neurons_of(*shape, "gates-alone")
    neurons.down_proj.bias.zero_()
    bias = float(neurons.router.selection_bias.mean())
    neurons.router.selection_bias.fill_(bias)
    ffn = SimpleNamespace(
        gate_FD=neurons.gate_proj.weight,
        up_FD=neurons.up_proj.weight,
        down_DF=neurons.down_proj.weight.T,
    )
    x_TD = inputs_of(neurons, 32)[:tokens]
    threshold = torch.tensor(-bias / 2).exp()
    expected = reference.cats(x_TD, ffn, float(threshold))
    assert expected.any()
    found = by_triton(neurons, x_TD)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["copies", "gates-alone"])
@pytest.mark.parametrize("activation", ["relu", "gelu_pytorch_tanh", "silu"])
def test_formats_biases_and_activations(activation: str, kind: str, dtype: torch.dtype) -> None:
    neurons = neurons_of(72, 45, kind, bias=True, activation=activation, dtype=dtype)
    x_TD = inputs_of(neurons, 32)[:2]
    found = by_triton(neurons, x_TD)
    # In float64, so that only the kernel rounds.
    expected = neurons.double()._part_by_part(x_TD.double())
    error = (found.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ["copies", "gates-alone"])
def test_nobody_and_everybody_runs(kind: str) -> None:
    neurons: Any = neurons_of(40, 70, kind)
    x_TD = inputs_of(neurons, 2)
    neurons.router.selection_bias.fill_(-200.0)
    expected = neurons.down_proj.bias.expand(2, -1)
    torch.testing.assert_close(by_triton(neurons, x_TD), expected)
    neurons.router.selection_bias.fill_(200.0)
    if kind == "copies":
        neurons.router.exact_margin.fill_(0.0)
    gate_TF = nn.functional.silu(neurons.gate_proj(x_TD))
    dense = neurons.down_proj(gate_TF * neurons.up_proj(x_TD))
    torch.testing.assert_close(by_triton(neurons, x_TD), dense, rtol=1e-5, atol=1e-5)


def test_what_is_told_to_be_nothing_has_an_energy_still() -> None:
    neurons: Any = neurons_of(24, 20, activation="relu")
    x_TD = inputs_of(neurons, 2)
    assert (neurons.router.copied(x_TD) == 0).any()
    outputs = []
    for bias in (87.0, 88.0):  # on either side of -log(1e-38)
        neurons.router.selection_bias.fill_(bias)
        neurons.router.exact_margin.fill_(0.0)
        outputs.append(by_triton(neurons, x_TD))
        expected = neurons._part_by_part(x_TD)
        torch.testing.assert_close(outputs[-1], expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(*outputs)


def test_tokens_are_computed_as_if_alone_and_twice_the_same() -> None:
    neurons = neurons_of(40, 35, bias=True)
    x_TD = inputs_of(neurons, 4)
    together = by_triton(neurons, x_TD)
    assert torch.equal(by_triton(neurons, x_TD), together)
    alone = [by_triton(neurons, x_TD[t : t + 1]) for t in range(4)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-6)
    x_TD[1] = torch.nan  # scores no neuron above zero, and is nothing to the others
    found = by_triton(neurons, x_TD)
    torch.testing.assert_close(found, neurons._part_by_part(x_TD), rtol=1e-5, atol=1e-6)


def test_who_is_turned_away() -> None:
    neurons: Any = neurons_of(40, 33)
    x_TD = inputs_of(neurons, 5)
    assert neurons_forward(neurons, x_TD) is None
    x_TD = x_TD[:2]
    assert neurons_forward(neurons, x_TD) is not None
    assert neurons_forward(neurons, x_TD.double()) is None
    with torch.enable_grad():
        assert neurons_forward(neurons, x_TD) is None
    with torch.autocast("cpu"):
        assert neurons_forward(neurons, x_TD) is None
    handle = neurons.router.register_forward_hook(lambda *_: None)
    assert neurons_forward(neurons, x_TD) is None
    handle.remove()
    neurons.router.selection_bias = neurons.router.selection_bias.double()
    assert neurons_forward(neurons, x_TD) is None


def test_a_model_that_asks_for_it_has_it() -> None:
    neurons: Any = neurons_of(40, 33)
    neurons.set_config(SimpleNamespace(_experts_implementation="moesaic"))
    x_TD = inputs_of(neurons, 2)
    assert torch.equal(neurons(x_TD[None])[0], by_triton(neurons, x_TD))


# --- experts -----------------------------------------------------------------------------------


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many tokens each expert computes those that run it, whether that pays or not."""
    monkeypatch.setattr(prompts_triton, "gathering_pays", lambda *call: True)


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        *zip(EXPERTS, [3, 2, 2, 1], strict=True),
        *zip(EXPERTS[:3], [70, FEW_TOKENS + 1, 200], strict=True),
    ],
)
def test_experts_equal_the_double_loop(
    shape: tuple[int, int, int, int], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = block_of((1, *shape))
    x_TD = torch.randn(tokens, shape[-1])
    index_TK, gate_TK = block.router(x_TD)
    _, experts = matrices_of(block)
    expected = reference.moe_forward(x_TD, None, experts, index_TK, gate_TK)
    found = experts_forward(block.experts, x_TD, index_TK, gate_TK)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(experts_forward(block.experts, x_TD, index_TK, gate_TK), found)
    # Or the CPU's kernel had it, or every prompt copies W_down.
    assert block.experts.down_proj.transpose(0, 1).is_contiguous()
    # However W_down lies, as where it has learnt.
    monkeypatch.setattr(experts_fit, "as_one_matrix", lambda down: None)
    down = block.experts.down_proj
    for turned in (down.data.contiguous(), down.data.mT.contiguous().mT):
        down.data = turned
        assert torch.equal(experts_forward(block.experts, x_TD, index_TK, gate_TK), found)


def test_what_has_learnt_lies_as_it_did() -> None:
    """Optimisers keep what belongs to its elements in their order."""
    block = block_of((1, 12, 9, 4, 40))
    down = block.experts.down_proj
    with torch.enable_grad():
        down.requires_grad_()
        block.train()(torch.randn(3, 40)).sum().backward()
    block.eval()
    x_TD = torch.randn(3, 40)
    found = experts_forward(block.experts, x_TD, *block.router(x_TD))
    assert torch.isfinite(found).all()
    assert down.is_contiguous()


@pytest.mark.parametrize("tokens", [1, FEW_TOKENS + 6])
@pytest.mark.parametrize(("gated", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
@pytest.mark.parametrize("activation", ["silu", "relu", "gelu_pytorch_tanh"])
def test_experts_of_all_kinds(
    activation: str, gated: bool, dtype: torch.dtype, tokens: int, gathers: None
) -> None:
    block = block_of((1, 12, 9, 4, 40), dtype, activation, gated)
    x_TD = torch.randn(tokens, 40).to(dtype)
    index_TK, gate_TK = block.router(x_TD)
    found = experts_forward(block.experts, x_TD, index_TK, gate_TK)
    assert found.dtype == dtype
    block.double().experts.config._experts_implementation = "eager"
    expected = block.experts(x_TD.double(), index_TK, gate_TK.double())
    error = (found.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [4, FEW_TOKENS + 4])
def test_an_index_beyond_the_experts_is_nobodys(tokens: int, gathers: None) -> None:
    block = block_of((1, 12, 9, 4, 40))
    x_TD = torch.randn(tokens, 40)
    index_TK, gate_TK = block.router(x_TD)
    fewer = experts_forward(block.experts, x_TD, index_TK[:, 1:], gate_TK[:, 1:])
    index_TK[:, 0] = torch.tensor([9, -1, 10**9, -(10**9)]).repeat(tokens // 4)
    gate_TK[:, 0] = torch.nan  # nor is its gate anything
    found = experts_forward(block.experts, x_TD, index_TK, gate_TK)
    torch.testing.assert_close(found, fewer)


@pytest.mark.parametrize(("length", "first"), [(7, "experts"), (70, "experts_prompts")])
def test_a_stock_model_takes_it_by_one_call(
    length: int, first: str, monkeypatch: pytest.MonkeyPatch, gathers: None
) -> None:
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
    model = Glm4MoeForCausalLM(config).eval()
    prompt = torch.arange(length)[None] % 64
    expected = model.generate(prompt, max_new_tokens=3, do_sample=False)
    calls = []
    call = gpu.call
    monkeypatch.setattr(gpu, "call", lambda *given: calls.append(given[0]) or call(*given))
    model.set_experts_implementation("moesaic")
    assert torch.equal(model.generate(prompt, max_new_tokens=3, do_sample=False), expected)
    assert calls == 2 * [first] + 4 * ["experts"]  # two layers, the prompt and two tokens


# --- blocks ------------------------------------------------------------------------------------

# Of the shared expert, of an expert, experts, that run, hidden size.
BLOCKS = [
    (9, 12, 9, 4, 40),
    (0, 1, 3, 2, 8),
    (150, 34, 4, 4, 72),
    (64, 3, 70, 11, 136),
    (40, 260, 2, 1, 24),
]


def shared_down_of(block: Any) -> list[Any]:
    return [] if block.shared_expert is None else [block.shared_expert.down_proj.weight]


def slow_block(block: Any, x_TD: Tensor) -> Tensor:
    """In float64 but for the choice, by the double loop."""
    index_TK, gate_TK = block.router(x_TD)
    shared, experts = matrices_of(block)
    return reference.moe_forward(x_TD, shared, experts, index_TK, gate_TK)


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        *zip(BLOCKS, [1, 3, FEW_TOKENS, 17, 2], strict=True),
        *zip(BLOCKS[:3], [FEW_TOKENS + 1, 70, 66], strict=True),
    ],
)
def test_blocks_equal_the_double_loop(
    shape: tuple[int, ...], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = block_of(shape)  # type: ignore[arg-type]
    x_TD = torch.randn(tokens, shape[-1])
    found = block_forward(block, x_TD)
    assert found is not None
    torch.testing.assert_close(found, slow_block(block, x_TD), rtol=1e-5, atol=1e-5)
    assert torch.equal(block_forward(block, x_TD), found)
    # However W_down lies, as where it has learnt.
    monkeypatch.setattr(experts_fit, "as_one_matrix", lambda down: None)
    for down in [block.experts.down_proj, *shared_down_of(block)]:
        down.data = down.data.mT.contiguous().mT
    assert torch.equal(block_forward(block, x_TD), found)


@pytest.mark.parametrize("cap", [None, 3])
@pytest.mark.parametrize("kind", ["linear", "quadratic", "neuron-copies"])
@pytest.mark.parametrize("tokens", [1, 3, FEW_TOKENS + 1])
def test_thresholds_equal_the_double_loop(tokens: int, kind: str, cap: int | None) -> None:
    """The last token passes none, and runs the first expert alone."""
    block = thresholds_of((8, 12, 9, 4, 40), kind, cap)
    x_TD = torch.randn(tokens, 40)
    x_TD[-1] = 0
    block.router.selection_bias.clamp_(max=-1e-3)
    found = block_forward(block, x_TD)
    expected = thresholds_by_loop(block, x_TD)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("directions", [16, 17])
@pytest.mark.parametrize("tokens", [2, FEW_TOKENS + 1])
def test_more_directions_than_experts(tokens: int, directions: int) -> None:
    """Up to 16 of them."""
    router = RouterConfig("quadratic", "topk", directions=directions)
    block = block_of((0, 4, 3, 2, 40), router=router)
    x_TD = torch.randn(tokens, 40)
    found = block_forward(block, x_TD)
    if directions > 16:
        assert found is None
        return
    torch.testing.assert_close(found, slow_block(block, x_TD), rtol=1e-5, atol=1e-5)


def test_gathered_tokens_of_thresholds_equal_all_under_a_mask(gathers: None) -> None:
    block = thresholds_of((8, 12, 9, 2, 40), "linear", None)
    x_TD = torch.randn(FEW_TOKENS + 1, 40)
    found = block_forward(block, x_TD)
    torch.testing.assert_close(found, thresholds_by_loop(block, x_TD), rtol=1e-5, atol=1e-5)


# Of which few enough run for a gathered product. The last takes programs of 128 tokens, and has
# more than `_sort` looks at together: read line by line that takes long, so once.
FEW_RUN = [
    ((8, 12, 9, 2, 40), 70, True),
    ((8, 12, 9, 2, 40), 70, False),
    ((0, 70, 5, 2, 72), 200, False),
    ((0, 64, 3, 1, 40), 1025, True),
]


@pytest.mark.parametrize(("shape", "tokens", "gated"), FEW_RUN)
def test_gathered_tokens_equal_all_under_a_mask(
    shape: tuple[int, ...], tokens: int, gated: bool, gathers: None
) -> None:
    block = block_of(shape, gated=gated)  # type: ignore[arg-type]
    x_TD = torch.randn(tokens, shape[-1])
    x_TD[tokens // 2] = torch.nan  # is nothing to the others
    found = block_forward(block, x_TD)
    assert found is not None
    assert torch.equal(block_forward(block, x_TD).nan_to_num(), found.nan_to_num())
    expected = block.experts(x_TD, None, block.router.gates_of_all(x_TD))
    if block.shared_expert is not None:
        expected = expected + block.shared_expert(x_TD)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_an_expert_may_have_all_tokens_or_none(gathers: None) -> None:
    block = block_of((8, 12, 9, 2, 40))
    block.router.selection_bias[:] = torch.tensor([9.0, 5, 0, 0, 0, 0, 0, 0, -9])
    x_TD = torch.randn(130, 40)
    torch.testing.assert_close(
        block_forward(block, x_TD), slow_block(block, x_TD), rtol=1e-5, atol=1e-5
    )
    index_TK, _ = block.router(x_TD)
    load_R = index_TK.flatten().bincount(minlength=9)
    assert load_R[0] == 130
    assert load_R[8] == 0


def test_rows_of_a_program() -> None:
    """Programs of 64 neurons compute 128 for an expert of 96, those of 32 just 96."""
    assert rows_of(704, torch.bfloat16) == 64
    assert rows_of(704, torch.float32) == 32
    assert rows_of(96, torch.bfloat16) == 32
    assert rows_of(48, torch.bfloat16) == 32


@pytest.mark.parametrize(
    ("active", "count", "neurons", "tokens", "hidden", "pays"),
    [
        (2, 6, 704, 2048, 2048, True),  # 0.83 of the dense FFN's time, 0.99 computing all
        (2, 6, 1376, 512, 4096, True),  # 0.89, 1.03
        (30, 62, 176, 2048, 4096, True),  # 0.84, 0.99
        (2, 6, 192, 2048, 576, False),  # 1.47, 1.42: too little is saved
        (2, 6, 608, 512, 896, False),  # 1.27, 1.21
        (30, 62, 88, 512, 2048, False),  # 1.53, 1.31: programs of 32 neurons
        (3, 5, 704, 2048, 2048, True),  # 1.00, 1.01
        (11, 15, 352, 2048, 2048, False),  # 1.08, 1.04: three quarters run
        (5, 7, 1376, 2048, 4096, False),  # 0.96, 0.94
    ],
)
def test_gathering_pays_where_it_did_on_an_h200(
    active: int, count: int, neurons: int, tokens: int, hidden: int, pays: bool
) -> None:
    """By benchmarks/results/h200_2026-11-28.md, bfloat16."""
    x_TD = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta")
    first_RND = torch.empty(count, 2 * neurons, hidden, dtype=torch.bfloat16, device="meta")
    assert gathering_pays(x_TD, first_RND, active, True) is pays


def test_what_gathering_saves_by_hand() -> None:
    """In float32 at 0.3 of torch's speed: 300 of 1,000 experts would take as long as all."""
    x_TD = torch.empty(1000, 1000, device="meta")
    first_RND = torch.empty(1000, 64, 1000, device="meta")  # 64e9 for all
    assert gathering_pays(x_TD, first_RND, 200, True)  # a third saved, 21e9
    assert not gathering_pays(x_TD, first_RND, 291, True)  # 0.97 taken, 1.9e9 saved
    assert gathering_pays(x_TD, first_RND, 290, True)  # 2.1e9
    assert gathering_pays(x_TD, first_RND[:, :32], 200, False)  # experts of 32, no gate


@pytest.mark.parametrize(
    ("experts", "neurons", "hidden", "most"),
    [(15, 352, 2048, 64), (5, 1376, 4096, 32), (62, 24, 576, 32), (31, 48, 576, 64)],
)
def test_how_many_tokens_are_few(experts: int, neurons: int, hidden: int, most: int) -> None:
    down_RDM = torch.empty(experts, hidden, neurons, device="meta")
    assert gpu.are_few(torch.empty(most, hidden, device="meta"), down_RDM)
    assert not gpu.are_few(torch.empty(most + 1, hidden, device="meta"), down_RDM)


@pytest.mark.parametrize("tokens", [3, FEW_TOKENS + 1])
@pytest.mark.parametrize(("gated", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_blocks_of_all_kinds(gated: bool, dtype: torch.dtype, tokens: int) -> None:
    block = block_of((8, 12, 9, 4, 40), dtype, "relu", gated)
    x_TD = torch.randn(tokens, 40).to(dtype)
    found = block_forward(block, x_TD)
    assert found.dtype == dtype
    block.double().experts.config._experts_implementation = "eager"
    error = (found.double() - block(x_TD.double())).norm() / found.norm()
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [3, FEW_TOKENS + 1])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("absolute", [True, False])
def test_experts_chosen_by_copies_of_neurons(absolute: bool, biased: bool, tokens: int) -> None:
    """With a bias by probability, without one by score, as the slow way does."""
    gated = biased == absolute  # each with both
    router = RouterConfig("neuron-copies", "topk", absolute=absolute)
    block = block_of((13, 12, 37, 14, 64), gated=gated, router=router)
    block.router.selection_bias.mul_(5 if biased else 0)
    x_TD = torch.randn(tokens, 64)
    found = block_forward(block, x_TD)
    block.experts.config._experts_implementation = "eager"
    torch.testing.assert_close(found, block(x_TD), rtol=1e-5, atol=1e-5)


def test_of_equal_scores_so_many_run_as_should() -> None:
    """Which of them is anyone's choice; a token that is no number disturbs no other."""
    block = block_of((8, 12, 9, 4, 40))
    x_TD = torch.randn(3, 40)
    x_TD[1] = torch.nan
    block.router.score_proj.weight.zero_()
    block.router.selection_bias.zero_()
    block.router.selection_bias[7] = 1.0
    index_TK = torch.tensor([[7, 0, 1, 2]] * 3)
    gate_TK = 1 + block.router.expert_scale[index_TK] / 9
    shared, experts = matrices_of(block)
    expected = reference.moe_forward(x_TD, shared, experts, index_TK, gate_TK)
    found = block_forward(block, x_TD)
    assert found[1].isnan().all()
    for token in (0, 2):
        torch.testing.assert_close(found[token], expected[token], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [3, FEW_TOKENS + 1])
@pytest.mark.parametrize("kind", ["linear", "neuron-copies"])
def test_as_many_run_where_most_are_forbidden(kind: str, tokens: int) -> None:
    """A bias of minus infinity on more experts than may rest: the first of them run."""
    block = block_of((8, 12, 9, 4, 40), router=RouterConfig(kind, "topk"))
    block.router.selection_bias[1:7] = -torch.inf
    x_TD = torch.randn(tokens, 40)
    index_TK = torch.tensor([[0, 1, 7, 8]]).expand(tokens, -1)
    gate_TR = block.router.gates(block.router.scores(x_TD))
    shared, experts = matrices_of(block)
    gate_TK = gate_TR.gather(1, index_TK)
    expected = reference.moe_forward(x_TD, shared, experts, index_TK, gate_TK)
    torch.testing.assert_close(block_forward(block, x_TD), expected, rtol=1e-5, atol=1e-5)


def test_blocks_that_are_turned_away() -> None:
    block = block_of((8, 12, 9, 4, 40))
    x_TD = torch.randn(2, 40)
    assert block_forward(block, x_TD) is not None
    assert block_forward(block, x_TD.double()) is None
    with torch.enable_grad():
        assert block_forward(block, x_TD) is None
    handle = block.router.register_forward_hook(lambda *_: None)
    assert block_forward(block, x_TD) is None
    handle.remove()


# --- as ops of torch ---------------------------------------------------------------------------


def given_to_neurons(kind: str) -> list[Any]:
    neurons: Any = neurons_of(24, 5, kind, bias=kind == "copies")
    router = neurons.router
    given: list[Any] = [
        inputs_of(neurons, 2),
        neurons.gate_proj.weight,
        neurons.up_proj.weight,
        neurons.down_proj.weight,
        neurons.gate_proj.bias,
        neurons.up_proj.bias,
        neurons.down_proj.bias,
    ]
    if kind == "copies":
        copies = (router.gate_copy, router.up_copy)
        for name in ("planes", "scales", "bias"):
            given += [getattr(copy, name) for copy in copies]
        given += [router.selection_bias, router.exact_margin]
    else:
        given += [None] * 6 + [router.selection_bias, None]
    return [*given, ACTIVATIONS["SiLU"]]


def given_to_blocks(cap: int | None = None) -> list[Any]:
    """By top-k, or by thresholds and products of directions."""
    chosen_by = RouterConfig("linear", "topk")
    if cap is not None:
        chosen_by = RouterConfig("quadratic", "threshold", directions=2, cap=cap)
    block = block_of((3, 5, 3, 2, 8), router=chosen_by)
    router, shared = block.router, block.shared_expert
    directions = getattr(router, "feature_proj", None)
    return [
        torch.randn(2, 8),
        router.score_proj.weight,
        None,
        None if directions is None else directions.weight,
        None if directions is None else directions.bias,
        router.selection_bias,
        router.expert_scale,
        shared.gate_proj.weight,
        shared.up_proj.weight,
        shared.down_proj.weight,
        block.experts.gate_up_proj,
        block.experts.down_proj,
        2,
        cap,
        True,
        0,
        False,
        False,
    ]


def given_to_experts() -> list[Any]:
    block = block_of((1, 5, 3, 2, 8))
    x_TD = torch.randn(2, 8)
    experts = block.experts
    return [x_TD, experts.gate_up_proj, experts.down_proj, *block.router(x_TD), True, 0]


OPS = [
    ("neurons", lambda: given_to_neurons("copies")),
    ("neurons", lambda: given_to_neurons("gates-alone")),
    ("experts", given_to_experts),
    ("experts_prompts", given_to_experts),
    ("blocks", given_to_blocks),
    ("blocks", lambda: given_to_blocks(cap=3)),
    ("prompts", given_to_blocks),
    ("prompts", lambda: given_to_blocks(cap=3)),
]


@pytest.mark.parametrize(("name", "given"), OPS)
def test_torch_can_reason_about_the_op(name: str, given: Any) -> None:
    arguments = given()
    assert gpu.call(name, *arguments) is not None  # which also registers it
    op = getattr(torch.ops.moesaic, name).default
    torch.library.opcheck(op, arguments)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        shape = op(*fakes).shape
    assert shape == arguments[0].shape


def test_a_compiled_graph_holds_the_ops() -> None:
    neurons: Any = neurons_of(24, 5)
    neurons.set_config(SimpleNamespace(_experts_implementation="moesaic"))
    x_TD = inputs_of(neurons, 2)
    block = block_of((1, 5, 3, 2, 24))
    experts = block.experts
    index_TK = torch.tensor([[0, 2], [1, 0]])
    gate_TK = torch.rand(2, 2)

    def both() -> Tensor:
        return neurons(x_TD) + experts(x_TD, index_TK, gate_TK) + block(x_TD)

    expected = both()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    assert torch.equal(torch.compile(both, backend=backend, fullgraph=True)(), expected)
    (graph,) = graphs
    targets = [node.target for node in graph.graph.nodes]
    assert torch.ops.moesaic.neurons in targets
    assert torch.ops.moesaic.experts in targets
    assert torch.ops.moesaic.blocks in targets
