"""A linear layer that skips inputs on a CPU: the compiled function against the masked product."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from moesaic.kernels.build import library
from moesaic.kernels.inputs import FEW_TOKENS
from moesaic.kernels.linears import linear_forward
from moesaic.modeling import MoesaicThresholdedLinear

if library() is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)

SHAPES = [(64, 64), (128, 40), (7, 3), (33, 65), (576, 192)]


def linear_of(
    inputs: int, outputs: int, *, bias: bool = False, threshold: float = 0.8, dtype: torch.dtype
) -> MoesaicThresholdedLinear:
    linear = MoesaicThresholdedLinear(inputs, outputs, bias, 0.5)
    generator = torch.Generator().manual_seed(inputs)
    for parameter in linear.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    linear.input_scale = torch.rand(inputs, generator=generator) + 0.5
    linear.threshold.fill_(threshold)
    return linear


def masked(linear: MoesaicThresholdedLinear, x_TI: Tensor) -> Tensor:
    """In float64."""
    counts = x_TI.float().abs() * linear.input_scale > linear.threshold
    y_TN = torch.where(counts, x_TI, 0).double() @ linear.weight.double().T
    return y_TN if linear.bias is None else y_TN + linear.bias.double()


@torch.no_grad()
@pytest.mark.parametrize("kernel", [True, False])
def test_what_is_no_number_is_not_hidden(kernel: bool) -> None:
    """A model that is broken before such a layer must look broken after it."""
    linear = linear_of(64, 40, dtype=torch.float32)
    x_TI = torch.randn(2, 64)
    x_TI[1, 5] = torch.nan
    found = linear_forward(linear, x_TI) if kernel else linear(x_TI.expand(9, 2, 64))[0]
    assert found is not None
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_equals_the_masked_product(
    shape: tuple[int, int], tokens: int, bias: bool, dtype: torch.dtype, threads: int
) -> None:
    linear = linear_of(*shape, bias=bias, dtype=dtype)
    x_TI = torch.randn(tokens, shape[0]).to(dtype)
    expected = masked(linear, x_TI)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = linear_forward(linear, x_TI)
    finally:
        torch.set_num_threads(before)
    assert found is not None
    assert found.dtype == dtype
    size = expected.norm(dim=1, keepdim=True).clamp(min=1.0)
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    assert ((found.double() - expected).abs() / size).max() < tolerance


@torch.no_grad()
def test_all_inputs_or_none() -> None:
    linear = linear_of(40, 24, bias=True, dtype=torch.float32, threshold=-1.0)
    x_TI = torch.randn(2, 40)
    dense = torch.nn.functional.linear(x_TI, linear.weight, linear.bias)
    torch.testing.assert_close(linear_forward(linear, x_TI), dense)
    linear.threshold.fill_(1e9)
    assert linear.bias is not None
    torch.testing.assert_close(linear_forward(linear, x_TI), linear.bias.expand(2, -1))


@torch.no_grad()
def test_the_weight_keeps_its_values_and_is_held_once() -> None:
    linear = linear_of(40, 24, dtype=torch.float32)
    before = linear.weight.clone()
    assert linear_forward(linear, torch.randn(1, 40)) is not None
    assert torch.equal(linear.weight, before)
    assert linear.weight.mT.is_contiguous()
    assert linear.weight.untyped_storage().nbytes() == linear.weight.nbytes


@torch.no_grad()
@pytest.mark.usefixtures("unasked_kernel")
def test_other_layouts_and_devices_change_nothing() -> None:
    linear = linear_of(40, 24, dtype=torch.float32)
    x_TI = torch.randn(2, 40)
    expected_TN = linear_forward(linear, x_TI)
    assert expected_TN is not None
    with torch.device("meta"):  # where new tensors go, unless told
        found_TN = linear_forward(linear, x_TI)
    assert found_TN is not None
    assert torch.equal(found_TN, expected_TN)
    linear.bias = torch.nn.Parameter(torch.randn(48)[::2], requires_grad=False)
    assert linear_forward(linear, x_TI) is None


@torch.no_grad()
def test_who_is_turned_away_gets_the_product() -> None:
    linear = linear_of(40, 24, dtype=torch.float32)
    x_TI = torch.randn(FEW_TOKENS + 1, 40)
    assert linear_forward(linear_of(40, 24, dtype=torch.float32), x_TI[:1]) is not None
    assert linear_forward(linear, x_TI) is None
    assert linear_forward(linear, x_TI[:1].double()) is None
    assert linear_forward(linear, x_TI[None, :1]) is None
    threshold = linear.threshold
    linear.threshold = torch.linspace(0, 2, 40)
    assert linear_forward(linear, x_TI[:1]) is None
    linear.threshold = threshold
    linear.input_scale = linear.input_scale[:1]
    assert linear_forward(linear, x_TI[:1]) is None
    with torch.enable_grad():
        assert linear_forward(linear, x_TI[:1]) is None
    few = linear(x_TI[None, :2])
    many = linear(x_TI[None])
    assert few.shape == (1, 2, 24)
    torch.testing.assert_close(few, many[:, :2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_a_weight_that_learns_stays_as_it_lies(training: bool) -> None:
    """The fused optimiser reads gradients and weights in one order."""
    linear = linear_of(33, 65, dtype=torch.float32).train(training)
    x_TI = torch.randn(2, 33)
    linear(x_TI).sum().backward()
    with torch.no_grad():
        assert linear_forward(linear, x_TI) is None
    assert linear.weight.is_contiguous()
    other = copy.deepcopy(linear)
    with torch.no_grad():
        assert linear_forward(other, x_TI) is None


def test_a_call_with_gradients_in_evaluation_is_no_training() -> None:
    linear = linear_of(33, 65, dtype=torch.float32).eval()
    x_TI = torch.randn(2, 33)
    linear(x_TI)
    with torch.no_grad():
        assert linear_forward(linear, x_TI) is not None
