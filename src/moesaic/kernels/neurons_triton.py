"""Neurons chosen one by one, on a GPU, for a few tokens at once: kernels in Triton.

`_choose` scores a block of neurons and lists those that run as it goes: nothing is
sorted. `_run` takes CHUNK neurons of a block's list, reads their rows, and writes a part
of the output. `_add` adds the parts up, always in the same order: two runs give the same
bits. No number goes back to the processor, so a CUDA graph can hold it all.

It ran right on a GPU, but was not timed there: the sizes of the tiles are not tuned.

Shape suffixes: T tokens, D hidden_size, F neurons (of a block), B blocks, C neurons of a
chunk, S parts of the output, P bytes of a row of a plane, G groups of inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.tiles_triton import activated, products, with_bias

BLOCK = 32  # neurons that a program of `_choose` scores
CHUNK = 16  # neurons that a program of `_run` runs; divides BLOCK
WIDTH = 256  # inputs or outputs at a time, of all tokens together
BYTES = 32  # bytes of a plane's row at a time, of all tokens together
PARTS = 64  # parts that are added at a time
GROUP = tl.constexpr(64)  # inputs of a copy that share a scale


@torch.library.custom_op("moesaic::neurons", mutates_args=())
def neurons(
    x_TD: Tensor,
    gate_FD: Tensor,
    up_FD: Tensor,
    down_FD: Tensor,
    gate_bias_F: Tensor | None,
    up_bias_F: Tensor | None,
    down_bias_D: Tensor | None,
    gate_planes_BFP: Tensor | None,
    up_planes_BFP: Tensor | None,
    gate_scales_FG: Tensor | None,
    up_scales_FG: Tensor | None,
    gate_copy_bias_F: Tensor | None,
    up_copy_bias_F: Tensor | None,
    bias_F: Tensor,
    margin: Tensor | None,
    activation: int,
) -> Tensor:
    """y_t = sum over n that run of h_tn w_n + b (T, D), h = act(W_gate x) * (W_up x).

    Neuron n runs where log h'^2 + bias_n is above 0: h' is what copies in bit planes say
    of h, or act(W_gate x) where there are none. With copies h is theirs where that score
    is not above `margin`. All tensors lie row by row. Costs, in bytes read, the copies
    or W_gate, and once the rows that any token runs.
    """
    tokens, hidden = x_TD.shape
    count = len(up_FD)
    blocks = triton.cdiv(count, BLOCK)
    chunks = BLOCK // CHUNK
    row_bytes = 0 if gate_planes_BFP is None else gate_planes_BFP.shape[2]
    padded = triton.next_power_of_2(tokens)
    width = WIDTH // padded
    new = x_TD.new_empty
    count_B = new(blocks, dtype=torch.int32)
    neuron_F = new(blocks * BLOCK, dtype=torch.int32)
    told_TF = new((tokens, blocks * BLOCK), dtype=torch.float32)
    mark_TF = new((tokens, blocks * BLOCK), dtype=torch.int8)
    part_STD = new((blocks * chunks, tokens, hidden), dtype=torch.float32)
    y_TD = torch.empty_like(x_TD)
    with torch.cuda.device_of(x_TD):  # Triton launches on the current one
        _choose[(blocks,)](
            x_TD,
            gate_FD,
            gate_bias_F,
            gate_planes_BFP,
            gate_scales_FG,
            gate_copy_bias_F,
            up_planes_BFP,
            up_scales_FG,
            up_copy_bias_F,
            bias_F,
            margin,
            count_B,
            neuron_F,
            told_TF,
            mark_TF,
            tokens,
            hidden,
            count,
            row_bytes,
            BITS=0 if gate_planes_BFP is None else len(gate_planes_BFP),
            ACTIVATION=activation,
            TOKENS=padded,
            BLOCK=BLOCK,
            WIDTH=width,
            BYTES=BYTES // padded,
        )
        _run[(blocks, chunks)](
            x_TD,
            gate_FD,
            up_FD,
            down_FD,
            gate_bias_F,
            up_bias_F,
            count_B,
            neuron_F,
            told_TF,
            mark_TF,
            part_STD,
            tokens,
            hidden,
            BY_GATES=gate_planes_BFP is None,
            ACTIVATION=activation,
            TOKENS=padded,
            BLOCK=BLOCK,
            CHUNK=CHUNK,
            WIDTH=width,
        )
        _add[(triton.cdiv(hidden, width), tokens)](
            part_STD,
            count_B,
            down_bias_D,
            y_TD,
            tokens,
            hidden,
            blocks,
            BLOCK=BLOCK,
            CHUNK=CHUNK,
            WIDTH=width,
            PARTS=PARTS,
        )
    return y_TD


@neurons.register_fake
def _shape_of_neurons(x_TD: Tensor, *others: object) -> Tensor:
    return torch.empty_like(x_TD)


@triton.jit
def _copied_products(
    x_TD,
    planes_BFP,
    scales_FG,
    row_F,
    exists_F,
    t_T,
    tokens,
    D,
    F,
    row_bytes,
    BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Of all tokens with a copy's rows (T, F).

    Bit b of eight codes is a byte of plane b; `packed_FP` holds those of all planes.
    """
    groups = tl.cdiv(D, GROUP)
    row_F = row_F.to(tl.int64)
    sum_TFP = tl.zeros((TOKENS, BLOCK, BYTES), tl.float32)
    for start in range(0, row_bytes, BYTES):
        p_P = start + tl.arange(0, BYTES)
        there_FP = exists_F[:, None] & (p_P < row_bytes)[None, :]
        group_P = p_P * 8 // GROUP
        at_FG = row_F[:, None] * groups + group_P[None, :]
        scale_FP = tl.load(scales_FG + at_FG, there_FP, 0.0).to(tl.float32)
        packed_FP = tl.zeros((BLOCK, BYTES), tl.int32)
        for bit in tl.static_range(BITS):
            at_FP = (bit * F + row_F[:, None]) * row_bytes + p_P[None, :]
            byte_FP = tl.load(planes_BFP + at_FP, there_FP, 0)
            packed_FP |= byte_FP.to(tl.int32) << (8 * bit)
        of_byte_TFP = tl.zeros((TOKENS, BLOCK, BYTES), tl.float32)
        for place in tl.static_range(8):
            code_FP = tl.zeros((BLOCK, BYTES), tl.int32)
            for bit in tl.static_range(BITS):
                code_FP |= ((packed_FP >> (8 * bit + place)) & 1) << bit
            number_FP = (code_FP - (1 << (BITS - 1))).to(tl.float32)
            d_P = p_P * 8 + place
            in_x_TP = (t_T < tokens)[:, None] & (d_P < D)[None, :]
            x = tl.load(x_TD + t_T[:, None] * D + d_P[None, :], in_x_TP, 0.0)
            of_byte_TFP += x.to(tl.float32)[:, None, :] * number_FP[None]
        sum_TFP += of_byte_TFP * scale_FP[None]
    return tl.sum(sum_TFP, axis=2)


