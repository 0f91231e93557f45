"""Whole blocks on a GPU, for many tokens at once.

`_gates` scores the experts and chooses. Where few enough run, gathered_triton.py makes
hidden states of those; else torch makes those of all, one product for all experts, and
`_masked` multiplies them with their gates, 0 for experts that do not run. W_down is one
product for all experts in torch, of zeros too: sums over a token's experts would write as
many outputs as it runs experts.

Shape suffixes: T tokens, D hidden_size, R experts, M neurons of an expert, N rows of a
matrix, S neurons of the shared expert, C columns, F hidden states of a token, Z directions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from moesaic.kernels.blocks_triton import (
    gates_of,
    pairs_of,
    store_gates,
    with_pairs,
)
from moesaic.kernels.experts_triton import (
    FEWEST,
    tile_of,
    tiling,
    tokens_of,
    unit_of,
)
from moesaic.kernels.gathered_triton import gathered, gathering_pays
from moesaic.kernels.tiles_triton import activated, multiplied

TOKENS = tl.constexpr(16)  # of a program of `_gates`
TILE = 8192  # weights of the router that a program of `_gates` reads at once
WIDTH = 1024  # hidden states of a program of `_masked`


@torch.library.custom_op("moesaic::prompts", mutates_args=())
def prompts(
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
    """What `blocks` gives, (T, D)."""
    tokens, hidden = x_TD.shape
    count = len(first_RND)
    beside_ND = router_gate_RD if direction_ZD is None else direction_ZD
    beside = 0 if beside_ND is None else len(beside_ND)
    padded = max(FEWEST, triton.next_power_of_2(count))
    padded_beside = max(FEWEST, triton.next_power_of_2(beside))
    rows = padded + (padded_beside if beside else 0)
    gate_TR = x_TD.new_empty((tokens, count), dtype=torch.float32)
    with torch.cuda.device_of(x_TD):  # Triton launches on the current one
        _gates[(triton.cdiv(tokens, TOKENS.value),)](
            x_TD,
            router_RD,
            beside_ND,
            direction_bias_Z,
            bias_R,
            scale_R,
            gate_TR,
            tokens,
            hidden,
            count,
            beside,
            active if cap is None else cap,
            EXPERTS=padded,
            BESIDE=padded_beside,
            DIRECTIONS=0 if direction_ZD is None else beside,
            BY_THRESHOLD=cap is not None,
            GATED=router_gate_RD is not None,
            COPIES=copies,
            ABSOLUTE=absolute,
            ACTIVATION=activation,
            **tiling(_tiling_of_gates(rows), x_TD.dtype),
        )
        h_TF = routed_hidden(
            x_TD, first_RND, gate_TR, active, gated, activation
        )
        down_DF = flat_down(down_RDM)
        if shared_up_SD is None or shared_down_DS is None:
            return linear(h_TF, down_DF)
        up_TS = linear(x_TD, shared_up_SD)
        gate_TS = up_TS
        if shared_gate_SD is not None:
            gate_TS = linear(x_TD, shared_gate_SD)
        shared = up_TS.shape[1]
        h_TS = _activations(gate_TS, up_TS, None, 1, shared, gated, activation)
    y_TD = linear(h_TS, shared_down_DS)
    return y_TD.addmm_(h_TF, down_DF.T)


@prompts.register_fake
def _shape_of_prompts(x_TD: Tensor, *others: object) -> Tensor:
    return torch.empty_like(x_TD)


def _tiling_of_gates(rows: int) -> dict[str, int]:
    """The wider, the fewer steps; but a wide tile of many rows fits no GPU."""
    width = min(max(TILE // triton.next_power_of_2(rows), 64), 256)
    return {
        "WIDTH": width,
        "num_warps": 8 if width == 256 else 4,
        "num_stages": 3,
    }


def routed_hidden(
    x_TD: Tensor,
    first_RND: Tensor,
    gate_TR: Tensor,
    active: int,
    gated: bool,
    activation: int,
) -> Tensor:
    """Hidden states of all experts times their gates, 0 where they rest (T, F)."""
    if gathering_pays(x_TD, first_RND, active, gated):
        return gathered(x_TD, first_RND, gate_TR, active, gated, activation)
    count, in_expert, _ = first_RND.shape
    neurons = in_expert // 2 if gated else in_expert
    up_TN = linear(x_TD, first_RND.flatten(0, 1))
    gate_TN = up_TN
    if gated:  # W_up follows W_gate in every expert
        up_TN = up_TN[:, neurons:]
    return _activations(
        gate_TN, up_TN, gate_TR, count, neurons, gated, activation
    )


def flat_down(down_RDM: Tensor) -> Tensor:
    """W_down of all experts beside each other (D, F): a copy, unless they lie so."""
    return down_RDM.transpose(0, 1).flatten(1)


def _activations(
    gate_TN: Tensor,
    up_TN: Tensor,
    gate_TR: Tensor | None,
    count: int,
    neurons: int,
    gated: bool,
    activation: int,
) -> Tensor:
    """Hidden states of all experts, times their gates where there are any (T, F)."""
    tokens = len(up_TN)
    width = count * neurons
    from_token = up_TN.stride(0)
    from_expert = from_token // count
    h_TF = up_TN.new_empty((tokens, width))
    _masked[(tokens, triton.cdiv(width, WIDTH))](
        gate_TN,
        up_TN,
        gate_TR,
        h_TF,
        width,
        neurons // unit_of(neurons),
        count,
        from_token // unit_of(from_token),
        from_expert // unit_of(from_expert),
        BY_NEURONS=unit_of(neurons),
        BY_TOKEN=unit_of(from_token),
        BY_EXPERT=unit_of(from_expert),
        GATED=gated,
        ACTIVATION=activation,
        WIDTH=WIDTH,
    )
    return h_TF


@triton.jit
def _gates(
    x_TD,
    router_RD,
    beside_ND,
    direction_bias_Z,
    bias_R,
    scale_R,
    gate_TR,
    tokens,
    D,
    R,
    beside,
    K,
    EXPERTS: tl.constexpr,
    BESIDE: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    BY_THRESHOLD: tl.constexpr,
    GATED: tl.constexpr,
    COPIES: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Gates of some tokens, 0 for experts that they do not run."""
    t_T = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    r_N = tl.arange(0, EXPERTS)
    b_N = tl.arange(0, BESIDE)
    score_NT = tl.zeros((EXPERTS, TOKENS), tl.float32)
    beside_NT = tl.zeros((BESIDE, TOKENS), tl.float32)
    for start in range(0, D, WIDTH):
        d_C = start + tl.arange(0, WIDTH)
        x_CT = tokens_of(x_TD, t_T, tokens, d_C, D, D)
        row = D + pairs_of(DIRECTIONS)
        router_NC = tile_of(router_RD, r_N, r_N < R, d_C, D, row, 1)
        score_NT = multiplied(router_NC, x_CT, score_NT)
        if beside_ND is not None:
            beside_NC = tile_of(beside_ND, b_N, b_N < beside, d_C, D, D, 1)
            beside_NT = multiplied(beside_NC, x_CT, beside_NT)
    score_TR = tl.trans(score_NT)
    beside_TR = tl.trans(beside_NT)
    if DIRECTIONS > 0:
        score_TR = with_pairs(
            score_TR, beside_TR, direction_bias_Z, router_RD, D, R,
            EXPERTS, BESIDE, DIRECTIONS,
        )  # fmt: skip
    gate, _ = gates_of(
        score_TR, beside_TR, bias_R, scale_R, t_T, tokens, R, K,
        EXPERTS, BY_THRESHOLD, GATED, COPIES, ABSOLUTE, ACTIVATION,
    )  # fmt: skip
    store_gates(gate_TR, gate, t_T, tokens, R, EXPERTS)


