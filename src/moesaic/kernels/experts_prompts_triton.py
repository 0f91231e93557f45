"""Experts on a GPU, for many tokens at once, where another's router has chosen.

Shape suffixes: T tokens, D hidden_size, R experts, K of them for a token, M neurons of an
expert, N rows of its first matrix, F hidden states of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from moesaic.kernels.prompts_triton import flat_down, routed_hidden


@torch.library.custom_op("moesaic::experts_prompts", mutates_args=())
def experts_prompts(
    x_TD: Tensor,
    first_RND: Tensor,
    down_RDM: Tensor,
    index_TK: Tensor,
    gate_TK: Tensor,
    gated: bool,
    activation: int,
) -> Tensor:
    """What `experts` of experts_triton.py gives, (T, D).

    Costs 2 R M D FLOPs a token for W_down, of every expert, and 4 K M D to 4 R M D for
    the others.
    """
    count, active = len(first_RND), index_TK.shape[1]
    is_one_TK = (index_TK >= 0) & (index_TK < count)
    column_TK = index_TK.long().where(is_one_TK, count)  # nobody's
    gate_TR = x_TD.new_zeros((len(x_TD), count + 1), dtype=torch.float32)
    gate_TR.scatter_add_(1, column_TK, gate_TK.float())
    gate_TR = gate_TR[:, :count].contiguous()
    with torch.cuda.device_of(x_TD):  # Triton launches on the current one
        h_TF = routed_hidden(
            x_TD, first_RND, gate_TR, active, gated, activation
        )
    return linear(h_TF, flat_down(down_RDM))


@experts_prompts.register_fake
def _shape_of_experts_prompts(x_TD: Tensor, *others: object) -> Tensor:
    return torch.empty_like(x_TD)
