"""One streaming pass over calibration tokens: the statistics of one FFN.

Shape suffixes: T tokens, D hidden_size, F neurons, K activation_top_k.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array

from moesaic.adapters import DenseFFN
from moesaic.errors import MoesaicError


@dataclass(frozen=True)
class Profile:
    """Statistics of an FFN's hidden state over q calibration tokens.

    `active` is the paper's A (Section 4.1): a q x F matrix with K ones per row, kept sparse.
    """

    active: csr_array
    energy_F: NDArray[np.float64]  # sum over tokens of h squared

    @property
    def tokens(self) -> int:
        return int(self.active.shape[0])

    @property
    def count_F(self) -> NDArray[np.int64]:
        """Tokens for which each neuron is among the K largest; count / tokens is the paper's mu."""
        return np.bincount(self.active.indices, minlength=self.active.shape[1])


@torch.no_grad()
def profile_ffn(
    blocks: Iterable[torch.Tensor], ffn: DenseFFN, activation_top_k: int, normalise: bool
) -> Profile:
    """Profiles one FFN on blocks of its inputs x (T, D) in one pass.

    Marks the K neurons of largest abs(h) per token (paper, eq. 14). `normalise` computes h from
    unit-length inputs and weight rows, as the authors' code does. Holds one block of hidden
    states at a time and 4 K bytes a token. Raises MoesaicError where h is not finite.
    """
    ffn = ffn.with_unit_rows() if normalise else ffn
    top_k = min(activation_top_k, ffn.intermediate_size)
    marks, energy_F = [], torch.zeros(ffn.intermediate_size, dtype=torch.float64)
    for x_TD in blocks:
        if normalise:
            x_TD = torch.nn.functional.normalize(x_TD, dim=-1)
        h_TF = ffn.hidden(x_TD).float()
        energy_F += torch.linalg.vector_norm(h_TF, dim=0).square().cpu().double()
        marks.append(h_TF.abs_().topk(top_k, dim=-1, sorted=False).indices.int().cpu())
    if not torch.isfinite(energy_F).all():
        raise MoesaicError("the FFN's activations are not finite")
    active_TK = torch.cat(marks).numpy()
    tokens = active_TK.shape[0]
    active = csr_array(
        (
            np.ones(active_TK.size, dtype=np.int32),
            active_TK.reshape(-1),
            np.arange(0, active_TK.size + 1, top_k, dtype=np.int64),
        ),
        shape=(tokens, ffn.intermediate_size),
    )
    return Profile(active, energy_F.numpy())
