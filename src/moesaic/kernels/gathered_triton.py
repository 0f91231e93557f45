"""Hidden states of experts on a GPU, for many tokens: each expert for the tokens that run it.

`_sort` puts these tokens first, for every expert in a list of its own. `_gathered`
fetches their inputs while it multiplies: no token is copied for its experts, and no
count goes back to the processor, so a CUDA graph can hold it all. A program whose
tokens all rest writes zeros.

Shape suffixes: T tokens, D hidden_size, R experts, K of them for a token, M neurons of an
expert, N rows of a matrix, C columns, F hidden states of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.experts_triton import tile_of, tiling
from moesaic.kernels.tiles_triton import activated, multiplied

# The fastest of sixteen in bfloat16 on an H200 (benchmarks/results), with 128 tokens for a
# program; in float32 the compiler runs out of registers with 64 rows.
PRODUCT = {"WIDTH": 64, "num_stages": 3}
ROWS = (64, 32)  # neurons of a program, the larger if that wastes little
WASTE = 1.15
# Multiply-accumulates in a second over those of torch's product, by the rows of a program.
# Measured in bfloat16 on an H200 (benchmarks/results); in float32 a guess.
SPEED = {
    (torch.bfloat16, 64): 0.65,
    (torch.bfloat16, 32): 0.5,
    (torch.float32, 32): 0.3,
}
# Gathering takes longer by what an H200 multiplies in 5 microseconds: lists are made first.
OVERHEAD = 2e9
MANY = 256  # tokens for each expert, from which a program takes 128
SORTED = 1024  # tokens that `_sort` looks at together


def gathering_pays(
    x_TD: Tensor, first_RND: Tensor, active: int, gated: bool
) -> bool:
    """Whether that takes less time than every expert for all tokens by torch's product."""
    count, in_expert, _ = first_RND.shape
    neurons = in_expert // 2 if gated else in_expert
    rows = rows_of(neurons, x_TD.dtype)
    for_all = x_TD.numel() * count * in_expert  # multiply-accumulates
    computed = active * _filled(neurons, rows) / (count * neurons)
    saved = 1 - computed / SPEED[x_TD.dtype, rows]
    return saved * for_all > OVERHEAD


def rows_of(neurons: int, dtype: torch.dtype) -> int:
    more, fewer = ROWS
    wastes_little = _filled(neurons, more) <= WASTE * neurons
    return more if wastes_little and dtype != torch.float32 else fewer


def _filled(neurons: int, rows: int) -> int:
    """Neurons that programs for so many each compute."""
    programs: int = triton.cdiv(neurons, rows)
    return programs * rows


def gathered(
    x_TD: Tensor,
    first_RND: Tensor,
    gate_TR: Tensor,
    active: int,
    gated: bool,
    activation: int,
) -> Tensor:
    """gate_tr act(W_gate x_t) * (W_up x_t) of all experts, 0 where they rest (T, F).

    Costs 4 K M D FLOPs a token, 2 K M D where experts have no gate.
    """
    tokens, hidden = x_TD.shape
    count, in_expert, _ = first_RND.shape
    neurons = in_expert // 2 if gated else in_expert
    token_RT = gate_TR.new_empty((count, tokens), dtype=torch.int32)
    count_R = gate_TR.new_empty(count, dtype=torch.int32)
    _sort[(count,)](gate_TR, token_RT, count_R, tokens, count, WIDTH=SORTED)
    of_program = 128 if tokens * active >= MANY * count else 64
    rows = rows_of(neurons, x_TD.dtype)
    h_TF = x_TD.new_empty((tokens, count * neurons))
    # Programs beside each other share an expert's rows.
    grid = (triton.cdiv(tokens, of_program), count * triton.cdiv(neurons, rows))
    _gathered[grid](
        x_TD,
        first_RND,
        gate_TR,
        token_RT,
        count_R,
        h_TF,
        tokens,
        hidden,
        count,
        neurons,
        GATED=gated,
        ACTIVATION=activation,
        TOKENS=of_program,
        ROWS=rows,
        num_warps=of_program // 16,
        **tiling(PRODUCT, x_TD.dtype),
    )
    return h_TF


