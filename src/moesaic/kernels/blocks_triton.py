"""Whole blocks on a GPU, for a few tokens at once: the router, in Triton.

`_route` scores the experts, chooses, and lists those that any token runs; the kernels of
experts_triton.py do the rest.

Shape suffixes: T tokens, D hidden_size, R experts, A listed experts, M neurons of an
expert, N rows of a matrix, S neurons of the shared expert, C columns of a product, P
programs that share a sum, Z directions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.experts_triton import (
    FEWEST,
    Places,
    is_last,
    run_listed,
    tile_of,
    tiling,
    tokens_of,
    write_list,
)
from moesaic.kernels.tiles_triton import activated, multiplied

ROUTE = {"ROWS": 16, "WIDTH": 128, "num_warps": 4, "num_stages": 3}
LOWEST = tl.constexpr(-1e38)  # of what is no expert
STEPS = 4  # of WIDTH weights that a program of `_route` takes


@torch.library.custom_op("moesaic::blocks", mutates_args=())
def blocks(
    x_TD: Tensor,
    router_RD: Tensor,
    router_gate_RD: Tensor | None,
    direction_ZD: Tensor | None,
    direction_bias_Z: Tensor | None,
    bias_R: Tensor,
    scale_R: Tensor,
    shared_gate_SD: Tensor | None,
    shared_up_SD: Tensor | None,
    shared_down_DS: Tensor | None,
    first_RND: Tensor,
    down_RDM: Tensor,
    active: int,
    cap: int | None,
    gated: bool,
    activation: int,
    copies: bool,
    absolute: bool,
) -> Tensor:
    """Shared expert, and the `active` experts of largest score + bias, (T, D).

    With a `cap` those where this sum is above zero, at least the first and at most so
    many; `active` is then how many run on average. The gate of an expert is
    1 + softmax(scores) * scale. Scores are products with the router's rows; with `copies`
    its rows are W_up of one neuron for each expert, beside them W_gate, and the score is
    that neuron's hidden state or its size. A bias is then added to probabilities, but for
    a `cap`. With directions z = direction_ZD x + bias the rows multiply [x, z_i z_j for all
    i <= j]. Weights as for `experts`.
    """
    most = active if cap is None else cap
    place = Places(x_TD, len(first_RND), most)
    count, hidden = len(first_RND), x_TD.shape[1]
    beside_ND = router_gate_RD if direction_ZD is None else direction_ZD
    beside = 0 if beside_ND is None else len(beside_ND)
    rows = max(count, beside)
    padded = max(FEWEST, triton.next_power_of_2(rows))
    tiles = triton.cdiv(rows, ROUTE["ROWS"])
    shares = triton.cdiv(hidden, STEPS * ROUTE["WIDTH"])
    matrices = 1 if beside_ND is None else 2
    part_PTR = x_TD.new_empty(
        (matrices * shares, place.padded, padded), dtype=torch.float32
    )
    with torch.cuda.device_of(x_TD):  # Triton launches on the current one
        _route[(tiles, shares)](
            x_TD,
            router_RD,
            beside_ND,
            direction_bias_Z,
            bias_R,
            scale_R,
            part_PTR,
            place.arrived,
            place.gate_TR,
            place.list_A,
            place.count,
            len(x_TD),
            hidden,
            count,
            beside,
            most,
            TOKENS=place.padded,
            EXPERTS=padded,
            DIRECTIONS=0 if direction_ZD is None else beside,
            BY_THRESHOLD=cap is not None,
            GATED=router_gate_RD is not None,
            COPIES=copies,
            ABSOLUTE=absolute,
            ACTIVATION=activation,
            **tiling(ROUTE, x_TD.dtype),
        )
        return run_listed(
            x_TD,
            shared_gate_SD,
            shared_up_SD,
            shared_down_DS,
            first_RND,
            down_RDM,
            place,
            gated,
            activation,
        )


@blocks.register_fake
def _shape_of_blocks(x_TD: Tensor, *others: object) -> Tensor:
    return torch.empty_like(x_TD)


@triton.jit
def _route(
    x_TD,
    router_RD,
    beside_ND,
    direction_bias_Z,
    bias_R,
    scale_R,
    part_PTR,
    arrived,
    gate_TR,
    list_A,
    count,
    tokens,
    D,
    R,
    beside,
    K,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    BY_THRESHOLD: tl.constexpr,
    GATED: tl.constexpr,
    COPIES: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Part of some scores; whoever comes last adds them up, and chooses.

    `beside_ND` is W_gate of copies or the directions, if there is either.
    """
    share = tl.program_id(1)
    shares = tl.num_programs(1)
    r_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t_T = tl.arange(0, TOKENS)
    score_NT = tl.zeros((ROWS, TOKENS), tl.float32)
    beside_NT = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(share * WIDTH, D, shares * WIDTH):
        d_C = start + tl.arange(0, WIDTH)
        x_CT = tokens_of(x_TD, t_T, tokens, d_C, D, D)
        row = D + pairs_of(DIRECTIONS)
        router_NC = tile_of(router_RD, r_N, r_N < R, d_C, D, row, 1)
        score_NT = multiplied(router_NC, x_CT, score_NT)
        if beside_ND is not None:  # noqa: SIM102 - the compiler knows this, not the next
            if tl.program_id(0) * ROWS < beside:
                beside_NC = tile_of(beside_ND, r_N, r_N < beside, d_C, D, D, 1)
                beside_NT = multiplied(beside_NC, x_CT, beside_NT)
    at_NT = (share * TOKENS + t_T)[None, :] * EXPERTS + r_N[:, None]
    tl.store(part_PTR + at_NT, score_NT, (r_N < EXPERTS)[:, None])
    beside_PTR = part_PTR + shares * TOKENS * EXPERTS
    if beside_ND is not None:
        tl.store(beside_PTR + at_NT, beside_NT, (r_N < EXPERTS)[:, None])
    if is_last(arrived, tl.num_programs(0) * shares):
        e_R = tl.arange(0, EXPERTS)
        runs_R = tl.zeros((EXPERTS,), tl.int32)
        for first in range(0, tokens, 16):  # tokens at a time
            s_T = first + tl.arange(0, 16)
            at_TR = s_T[:, None] * EXPERTS + e_R[None, :]
            score_TR = _added(part_PTR, shares, at_TR, R, TOKENS, EXPERTS)
            beside_TR = score_TR
            if beside_ND is not None:
                beside_TR = _added(
                    beside_PTR, shares, at_TR, beside, TOKENS, EXPERTS
                )
            if DIRECTIONS > 0:
                score_TR = with_pairs(
                    score_TR, beside_TR, direction_bias_Z, router_RD, D, R,
                    EXPERTS, EXPERTS, DIRECTIONS,
                )  # fmt: skip
            gate, chosen_TR = gates_of(
                score_TR, beside_TR, bias_R, scale_R, s_T, tokens, R, K,
                EXPERTS, BY_THRESHOLD, GATED, COPIES, ABSOLUTE, ACTIVATION,
            )  # fmt: skip
            store_gates(gate_TR, gate, s_T, tokens, R, EXPERTS)
            runs_R = runs_R | tl.max(chosen_TR.to(tl.int32), axis=0)
        write_list(runs_R, e_R, list_A, count)


