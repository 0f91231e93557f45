"""What the neurons that pruning would keep next are worth: widths by layer.

A neuron more in layer l, run for every token t with its own weights w_j, takes to first
order

    m_l = - sum_tj h_tj w_j . dL/dy_t / sum_tj 1

off the loss L; y is the FFN's output, and j one of the best neurons that were left out.
The neurons that were kept say nothing: least squares has made their slope zero.

Shape suffixes: T tokens, D hidden_size, F neurons, N those that come next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.families import DenseFFN
from moesaic.methods.expert_method import Made
from moesaic.parts.importance import by_importance

NEXT = 0.1  # of a layer's neurons: half of what a round adds at most


def next_neurons(ffn: DenseFFN, made: Made) -> DenseFFN:
    """The dense FFN's neurons of largest contribution that were not kept.

    A tenth of all, or those that there are; none where all are kept.
    """
    assert made.partition is not None
    assert made.energy_F is not None
    order_F = by_importance(made.energy_F)
    is_kept_F = np.isin(order_F, made.partition.shared_S)
    left_out_N = order_F[~is_kept_F]
    count = math.ceil(NEXT * ffn.intermediate_size)
    next_N = torch.from_numpy(left_out_N[:count])
    return ffn.subset(next_N.to(ffn.up_FD.device))


def adds_neurons(
    ffn: DenseFFN, shift: Tensor, layer: int, bump_L: list[Tensor]
) -> Callable[..., Tensor]:
    """A forward hook: `shift`, a 0, times what these neurons would add.

    Counts pairs of token and neuron in `bump_L`.
    """

    def hook(block: Any, inputs: Any, output: Tensor) -> Tensor:
        with torch.no_grad():
            x_TD = inputs[0].flatten(0, -2)
            h_TN = ffn.hidden(x_TD)
            added_TD = h_TN @ ffn.down_DF.T
            bump_L[layer] = bump_L[layer] + h_TN.numel()
        return output + shift * added_TD.view_as(output)

    return hook