@triton.jit
def _sort(gate_TR, token_RT, count_R, tokens, R, WIDTH: tl.constexpr):
    """The tokens that run an expert, in their order, then the others from the last on."""
    expert = tl.program_id(0)
    token_T = token_RT + expert.to(tl.int64) * tokens
    running = 0
    resting = 0
    for start in range(0, tokens, WIDTH):
        t_C = start + tl.arange(0, WIDTH)
        there_C = t_C < tokens
        at_C = t_C.to(tl.int64) * R + expert
        gate_C = tl.load(gate_TR + at_C, there_C, 0.0)
        runs_C = (there_C & (gate_C != 0.0)).to(tl.int32)
        rests_C = there_C.to(tl.int32) - runs_C
        before_C = running + tl.cumsum(runs_C, axis=0) - runs_C
        after_C = resting + tl.cumsum(rests_C, axis=0)
        tl.store(token_T + before_C, t_C, runs_C > 0)
        tl.store(token_T + tokens - after_C, t_C, rests_C > 0)
        running += tl.sum(runs_C, axis=0)
        resting += tl.sum(rests_C, axis=0)
    tl.store(count_R + expert, running)


@triton.jit
def _gathered(
    x_TD,
    first_RND,
    gate_TR,
    token_RT,
    count_R,
    h_TF,
    tokens,
    D,
    R,
    M,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Some hidden states of an expert for some tokens of its list, times their gates.

    Tokens are rows of the product, not columns as in experts_triton.py: an H100's fast
    one wants 64 rows or more, and programs have 32 neurons too.
    """
    tiles = tl.cdiv(M, ROWS)
    expert = (tl.program_id(1) // tiles).to(tl.int64)
    n_N = tl.program_id(1) % tiles * ROWS + tl.arange(0, ROWS)
    first_place = tl.program_id(0) * TOKENS
    place_T = first_place + tl.arange(0, TOKENS)
    there_T = place_T < tokens
    t_T = tl.load(token_RT + expert * tokens + place_T, there_T, 0)
    t_T = t_T.to(tl.int64)
    running = tl.load(count_R + expert)
    h_TN = tl.zeros((TOKENS, ROWS), tl.float32)
    if first_place < running:
        runs_T = place_T < running
        up_TN = tl.zeros((TOKENS, ROWS), tl.float32)
        gate_TN = tl.zeros((TOKENS, ROWS), tl.float32)
        gate_row_N = expert * M + n_N
        up_row_N = gate_row_N
        if GATED:  # W_up follows W_gate in every expert
            gate_row_N += expert * M
            up_row_N = gate_row_N + M
        for start in range(0, D, WIDTH):
            d_C = start + tl.arange(0, WIDTH)
            x_TC = tile_of(x_TD, t_T, runs_T, d_C, D, D, 1)
            up_NC = tile_of(first_RND, up_row_N, n_N < M, d_C, D, D, 1)
            up_TN = multiplied(x_TC, tl.trans(up_NC), up_TN)
            if GATED:
                gate_NC = tile_of(first_RND, gate_row_N, n_N < M, d_C, D, D, 1)
                gate_TN = multiplied(x_TC, tl.trans(gate_NC), gate_TN)
        if GATED:
            h_TN = activated(gate_TN, ACTIVATION) * up_TN
        else:
            h_TN = activated(up_TN, ACTIVATION)
        times_T = tl.load(gate_TR + t_T * R + expert, runs_T, 0.0)
        h_TN = tl.where(runs_T[:, None], h_TN * times_T[:, None], 0.0)
    to_TN = t_T[:, None] * (R * M) + (expert * M + n_N)[None, :]
    there_TN = there_T[:, None] & (n_N < M)[None, :]
    tl.store(h_TF + to_TN, h_TN.to(h_TF.dtype.element_ty), there_TN)
