"""WINA: every linear layer reads the inputs that weigh most in it.

Chen et al., WINA: Weight Informed Neuron Activation for Accelerating Large Language
Model Inference, arXiv:2505.19427. An input x_i of a matrix W counts by abs(x_i)
norm(W[:, i]). The paper reads the K largest of every token; here one threshold a matrix
lets so many through on average, and weights are not rotated first (docs/deviations.md).
Matrices of a block share its sparsity by TEAL's search, as in the paper.

Shape suffixes: I inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moesaic.methods.contents import METHODS
from moesaic.methods.largest_inputs import LargestInputs


@dataclass(frozen=True)
class Wina(LargestInputs):
    """The largest inputs by magnitude times the norm of their weights."""

    description = METHODS["wina"]

    @torch.no_grad()
    def scale_of(self, linear: nn.Linear) -> Tensor:
        """The norm of every column of W."""
        norm_I: Tensor = torch.linalg.vector_norm(linear.weight.float(), dim=0)
        return norm_I
