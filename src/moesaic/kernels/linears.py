"""A linear layer that reads the columns of its largest inputs, on a CPU, for a few tokens.

Shape suffixes: T tokens, I inputs, N outputs.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.kernels.build import library
from moesaic.kernels.inputs import (
    is_plain_inference,
    learns,
    rows_side_by_side,
)

FEW_TOKENS = (
    4  # each reads columns of its own: more of them are faster together
)
FUNCTIONS = {
    torch.float32: "moesaic_linear_float32",
    torch.bfloat16: "moesaic_linear_bfloat16",
}


class _Call(ctypes.Structure):
    """The struct of the same name in linears_cpu.cpp; what is not given is 0."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("x_TI", "out_TN", "weight_IN", "bias_N", "scale_I")
        ),
        *((name, ctypes.c_int64) for name in ("tokens", "I", "N")),
        ("threshold", ctypes.c_float),
        ("threads", ctypes.c_int32),
    ]


def linear_forward(linear: Any, x_TI: Tensor) -> Tensor | None:
    """What MoesaicThresholdedLinear puts out (T, N), or None where this is not for it.

    Reads the columns of the inputs that count, for each token its own. The weight is
    laid out anew, column by column, the first time: its values and shape stay.
    """
    if not _fits(linear, x_TI):
        return None
    x_TI = x_TI.contiguous()
    tokens, inputs = x_TI.shape
    outputs = linear.weight.shape[0]
    y_TN = torch.empty((tokens, outputs), dtype=x_TI.dtype, device=x_TI.device)
    given = {
        "x_TI": x_TI,
        "out_TN": y_TN,
        "weight_IN": rows_side_by_side(linear.weight),
        "bias_N": linear.bias,
        "scale_I": linear.input_scale,
    }
    call = _Call(
        tokens=tokens,
        I=inputs,
        N=outputs,
        threshold=linear.threshold.item(),
        threads=torch.get_num_threads(),
    )
    for name, tensor in given.items():
        if tensor is not None:
            setattr(call, name, tensor.data_ptr())
    compiled = library()
    assert compiled is not None  # or it would not fit
    getattr(compiled, FUNCTIONS[x_TI.dtype])(ctypes.byref(call))
    return y_TN


def _fits(linear: Any, x_TI: Tensor) -> bool:
    # Asked first: whatever the input is, the weight may learn by it.
    if learns(linear) or not 0 < len(x_TI) <= FEW_TOKENS:
        return False
    if x_TI.dtype not in FUNCTIONS or not is_plain_inference(x_TI):
        return False
    for parameter in (linear.weight, linear.bias):
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter or parameter.dtype != x_TI.dtype:
            return False
        if parameter.device.type != "cpu":
            return False
    if linear.bias is not None and not linear.bias.is_contiguous():
        return False
    if x_TI.device.type != "cpu" or x_TI.shape[1] != linear.weight.shape[1]:
        return False
    for vector in (linear.input_scale, linear.threshold):
        # A cast of the whole model takes them along.
        if vector.dtype != torch.float32 or not vector.is_contiguous():
            return False
    return library() is not None
