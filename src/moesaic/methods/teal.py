"""TEAL: every linear layer reads its inputs of largest magnitude only.

Liu et al., Training-Free Activation Sparsity in Large Language Models,
arXiv:2408.14690. An input x_i of a matrix is read where abs(x_i) is above the matrix's
threshold, a quantile of its inputs on the calibration text. Every transformer block
skips the same share of its weights; a greedy search (the paper's Algorithm 1) divides
it among the block's matrices. It saves time for a few tokens at once: a column is
skipped where no token reads it.

Shape suffixes: I inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moesaic.methods.contents import METHODS
from moesaic.methods.largest_inputs import LargestInputs


@dataclass(frozen=True)
class Teal(LargestInputs):
    """The largest inputs by magnitude."""

    description = METHODS["teal"]

    def scale_of(self, linear: nn.Linear) -> Tensor:
        """Ones: magnitude alone counts."""
        return torch.ones(linear.in_features, device=linear.weight.device)
