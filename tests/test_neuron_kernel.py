"""Neurons chosen one by one on a CPU: the compiled function against the parts it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moesaic.kernels.build import library
from moesaic.kernels.neurons import FEW_TOKENS, copy_weight, neurons_forward
from moesaic.modeling import (
    BlockConfig,
    MoesaicCopy,
    MoesaicNeurons,
    RouterConfig,
    Sizes,
    packed,
)

if library() is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)

# Hidden size, neurons: whole groups of 64 inputs or not, whole chunks of neurons or not.
SHAPES = [(64, 64), (128, 200), (40, 9), (72, 130), (7, 3), (576, 192), (65, 65)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def neurons_of(
    hidden: int,
    count: int,
    kind: str = "copies",
    *,
    bits: int = 4,
    exact: float = 0.4,
    bias: bool = False,
    activation: str = "silu",
    dtype: torch.dtype = torch.float32,
    runs: float = 0.5,
) -> MoesaicNeurons:
    """Random neurons; half of them run for `inputs_of`, some of these exactly."""
    router = RouterConfig(kind, "threshold")
    if kind == "copies":
        router = RouterConfig(kind, "threshold", bits=bits, exact=exact)
    block = BlockConfig("neurons", hidden, True, bias, activation, True, router)
    active = max(1, int(count * runs))
    neurons = MoesaicNeurons(block, Sizes(shared=0, expert=1, num_routed=count, num_active=active))
    generator = torch.Generator().manual_seed(hidden + count)
    for parameter in neurons.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / hidden**0.5
    neurons.to(dtype)
    chooser: Any = neurons.router
    for copy in chooser.modules():
        if isinstance(copy, MoesaicCopy):
            fill(copy, generator, dtype)
    chooser.selection_bias = torch.randn(count, generator=generator) / 4
    set_thresholds(neurons, active)
    return neurons.eval()


def fill(copy: MoesaicCopy, generator: torch.Generator, dtype: torch.dtype) -> None:
    half = 2 ** (copy.bits - 1)
    shape = (copy.out_features, copy.in_features)
    code_RI = torch.randint(-half, half, shape, generator=generator, dtype=torch.int8)
    copy.planes = packed(code_RI, copy.bits)
    scales = torch.rand(copy.scales.shape, generator=generator) / copy.in_features**0.5
    copy.scales = scales.to(dtype)
    if copy.bias is not None:
        copy.bias = torch.randn(copy.out_features, generator=generator).to(dtype)


def set_thresholds(neurons: Any, active: int) -> None:
    """Into the widest gaps between scores, so that rounding decides nothing."""
    x_TD = inputs_of(neurons, 32)
    score = neurons.scores(x_TD).flatten().sort().values
    places = len(score) * (1 - active / neurons.sizes.num_routed)
    neurons.router.selection_bias -= gap_near(score, int(places))
    if not neurons.router.reads_gates:
        score = neurons.scores(x_TD).flatten().sort().values
        positive = score[score > 0]
        neurons.router.exact_margin.fill_(gap_near(positive, len(positive) // 2))


def gap_near(ordered: Tensor, place: int) -> float:
    first = max(place - 20, 0)
    near = ordered[first : place + 20]
    if len(near) < 2:
        return float(near[0]) - 0.1
    widest = int((near[1:] - near[:-1]).argmax())
    return float(near[widest] + near[widest + 1]) / 2


def inputs_of(neurons: Any, tokens: int) -> Tensor:
    weight = neurons.up_proj.weight
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, weight.shape[1], generator=generator).to(weight.dtype)


def check(neurons: Any, tokens: int) -> None:
    x_TD = inputs_of(neurons, 32)[:tokens]
    found = neurons_forward(neurons, x_TD)
    assert found is not None
    # In float64, so that only the kernel rounds.
    exact = neurons.double()
    expected = exact._part_by_part(x_TD.double())
    size = expected.norm(dim=1, keepdim=True).clamp(min=1e-6)
    error = (found.double() - expected).abs() / size
    assert error.max() < TOLERANCE[found.dtype]
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
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(neurons_of(128, 200), 2)
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def test_nobody_and_everybody_runs() -> None:
    neurons: Any = neurons_of(64, 100)
    x_TD = inputs_of(neurons, 2)
    neurons.router.selection_bias.fill_(-200.0)
    found = neurons_forward(neurons, x_TD)
    assert found is not None
    torch.testing.assert_close(found, neurons.down_proj.bias.expand(2, -1))
    neurons.router.selection_bias.fill_(200.0)
    neurons.router.exact_margin.fill_(0.0)
    found = neurons_forward(neurons, x_TD)
    gate_TF = nn.functional.silu(neurons.gate_proj(x_TD))
    dense = neurons.down_proj(gate_TF * neurons.up_proj(x_TD))
    torch.testing.assert_close(found, dense, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_tokens_are_computed_as_if_alone() -> None:
    neurons = neurons_of(128, 200)
    x_TD = inputs_of(neurons, 4)
    together = neurons_forward(neurons, x_TD)
    alone = [neurons_forward(neurons, x_TD[t : t + 1]) for t in range(4)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-6)


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
