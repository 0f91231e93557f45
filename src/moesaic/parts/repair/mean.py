"""Mean compensation: what pruned neurons add on average is put back.

Shape suffixes: D hidden_size, N neurons that are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.parts.repair.moments import Residual


@dataclass(frozen=True)
class Candidate:
    """A change of the output vectors (N, D) and an output intercept (D,).

    Either may be None.
    """

    name: str
    delta_ND: Tensor | None = None
    intercept_D: Tensor | None = None

    def output(self, h_TN: Tensor) -> Tensor | float:
        """What it adds to the output (T, D)."""
        y_TD: Tensor | float = 0.0
        if self.delta_ND is not None:
            y_TD = h_TN @ self.delta_ND
        if self.intercept_D is not None:
            y_TD = y_TD + self.intercept_D
        return y_TD


@torch.no_grad()
def mean_compensation(sums: Residual, intercept: bool) -> list[Candidate]:
    """mean(r) as an intercept; without one, carried by the neurons' own mean.

    Without an output bias in the architecture, the best rank-one correction along
    u = mean(h): s = h.u, D = u (sum s r / sum s^2)^T, which needs no more tokens than a
    mean does.
    """
    if intercept:
        intercept_D = sums.mean_D.float()
        return [Candidate("mean compensation", None, intercept_D)]
    energy = sums.mean_N @ sums.gram_NN @ sums.mean_N
    if not energy > 0:
        return []
    along_D = (sums.mean_N @ sums.cross_ND) / energy
    delta_ND = torch.outer(sums.mean_N, along_D)
    return [Candidate("mean compensation", delta_ND.float())]
