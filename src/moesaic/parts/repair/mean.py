"""Mean compensation: what pruned neurons add on average is put back.

Shape suffixes: D hidden_size, N neurons that are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.parts.repair.moments import Moments


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
def mean_compensation(
    moments: Moments, down_ND: Tensor, intercept: bool
) -> list[Candidate]:
    """mean(r) as an intercept; without one, carried by the neurons' own mean.

    r = y - h W is what the kept neurons leave. Without an output bias in the
    architecture, the best rank-one correction along u = mean(h): s = h.u, D = u (sum s r
    / sum s^2)^T, which needs no more tokens than a mean does. 2 N (N + D) FLOPs.
    """
    down_ND = down_ND.double()
    mean_N = moments.mean_N
    if intercept:
        left_D = moments.mean_D - mean_N @ down_ND
        return [Candidate("mean compensation", None, left_D.float())]
    image_N = moments.gram_times(mean_N)  # sum of s h
    energy = mean_N @ image_N
    if not energy > 0:
        return []
    left_D = mean_N @ moments.cross_ND.double() - image_N @ down_ND
    delta_ND = torch.outer(mean_N, left_D / energy)
    return [Candidate("mean compensation", delta_ND.float())]
