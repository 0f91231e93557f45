"""What the compiled function of experts_cpu.cpp is given.

Shape suffixes: T tokens, D hidden_size, R experts, K of them for a token, M neurons of
one, N rows of an expert's first matrix, S neurons of the shared expert, C directions.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels.build import library
from moesaic.kernels.compiled_call import CompiledCall
from moesaic.kernels.inputs import ACTIVATIONS, on_lines, rows_side_by_side

_POINTERS = (
    "first_RND",
    "down_RMD",
    "index_TK",
    "gate_TK",
    "router_RD",
    "router_gate_RD",
    "direction_CD",
    "direction_bias_C",
    "bias_R",
    "scale_R",
    "shared_gate_SD",
    "shared_up_SD",
    "shared_down_SD",
)
_SIZES = ("K", "R", "M", "used", "D", "S", "C")
_SWITCHES = ("gated", "activation", "copies", "absolute", "by_threshold")


class _Call(ctypes.Structure):
    """The struct of the same name in experts_cpu.cpp; what is not given is 0."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_int32) for name in _SWITCHES),
    ]


def call_of(
    experts: Any,
    most: int,
    given: dict[str, Tensor],
    dtype: torch.dtype,
    **switches: bool,
) -> CompiledCall:
    """The compiled function for these experts, which lie as `lay_out` lays them out.

    A token runs `most` of them, by thresholds at most so many. `given` and `switches` are
    fields of its struct.
    """
    down_RMD = experts.down_proj.mT
    count, neurons, hidden = down_RMD.shape
    call = _Call(
        K=most,
        R=count,
        M=neurons,
        used=min(getattr(experts, "neurons", neurons), neurons),
        D=hidden,
        gated=experts.has_gate,
        activation=ACTIVATIONS[type(experts.act_fn).__name__],
        **switches,
    )
    of_experts = {"first_RND": first_matrix(experts), "down_RMD": down_RMD}
    for name, tensor in (given | of_experts).items():
        setattr(call, name, tensor.data_ptr())
    if "shared_up_SD" in given:
        call.S = len(given["shared_up_SD"])
    if "direction_CD" in given:
        call.C = len(given["direction_CD"])
    return CompiledCall("experts", call, dtype, hidden)


def lay_out(experts: Any) -> None:
    """W_down neuron by neuron, and rows that are read as tiles on whole lines."""
    rows_side_by_side(experts.down_proj)
    laid_out(first_matrix(experts))


def laid_out(matrix: Any) -> Tensor:
    """A matrix of rows that are read as tiles: one that lies across lines takes a tenth more."""
    compiled = library()
    assert compiled is not None  # or it would not fit
    if matrix.dtype == torch.bfloat16 and compiled.moesaic_has_tiles():
        return on_lines(matrix)
    found: Tensor = matrix
    return found


def first_matrix(experts: Any) -> Any:
    """Gate and up of every expert, or up alone."""
    return experts.gate_up_proj if experts.has_gate else experts.up_proj
