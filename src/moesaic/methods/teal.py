"""TEAL: every linear layer reads its inputs of largest magnitude only.

Liu et al., Training-Free Activation Sparsity in Large Language Models,
arXiv:2408.14690. An input x_i of a matrix is read where abs(x_i) is above the matrix's
threshold, a quantile of its inputs on the calibration text. Every matrix skips the same
share; the paper's greedy search for shares by block is left out (docs/deviations.md).
It saves time for a few tokens at once: a column is skipped where no token reads it.

Shape suffixes: I inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.methods.base import LINEARS, LinearMethod, ModelShape, setting
from moesaic.methods.contents import METHODS
from moesaic.modeling import MoesaicThresholdedLinear
from moesaic.parts.inputs import keep_largest


@dataclass(frozen=True)
class Teal(LinearMethod):
    """The largest inputs by magnitude."""

    description = METHODS["teal"]

    where: str = setting(
        "all", "Which linear layers skip inputs.", choices=LINEARS
    )

    def chosen_paths(self, shape: ModelShape) -> tuple[str, ...]:
        return shape.linears_where(self.where)

    def convert_linear(
        self,
        weights: nn.Linear,
        inputs: FFNInputs,
        share: float,
        generator: np.random.Generator,
    ) -> MoesaicThresholdedLinear:
        device = weights.weight.device
        ones_I = torch.ones(weights.in_features, device=device)
        return keep_largest(weights, inputs, share, ones_I)
