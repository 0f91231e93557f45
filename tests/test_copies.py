"""Low-bit copies of matrices: packed, unpacked, and rounded so that errors cancel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moesaic.modeling import COPY_BITS, GROUP, MoesaicCopy, packed, unpacked
from moesaic.parts.copies import DAMPING, _best_scale, codes, low_bits
from tests import reference


def correlated(inputs: int, tokens: int = 400, seed: int = 0) -> torch.Tensor:
    """Inputs around a mean, a few of them large, all of them correlated."""
    torch.manual_seed(seed)
    x_TI = torch.randn(tokens, inputs) @ torch.randn(inputs, inputs) / inputs**0.5
    return x_TI * torch.linspace(0.2, 3, inputs) + 0.5


def copy_of(
    weight_RI: torch.Tensor, x_TI: torch.Tensor, bits: int, dtype: torch.dtype = torch.float32
) -> MoesaicCopy:
    rows, inputs = weight_RI.shape
    few = low_bits(weight_RI, x_TI.T @ x_TI / len(x_TI), bits, dtype)
    copy = MoesaicCopy(inputs, rows, bits, bias=False)
    copy.planes = packed(few.code_RI, bits)
    copy.scales = few.scale_RG
    return copy


@given(st.sampled_from(COPY_BITS), st.integers(1, 6), st.integers(1, 150), st.integers(0, 99))
@settings(deadline=None)
def test_codes_come_back_from_their_bits(bits: int, rows: int, inputs: int, seed: int) -> None:
    half = 2 ** (bits - 1)
    generator = torch.Generator().manual_seed(seed)
    code_RI = torch.randint(-half, half, (rows, inputs), generator=generator, dtype=torch.int8)
    planes_BRP = packed(code_RI, bits)
    assert planes_BRP.dtype == torch.uint8
    assert planes_BRP.shape == (bits, rows, -(-inputs // 8))
    assert torch.equal(unpacked(planes_BRP, inputs), code_RI)


@pytest.mark.parametrize("bits", COPY_BITS)
@pytest.mark.parametrize("inputs", [12, GROUP, GROUP + 9])
def test_a_copy_is_what_one_bit_after_the_other_says(bits: int, inputs: int) -> None:
    torch.manual_seed(bits)
    copy = copy_of(torch.randn(5, inputs), correlated(inputs), bits)
    expected = reference.copied_rows(copy.planes, copy.scales, inputs, GROUP)
    np.testing.assert_allclose(copy.weight().numpy(), expected, rtol=1e-6)
    x_TI = torch.randn(3, inputs)
    np.testing.assert_allclose(copy(x_TI).numpy(), x_TI.numpy() @ expected.T, rtol=1e-4, atol=1e-4)


def test_two_rows_worked_by_hand() -> None:
    """Inputs that do not correlate: every weight goes to the nearest code."""
    weight_RI = torch.tensor([[-4.0, 0.9, 3.0, -2.2], [0.0, 0.0, 0.0, 0.0]])
    few = low_bits(weight_RI, torch.eye(4), 3, torch.float32)
    # Codes -4 to 3 of the scale 1.
    scale = float(few.scale_RG[0, 0])
    assert 0.9 < scale < 1.1
    assert few.code_RI.tolist() == [[-4, 1, 3, -2], [0, 0, 0, 0]]
    assert few.scale_RG[1, 0] == 0


@pytest.mark.parametrize("bits", COPY_BITS)
def test_rounding_is_least_squares_column_by_column(bits: int) -> None:
    inputs = GROUP + 13
    torch.manual_seed(3)
    weight_RI = torch.randn(6, inputs)
    x_TI = correlated(inputs)
    gram_II = x_TI.T @ x_TI / len(x_TI)
    few = low_bits(weight_RI, gram_II, bits, torch.float32)
    damped_II = gram_II.double()
    damped_II.diagonal().add_(DAMPING * damped_II.diagonal().mean())
    scale_RI = few.scale_RG.repeat_interleave(GROUP, dim=1)[:, :inputs]
    expected = reference.error_feedback(weight_RI, damped_II, scale_RI, bits)
    differ = (few.code_RI != expected).float().mean()
    assert differ < 0.01  # ties within float32
    first = _best_scale(weight_RI[:, :GROUP], gram_II.diagonal()[:GROUP], bits)
    torch.testing.assert_close(few.scale_RG[:, 0], first)


@pytest.mark.parametrize("bits", COPY_BITS)
def test_errors_cancel_on_the_inputs_they_were_fitted_to(bits: int) -> None:
    inputs = 2 * GROUP
    torch.manual_seed(5)
    weight_RI = torch.randn(32, inputs)
    x_TI = correlated(inputs, tokens=2000)
    copied_TR = copy_of(weight_RI, x_TI, bits)(x_TI)
    nearest = []
    for start in range(0, inputs, GROUP):
        group_RC = weight_RI[:, start : start + GROUP]
        scale_R = _best_scale(group_RC, torch.ones(GROUP), bits)
        nearest.append(codes(group_RC, scale_R, bits) * scale_R[:, None])
    exact_TR = x_TI @ weight_RI.T
    rounded_TR = x_TI @ torch.cat(nearest, dim=1).T
    error = (copied_TR - exact_TR).square().mean()
    assert error < 0.8 * (rounded_TR - exact_TR).square().mean()
    assert error < exact_TR.square().mean()


def test_inputs_that_are_never_there_do_no_harm() -> None:
    x_TI = correlated(16)
    x_TI[:, 3:7] = 0
    few = low_bits(torch.randn(4, 16), x_TI.T @ x_TI, 4, torch.float32)
    assert torch.isfinite(few.scale_RG).all()
    nothing = low_bits(torch.randn(4, 16), torch.zeros(16, 16), 4, torch.float32)
    assert torch.isfinite(nothing.scale_RG).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_saved_and_loaded_a_copy_is_the_same_to_the_last_bit(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    weight_RI = torch.randn(6, GROUP + 5).to(dtype)
    copy = copy_of(weight_RI, correlated(GROUP + 5), 3, dtype)
    save_file(copy.state_dict(), tmp_path / "copy.safetensors")
    again = MoesaicCopy(GROUP + 5, 6, 3, bias=False).to(dtype)
    again.load_state_dict(load_file(tmp_path / "copy.safetensors"))
    x_TI = torch.randn(4, GROUP + 5).to(dtype)
    assert again.planes.dtype == torch.uint8
    assert torch.equal(again(x_TI), copy(x_TI))
    assert again(x_TI).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_codes_and_scales(dtype: torch.dtype) -> None:
    copy: Any = MoesaicCopy(2 * GROUP, 10, 3, bias=True).to(dtype)
    size = torch.empty((), dtype=dtype).element_size()
    assert copy.weight_bytes() == 10 * 2 * GROUP * 3 / 8 + 10 * 2 * size
    stored = copy.planes.nbytes + copy.scales.nbytes
    assert copy.weight_bytes() == stored
