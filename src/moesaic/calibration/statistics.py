"""One streaming pass over calibration tokens: the statistics of one FFN.

Shape suffixes: T tokens, D hidden_size, F neurons, K activation_top_k, S tokens of the sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array

from moesaic.errors import MoesaicError
from moesaic.families import DenseFFN

SAMPLE_TOKENS = 8192  # tokens whose hidden states are kept for grouping


@dataclass(frozen=True)
class Profile:
    """Statistics of an FFN's hidden state over q calibration tokens.

    `active` is the paper's A (Section 4.1): a q x F matrix with K ones per row, kept sparse.
    `sample_x_SD` and `sample_h_SF` are inputs and hidden states of at most SAMPLE_TOKENS tokens,
    evenly spaced. What a recipe does not use is None.
    """

    tokens: int
    energy_F: NDArray[np.float64]  # sum over tokens of h squared
    sum_F: NDArray[np.float64]  # sum over tokens of h
    active: csr_array | None = None
    gram_FF: torch.Tensor | None = None  # sum over tokens of h h^T
    sample_x_SD: torch.Tensor | None = None
    sample_h_SF: torch.Tensor | None = None

    @property
    def count_F(self) -> NDArray[np.int64]:
        """Tokens for which each neuron is among the K largest; count / tokens is the paper's mu."""
        assert self.active is not None
        return np.bincount(self.active.indices, minlength=self.active.shape[1])


@torch.no_grad()
def profile_ffn(
    blocks: Iterable[torch.Tensor],
    ffn: DenseFFN,
    activation_top_k: int | None = None,
    normalise: bool = False,
    sample_of: int | None = None,
    gram: bool = False,
) -> Profile:
    """Profiles one FFN on blocks of its inputs x (T, D) in one pass.

    With `activation_top_k` marks the K neurons of largest abs(h) per token (paper, eq. 14);
    `normalise` computes h from unit-length inputs and weight rows, as the authors' code does.
    `sample_of` is the number of tokens to come where a sample is wanted. Holds one block of
    hidden states at a time, 4 K bytes a token, the sample, and with `gram` 4 F^2 bytes.
    Raises MoesaicError where h is not finite.
    """
    ffn = ffn.with_unit_rows() if normalise else ffn
    neurons, device = ffn.intermediate_size, ffn.up_FD.device
    top_k = min(activation_top_k or 0, neurons)
    stride = -(-(sample_of or 1) // SAMPLE_TOKENS)
    energy_F = torch.zeros(neurons, dtype=torch.float64)
    sum_F, tokens = torch.zeros_like(energy_F), 0
    gram_FF = torch.zeros(neurons, neurons, device=device) if gram else None
    marks, sample_x, sample_h = [], [], []
    for x_TD in blocks:
        if normalise:
            x_TD = torch.nn.functional.normalize(x_TD, dim=-1)
        h_TF = ffn.hidden(x_TD).float()
        energy_F += torch.linalg.vector_norm(h_TF, dim=0).square().cpu().double()
        sum_F += h_TF.sum(0).cpu().double()
        if gram_FF is not None:
            gram_FF.addmm_(h_TF.T, h_TF)
        if sample_of:
            first = -tokens % stride
            sample_x.append(x_TD[first::stride].float().clone())
            sample_h.append(h_TF[first::stride].clone())
        tokens += len(x_TD)
        if top_k:
            marks.append(
                h_TF.abs_().topk(top_k, dim=-1, sorted=False).indices.int().cpu()
            )
    if not torch.isfinite(energy_F).all():
        raise MoesaicError("the FFN's activations are not finite")
    return Profile(
        tokens,
        energy_F.numpy(),
        sum_F.numpy(),
        binary(torch.cat(marks).numpy(), neurons) if marks else None,
        gram_FF,
        torch.cat(sample_x) if sample_x else None,
        torch.cat(sample_h) if sample_h else None,
    )


def binary(active_TK: NDArray[np.int32], neurons: int) -> csr_array:
    """The matrix of which a row's ones are at the K indices given, sparse."""
    tokens, top_k = active_TK.shape
    return csr_array(
        (
            np.ones(active_TK.size, dtype=np.int32),
            active_TK.reshape(-1),
            np.arange(0, active_TK.size + 1, top_k, dtype=np.int64),
        ),
        shape=(tokens, neurons),
    )
