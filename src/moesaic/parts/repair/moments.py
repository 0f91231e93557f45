"""What least squares needs to know of all tokens: sums of products, never the tokens.

Shape suffixes: T tokens, D hidden_size, N neurons that are kept, M some of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.calibration.share import Share

_ROWS = 256  # of the Gram matrix summed at once


class Moments:
    """Sums over tokens of h h^T, h y^T, h and y.

    h (T, N) is the masked hidden state of the neurons that are kept, y (T, D) the
    output of the dense FFN. float32; T N (N + 2 D) FLOPs, as only the upper half of
    h h^T is summed; 4 N (N + D) bytes.
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
        """Adds a block of tokens."""
        tokens = len(h_TN)
        self.tokens += tokens
        for start in range(0, self.neurons, _ROWS):
            end = start + _ROWS
            rows_TM = h_TN[:, start:end]
            columns_TN = h_TN[:, start:]
            upper_MN = self._upper_NN[start:end, start:]
            upper_MN.addmm_(rows_TM.T, columns_TN)
        self.cross_ND.addmm_(h_TN.T, y_TD)
        # A product sums columns faster than a sum does.
        ones_T = h_TN.new_ones(tokens)
        self.sum_N.addmv_(h_TN.T, ones_T)
        self.sum_D.addmv_(y_TD.T, ones_T)

    def total_(self, share: Share) -> None:
        """Adds up the sums of all processes: what is held is what is sent."""
        self.tokens = int(share.total(self.tokens))
        share.total_(self._upper_NN, self.cross_ND, self.sum_N, self.sum_D)

    def residual(self, down_ND: Tensor) -> Residual:
        """The sums of r = y - H W, without a product per token.

        H^T r = H^T y - (H^T H) W.
        """
        down_ND = down_ND.double()
        gram_NN = self.gram_NN
        sum_N = self.sum_N.double()
        cross_ND = self.cross_ND.double() - gram_NN @ down_ND
        sum_D = self.sum_D.double() - sum_N @ down_ND
        tokens = max(self.tokens, 1)
        return Residual(
            tokens=self.tokens,
            gram_NN=gram_NN,
            cross_ND=cross_ND,
            mean_N=sum_N / tokens,
            mean_D=sum_D / tokens,
        )


@dataclass(frozen=True)
class Residual:
    """What least squares on r needs, in float64."""

    tokens: int
    gram_NN: Tensor  # sum of h h^T
    cross_ND: Tensor  # sum of h r^T
    mean_N: Tensor  # of h
    mean_D: Tensor  # of r
