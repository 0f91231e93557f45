"""What the kernels in Triton are made of: products with rows, biases, activations.

Shape suffixes: T tokens, D hidden_size, N rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moesaic.kernels import gpu

# Triton's interpreter takes bfloat16 for integers when it multiplies matrices.
INTERPRETED = tl.constexpr(gpu.INTERPRETED)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """By the numbers of inputs.ACTIVATIONS."""
    if ACTIVATION == 1:
        y = tl.where(x < 0.0, 0.0, x)  # what is no number stays none
    elif ACTIVATION == 2:
        # (1 + tanh u) / 2 is the sigmoid of 2 u.
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        y = x * tl.sigmoid(u)
    else:
        y = x * tl.sigmoid(x)
    return y


@triton.jit
def multiplied(a_NC, b_CT, sum_NT):
    """The sum and a product of two matrices, in float32."""
    if INTERPRETED:
        a_NC = a_NC.to(tl.float32)
        b_CT = b_CT.to(tl.float32)
    return tl.dot(a_NC, b_CT, sum_NT, input_precision="ieee")


@triton.jit
def products(
    x_TD,
    rows_ND,
    row_N,
    wanted_N,
    t_T,
    tokens,
    D,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Of all tokens with rows of a matrix (T, N), 0 for rows that are not wanted."""
    sum_TND = tl.zeros((TOKENS, ROWS, WIDTH), tl.float32)
    for start in range(0, D, WIDTH):
        d_D = start + tl.arange(0, WIDTH)
        in_x_TD = (t_T < tokens)[:, None] & (d_D < D)[None, :]
        x = tl.load(x_TD + t_T[:, None] * D + d_D[None, :], in_x_TD, 0.0)
        in_rows_ND = wanted_N[:, None] & (d_D < D)[None, :]
        at_ND = row_N.to(tl.int64)[:, None] * D + d_D[None, :]
        rows = tl.load(rows_ND + at_ND, in_rows_ND, 0.0)
        sum_TND += x.to(tl.float32)[:, None, :] * rows.to(tl.float32)[None]
    return tl.sum(sum_TND, axis=2)


@triton.jit
def with_bias(y_TN, bias_N, row_N, wanted_N):
    """Products and what is added to them, where there is anything."""
    if bias_N is not None:
        some_N = tl.load(bias_N + row_N, wanted_N, 0.0)
        y_TN += some_N.to(tl.float32)[None, :]
    return y_TN
