"""Directions whose products a quadratic router reads besides the input itself.

Shape suffixes: T tokens, D hidden_size, C directions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.parts.ridge_router import Blocks, mean_of


@torch.no_grad()
def directions(blocks: Blocks, count: int) -> tuple[Tensor, Tensor]:
    """Weight (C, D) and bias (C,) of z = (x - mean) . v / std, v the first principal axes of x.

    An expert's energy is even in the pre-activations it multiplies, which no linear score can
    follow; products of pairs can. Costs 2 T D^2 FLOPs and an eigendecomposition in float64.
    Fewer than `count` axes where x has no more variance.
    """
    mean_D = mean_of(blocks)
    gram_DD: Tensor | float = 0.0
    tokens = 0
    for x_TD in blocks():
        gram_DD = gram_DD + (x_TD - mean_D).T @ (x_TD - mean_D)
        tokens += len(x_TD)
    assert isinstance(gram_DD, Tensor)
    mean_D = mean_D.double()
    variance_D, axes_DD = torch.linalg.eigh(gram_DD.double() / tokens)
    variance_C, axes_DC = (
        variance_D[-count:].flip(0),
        axes_DD[:, -count:].flip(1),
    )
    # Each axis' sign is the eigensolver's choice; take the one with a positive largest entry.
    peak_C = axes_DC.gather(0, axes_DC.abs().argmax(0, keepdim=True))[0]
    weight_CD = (axes_DC * peak_C.sign() / variance_C.clamp(min=1e-12).sqrt()).T
    weight_CD = weight_CD * (variance_C > 1e-10 * variance_C[0])[:, None]
    return weight_CD.float(), -(weight_CD @ mean_D).float()
