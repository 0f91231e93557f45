"""Low-bit copies of matrices whose errors on the calibration inputs cancel.

Shape suffixes: I inputs, R rows, G groups of inputs, C columns of one group,
S candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.modeling import GROUP

DAMPING = 0.01  # of the mean diagonal of the inputs' Gram matrix
SHRINKINGS = torch.linspace(1.05, 0.5, 20)  # of the scale that clips nothing


@dataclass(frozen=True)
class LowBits:
    """W ~ code * scale: codes of a few bits, a scale for GROUP inputs of a row."""

    code_RI: Tensor
    scale_RG: Tensor


@torch.no_grad()
def low_bits(
    weight_RI: Tensor, gram_II: Tensor, bits: int, dtype: torch.dtype
) -> LowBits:
    """Codes and scales (in `dtype`) that keep W x, for inputs of this Gram matrix.

    GPTQ (Frantar et al., arXiv:2210.17323): columns are rounded one after the other,
    and the error of each is made up for by those that follow: with the inverse Gram
    matrix U^T U, column j's error e_j takes (e_j / U_jj) U_jk off column k. A group's
    scale is set as it is reached: of 20, the one of least error, weighted by the
    inputs' energies. R I^2 FLOPs and an inverse of I^3 in float64.
    """
    rows, inputs = weight_RI.shape
    root_II = _inverse_root(gram_II)
    energy_I = gram_II.diagonal().float()
    rest_RI = weight_RI.float().clone()
    code_RI = torch.empty(
        rows, inputs, dtype=torch.int8, device=weight_RI.device
    )
    scales = []
    for start in range(0, inputs, GROUP):
        end = min(start + GROUP, inputs)
        group_RC = rest_RI[:, start:end]
        scale_R = _best_scale(group_RC, energy_I[start:end], bits).to(dtype)
        scales.append(scale_R)
        root_CC = root_II[start:end, start:end]
        code_RC, error_RC = _rounded(group_RC, scale_R.float(), root_CC, bits)
        code_RI[:, start:end] = code_RC.to(torch.int8)
        rest_RI[:, end:] -= error_RC @ root_II[start:end, end:]
    return LowBits(code_RI, torch.stack(scales, dim=1))


@torch.no_grad()
def nearest_bits(weight_RI: Tensor, bits: int, dtype: torch.dtype) -> LowBits:
    """Codes and scales (in `dtype`) that keep W itself: each weight by itself.

    The scales are those of `low_bits` for inputs of equal energy. 20 R I simple steps.
    """
    code_RI = torch.empty(
        weight_RI.shape, dtype=torch.int8, device=weight_RI.device
    )
    scales = []
    inputs = weight_RI.shape[1]
    for start in range(0, inputs, GROUP):
        end = min(start + GROUP, inputs)
        group_RC = weight_RI[:, start:end].float()
        equal_C = torch.ones(end - start, device=weight_RI.device)
        scale_R = _best_scale(group_RC, equal_C, bits).to(dtype)
        code_RC = codes(group_RC, scale_R.float(), bits)
        code_RI[:, start:end] = code_RC.to(torch.int8)
        scales.append(scale_R)
    return LowBits(code_RI, torch.stack(scales, dim=1))


def _inverse_root(gram_II: Tensor) -> Tensor:
    """Upper triangular U with U^T U the inverse of the damped Gram matrix."""
    damped_II = gram_II.double().clone()
    diagonal_I = damped_II.diagonal()
    mean = diagonal_I.mean().clamp(min=1e-20)
    diagonal_I.add_(DAMPING * mean)
    factor_II = torch.linalg.cholesky(damped_II)
    inverse_II = torch.cholesky_inverse(factor_II)
    root_II: Tensor = torch.linalg.cholesky(inverse_II, upper=True)
    return root_II.float()


def _best_scale(group_RC: Tensor, energy_C: Tensor, bits: int) -> Tensor:
    """The scale of each row (R,) that rounds one group with least weighted error.

    The largest weight gets the lowest code, which has one more step than the highest:
    scales may be negative.
    """
    half = 2 ** (bits - 1)
    largest_R1 = group_RC.abs().argmax(dim=1, keepdim=True)
    extreme_R = group_RC.gather(1, largest_R1)[:, 0]
    best_R: Tensor = extreme_R / -half
    least_R = torch.full_like(best_R, torch.inf)
    for shrinking in SHRINKINGS.tolist():
        scale_R = shrinking * extreme_R / -half
        rounded_RC = codes(group_RC, scale_R, bits) * scale_R[:, None]
        error_RC = (rounded_RC - group_RC).square()
        error_R = error_RC @ energy_C
        better_R = error_R < least_R
        best_R = torch.where(better_R, scale_R, best_R)
        least_R = torch.where(better_R, error_R, least_R)
    return best_R


def _rounded(
    group_RC: Tensor, scale_R: Tensor, root_CC: Tensor, bits: int
) -> tuple[Tensor, Tensor]:
    """Codes of one group, and what each column's error weighs in those after it."""
    rest_RC = group_RC.clone()
    code_RC = torch.empty_like(rest_RC)
    error_RC = torch.empty_like(rest_RC)
    for column in range(rest_RC.shape[1]):
        weight_R1 = rest_RC[:, column : column + 1]
        code_R1 = codes(weight_R1, scale_R, bits)
        error_R1 = weight_R1 - code_R1 * scale_R[:, None]
        error_R1 = error_R1 / root_CC[column, column]
        rest_RC[:, column + 1 :] -= error_R1 * root_CC[column, column + 1 :]
        code_RC[:, column : column + 1] = code_R1
        error_RC[:, column : column + 1] = error_R1
    return code_RC, error_RC


def codes(weight_RC: Tensor, scale_R: Tensor, bits: int) -> Tensor:
    """The nearest whole multiples of each row's scale that `bits` bits hold."""
    half = 2 ** (bits - 1)
    safe_R = torch.where(scale_R == 0, 1.0, scale_R)
    multiple_RC = weight_RC / safe_R[:, None]
    code_RC: Tensor = multiple_RC.round().clamp(-half, half - 1)
    return code_RC
