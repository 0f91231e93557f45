"""Experts on a GPU, for a few tokens at once: kernels in Triton.

`_list` lists the experts that any token runs, `_hidden` makes hidden states, those of
the shared expert and then those of the listed ones, `_output` multiplies them with
W_down. Weights are read once for all tokens, those of experts that nobody chose not at
all. blocks_triton.py puts the router before that.

Sums that several programs share are added up, in their order, by the program that comes
last: two runs give the same bits. No number goes back to the processor, so a CUDA graph
can hold it all.

Shape suffixes: T tokens, D hidden_size, R experts, K of them for a token, A listed
experts, M neurons of an expert, N rows of a matrix, S neurons of the shared expert,
C columns of a product, F hidden states of a token, P programs that share a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.tiles_triton import activated, multiplied

# Rows, columns and tokens of the smallest product that Triton makes.
FEWEST = 16
UNIT = 8  # numbers of bfloat16 that are read at once where they lie so
# Of twelve tilings each among the fastest on an H200 (benchmarks/results), in bfloat16.
HIDDEN = {"ROWS": 16, "WIDTH": 128, "num_warps": 2, "num_stages": 4}
OUTPUT = {"ROWS": 64, "WIDTH": 128, "num_warps": 4, "num_stages": 3}
PROGRAMS = 264  # that share W_down, two for each part of the GPU


@torch.library.custom_op("moesaic::experts", mutates_args=())
def experts(
    x_TD: Tensor,
    first_RND: Tensor,
    down_RDM: Tensor,
    index_TK: Tensor,
    gate_TK: Tensor,
    gated: bool,
    activation: int,
) -> Tensor:
    """y_t = sum over k of gate_tk W_down h, h = act(W_gate x_t) * (W_up x_t), (T, D).

    `first_RND` holds W_gate and W_up one after the other, or W_up alone, whose h is
    act(W_up x). An index beyond the experts is nobody's. `down_RDM` may lie in memory as
    it likes, the others row by row. Reads 3 M D weights, or 2 M D, of every expert that
    a token runs.
    """
    count, active = len(first_RND), index_TK.shape[1]
    place = Places(x_TD, count, active)
    padded = max(FEWEST, triton.next_power_of_2(count))
    with torch.cuda.device_of(x_TD):
        _list[(1,)](
            index_TK,
            gate_TK,
            place.gate_TR,
            place.list_A,
            place.count,
            len(x_TD),
            count,
            active,
            EXPERTS=padded,
        )
        return run_listed(
            x_TD,
            None,
            None,
            None,
            first_RND,
            down_RDM,
            place,
            gated,
            activation,
        )


@experts.register_fake
def _shape_of_experts(x_TD: Tensor, *others: object) -> Tensor:
    return torch.empty_like(x_TD)


class Places:
    """What one kernel writes for the next."""

    def __init__(self, x_TD: Tensor, count: int, active: int):
        tokens, hidden = x_TD.shape
        self.padded = max(FEWEST, triton.next_power_of_2(tokens))
        self.most = min(count, tokens * active)  # experts that can be listed
        self.tiles = triton.cdiv(hidden, OUTPUT["ROWS"])
        numbers = x_TD.new_empty(self.most + 1, dtype=torch.int32)
        self.list_A = numbers[1:]
        self.count = numbers[:1]
        self.gate_TR = x_TD.new_empty((tokens, count), dtype=torch.float32)
        # Of `_route` one, and one for each tile of the output.
        self.arrived = x_TD.new_zeros(1 + self.tiles, dtype=torch.int32)


def run_listed(
    x_TD: Tensor,
    shared_gate_SD: Tensor | None,
    shared_up_SD: Tensor | None,
    shared_down_DS: Tensor | None,
    first_RND: Tensor,
    down_RDM: Tensor,
    place: Places,
    gated: bool,
    activation: int,
) -> Tensor:
    """The shared expert and the listed ones."""
    tokens, hidden = x_TD.shape
    neurons = down_RDM.shape[2]
    shared = 0 if shared_up_SD is None else len(shared_up_SD)
    # Nothing is read of what stands in for a matrix that is not there.
    if shared_up_SD is None or shared_down_DS is None:
        shared_up_SD = first_RND
        shared_down_DS = down_RDM[0]
    if shared_gate_SD is None:
        shared_gate_SD = shared_up_SD
    listed = place.most * neurons
    rows = HIDDEN["ROWS"]
    shares = triton.cdiv(PROGRAMS, place.tiles)
    shares = min(shares, triton.cdiv(shared + listed, OUTPUT["WIDTH"]))
    # Told which of these numbers `UNIT` divides, Triton reads 16 bytes at a time.
    width = shared + listed
    shared_row, shared_column = shared_down_DS.stride()
    of_expert, of_row, of_column = down_RDM.stride()
    h_TF = x_TD.new_empty((tokens, width))
    part_PTD = x_TD.new_empty((shares, tokens, hidden), dtype=torch.float32)
    y_TD = torch.empty_like(x_TD)
    shared_tiles = triton.cdiv(shared, rows)
    _hidden[(shared_tiles + triton.cdiv(listed, rows),)](
        x_TD,
        shared_gate_SD,
        shared_up_SD,
        first_RND,
        place.gate_TR,
        place.list_A,
        place.count,
        h_TF,
        tokens,
        hidden,
        len(first_RND),
        shared,
        neurons,
        width,
        GATED=gated,
        ACTIVATION=activation,
        TOKENS=place.padded,
        **tiling(HIDDEN, x_TD.dtype),
    )
    _output[(place.tiles, shares)](
        h_TF,
        shared_down_DS,
        down_RDM,
        place.list_A,
        place.count,
        part_PTD,
        place.arrived,
        y_TD,
        tokens,
        hidden,
        shared // unit_of(shared),
        neurons // unit_of(neurons),
        width // unit_of(width),
        shared_row // unit_of(shared_row),
        shared_column,
        of_expert // unit_of(of_expert),
        of_row // unit_of(of_row),
        of_column,
        BY_SHARED=unit_of(shared),
        BY_NEURONS=unit_of(neurons),
        BY_WIDTH=unit_of(width),
        BY_SHARED_ROW=unit_of(shared_row),
        BY_EXPERT=unit_of(of_expert),
        BY_ROW=unit_of(of_row),
        TOKENS=place.padded,
        **tiling(OUTPUT, x_TD.dtype),
    )
    return y_TD


def unit_of(number: int) -> int:
    return UNIT if number % UNIT == 0 else 1


def tiling(sizes: dict[str, int], dtype: torch.dtype) -> dict[str, int]:
    """Numbers of twice the width take half as many: shared memory holds no more."""
    if dtype != torch.float32:
        return sizes
    return sizes | {"WIDTH": sizes["WIDTH"] // 2}


@triton.jit
def _list(
    index_TK,
    gate_TK,
    gate_TR,
    list_A,
    count,
    tokens,
    R,
    K,
    EXPERTS: tl.constexpr,
):
    """Gates of all experts, 0 for those that a token does not run, and who runs."""
    e_R = tl.arange(0, EXPERTS)
    runs_R = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, tokens, 16):
        t_T = first + tl.arange(0, 16)
        gate = tl.zeros((16, EXPERTS), tl.float32)
        chosen_TR = tl.zeros((16, EXPERTS), tl.int32)
        for k in range(K):
            expert_T = tl.load(index_TK + t_T * K + k, t_T < tokens, -1)
            of_k_T = tl.load(gate_TK + t_T * K + k, t_T < tokens, 0.0)
            is_it_TR = expert_T[:, None] == e_R[None, :]
            gate += tl.where(is_it_TR, of_k_T.to(tl.float32)[:, None], 0.0)
            chosen_TR = chosen_TR | is_it_TR.to(tl.int32)
        there_TR = (t_T < tokens)[:, None] & (e_R < R)[None, :]
        tl.store(gate_TR + t_T[:, None] * R + e_R[None], gate, there_TR)
        chosen_TR = tl.where(there_TR, chosen_TR, 0)
        runs_R = runs_R | tl.max(chosen_TR, axis=0)
    write_list(runs_R, e_R, list_A, count)


@triton.jit
def _hidden(
    x_TD,
    shared_gate_SD,
    shared_up_SD,
    first_RND,
    gate_TR,
    list_A,
    count,
    h_TF,
    tokens,
    D,
    R,
    S,
    M,
    F,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Some hidden states of all tokens, times their gates."""
    shared_tiles = tl.cdiv(S, ROWS)
    tile = tl.program_id(0)
    t_T = tl.arange(0, TOKENS)
    if tile < shared_tiles:
        n_N = tile * ROWS + tl.arange(0, ROWS)
        h_NT = _activations(
            x_TD, shared_gate_SD, shared_up_SD, n_N, n_N, n_N < S,
            t_T, tokens, D, GATED, ACTIVATION, TOKENS, ROWS, WIDTH,
        )  # fmt: skip
        _store(h_TF, h_NT, n_N, n_N < S, t_T, tokens, F)
    else:
        n_N = (tile - shared_tiles) * ROWS + tl.arange(0, ROWS)
        listed = tl.load(count)
        if (tile - shared_tiles) * ROWS < listed * M:
            place_N = n_N // M
            wanted_N = place_N < listed
            expert_N = tl.load(list_A + place_N, wanted_N, 0)
            gate_row_N = expert_N.to(tl.int64) * M + n_N % M
            up_row_N = gate_row_N
            if GATED:
                gate_row_N += expert_N.to(tl.int64) * M
                up_row_N = gate_row_N + M
            h_NT = _activations(
                x_TD, first_RND, first_RND, gate_row_N, up_row_N, wanted_N,
                t_T, tokens, D, GATED, ACTIVATION, TOKENS, ROWS, WIDTH,
            )  # fmt: skip
            there_NT = wanted_N[:, None] & (t_T < tokens)[None, :]
            at_NT = t_T[None, :] * R + expert_N[:, None]
            gate_NT = tl.load(gate_TR + at_NT, there_NT, 0.0)
            # Of a token that does not run the expert this may be no number.
            h_NT = tl.where(gate_NT == 0.0, 0.0, h_NT * gate_NT)
            _store(h_TF, h_NT, S + n_N, wanted_N, t_T, tokens, F)