@triton.jit
def _choose(
    x_TD,
    gate_FD,
    gate_bias_F,
    gate_planes_BFP,
    gate_scales_FG,
    gate_copy_bias_F,
    up_planes_BFP,
    up_scales_FG,
    up_copy_bias_F,
    bias_F,
    margin,
    count_B,
    neuron_F,
    told_TF,
    mark_TF,
    tokens,
    D,
    F,
    row_bytes,
    BITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Scores a block of neurons; lists those that any token runs.

    Writes how many there are, and of each its number, what was told of it, and a mark
    for each token: 0 does not run, 1 runs by its copies, 2 runs by its own rows.
    """
    block = tl.program_id(0)
    row_F = block * BLOCK + tl.arange(0, BLOCK)
    exists_F = row_F < F
    t_T = tl.arange(0, TOKENS)
    if BITS == 0:
        gate_TF = products(
            x_TD,
            gate_FD,
            row_F,
            exists_F,
            t_T,
            tokens,
            D,
            TOKENS,
            BLOCK,
            WIDTH,
        )
        gate_TF = with_bias(gate_TF, gate_bias_F, row_F, exists_F)
        told = activated(gate_TF, ACTIVATION)
    else:
        gate_TF = _copied_products(
            x_TD,
            gate_planes_BFP,
            gate_scales_FG,
            row_F,
            exists_F,
            t_T,
            tokens,
            D,
            F,
            row_bytes,
            BITS,
            TOKENS,
            BLOCK,
            BYTES,
        )
        up_TF = _copied_products(
            x_TD,
            up_planes_BFP,
            up_scales_FG,
            row_F,
            exists_F,
            t_T,
            tokens,
            D,
            F,
            row_bytes,
            BITS,
            TOKENS,
            BLOCK,
            BYTES,
        )
        gate_TF = with_bias(gate_TF, gate_copy_bias_F, row_F, exists_F)
        up_TF = with_bias(up_TF, up_copy_bias_F, row_F, exists_F)
        told = activated(gate_TF, ACTIVATION) * up_TF
    energy_TF = told * told
    energy_TF = tl.where(energy_TF < 1e-38, 1e-38, energy_TF)
    bias = tl.load(bias_F + row_F, exists_F, float("-inf"))
    score_TF = tl.log(energy_TF) + bias[None, :]
    runs_TF = (score_TF > 0.0) & (t_T < tokens)[:, None]
    exact_TF = runs_TF
    if BITS > 0:
        exact_TF = runs_TF & (score_TF > tl.load(margin))
    any_F = tl.max(runs_TF.to(tl.int32), axis=0)
    rank_F = tl.cumsum(any_F, axis=0) - any_F
    to_F = block * BLOCK + rank_F
    to_TF = t_T[:, None] * (tl.num_programs(0) * BLOCK) + to_F[None, :]
    listed_TF = (any_F > 0)[None, :] & (t_T < tokens)[:, None]
    mark = runs_TF.to(tl.int8) + exact_TF.to(tl.int8)
    tl.store(count_B + block, tl.sum(any_F, axis=0))
    tl.store(neuron_F + to_F, row_F, any_F > 0)
    tl.store(told_TF + to_TF, told, listed_TF)
    tl.store(mark_TF + to_TF, mark, listed_TF)


@triton.jit
def _run(
    x_TD,
    gate_FD,
    up_FD,
    down_FD,
    gate_bias_F,
    up_bias_F,
    count_B,
    neuron_F,
    told_TF,
    mark_TF,
    part_STD,
    tokens,
    D,
    BY_GATES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Adds up what CHUNK listed neurons give, for all tokens; nothing beyond the list."""
    block = tl.program_id(0)
    chunk = tl.program_id(1)
    count = tl.load(count_B + block)
    place_C = chunk * CHUNK + tl.arange(0, CHUNK)
    listed_C = place_C < count
    t_T = tl.arange(0, TOKENS)
    if chunk * CHUNK < count:
        at_C = block * BLOCK + place_C
        at_TC = t_T[:, None] * (tl.num_programs(0) * BLOCK) + at_C[None, :]
        listed_TC = listed_C[None, :] & (t_T < tokens)[:, None]
        row_C = tl.load(neuron_F + at_C, listed_C, 0)
        told_TC = tl.load(told_TF + at_TC, listed_TC, 0.0)
        mark_TC = tl.load(mark_TF + at_TC, listed_TC, 0)
        exact_C = tl.max((mark_TC == 2).to(tl.int32), axis=0) > 0
        up_TC = products(
            x_TD,
            up_FD,
            row_C,
            exact_C,
            t_T,
            tokens,
            D,
            TOKENS,
            CHUNK,
            WIDTH,
        )
        up_TC = with_bias(up_TC, up_bias_F, row_C, exact_C)
        if BY_GATES:
            h_TC = told_TC * up_TC
        else:
            gate_TC = products(
                x_TD,
                gate_FD,
                row_C,
                exact_C,
                t_T,
                tokens,
                D,
                TOKENS,
                CHUNK,
                WIDTH,
            )
            gate_TC = with_bias(gate_TC, gate_bias_F, row_C, exact_C)
            h_TC = activated(gate_TC, ACTIVATION) * up_TC
        h_TC = tl.where(mark_TC == 2, h_TC, told_TC)
        h_TC = tl.where(mark_TC > 0, h_TC, 0.0)
        part = block * (BLOCK // CHUNK) + chunk
        to_T = (part.to(tl.int64) * tokens + t_T) * D
        for start in range(0, D, WIDTH):
            d_D = start + tl.arange(0, WIDTH)
            there_CD = listed_C[:, None] & (d_D < D)[None, :]
            at_CD = row_C.to(tl.int64)[:, None] * D + d_D[None, :]
            down_CD = tl.load(down_FD + at_CD, there_CD, 0.0).to(tl.float32)
            y_TD = tl.sum(h_TC[:, :, None] * down_CD[None], axis=1)
            there_TD = (t_T < tokens)[:, None] & (d_D < D)[None, :]
            to_TD = to_T[:, None] + d_D[None, :]
            tl.store(part_STD + to_TD, y_TD, there_TD)


@triton.jit
def _add(
    part_STD,
    count_B,
    down_bias_D,
    y_TD,
    tokens,
    D,
    blocks,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A token's output from the parts that were written, and the bias."""
    d_D = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    token = tl.program_id(1)
    chunks = BLOCK // CHUNK
    sum_SD = tl.zeros((PARTS, WIDTH), tl.float32)
    for start in range(0, blocks * chunks, PARTS):
        part_S = start + tl.arange(0, PARTS)
        block_S = part_S // chunks
        count_S = tl.load(count_B + block_S, block_S < blocks, 0)
        written_S = part_S % chunks * CHUNK < count_S
        at_S = (part_S.to(tl.int64) * tokens + token) * D
        there_SD = written_S[:, None] & (d_D < D)[None, :]
        at_SD = at_S[:, None] + d_D[None, :]
        sum_SD += tl.load(part_STD + at_SD, there_SD, 0.0)
    y_D = tl.sum(sum_SD, axis=0)
    if down_bias_D is not None:
        y_D += tl.load(down_bias_D + d_D, d_D < D, 0.0).to(tl.float32)
    tl.store(y_TD + token * D + d_D, y_D.to(y_TD.dtype.element_ty), d_D < D)
