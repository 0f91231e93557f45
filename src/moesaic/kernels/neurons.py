"""Neurons chosen one by one, for a few tokens at once: MoesaicNeurons in one call.

Copies of W_gate and W_up are read in whole, bit plane by bit plane, and of the exact
matrices the rows of neurons that run. torch has no product of that kind. On a CPU by
neurons_cpu.cpp, on a GPU by neurons_triton.py.

Shape suffixes: T tokens, D hidden_size, F neurons, B bits, P bytes of a row of a plane, G
groups of inputs.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.kernels import gpu
from moesaic.kernels.build import library
from moesaic.kernels.compiled_call import DTYPES, CompiledCall
from moesaic.kernels.inputs import (
    ACTIVATIONS,
    FEW_TOKENS,
    can_be_read,
    is_plain_inference,
)
from moesaic.kernels.seen import Known, Seen, run_as_known
from moesaic.modeling.replacement_moesaic import are_hooked

_NEURONS = (
    "gate_FD",
    "up_FD",
    "down_FD",
    "gate_bias_F",
    "up_bias_F",
    "down_bias_D",
    "gate_planes_BFP",
    "up_planes_BFP",
    "gate_scales_FG",
    "up_scales_FG",
    "gate_copy_bias_F",
    "up_copy_bias_F",
    "bias_F",
)
_INT8_NEURONS = (
    "gate_rest_planes_FBP",
    "up_rest_planes_FBP",
    "gate_rest_scales_FG",
    "up_rest_scales_FG",
    "down_scales_FG",
)
_POINTERS = (*_NEURONS, *_INT8_NEURONS, "margin")


class _Call(ctypes.Structure):
    """The struct of the same name in neurons_cpu.cpp; what is not given is 0."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in ("F", "D")),
        *((name, ctypes.c_int32) for name in ("bits", "activation")),
    ]


def neurons_forward(neurons: Any, x_TD: Tensor) -> Tensor | None:
    """What MoesaicNeurons puts out (T, D), or None where this is not for the kernel.

    Costs, in bytes read, all of the copies (or of W_gate, where that tells) and the rows
    of the neurons that run, for each token its own.
    """
    if not 0 < len(x_TD) <= FEW_TOKENS or torch.is_grad_enabled():
        return None
    if not is_plain_inference(x_TD) or x_TD.ndim != 2:
        return None
    if gpu.takes(x_TD):
        return _on_gpu(neurons, x_TD)
    return run_as_known(neurons, x_TD, _look_at)


