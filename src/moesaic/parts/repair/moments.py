"""What least squares needs to know of all tokens: sums of products, never the tokens.

Shape suffixes: T tokens, D hidden_size, N neurons that are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS = 256  # of the Gram matrix summed at once


class Moments:
    """Sums over tokens of h h^T, h y^T, h and y.

    h (T, N) is the masked hidden state of the neurons that are kept, y (T, D) the output of the
    dense FFN. float32; T N (N + 2 D) FLOPs, as only the upper half of h h^T is summed;
    4 N (N + D) bytes.
    """

    def __init__(self, neurons: int, hidden_size: int, device: torch.device):
        self.tokens = 0
        self._upper_NN = torch.zeros(neurons, neurons, device=device)
        self.cross_ND = torch.zeros(neurons, hidden_size, device=device)
        self.sum_N = torch.zeros(neurons, device=device)
        self.sum_D = torch.zeros(hidden_size, device=device)

    @property
    def neurons(self) -> int:
        return len(self.sum_N)

    @property
    def gram_NN(self) -> Tensor:
        """Sum of h h^T, in float64: a copy."""
        upper_NN = self._upper_NN.double().triu_()
        diagonal_N = upper_NN.diagonal().clone()
        upper_NN += upper_NN.T.clone()
        upper_NN.diagonal().copy_(diagonal_N)
        return upper_NN

    def add(self, h_TN: Tensor, y_TD: Tensor) -> None:
        self.tokens += len(h_TN)
        for start in range(0, self.neurons, _ROWS):
            rows_TM = h_TN[:, start : start + _ROWS]
            self._upper_NN[start : start + _ROWS, start:].addmm_(
                rows_TM.T, h_TN[:, start:]
            )
        self.cross_ND.addmm_(h_TN.T, y_TD)
        ones_T = h_TN.new_ones(
            len(h_TN)
        )  # a product sums columns faster than a sum does
        self.sum_N.addmv_(h_TN.T, ones_T)
        self.sum_D.addmv_(y_TD.T, ones_T)

    def residual(self, down_ND: Tensor) -> Residual:
        """The sums of r = y - H W, without a product per token: H^T r = H^T y - (H^T H) W."""
        gram_NN = self.gram_NN
        sum_N, down_ND = self.sum_N.double(), down_ND.double()
        cross_ND = self.cross_ND.double() - gram_NN @ down_ND
        tokens, sum_D = (
            max(self.tokens, 1),
            self.sum_D.double() - sum_N @ down_ND,
        )
        return Residual(
            self.tokens, gram_NN, cross_ND, sum_N / tokens, sum_D / tokens
        )


@dataclass(frozen=True)
class Residual:
    """What least squares on r needs, in float64: sums of h h^T and h r^T, means of h and r."""

    tokens: int
    gram_NN: Tensor
    cross_ND: Tensor
    mean_N: Tensor
    mean_D: Tensor
