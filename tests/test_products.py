"""float32 products whose factors bfloat16 holds, and short products made in float32.

Shape suffixes: T tokens, D hidden size, N neurons, G groups.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.parts import products
from moesaic.parts.products import (
    emulated_products,
    is_emulated,
    products_of,
    widened_products,
)

CPU = torch.device("cpu")


def precisions() -> tuple[str, str]:
    cpu = torch.backends.mkldnn.matmul
    gpu = torch.backends.cuda.matmul
    return cpu.fp32_precision, gpu.fp32_precision


def test_products_of_numbers_that_bfloat16_holds_are_rounded_in_sums_only() -> None:
    generator = torch.Generator().manual_seed(0)
    h_TN = torch.randn(512, 96, generator=generator).bfloat16()
    exact_NN = h_TN.double().T @ h_TN.double()
    with products_of(torch.bfloat16):
        gram_NN = h_TN.float().T @ h_TN.float()
    assert gram_NN.dtype == torch.float32
    rounding = 2.0**-23 * 512**0.5 * exact_NN.diagonal().max()
    assert (gram_NN - exact_NN).abs().max() < 4 * rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_formats_leave_torchs_setting(dtype: torch.dtype) -> None:
    before = precisions()
    with products_of(dtype):
        assert precisions() == before


def test_the_setting_comes_back_where_a_product_fails() -> None:
    before = precisions()
    within = []

    def fail() -> None:
        with products_of(torch.bfloat16):
            within.append(precisions())
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert within != [before]
    assert precisions() == before
    torch.get_float32_matmul_precision()  # raises where old and new settings disagree


def test_a_setting_for_all_of_torch_stays_one() -> None:
    """It is read from every backend that has none of its own."""
    everything: Any = torch.backends
    before = everything.fp32_precision
    try:
        everything.fp32_precision = "tf32"
        with products_of(torch.bfloat16):
            pass
        everything.fp32_precision = "ieee"
        assert precisions() == ("ieee", "ieee")
    finally:
        everything.fp32_precision = before


class Dtypes(TorchDispatchMode):
    """The number formats of all products that torch is really asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in products._PRODUCTS:
            self.seen.append(args[-1].dtype)
        return func(*args, **(kwargs or {}))


def emulate(monkeypatch: pytest.MonkeyPatch, *capabilities: str) -> None:
    """A processor with these instructions, and no others."""
    monkeypatch.setattr(products.platform, "machine", lambda: "x86_64")
    found = dict.fromkeys(capabilities, True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_products_are_made_in_float32_and_rounded(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    emulate(monkeypatch)
    x_TD = random(40, 64, dtype=dtype)
    weight_ND = random(48, 64, dtype=dtype)
    bias_N = random(48, dtype=dtype)
    batch = random(3, 40, 64, dtype=dtype)
    with Dtypes() as asked, widened_products(dtype, CPU):
        found = [
            x_TD @ weight_ND.T,
            linear(x_TD, weight_ND, bias_N),
            batch @ batch.mT,
        ]
    expected = [
        x_TD.float() @ weight_ND.float().T,
        linear(x_TD.float(), weight_ND.float(), bias_N.float()),
        batch.float() @ batch.float().mT,
    ]
    for made, exact in zip(found, expected, strict=True):
        assert made.dtype == dtype
        assert torch.equal(made, exact.to(dtype))
    assert asked.seen == [torch.float32] * 3


def test_in_inference_mode_too(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    x_TD = random(40, 64)
    weight_ND = random(48, 64)
    with torch.inference_mode(), widened_products(torch.bfloat16, CPU):
        found = linear(x_TD, weight_ND)
    assert torch.equal(found, linear(x_TD.float(), weight_ND.float()).bfloat16())


def test_grouped_products(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    x_TD = random(64, 32)
    weight_GDN = random(2, 32, 48)
    ends_G = torch.tensor([24, 64], dtype=torch.int32)
    with Dtypes() as asked, widened_products(torch.bfloat16, CPU):
        found = torch._grouped_mm(x_TD, weight_GDN, ends_G)
    first = x_TD[:24].float() @ weight_GDN[0].float()
    second = x_TD[24:].float() @ weight_GDN[1].float()
    torch.testing.assert_close(found, torch.cat([first, second]).bfloat16())
    assert len(asked.seen) == 1


def test_gradients_are_those_of_the_same_products(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    x_TD = random(40, 64)
    weight_ND = random(48, 64).requires_grad_()
    slope_TN = random(40, 48)
    with Dtypes() as asked, widened_products(torch.bfloat16, CPU):
        linear(x_TD, weight_ND).backward(slope_TN)
    assert weight_ND.grad is not None
    assert weight_ND.grad.dtype == torch.bfloat16
    exact = slope_TN.float().T @ x_TD.float()
    torch.testing.assert_close(weight_ND.grad, exact.bfloat16())
    assert asked.seen == [torch.float32] * 2


def test_few_rows_and_other_formats_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    weight_ND = random(48, 64)
    with Dtypes() as asked, widened_products(torch.bfloat16, CPU):
        linear(random(31, 64), weight_ND)
        linear(random(40, 64).half(), weight_ND.half())
    assert asked.seen == [torch.bfloat16, torch.float16]


def test_one_within_another_widens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    with widened_products(torch.bfloat16, CPU), Dtypes():
        before = len(products.dispatch._get_current_dispatch_mode_stack())
        with widened_products(torch.bfloat16, CPU):
            assert len(products.dispatch._get_current_dispatch_mode_stack()) == before


def test_a_processor_that_has_the_instructions_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulate(monkeypatch, "avx512_bf16")
    assert not is_emulated(torch.bfloat16)
    assert is_emulated(torch.float16)
    assert not is_emulated(torch.float32)
    with Dtypes() as asked, widened_products(torch.bfloat16, CPU):
        random(40, 64) @ random(64, 48)
    assert asked.seen == [torch.bfloat16]
    monkeypatch.setattr(products.platform, "machine", lambda: "aarch64")
    assert not is_emulated(torch.float16)


def test_nothing_stands_in_the_way_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    with widened_products(torch.bfloat16, torch.device("cuda")):
        assert not products.dispatch._get_current_dispatch_mode_stack()


def test_what_is_timed_is_not_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    with Dtypes(), widened_products(torch.bfloat16, CPU), emulated_products():
        assert not products.dispatch._get_current_dispatch_mode_stack()


def test_an_older_torch_emulates_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not is_emulated(torch.bfloat16)


def test_a_format_within_another_is_widened_too(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    half = random(40, 64, dtype=torch.float16)
    with (
        Dtypes() as asked,
        widened_products(torch.bfloat16, CPU),
        widened_products(torch.float16, CPU),
    ):
        random(40, 64) @ random(64, 48)
        half @ half.T
    assert asked.seen == [torch.float32] * 2


def test_what_torch_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    x_TD = random(40, 64)
    weight_ND = random(48, 64)
    with widened_products(torch.bfloat16, CPU):
        with pytest.raises(RuntimeError, match="dtype"):
            linear(x_TD, weight_ND, random(48).float())
        ends_G = torch.tensor([24, 40], dtype=torch.int32)
        stacked = random(2, 64, 48)
        found = torch._grouped_mm(x_TD, stacked, ends_G, out_dtype=torch.bfloat16)
    assert found.dtype == torch.bfloat16


def test_what_torch_compiles_by_itself_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention does: it compiles whole graphs, which a mode may forbid."""
    emulate(monkeypatch)
    double = torch.compile(lambda x: 2 * x, backend="eager", fullgraph=True)
    with widened_products(torch.bfloat16, CPU):
        assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