@triton.jit
def _masked(
    gate_TN,
    up_TN,
    gate_TR,
    h_TF,
    F,
    neuron_units,
    R,
    token_units,
    expert_units,
    BY_NEURONS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Some hidden states of a token, times their gates where there are any.

    `from_...` says how far apart products with W_gate, and with W_up, lie.
    """
    M = neuron_units * BY_NEURONS
    from_token = token_units * BY_TOKEN
    from_expert = expert_units * BY_EXPERT
    token = tl.program_id(0).to(tl.int64)
    c_C = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there_C = c_C < F
    expert_C = c_C // M
    from_C = token * from_token + expert_C * from_expert + c_C % M
    h_C = tl.load(up_TN + from_C, there_C, 0.0).to(tl.float32)
    if GATED:
        gate_C = tl.load(gate_TN + from_C, there_C, 0.0).to(tl.float32)
        h_C = activated(gate_C, ACTIVATION) * h_C
    else:
        h_C = activated(h_C, ACTIVATION)
    if gate_TR is not None:
        times_C = tl.load(gate_TR + token * R + expert_C, there_C, 0.0)
        # Of a token that does not run the expert this may be no number.
        h_C = tl.where(times_C == 0.0, 0.0, h_C * times_C)
    tl.store(h_TF + token * F + c_C, h_C.to(h_TF.dtype.element_ty), there_C)
