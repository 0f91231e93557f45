"""Energies of experts: how much each adds to the output of a token.

Shape suffixes: T tokens, D hidden_size, F neurons, N those of all experts, R routed
experts, M neurons of one.
"""

from __future__ import annotations

from torch import Tensor

from moesaic.families import DenseFFN


def expert_grams(ffn: DenseFFN, experts_RM: Tensor) -> Tensor:
    """W_j W_j^T of every expert's output vectors (R, M, M); 2 F M D FLOPs."""
    down_RMD = ffn.down_DF.float().T[experts_RM]
    return down_RMD @ down_RMD.mT


def expert_energies(
    h_TF: Tensor,
    experts_RM: Tensor,
    gram_RMM: Tensor,
) -> Tensor:
    """e_tj = ||sum over expert j's neurons of h_ti w_i||^2 (T, R).

    2 T F M FLOPs, not 2 T F D.
    """
    h_TN = h_TF.float().index_select(1, experts_RM.flatten())
    h_TRM = h_TN.unflatten(1, tuple(experts_RM.shape))
    h_RTM = h_TRM.transpose(0, 1)
    terms_RTM = (h_RTM @ gram_RMM).mul_(h_RTM)
    energy_TR: Tensor = terms_RTM.sum(-1).T
    return energy_TR.clamp(min=0)