@triton.jit
def pairs_of(DIRECTIONS: tl.constexpr):
    """How many products their pairs have."""
    return DIRECTIONS * (DIRECTIONS + 1) // 2


@triton.jit
def with_pairs(
    score_TR,
    product_TN,
    direction_bias_Z,
    router_RD,
    D,
    R,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIRECTIONS: tl.constexpr,
):
    """Scores and what the products of pairs of directions add, z_i z_j for all i <= j."""
    e_R = tl.arange(0, EXPERTS)
    weight_R = router_RD + e_R.to(tl.int64) * (D + pairs_of(DIRECTIONS)) + D
    for i in tl.static_range(DIRECTIONS):
        z_i_T1 = _direction(product_TN, direction_bias_Z, i, COLUMNS)
        for j in tl.static_range(i, DIRECTIONS):
            z_j_T1 = _direction(product_TN, direction_bias_Z, j, COLUMNS)
            some_R = tl.load(weight_R, e_R < R, 0.0).to(tl.float32)
            score_TR += z_i_T1 * z_j_T1 * some_R[None, :]
            weight_R += 1
    return score_TR


@triton.jit
def _direction(
    product_TN, direction_bias_Z, number: tl.constexpr, COLUMNS: tl.constexpr
):
    is_it_1N = (tl.arange(0, COLUMNS) == number)[None, :]
    z_T1 = tl.sum(tl.where(is_it_1N, product_TN, 0.0), axis=1)[:, None]
    return z_T1 + tl.load(direction_bias_Z + number).to(tl.float32)


