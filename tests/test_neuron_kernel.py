"""Neurons chosen one by one on a CPU: the compiled function against the parts it stands for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from moesaic.kernels.build import library
from moesaic.kernels.inputs import FEW_TOKENS
from moesaic.kernels.neurons import copy_weight, neurons_forward
from moesaic.modeling import MoesaicCopy, MoesaicRest
from tests.random_neurons import fill, inputs_of, neurons_of

if library() is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)

# Hidden size, neurons: whole groups of 64 inputs or not, whole chunks of neurons or not.
SHAPES = [(64, 64), (128, 200), (40, 9), (72, 130), (7, 3), (576, 192), (65, 65)]
# Of the error's norm over the output's; that of one neuron less is larger.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}


def check(neurons: Any, tokens: int) -> None:
    x_TD = inputs_of(neurons, 32)[:tokens]
    found = neurons_forward(neurons, x_TD)
    assert found is not None
    # In float64, so that only the kernel rounds.
    exact = neurons.double()
    expected = exact._part_by_part(x_TD.double())
    size_T = expected.norm(dim=1).clamp(min=1e-6)
    error_T = (found.double() - expected).norm(dim=1) / size_T
    assert error_T.max() < TOLERANCE[found.dtype]
    assert found.dtype == x_TD.dtype


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_copies(shape: tuple[int, int], bits: int, tokens: int, dtype: torch.dtype) -> None:
    check(neurons_of(*shape, bits=bits, dtype=dtype), tokens)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_weights_in_8_bits(
    shape: tuple[int, int], bits: int, tokens: int, dtype: torch.dtype
) -> None:
    check(neurons_of(*shape, bits=bits, dtype=dtype, int8=True, bias=True), tokens)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_gates(shape: tuple[int, int], tokens: int, dtype: torch.dtype) -> None:
    check(neurons_of(*shape, "gates-alone", dtype=dtype), tokens)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["copies", "gates-alone"])
@pytest.mark.parametrize("activation", ["relu", "gelu_pytorch_tanh", "silu"])
def test_biases_and_activations(kind: str, activation: str) -> None:
    neurons = neurons_of(72, 130, kind, bias=True, activation=activation)
    check(neurons, 2)


@torch.no_grad()
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_threads(threads: int, int8: bool) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(neurons_of(128, 200, int8=int8), 2)
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_nobody_and_everybody_runs(activation: str) -> None:
    """With ReLU many copies say exactly 0, and those neurons run too where all do."""
    neurons: Any = neurons_of(64, 100, activation=activation)
    x_TD = inputs_of(neurons, 2)
    neurons.router.selection_bias.fill_(-200.0)
    found = neurons_forward(neurons, x_TD)
    assert found is not None
    torch.testing.assert_close(found, neurons.down_proj.bias.expand(2, -1))
    neurons.router.selection_bias.fill_(200.0)
    neurons.router.exact_margin.fill_(0.0)
    found = neurons_forward(neurons, x_TD)
    gate_TF = neurons.act_fn(neurons.gate_proj(x_TD))
    dense = neurons.down_proj(gate_TF * neurons.up_proj(x_TD))
    torch.testing.assert_close(found, dense, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("bias", [87.0, 88.0])
def test_what_is_told_to_be_nothing_has_an_energy_still(bias: float) -> None:
    """1e-38, whose logarithm is -87.5: on either side of it the kernel and torch agree."""
    neurons: Any = neurons_of(64, 100, activation="relu")
    x_TD = inputs_of(neurons, 2)
    assert (neurons.router.copied(x_TD) == 0).any()
    neurons.router.selection_bias.fill_(bias)
    neurons.router.exact_margin.fill_(0.0)
    check(neurons, 2)


@torch.no_grad()
@pytest.mark.parametrize("int8", [False, True])
def test_tokens_are_computed_as_if_alone(int8: bool) -> None:
    neurons = neurons_of(128, 200, int8=int8)
    x_TD = inputs_of(neurons, 4)
    together = neurons_forward(neurons, x_TD)
    alone = [neurons_forward(neurons, x_TD[t : t + 1]) for t in range(4)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("int8", [False, True])
def test_two_threads_of_python_may_use_one_model(int8: bool) -> None:
    neurons = neurons_of(576, 640, int8=int8)
    inputs = [inputs_of(neurons, 32)[t : t + 1] for t in range(2)]
    with torch.no_grad():
        expected = [neurons_forward(neurons, x_TD) for x_TD in inputs]

    @torch.no_grad()
    def wrong_ones(t: int) -> int:
        found = [neurons_forward(neurons, inputs[t]) for _ in range(300)]
        return sum(not torch.allclose(y, expected[t], rtol=1e-4, atol=1e-5) for y in found)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(wrong_ones, range(2))) == [0, 0]


@torch.no_grad()
def test_who_is_turned_away() -> None:
    neurons: Any = neurons_of(64, 100)
    x_TD = inputs_of(neurons, FEW_TOKENS)
    assert neurons_forward(neurons, x_TD) is not None
    assert neurons_forward(neurons, x_TD[:0]) is None
    assert neurons_forward(neurons, inputs_of(neurons, FEW_TOKENS + 1)) is None
    assert neurons_forward(neurons, x_TD.double()) is None
    with torch.enable_grad():
        assert neurons_forward(neurons, x_TD) is None
    with torch.autocast("cpu"):
        assert neurons_forward(neurons, x_TD) is None
    handle = neurons.up_proj.register_forward_hook(lambda *_: None)
    assert neurons_forward(neurons, x_TD) is None
    handle.remove()
    up_proj = neurons.up_proj
    neurons.up_proj = nn.Sequential(up_proj)
    assert neurons_forward(neurons, x_TD) is None
    neurons.up_proj = up_proj
    neurons.router.gate_copy.scales = neurons.router.gate_copy.scales.bfloat16()
    assert neurons_forward(neurons, x_TD) is None


@torch.no_grad()
@pytest.mark.parametrize("kind", ["copies", "gates", "gates-alone"])
def test_without_the_kernel_hooks_and_autocast_hold_for_a_token(kind: str) -> None:
    """Pairs multiply with the weights themselves, past hooks and in one dtype."""
    neurons: Any = neurons_of(64, 100, kind)
    x_TD = inputs_of(neurons, 4)
    with torch.autocast("cpu", torch.bfloat16):
        all_rows = neurons._part_by_part(x_TD)[:2]
        found = neurons._part_by_part(x_TD[:2])
    torch.testing.assert_close(found, all_rows)
    x_TD = x_TD[:2]
    expected = neurons._part_by_part(x_TD)
    called = []
    handle = neurons.up_proj.register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(neurons._part_by_part(x_TD), expected, rtol=1e-4, atol=1e-5)
    assert called
    handle.remove()


@torch.no_grad()
def test_inputs_of_another_width_are_turned_away() -> None:
    """Before anything is read, also where the same neurons ran before."""
    wide: Any = neurons_of(576, 64)
    x_TD = inputs_of(wide, 1)
    assert neurons_forward(wide, x_TD) is not None
    assert neurons_forward(wide, x_TD[:, :64].contiguous()) is None
    narrow: Any = neurons_of(64, 576)  # as wide as its neurons are many
    assert neurons_forward(narrow, x_TD) is None


@torch.no_grad()
def test_neurons_that_are_not_as_many_as_said_are_turned_away() -> None:
    """Else the kernel would read beyond their rows."""
    neurons: Any = neurons_of(64, 100)
    for linear in (neurons.gate_proj, neurons.up_proj):
        linear.weight.data = linear.weight.data[:50]
    assert neurons_forward(neurons, inputs_of(neurons, 1)) is None
    neurons = neurons_of(64, 100)
    neurons.router.exact_margin = torch.zeros(100)
    assert neurons_forward(neurons, inputs_of(neurons, 1)) is None


@torch.no_grad()
def test_another_activation_is_looked_at_again() -> None:
    neurons: Any = neurons_of(64, 100)
    x_TD = inputs_of(neurons, 2)
    assert neurons_forward(neurons, x_TD) is not None
    neurons.act_fn = nn.ReLU()
    assert neurons_forward(neurons, x_TD) is None  # the copies still have the old one
    neurons.router.act_fn = nn.ReLU()
    found_TD = neurons_forward(neurons, x_TD)
    assert found_TD is not None
    torch.testing.assert_close(found_TD, neurons._part_by_part(x_TD), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_copy_is_read_where_it_lies() -> None:
    copy = neurons_of(64, 100).router.gate_copy
    expected_FD = copy_weight(copy)
    assert expected_FD is not None
    with torch.device("meta"):  # where new tensors go, unless told
        found_FD = copy_weight(copy)
    assert found_FD is not None
    assert torch.equal(found_FD, expected_FD)


@torch.no_grad()
def test_weights_in_8_bits_that_are_turned_away() -> None:
    neurons: Any = neurons_of(64, 100, int8=True)
    x_TD = inputs_of(neurons, 1)
    assert neurons_forward(neurons, x_TD) is not None
    assert neurons_forward(neurons, x_TD.bfloat16()) is None
    assert neurons_forward(neurons, x_TD[:, :63]) is None
    codes_FD = neurons.down_proj.codes
    neurons.down_proj.codes = codes_FD.T.contiguous().T
    assert neurons_forward(neurons, x_TD) is None
    neurons.down_proj.codes = codes_FD
    neurons.gate_proj.scales = neurons.gate_proj.scales.bfloat16()
    assert neurons_forward(neurons, x_TD) is None


@torch.no_grad()
@pytest.mark.usefixtures("unasked_kernel")
def test_a_block_takes_it_by_itself_unless_it_is_viewed(monkeypatch: pytest.MonkeyPatch) -> None:
    neurons: Any = neurons_of(64, 100)
    x_TD = inputs_of(neurons, 2)
    monkeypatch.setattr(neurons, "_part_by_part", lambda x: torch.full_like(x, torch.nan))
    assert neurons(x_TD[None]).isfinite().all()
    neurons.view = object()
    assert neurons(x_TD[None]).isnan().all()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_unpacked_copies_are_the_same_to_the_last_bit(
    bits: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    hidden, count = shape
    copy = MoesaicCopy(hidden, count, bits, bias=False)
    fill(copy, torch.Generator().manual_seed(0), dtype)
    found = copy_weight(copy)
    assert found is not None
    assert torch.equal(found, copy._unpacked())


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_what_copies_leave_is_unpacked_the_same(shape: tuple[int, int]) -> None:
    hidden, count = shape
    rest = MoesaicRest(hidden, count)
    fill(rest, torch.Generator().manual_seed(0), torch.bfloat16)
    assert rest.planes.shape[0] == count
    found = copy_weight(rest)
    assert found is not None
    assert torch.equal(found, rest._unpacked())
