"""Activation statistics of one FFN, in one streaming pass over calibration tokens.

Shape suffixes: T tokens, D hidden_size, F neurons, K activation_top_k, S tokens of the
sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from moesaic.calibration.share import ALONE, Share, every
from moesaic.errors import MoesaicError
from moesaic.families import DenseFFN
from moesaic.families.ffn import unit_rows

SAMPLE_TOKENS = 8192  # tokens whose hidden states are kept for grouping


@dataclass(frozen=True)
class StatisticsKind:
    """What is to be known of an FFN besides sums.

    With `activation_top_k` the K neurons of largest abs(h) of every token (paper,
    eq. 14). `normalise` computes h from unit-length inputs and weight rows, as the
    authors' code does. `sample` keeps inputs and hidden states of some tokens, `gram`
    the sum of h h^T.
    """

    activation_top_k: int | None = None
    normalise: bool = False
    sample: bool = False
    gram: bool = False


@dataclass(frozen=True)
class Statistics:
    """Statistics of an FFN's hidden state over q calibration tokens.

    `active` is the paper's A (Section 4.1): a q x F matrix with K ones per row, kept
    sparse. `sample_x_SD` and `sample_h_SF` are inputs and hidden states of at most
    SAMPLE_TOKENS tokens, evenly spaced. What was not asked for is None.
    """

    tokens: int
    energy_F: NDArray[np.float64]  # sum over tokens of h squared
    sum_F: NDArray[np.float64]  # sum over tokens of h
    active: csr_array | None = None
    gram_FF: Tensor | None = None  # sum over tokens of h h^T
    sample_x_SD: Tensor | None = None
    sample_h_SF: Tensor | None = None

    @property
    def count_F(self) -> NDArray[np.int64]:
        """Tokens for which each neuron is among the K largest.

        Divided by `tokens` it is the paper's mu.
        """
        assert self.active is not None
        neurons = self.active.shape[1]
        return np.bincount(self.active.indices, minlength=neurons)

    def subset(self, index_N: NDArray[np.int64]) -> Statistics:
        """Of some neurons, in the order given; one that is named twice comes twice."""
        active = self.active
        if active is not None:
            active = active[:, index_N]
        gram_NN = self.gram_FF
        if gram_NN is not None:
            gram_NN = gram_NN[index_N][:, index_N]
        sample_h_SN = self.sample_h_SF
        if sample_h_SN is not None:
            sample_h_SN = sample_h_SN[:, index_N]
        return replace(
            self,
            energy_F=self.energy_F[index_N],
            sum_F=self.sum_F[index_N],
            active=active,
            gram_FF=gram_NN,
            sample_h_SF=sample_h_SN,
        )


PLAIN = StatisticsKind()


@torch.no_grad()
def compute_statistics(
    blocks: Iterable[Tensor],
    ffn: DenseFFN,
    kind: StatisticsKind = PLAIN,
    tokens_to_come: int = SAMPLE_TOKENS,
    share: Share = ALONE,
    first: int = 0,
) -> Statistics:
    """Statistics of one FFN on blocks of its inputs x (T, D), in one pass.

    As `sum_statistics` has them, of hidden states that are computed here.
    """
    if kind.normalise:
        ffn = ffn.with_unit_rows()

    def with_hidden() -> Iterator[tuple[Tensor, Tensor]]:
        for x_TD in blocks:
            if kind.normalise:
                x_TD = unit_rows(x_TD)
            yield x_TD, ffn.hidden(x_TD)

    return sum_statistics(
        with_hidden(), ffn, kind, tokens_to_come, share, first
    )


@torch.no_grad()
def sum_statistics(
    blocks: Iterable[tuple[Tensor, Tensor]],
    ffn: DenseFFN,
    kind: StatisticsKind = PLAIN,
    tokens_to_come: int = SAMPLE_TOKENS,
    share: Share = ALONE,
    first: int = 0,
) -> Statistics:
    """Statistics of one FFN from blocks of x (T, D) and h (T, F), in one pass.

    `tokens_to_come` spaces the sample. Holds one block of hidden states at a time,
    4 K bytes a token, the sample, and with `gram` 4 F^2 bytes. Raises MoesaicError
    where h is not finite. Of several processes each has the blocks of its `share`, from
    the token in place `first` on, and all get the whole: what is held is what is sent.
    """
    neurons = ffn.intermediate_size
    device = ffn.up_FD.device
    top_k = min(kind.activation_top_k or 0, neurons)
    stride = sample_stride(tokens_to_come)
    energy_F = torch.zeros(neurons, dtype=torch.float64)
    sum_F = torch.zeros_like(energy_F)
    gram_FF = None
    if kind.gram:
        gram_FF = torch.zeros(neurons, neurons, device=device)
    tokens = 0
    marks: list[Tensor] = []
    sample_x: list[Tensor] = []
    sample_h: list[Tensor] = []
    for x_TD, h_TF in blocks:
        h_TF = h_TF.float()
        # Norms of columns take ten times as long on a CPU.
        energy_F += h_TF.square().sum(0).cpu().double()
        sum_F += h_TF.sum(0).cpu().double()
        if gram_FF is not None:
            gram_FF.addmm_(h_TF.T, h_TF)
        if kind.sample:
            place = first + tokens
            sample_x += [
                x.float().clone() for x in every([x_TD], stride, place)
            ]
            sample_h += [h.clone() for h in every([h_TF], stride, place)]
        tokens += len(x_TD)
        if top_k:
            largest_TK = h_TF.abs().topk(top_k, dim=-1, sorted=False).indices
            marks.append(largest_TK.int().cpu())
    share.total_(energy_F, sum_F)
    if not torch.isfinite(energy_F).all():
        raise MoesaicError("the FFN's activations are not finite")
    if gram_FF is not None:
        share.total_(gram_FF)
    active = None
    if top_k:
        active_TK = share.gathered(marks).cpu().numpy()
        active = binary(active_TK, neurons)
    return Statistics(
        tokens=int(share.total(tokens)),
        energy_F=energy_F.numpy(),
        sum_F=sum_F.numpy(),
        active=active,
        gram_FF=gram_FF,
        sample_x_SD=share.gathered(sample_x) if kind.sample else None,
        sample_h_SF=share.gathered(sample_h) if kind.sample else None,
    )


def sample_stride(tokens: int) -> int:
    """Every so many tokens one is kept, so that at most SAMPLE_TOKENS are."""
    return -(-max(tokens, 1) // SAMPLE_TOKENS)


def binary(active_TK: NDArray[np.int32], neurons: int) -> csr_array:
    """The matrix of which a row's ones are at the K indices given, sparse."""
    tokens, top_k = active_TK.shape
    entries = active_TK.size
    ones = np.ones(entries, dtype=np.int32)
    columns = active_TK.reshape(-1)
    row_starts = np.arange(0, entries + 1, top_k, dtype=np.int64)
    return csr_array((ones, columns, row_starts), shape=(tokens, neurons))