@triton.jit
def _output(
    h_TF,
    shared_down_DS,
    down_RDM,
    list_A,
    count,
    part_PTD,
    arrived,
    y_TD,
    tokens,
    D,
    shared_units,
    neuron_units,
    width_units,
    shared_row_units,
    shared_from_column,
    expert_units,
    row_units,
    from_column,
    BY_SHARED: tl.constexpr,
    BY_NEURONS: tl.constexpr,
    BY_WIDTH: tl.constexpr,
    BY_SHARED_ROW: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    BY_ROW: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Part of some outputs; whoever comes last adds them up.

    `from_...` says how far apart things lie in W_down.
    """
    S = shared_units * BY_SHARED
    M = neuron_units * BY_NEURONS
    F = width_units * BY_WIDTH
    shared_from_row = shared_row_units * BY_SHARED_ROW
    from_expert = expert_units * BY_EXPERT
    from_row = row_units * BY_ROW
    tile = tl.program_id(0)
    share = tl.program_id(1)
    shares = tl.num_programs(1)
    d_N = tile * ROWS + tl.arange(0, ROWS)
    t_T = tl.arange(0, TOKENS)
    y_NT = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(share * WIDTH, S, shares * WIDTH):
        s_C = start + tl.arange(0, WIDTH)
        down_NC = tile_of(
            shared_down_DS, d_N, d_N < D, s_C, S,
            shared_from_row, shared_from_column,
        )  # fmt: skip
        h_CT = tokens_of(h_TF, t_T, tokens, s_C, S, F)
        y_NT = multiplied(down_NC, h_CT, y_NT)
    listed = tl.load(count)
    for start in range(share * WIDTH, listed * M, shares * WIDTH):
        c_C = start + tl.arange(0, WIDTH)
        place_C = c_C // M
        expert_C = tl.load(list_A + place_C, place_C < listed, 0)
        at_C = expert_C.to(tl.int64) * from_expert + c_C % M * from_column
        at_NC = d_N.to(tl.int64)[:, None] * from_row + at_C[None, :]
        there_NC = (d_N < D)[:, None] & (place_C < listed)[None, :]
        down_NC = tl.load(down_RDM + at_NC, there_NC, 0.0)
        h_CT = tokens_of(h_TF + S, t_T, tokens, c_C, listed * M, F)
        y_NT = multiplied(down_NC, h_CT, y_NT)
    there_NT = (d_N < D)[:, None] & (t_T < tokens)[None, :]
    to_NT = t_T[None, :] * D + d_N[:, None]
    tl.store(part_PTD + share * tokens * D + to_NT, y_NT, there_NT)
    if is_last(arrived + 1 + tile, shares):
        y_NT = tl.zeros((ROWS, TOKENS), tl.float32)
        for number in range(shares):
            at_NT = number * tokens * D + to_NT
            y_NT += tl.load(
                part_PTD + at_NT, there_NT, 0.0, cache_modifier=".cg"
            )
        tl.store(y_TD + to_NT, y_NT.to(y_TD.dtype.element_ty), there_NT)


@triton.jit
def _activations(
    x_TD,
    gate_ND,
    up_ND,
    gate_row_N,
    up_row_N,
    wanted_N,
    t_T,
    tokens,
    D,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """act(W_gate x) * (W_up x), or act(W_up x), of some rows for all tokens (N, T)."""
    gate_NT = tl.zeros((ROWS, TOKENS), tl.float32)
    up_NT = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, D, WIDTH):
        d_C = start + tl.arange(0, WIDTH)
        x_CT = tokens_of(x_TD, t_T, tokens, d_C, D, D)
        up_NC = tile_of(up_ND, up_row_N, wanted_N, d_C, D, D, 1)
        up_NT = multiplied(up_NC, x_CT, up_NT)
        if GATED:
            gate_NC = tile_of(gate_ND, gate_row_N, wanted_N, d_C, D, D, 1)
            gate_NT = multiplied(gate_NC, x_CT, gate_NT)
    if GATED:
        h_NT = activated(gate_NT, ACTIVATION) * up_NT
    else:
        h_NT = activated(up_NT, ACTIVATION)
    return h_NT


@triton.jit
def tile_of(matrix, row_N, wanted_N, c_C, columns, from_row, from_column):
    """Some rows and columns of a matrix (N, C), 0 beyond it."""
    there_NC = wanted_N[:, None] & (c_C < columns)[None, :]
    at_NC = row_N.to(tl.int64)[:, None] * from_row + c_C[None, :] * from_column
    return tl.load(matrix + at_NC, there_NC, 0.0)


@triton.jit
def tokens_of(values_TC, t_T, tokens, c_C, columns, from_token):
    """Some columns of all tokens, turned (C, T), 0 beyond them."""
    there_CT = (c_C < columns)[:, None] & (t_T < tokens)[None, :]
    at_CT = t_T[None, :] * from_token + c_C[:, None]
    return tl.load(values_TC + at_CT, there_CT, 0.0)


@triton.jit
def _store(h_TF, h_NT, to_N, wanted_N, t_T, tokens, F):
    there_NT = wanted_N[:, None] & (t_T < tokens)[None, :]
    to_NT = t_T[None, :] * F + to_N[:, None]
    tl.store(h_TF + to_NT, h_NT.to(h_TF.dtype.element_ty), there_NT)


@triton.jit
def is_last(arrived, programs):
    """Whether the others have written already what they had to."""
    tl.debug_barrier()  # all threads of this one have
    return tl.atomic_add(arrived, 1) == programs - 1


@triton.jit
def write_list(runs_R, e_R, list_A, count):
    """The experts that any token runs, in their order, and how many they are."""
    place_R = tl.cumsum(runs_R, axis=0) - runs_R
    tl.store(list_A + place_R, e_R, runs_R > 0)
    tl.store(count, tl.sum(runs_R, axis=0))
