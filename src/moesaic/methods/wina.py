"""WINA: every linear layer reads the inputs that weigh most in it.

Chen et al., WINA: Weight Informed Neuron Activation for Accelerating Large Language
Model Inference, arXiv:2505.19427. An input x_i of a matrix W counts by abs(x_i)
norm(W[:, i]). The paper reads the K largest of every token; here one threshold a matrix
lets so many through on average, and weights are not rotated first (docs/deviations.md).

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
class Wina(LinearMethod):
    """The largest inputs by magnitude times the norm of their weights."""

    description = METHODS["wina"]

    where: str = setting(
        "all", "Which linear layers skip inputs.", choices=LINEARS
    )

    def chosen_paths(self, shape: ModelShape) -> tuple[str, ...]:
        return shape.linears_where(self.where)

    @torch.no_grad()
    def convert_linear(
        self,
        weights: nn.Linear,
        inputs: FFNInputs,
        share: float,
        generator: np.random.Generator,
    ) -> MoesaicThresholdedLinear:
        weight_NI = weights.weight.float()
        norm_I = torch.linalg.vector_norm(weight_NI, dim=0)
        return keep_largest(weights, inputs, share, norm_I)
