"""A linear layer that reads the columns of its largest inputs, on a CPU, for a few tokens.

Shape suffixes: T tokens, I inputs, N outputs.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.kernels.build import library
from moesaic.kernels.compiled_call import DTYPES, CompiledCall
from moesaic.kernels.inputs import (
    FEW_TOKENS,
    is_of_processes,
    is_plain_inference,
    learns,
    rows_side_by_side,
)
from moesaic.kernels.seen import Known, Seen, run_as_known


class _Call(ctypes.Structure):
    """The struct of the same name in linears_cpu.cpp; what is not given is 0."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("weight_IN", "bias_N", "scale_I", "threshold")
        ),
        *((name, ctypes.c_int64) for name in ("I", "N")),
    ]


def linear_forward(linear: Any, x_TI: Tensor) -> Tensor | None:
    """What MoesaicThresholdedLinear puts out (T, N), or None where this is not for it.

    Reads the columns of the inputs that count, for each token its own. The weight is
    laid out anew, column by column, the first time: its values and shape stay.
    """
    # Asked first: whatever the input is, the weight may learn by it.
    if learns(linear) or not 0 < len(x_TI) <= FEW_TOKENS:
        return None
    if not x_TI.is_cpu or not is_plain_inference(x_TI):
        return None
    return run_as_known(linear, x_TI, _look_at)


def _look_at(linear: Any, x_TI: Tensor) -> Known | None:
    if not _fits(linear, x_TI):
        return None
    rows_side_by_side(linear.weight)
    seen = Seen(linear, x_TI)
    outputs, inputs = linear.weight.shape
    given = {
        "weight_IN": linear.weight.mT,
        "bias_N": linear.bias,
        "scale_I": linear.input_scale,
        "threshold": linear.threshold,
    }
    call = _Call(I=inputs, N=outputs)
    for name, tensor in given.items():
        if tensor is not None:
            setattr(call, name, tensor.data_ptr())
    return Known(seen, CompiledCall("linear", call, x_TI.dtype, outputs))


def _fits(linear: Any, x_TI: Tensor) -> bool:
    if x_TI.dtype not in DTYPES or x_TI.ndim != 2:
        return False
    outputs, inputs = linear.weight.shape
    if x_TI.shape[1] != inputs:
        return False
    for parameter in (linear.weight, linear.bias):
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter or parameter.dtype != x_TI.dtype:
            return False
        if not parameter.is_cpu or is_of_processes(parameter):
            return False
    if linear.bias is not None and not _is_vector(linear.bias, outputs):
        return False
    scale_I = linear.input_scale
    threshold = linear.threshold
    for vector in (scale_I, threshold):
        # A cast of the whole model takes them along.
        if vector.dtype != torch.float32 or not vector.is_cpu:
            return False
    if not _is_vector(scale_I, inputs) or threshold.numel() != 1:
        return False
    return library() is not None


def _is_vector(vector: Tensor, size: int) -> bool:
    return vector.shape == (size,) and vector.is_contiguous()
