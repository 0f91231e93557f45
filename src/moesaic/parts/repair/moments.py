"""What least squares needs to know of all tokens: sums of products, never the tokens.

Shape suffixes: T tokens, D hidden_size, N neurons that are kept, M some of them.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    def mean_N(self) -> Tensor:
        """Mean of h, in float64."""
        return self.sum_N.double() / max(self.tokens, 1)

    @property
    def mean_D(self) -> Tensor:
        """Mean of y, in float64."""
        return self.sum_D.double() / max(self.tokens, 1)

    @property
    def gram_NN(self) -> Tensor:
        """Sum of h h^T, in float64: a copy."""
        gram_NN = self._upper_NN.double()
        for rows, _, after in self._panels():
            gram_NN[after, rows] = gram_NN[rows, after].T
        return gram_NN

    def gram_times(self, vector_N: Tensor) -> Tensor:
        """(H^T H) v of one vector, in float64: without that copy."""
        product_N = torch.zeros_like(vector_N)
        for rows, from_here, after in self._panels():
            upper_MN = self._upper_NN[rows, from_here].double()
            product_N[rows] += upper_MN @ vector_N[from_here]
            beside_MN = upper_MN[:, upper_MN.shape[0] :]
            product_N[after] += beside_MN.T @ vector_N[rows]
        return product_N

    def add(self, h_TN: Tensor, y_TD: Tensor) -> None:
        """Adds a block of tokens."""
        tokens = len(h_TN)
        self.tokens += tokens
        for rows, from_here, _ in self._panels():
            rows_TM = h_TN[:, rows]
            columns_TN = h_TN[:, from_here]
            upper_MN = self._upper_NN[rows, from_here]
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

    def _panels(self) -> Iterator[tuple[slice, slice, slice]]:
        """Some rows of h h^T, the columns from theirs on, and those after theirs."""
        for start in range(0, self.neurons, _ROWS):
            end = start + _ROWS
            yield slice(start, end), slice(start, None), slice(end, None)