def copy_weight(copy: Any) -> Tensor | None:
    """The matrix (F, D) that a MoesaicCopy stands for, or None where it does not fit.

    To the last bit what `copy.weight()` gives without it, in one pass over its bytes.
    """
    planes_BFP = copy.planes_first()
    scales_FG = copy.scales
    dtype = scales_FG.dtype
    if dtype not in DTYPES or not is_plain_inference(scales_FG):
        return None
    if not scales_FG.is_cpu:
        return None
    if not _lies_as(copy.planes, torch.uint8) or not _lies_as(scales_FG, dtype):
        return None
    compiled = library()
    if compiled is None:
        return None
    shape = (copy.out_features, copy.in_features)
    weight_FD = torch.empty(shape, dtype=dtype, device=scales_FG.device)
    getattr(compiled, f"moesaic_copy_{DTYPES[dtype]}")(
        *(
            ctypes.c_void_p(tensor.data_ptr())
            for tensor in (planes_BFP, scales_FG, weight_FD)
        ),
        *(ctypes.c_int64(step) for step in planes_BFP.stride()[:2]),
        *(ctypes.c_int64(size) for size in shape),
        ctypes.c_int32(copy.bits),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return weight_FD


def _on_gpu(neurons: Any, x_TD: Tensor) -> Tensor | None:
    """The same by Triton, which waits for no number: exact_margin stays where it is.

    Not for weights in 8 bits.
    """
    if not _has_known_parts(neurons):
        return None
    tensors = _tensors(neurons)
    if "down_scales_FG" in tensors:
        return None
    if not _fits(neurons, tensors, x_TD):
        return None
    return gpu.call(
        "neurons",
        x_TD.contiguous(),
        *(tensors.get(name) for name in (*_NEURONS, "margin")),
        ACTIVATIONS[type(neurons.act_fn).__name__],
    )


def _look_at(neurons: Any, x_TD: Tensor) -> Known | None:
    if not _has_known_parts(neurons) or library() is None:
        return None
    seen = Seen(neurons, x_TD)
    tensors = _tensors(neurons)
    if not _fits(neurons, tensors, x_TD):
        return None
    hidden = x_TD.shape[1]
    call = _Call(F=neurons.sizes.num_routed, D=hidden)
    call.activation = ACTIVATIONS[type(neurons.act_fn).__name__]
    if not neurons.router.reads_gates:
        call.bits = neurons.router.gate_copy.bits
    for name, tensor in tensors.items():
        if tensor is not None:
            setattr(call, name, tensor.data_ptr())
    return Known(seen, CompiledCall("neurons", call, x_TD.dtype, hidden))


def _activations(neurons: Any) -> tuple[type, type]:
    """Of the neurons, and of the copies that choose them; the same where there is none."""
    parts = neurons._modules
    own = parts["act_fn"]
    return type(own), type(parts["router"]._modules.get("act_fn", own))


def _tensors(neurons: Any) -> dict[str, Tensor | None]:
    """Its tensors by the struct's names; None for those that it has not.

    Straight from where modules keep them. A part that is wrapped has none of its own.
    """
    parts = neurons._modules
    router = parts["router"]
    tensors = {
        "bias_F": _own(router, "selection_bias"),
        "margin": _own(router, "exact_margin"),
    }
    for name in ("gate", "up"):
        rows = parts[f"{name}_proj"]
        if "planes" in rows._buffers:
            tensors[f"{name}_rest_planes_FBP"] = _own(rows, "planes")
            tensors[f"{name}_rest_scales_FG"] = _own(rows, "scales")
        else:
            tensors[f"{name}_FD"] = _own(rows, "weight")
            tensors[f"{name}_bias_F"] = _own(rows, "bias")
        copy = router._modules.get(f"{name}_copy")
        if copy is not None:
            tensors[f"{name}_planes_BFP"] = _own(copy, "planes")
            tensors[f"{name}_scales_FG"] = _own(copy, "scales")
            tensors[f"{name}_copy_bias_F"] = _own(copy, "bias")
    down = parts["down_proj"]
    tensors["down_bias_D"] = _own(down, "bias")
    if "codes" in down._buffers:
        tensors["down_FD"] = _own(down, "codes")
        tensors["down_scales_FG"] = _own(down, "scales")
    else:
        tensors["down_FD"] = _own(down, "weight")
    return tensors


def _own(module: Any, name: str) -> Tensor | None:
    """A parameter or buffer of the module itself."""
    parameter: Tensor | None = module._parameters.get(name)
    if parameter is not None:
        return parameter
    buffer: Tensor | None = module._buffers.get(name)
    return buffer


def _fits(
    neurons: Any, tensors: dict[str, Tensor | None], x_TD: Tensor
) -> bool:
    """Whether the tensors of known parts are as a conversion makes them, and together."""
    if x_TD.dtype not in DTYPES or x_TD.shape[1] != neurons.block.hidden_size:
        return False
    if are_hooked(*_parts_of(neurons)):
        return False
    own, of_copies = _activations(neurons)
    if own.__name__ not in ACTIVATIONS or own is not of_copies:
        return False
    in_8_bits = "down_scales_FG" in tensors
    if not in_8_bits:
        matrices = [tensors[name] for name in ("gate_FD", "up_FD", "down_FD")]
        if not can_be_read(matrices, x_TD):
            return False
    if not neurons.router.reads_gates and tensors["margin"] is None:
        return False
    sizes = _sizes(neurons)
    for name, tensor in tensors.items():
        dtype = x_TD.dtype
        if name in ("bias_F", "margin"):
            dtype = torch.float32
        elif "_planes_" in name:
            dtype = torch.uint8
        elif name == "down_FD" and in_8_bits:
            dtype = torch.int8
        if tensor is None:
            continue
        if tensor.device != x_TD.device or not _lies_as(tensor, dtype):
            return False
        if tensor.shape != _shape_of(name, sizes):
            return False
    return True


def _sizes(neurons: Any) -> dict[str, int]:
    """By the letters of the struct's names."""
    from moesaic.modeling.copies_moesaic import GROUP, ceil_div

    hidden = neurons.block.hidden_size
    router = neurons.router
    return {
        "D": hidden,
        "F": neurons.sizes.num_routed,
        "B": 0 if router.reads_gates else router.gate_copy.bits,
        "P": ceil_div(hidden, 8),
        "G": ceil_div(hidden, GROUP),
    }


def _shape_of(name: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """The shape that a name of the struct tells."""
    from moesaic.modeling.int8_neurons_moesaic import REST_BITS

    if name == "margin":
        return ()
    letters = name.rsplit("_", 1)[1]
    if "_rest_" in name:
        sizes = sizes | {"B": REST_BITS}
    return tuple(sizes[letter] for letter in letters)


def _has_known_parts(neurons: Any) -> bool:
    """Whether its parts are of the classes that a conversion puts there."""
    # Whoever imports these first imports this module on the way.
    from transformers.pytorch_utils import Conv1D

    from moesaic.modeling import (
        MoesaicCopyRouter,
        MoesaicGateRouter,
        MoesaicInt8Neurons,
        MoesaicInt8Rows,
        MoesaicNeurons,
        MoesaicRest,
    )

    if type(neurons.router) not in (MoesaicCopyRouter, MoesaicGateRouter):
        return False
    rows: type[nn.Module] = nn.Linear
    down: type[nn.Module] = Conv1D
    if type(neurons) is MoesaicInt8Neurons:
        rows = MoesaicRest
        down = MoesaicInt8Rows
    elif type(neurons) is not MoesaicNeurons:
        return False
    if type(neurons.down_proj) is not down:
        return False
    return all(
        type(part) is rows for part in (neurons.gate_proj, neurons.up_proj)
    )


def _parts_of(neurons: Any) -> list[Any]:
    parts = neurons._modules
    inner = parts["router"]._modules
    return [*parts.values(), *inner.values()]


def _lies_as(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether it lies in memory row by row."""
    return tensor.dtype == dtype and tensor.is_contiguous()
