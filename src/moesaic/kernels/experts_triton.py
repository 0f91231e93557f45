"""Experts on a GPU, for a few tokens at once: two kernels in Triton.

`_hidden` makes the hidden states of every pair of a token and an expert, `_output` a
token's output of all its pairs, in their order: two runs give the same bits. Nothing is
sorted, no number goes back to the processor, so a CUDA graph can hold it all.

The sizes of the tiles have not been tuned: no GPU was there.

Shape suffixes: T tokens, D hidden_size, R experts, K of them for a token, P pairs of
both, M neurons of an expert, N rows of its first matrix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.tiles_triton import activated, products

ROWS = 16  # neurons that a program of `_hidden` makes
WIDTH = 256  # weights of a row at a time
TILE = 4096  # weights that a program of `_output` reads at a time


@torch.library.custom_op("moesaic::experts", mutates_args=())
def experts(
    x_TD: Tensor,
    first_RND: Tensor,
    down_RDM: Tensor,
    index_TK: Tensor,
    gate_TK: Tensor,
    used: int,
    gated: bool,
    activation: int,
) -> Tensor:
    """y_t = sum over k of gate_tk W_down h, h = act(W_gate x_t) * (W_up x_t), (T, D).

    `first_RND` holds W_gate and W_up one after the other, or W_up alone, whose h is
    act(W_up x). The first `used` neurons of an expert count. An index beyond the experts
    is nobody's. `down_RDM` may lie in memory as it likes, the others row by row. Every
    pair reads the weights of its expert: 3 M D, or 2 M D.
    """
    tokens, hidden = x_TD.shape
    count = len(first_RND)
    neurons = down_RDM.shape[2]
    chosen = index_TK.shape[1]
    h_PM = x_TD.new_empty((tokens * chosen, used), dtype=torch.float32)
    y_TD = torch.empty_like(x_TD)
    width = min(triton.next_power_of_2(used), WIDTH)
    rows = TILE // width
    with torch.cuda.device_of(x_TD):  # Triton launches on the current one
        _hidden[(triton.cdiv(used, ROWS), tokens * chosen)](
            x_TD,
            first_RND,
            index_TK,
            gate_TK,
            h_PM,
            hidden,
            neurons,
            used,
            count,
            chosen,
            GATED=gated,
            ACTIVATION=activation,
            ROWS=ROWS,
            WIDTH=WIDTH,
        )
        _output[(triton.cdiv(hidden, rows), tokens)](
            h_PM,
            down_RDM,
            index_TK,
            y_TD,
            hidden,
            used,
            count,
            chosen,
            down_RDM.stride(0),
            down_RDM.stride(1),
            down_RDM.stride(2),
            ROWS=rows,
            WIDTH=width,
        )
    return y_TD


@experts.register_fake
def _shape_of_experts(x_TD: Tensor, *others: object) -> Tensor:
    return torch.empty_like(x_TD)


@triton.jit
def _hidden(
    x_TD,
    first_RND,
    index_P,
    gate_P,
    h_PM,
    D,
    M,
    used,
    R,
    K,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Some hidden states of a pair, times its gate."""
    pair = tl.program_id(1)
    expert = tl.load(index_P + pair).to(tl.int64)
    is_one = (expert >= 0) & (expert < R)
    m_M = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wanted_M = (m_M < used) & is_one
    x_D = x_TD + pair // K * D
    row_M = expert * M + m_M
    one = tl.arange(0, 1)  # a token
    if GATED:
        row_M += expert * M
        gate_TM = products(
            x_D, first_RND, row_M, wanted_M, one, 1, D, 1, ROWS, WIDTH
        )
        up_TM = products(
            x_D, first_RND, row_M + M, wanted_M, one, 1, D, 1, ROWS, WIDTH
        )
        h_TM = activated(gate_TM, ACTIVATION) * up_TM
    else:
        up_TM = products(
            x_D, first_RND, row_M, wanted_M, one, 1, D, 1, ROWS, WIDTH
        )
        h_TM = activated(up_TM, ACTIVATION)
    gate = tl.load(gate_P + pair).to(tl.float32)
    to_TM = (pair * used + m_M)[None, :]
    tl.store(h_PM + to_TM, h_TM * gate, wanted_M[None, :])


@triton.jit
def _output(
    h_PM,
    down_RDM,
    index_P,
    y_TD,
    D,
    used,
    R,
    K,
    from_expert,
    from_row,
    from_column,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Some outputs of a token; `from_...` says how far apart things lie in W_down."""
    token = tl.program_id(1)
    d_D = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sum_DM = tl.zeros((ROWS, WIDTH), tl.float32)
    for k in range(K):
        pair = token * K + k
        expert = tl.load(index_P + pair).to(tl.int64)
        if (expert >= 0) & (expert < R):
            for start in range(0, used, WIDTH):
                m_M = start + tl.arange(0, WIDTH)
                h_M = tl.load(h_PM + pair * used + m_M, m_M < used, 0.0)
                there_DM = (d_D < D)[:, None] & (m_M < used)[None, :]
                at_D = expert * from_expert + d_D * from_row
                at_DM = at_D[:, None] + m_M[None, :] * from_column
                down_DM = tl.load(down_RDM + at_DM, there_DM, 0.0)
                sum_DM += down_DM.to(tl.float32) * h_M[None, :]
    y_D = tl.sum(sum_DM, axis=1)
    to_D = y_TD + token * D + d_D
    tl.store(to_D, y_D.to(y_TD.dtype.element_ty), d_D < D)
