"""float32 products whose factors bfloat16 holds.

Shape suffixes: T tokens, N neurons.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moesaic.parts.products import products_of


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
