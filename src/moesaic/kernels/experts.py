"""Experts as a function that transformers calls ("moesaic").

    model.set_experts_implementation("moesaic")

does it for any model whose experts stand behind that interface, such as an exported one.
Models of moesaic's own architecture do it by themselves on a processor with AVX2 and on
a GPU of NVIDIA's, and with them the router and the shared expert in the same call
(on a GPU not with more than 16 directions, blocks.py). On a
GPU up to 64 tokens at once (32 of large blocks) run by experts_triton.py and
blocks_triton.py, longer inputs by experts_prompts_triton.py (where more than a quarter of
the experts run) and prompts_triton.py. All others, on other devices, in training and
where there is no compiler, go to transformers' grouped product, or the block computes
every expert.

Shape suffixes: T tokens, D hidden_size, K experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moesaic.kernels import gpu
from moesaic.kernels.blocks import block_forward
from moesaic.kernels.experts_call import call_of, first_matrix, lay_out
from moesaic.kernels.experts_fit import fits, fits_gpu, lay_out_on_gpu
from moesaic.kernels.inputs import ACTIVATIONS
from moesaic.kernels.linears import linear_forward
from moesaic.kernels.neurons import copy_weight, neurons_forward

NAME = "moesaic"
# Share of the experts up to which many tokens on a GPU do not go by W_down of all of them.
# Blocks of ours always do: all their experts are one dense FFN, those of others are many.
FEW_EXPERTS = 0.25


def experts_forward(
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """y_T = sum of gate * expert(x_T) over each token's experts, (T, D).

    `top_k_index` (T, K) names experts, `top_k_weights` (T, K) are their gates. `experts`
    is a module of transformers' experts interface. On a CPU an index beyond the experts is
    nobody's. Costs 6 K M D FLOPs a token, 4 where
    the FFN has no gate, and weights of experts that nobody chose are not read, but for
    many tokens on a GPU (experts_prompts_triton.py). W_down is
    laid out anew, neuron by neuron, the first time: its values and shape stay.
    """
    if gpu.takes(hidden_states):
        y_TD = _on_gpu(experts, hidden_states, top_k_index, top_k_weights)
        if y_TD is not None:
            return y_TD
    if not fits(experts, hidden_states):
        grouped = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
        output: Tensor = grouped(
            experts, hidden_states, top_k_index, top_k_weights
        )
        return output
    index_TK = top_k_index.to(torch.int64).contiguous()
    gate_TK = top_k_weights.to(torch.float32).contiguous()
    given = {"index_TK": index_TK, "gate_TK": gate_TK}
    dtype = hidden_states.dtype
    lay_out(experts)
    return call_of(experts, index_TK.shape[1], given, dtype)(hidden_states)


def _on_gpu(
    experts: Any, x_TD: Tensor, index_TK: Tensor, gate_TK: Tensor
) -> Tensor | None:
    """By Triton; None where this is not for it.

    Many tokens multiply W_down of every expert, so not where few of them run.
    """
    if not fits_gpu(experts, x_TD):
        return None
    are_few = len(x_TD) <= gpu.FEW_TOKENS
    share = index_TK.shape[1] / len(experts.down_proj)
    if not are_few and share <= FEW_EXPERTS:
        return None
    lay_out_on_gpu(experts, x_TD)
    return gpu.call(
        "experts" if are_few else "experts_prompts",
        x_TD.contiguous(),
        first_matrix(experts),
        experts.down_proj,
        index_TK.contiguous(),
        gate_TK.contiguous(),
        experts.has_gate,
        ACTIVATIONS[type(experts.act_fn).__name__],
    )


def _fits_any(experts: Any, x_TD: Tensor) -> bool:
    """Whether these experts run by a kernel of ours, on such an input."""
    if gpu.takes(x_TD):
        are_few = len(x_TD) <= gpu.FEW_TOKENS
        name = "experts" if are_few else "experts_prompts"
        return fits_gpu(experts, x_TD) and gpu.is_there(name)
    return fits(experts, x_TD)


def runs_by_itself() -> bool:
    """Whether converted models take it unasked.

    On processors where it was measured to be faster; on a GPU the kernel for blocks was,
    for few tokens, and the others do less than what they stand for.
    """
    if torch.accelerator.is_available():
        return torch.cuda.is_available() and torch.version.cuda is not None
    capability = torch.backends.cpu.get_cpu_capability()
    return capability.startswith(("AVX2", "AVX512"))


experts_forward.by_itself = runs_by_itself()  # type: ignore[attr-defined]
experts_forward.fits = _fits_any  # type: ignore[attr-defined]
experts_forward.block = block_forward  # type: ignore[attr-defined]
experts_forward.neurons = neurons_forward  # type: ignore[attr-defined]
experts_forward.copy_weight = copy_weight  # type: ignore[attr-defined]
experts_forward.linear = linear_forward  # type: ignore[attr-defined]
ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
