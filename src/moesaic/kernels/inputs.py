"""What the kernels can be given: plain tensors, outside of training.

Shape suffixes: T tokens, D hidden_size, M neurons.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from moesaic.kernels import gpu

# By what transformers calls the module; the numbers are those of vectors.h.
ACTIVATIONS = {"SiLUActivation": 0, "SiLU": 0, "ReLU": 1, "GELUTanh": 2}

# Where each token reads rows or columns of its own: more of them are faster together.
FEW_TOKENS = 4

LINE = 64  # bytes that a processor reads at once

LEARNT = "_moesaic_has_learnt"  # an attribute of modules that have
_WATCHED = "_moesaic_watches"

_LAYING_OUT = threading.Lock()  # another thread may read what lies there now


def is_plain_inference(x_TD: Tensor) -> bool:
    """Whether an input is a plain tensor, and nothing else watches what becomes of it."""
    if type(x_TD) is not Tensor or not (x_TD.is_cpu or x_TD.is_cuda):
        return False
    if torch.is_autocast_enabled(x_TD.device.type):
        return False
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return False
    if torch.compiler.is_compiling():
        # What is not an op of torch stands in no graph.
        return gpu.takes(x_TD)
    return not _is_watched(x_TD)


def _is_watched(x_TD: Tensor) -> bool:
    """Whether torch's operations are counted, batched by vmap, or differentiated forwards.

    A kernel of ours would be left out of that.
    """
    if torch._C._len_torch_dispatch_stack():
        modes = _get_current_dispatch_mode_stack()
        if any(not getattr(mode, "leaves_kernels", False) for mode in modes):
            return True
    if is_functorch_wrapped_tensor(x_TD):
        return True
    if forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(x_TD).tangent is not None


def can_be_read(parameters: list[Any], x_TD: Tensor) -> bool:
    """Whether these lie beside the input as they are, in its dtype and width.

    PEFT and others put something else in their place.
    """
    if x_TD.ndim != 2 or not are_parameters_beside(parameters, x_TD):
        return False
    width = x_TD.shape[1]
    return all(width in parameter.shape[-2:] for parameter in parameters)


def are_parameters_beside(parameters: list[Any], x_TD: Tensor) -> bool:
    """Whether these are plain parameters on the input's device, in its dtype.

    And not in memory that processes share, which must stay where it is.
    """
    for parameter in parameters:
        if type(parameter) is not nn.Parameter or is_of_processes(parameter):
            return False
        if parameter.dtype != x_TD.dtype or parameter.device != x_TD.device:
            return False
    return True


def is_of_processes(parameter: Tensor) -> bool:
    """Whether other processes see this memory on a CPU (`share_memory`)."""
    if torch.compiler.is_compiling():  # for a GPU, and a graph cannot ask
        return False
    return parameter.is_cpu and parameter.is_shared()


def learns(module: Any, matrix: str = "weight") -> bool:
    """Whether gradients are wanted, or a matrix of this module has had some.

    What learns stays as it lies: optimisers keep what belongs to its elements in their
    order. In evaluation a call with gradients is no training yet; the first backward
    pass is.
    """
    marks = vars(module)
    if not torch.is_grad_enabled():
        return LEARNT in marks
    if module.training:
        marks[LEARNT] = True
    elif not torch.compiler.is_compiling():
        _mark_when_it_learns(module, module._parameters.get(matrix))
    return True


def _mark_when_it_learns(module: Any, parameter: Any) -> None:
    """Once for each parameter; a copy of a module has others."""
    marks = vars(module)
    if type(parameter) is not nn.Parameter or not parameter.requires_grad:
        return
    if marks.get(_WATCHED) == id(parameter):
        return
    marks[_WATCHED] = id(parameter)
    reference = weakref.ref(module)  # else neither would be freed

    def mark(_: Tensor) -> None:
        found = reference()
        if found is not None:
            vars(found)[LEARNT] = True

    parameter.register_post_accumulate_grad_hook(mark)


def rows_side_by_side(matrix: Any) -> Tensor:
    """A matrix (..., D, M) as (..., M, D), and in memory so, whatever its shape says.

    The column of an input then lies side by side. In place: nothing is held twice.
    """
    return _turned(matrix, -2, -1)


def as_one_matrix(down_RDM: Any) -> Tensor:
    """W_down of all experts as (D, R, M), and in memory so, whatever its shape says.

    It then is one matrix of all experts' neurons. In place, likewise.
    """
    return _turned(down_RDM, 0, 1)


def _turned(matrix: Any, first: int, second: int) -> Tensor:
    """In memory of the same kind: an inference tensor takes no other, and what others are
    could never be trained again on one.
    """
    turned: Tensor = matrix.data.transpose(first, second)
    if turned.is_contiguous():
        return turned
    with _LAYING_OUT:
        turned = matrix.data.transpose(first, second)
        if not turned.is_contiguous():
            with torch.inference_mode(matrix.is_inference()):
                before = matrix.data
                turned = before.transpose(first, second).contiguous()
                matrix.data = turned.transpose(first, second)
                if before.is_cuda:  # may have come from another stream
                    before.record_stream(torch.cuda.current_stream())
    return turned


def on_lines(matrix: Any) -> Tensor:
    """The same matrix, and its memory begins with a line of the cache.

    Weights read from a file lie as they come there. In place: nothing is held twice.
    """
    if matrix.data_ptr() % LINE:
        with _LAYING_OUT:
            if matrix.data_ptr() % LINE:
                with torch.inference_mode(matrix.is_inference()):
                    matrix.data = matrix.data.clone()
    found: Tensor = matrix
    return found
