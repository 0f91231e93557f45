"""Directions whose products a quadratic router reads besides the input itself.

Shape suffixes: T tokens, D hidden_size, C directions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.calibration.share import Rows
from moesaic.parts.ridge_router import mean_of


@torch.no_grad()
def directions(rows: Rows, count: int) -> tuple[Tensor, Tensor]:
    """Weight (C, D) and bias (C,) of z = (x - mean) . v / std.

    v are the first principal axes of x. An expert's energy is even in the
    pre-activations it multiplies, which no linear score can follow; products of
    pairs can. Costs 2 T D^2 FLOPs and an eigendecomposition in float64. Fewer than
    `count` axes where x has no more variance.
    """
    mean_D = mean_of(rows)
    gram_DD: Tensor | float = 0.0
    tokens = 0
    for x_TD in rows.blocks():
        centred_TD = x_TD - mean_D
        gram_DD = gram_DD + centred_TD.T @ centred_TD
        tokens += len(x_TD)
    tokens_of_all = rows.share.total(tokens)
    covariance_DD = rows.share.total_of(gram_DD).double() / tokens_of_all
    variance_C, axes_DC = largest_axes(covariance_DD, count)
    std_C = variance_C.clamp(min=1e-12).sqrt()
    varies_C = variance_C > 1e-10 * variance_C[0]
    weight_CD = (axes_DC / std_C).T
    weight_CD = weight_CD * varies_C[:, None]
    bias_C = -(weight_CD @ mean_D.double())
    return weight_CD.float(), bias_C.float()


def largest_axes(symmetric_DD: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues (C,), falling, and their eigenvectors (D, C).

    An eigenvector's sign is the solver's choice: here its largest entry is positive.
    """
    values_D, axes_DD = torch.linalg.eigh(symmetric_DD)
    values_C = values_D[-count:].flip(0)
    axes_DC = axes_DD[:, -count:].flip(1)
    largest_1C = axes_DC.abs().argmax(0, keepdim=True)
    peak_C = axes_DC.gather(0, largest_1C)[0]
    return values_C, axes_DC * peak_C.sign()