@triton.jit
def gates_of(
    up_TR,
    beside_TR,
    bias_R,
    scale_R,
    t_T,
    tokens,
    R,
    K,
    EXPERTS: tl.constexpr,
    BY_THRESHOLD: tl.constexpr,
    GATED: tl.constexpr,
    COPIES: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """From the router's products: gates, 0 for experts that do not run, and who runs."""
    e_R = tl.arange(0, EXPERTS)
    bias_1R = tl.load(bias_R + e_R, e_R < R, 0.0)[None, :]
    scale_1R = tl.load(scale_R + e_R, e_R < R, 0.0)[None, :]
    score_TR = up_TR
    if COPIES:
        if GATED:
            score_TR = activated(beside_TR, ACTIVATION) * up_TR
        else:
            score_TR = activated(up_TR, ACTIVATION)
        if ABSOLUTE:
            score_TR = tl.abs(score_TR)
    there_TR = (t_T < tokens)[:, None] & (e_R < R)[None, :]
    score_TR = tl.where((e_R < R)[None, :], score_TR, LOWEST)
    top_T1 = tl.max(score_TR, axis=1)[:, None]
    part_TR = tl.exp(score_TR - top_T1)
    share_TR = part_TR / tl.sum(part_TR, axis=1)[:, None]
    value_TR = score_TR + bias_1R
    # What is no expert comes after all that are, the lowest too.
    value_TR = tl.where(there_TR, value_TR, float("-inf"))
    if COPIES and not BY_THRESHOLD:
        # Without a bias scores rank: probabilities may underflow.
        has_bias = tl.max(tl.abs(bias_1R)) > 0.0
        by_share_TR = share_TR + bias_1R
        by_share_TR = tl.where(there_TR, by_share_TR, float("-inf"))
        value_TR = tl.where(has_bias, by_share_TR, value_TR)
    chosen_TR = _best(value_TR, K, EXPERTS)
    if BY_THRESHOLD:
        finite_TR = tl.where(value_TR == value_TR, value_TR, float("inf"))
        first_T1 = tl.argmax(finite_TR, axis=1)[:, None]
        chosen_TR = chosen_TR & ((value_TR > 0.0) | (e_R[None, :] == first_T1))
    chosen_TR = chosen_TR & there_TR
    gate = tl.where(chosen_TR, 1.0 + share_TR * scale_1R, 0.0)
    return gate, chosen_TR


@triton.jit
def store_gates(gate_TR, gate, t_T, tokens, R, EXPERTS: tl.constexpr):
    e_R = tl.arange(0, EXPERTS)
    there_TR = (t_T < tokens)[:, None] & (e_R < R)[None, :]
    tl.store(gate_TR + t_T[:, None] * R + e_R[None, :], gate, there_TR)


@triton.jit
def _added(
    part_PTR, shares, at_TR, R, TOKENS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Sums of what all programs made, in their order, 0 for what is no expert."""
    is_one_1R = (tl.arange(0, EXPERTS) < R)[None, :]
    sum_TR = tl.zeros(at_TR.shape, tl.float32)
    for number in range(shares):
        place_TR = number * TOKENS * EXPERTS + at_TR
        sum_TR += tl.load(
            part_PTR + place_TR, is_one_1R, 0.0, cache_modifier=".cg"
        )
    return sum_TR


@triton.jit
def _best(value_TR, K, EXPERTS: tl.constexpr):
    """The K largest of each token, the first of equal ones; no number counts as infinite."""
    value_TR = tl.where(value_TR == value_TR, value_TR, float("inf"))
    sorted_TR = tl.sort(value_TR, dim=1, descending=True)
    is_kth_1R = (tl.arange(0, EXPERTS) == K - 1)[None, :]
    kth_TR = tl.where(is_kth_1R, sorted_TR, float("-inf"))
    kth_T1 = tl.max(kth_TR, axis=1)[:, None]
    above_TR = value_TR > kth_T1
    equal_TR = (value_TR == kth_T1).to(tl.int32)
    room_T1 = K - tl.sum(above_TR.to(tl.int32), axis=1)[:, None]
    number_TR = tl.cumsum(equal_TR, axis=1)
    return above_TR | ((equal_TR > 0) & (number_TR <= room_T1))
