"""Which experts run by kernels of ours, and on which inputs.

Shape suffixes: T tokens, D hidden_size, R experts, M neurons of one, N rows of an expert's
first matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations import moe

from moesaic.kernels.build import library
from moesaic.kernels.compiled_call import DTYPES
from moesaic.kernels.experts_call import first_matrix
from moesaic.kernels.inputs import (
    ACTIVATIONS,
    as_one_matrix,
    can_be_read,
    is_plain_inference,
    learns,
)
from moesaic.modeling.replacement_moesaic import are_hooked

# On a processor with AVX2 MKL multiplies faster from so large a matrix of an expert on,
# and from so many tokens for each expert.
LARGE = 2**20
MANY_TOKENS = 8

# An attribute of experts that a CUDA graph reads.
_IN_GRAPH = "_moesaic_in_graph"


def fits(experts: Any, x_TD: Tensor) -> bool:
    """Whether these experts run by the CPU's kernel, on such an input."""
    if experts_learn(experts) or is_offloaded(experts):
        return False
    if x_TD.device.type != "cpu" or not is_usual(experts, x_TD):
        return False
    if is_grouped_faster(experts, x_TD):
        return False
    return library() is not None


def fits_gpu(experts: Any, x_TD: Tensor) -> bool:
    """Whether they run by the kernels for GPUs, on such an input."""
    experts_learn(experts)  # marks what does: it stays as it lies
    if not len(x_TD) or torch.is_grad_enabled():
        return False
    return is_usual(experts, x_TD) and not is_offloaded(experts)


def lay_out_on_gpu(experts: Any, x_TD: Tensor) -> None:
    """W_down as one matrix, or every prompt would copy it.

    By the first call, whatever its length. A CUDA graph holds the place where weights
    lie: where it is made before, they stay there. Nor can a graph that torch compiles
    hold this.
    """
    if torch.compiler.is_compiling() or experts_learn(experts):
        return
    marks = vars(experts)
    if x_TD.is_cuda and torch.cuda.is_current_stream_capturing():
        marks[_IN_GRAPH] = True
    elif _IN_GRAPH not in marks:
        as_one_matrix(experts.down_proj)


def is_usual(experts: Any, x_TD: Tensor) -> bool:
    """Whether the kernels know what these experts do, and how their weights lie."""
    if experts.has_bias or getattr(experts, "is_transposed", False):
        return False
    if not getattr(experts, "is_concatenated", True):
        return False
    if getattr(experts, "has_post_expert_norm", False):
        return False
    usual_gate = getattr(moe, "_default_apply_gate", None)
    if getattr(type(experts), "_apply_gate", None) is not usual_gate:
        return False
    if type(experts.act_fn).__name__ not in ACTIVATIONS:
        return False
    if are_hooked(*experts.children()):
        return False
    if x_TD.dtype not in DTYPES or not is_plain_inference(x_TD):
        return False
    first_RND = first_matrix(experts)
    if not can_be_read([first_RND, experts.down_proj], x_TD):
        return False
    if x_TD.shape[1] != experts.down_proj.shape[1]:
        return False
    contiguous: bool = first_RND.is_contiguous()
    return contiguous


def is_grouped_faster(experts: Any, x_TD: Tensor) -> bool:
    """Large experts in float32, many tokens, and registers of eight numbers.

    The kernel's panels are sixteen tokens wide there, and MKL's blocks are larger.
    """
    if x_TD.dtype != torch.float32:
        return False
    count, hidden, neurons = experts.down_proj.shape
    is_large = hidden * neurons >= LARGE
    are_many = len(x_TD) >= MANY_TOKENS * count
    is_avx2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
    return is_large and are_many and is_avx2


def experts_learn(experts: Any) -> bool:
    """Whether W_down of these experts has to stay as it lies."""
    return learns(experts, "down_proj")


def is_offloaded(experts: Any) -> bool:
    """Whether accelerate fetches the weights for every call."""
    hook = getattr(experts, "_hf_hook", None)
    return bool(getattr(hook, "offload", False))
