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

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.linear_trial import LinearTrial
from moesaic.methods.base import LINEARS, LinearMethod, ModelShape, setting
from moesaic.methods.contents import METHODS
from moesaic.modeling import MoesaicThresholdedLinear
from moesaic.parts.inputs import SHARES, greedy_shares, keep_largest


@dataclass(frozen=True)
class Wina(LinearMethod):
    """The largest inputs by magnitude times the norm of their weights."""

    description = METHODS["wina"]

    where: str = setting(
        "all", "Which linear layers skip inputs.", choices=LINEARS
    )
    shares: str = setting(
        "greedy",
        "Whether matrices of a block skip what costs its output least, or all the same "
        "share.",
        choices=SHARES,
    )
    tokens: int = setting(
        1024,
        "Calibration tokens that the search is judged on; one window at least.",
        64,
    )

    def chosen_paths(self, shape: ModelShape) -> tuple[str, ...]:
        return shape.linears_where(self.where)

    def shares_of_layer(self, trial: LinearTrial, share: float) -> list[float]:
        if self.shares == "equal" or share == 1:
            return []
        scales = [scale_of(linear) for linear in trial.linears]
        return greedy_shares(trial, share, scales, self.tokens)

    def convert_linear(
        self,
        weights: nn.Linear,
        inputs: FFNInputs,
        share: float,
        generator: np.random.Generator,
    ) -> MoesaicThresholdedLinear:
        return keep_largest(weights, inputs, share, scale_of(weights))


@torch.no_grad()
def scale_of(linear: nn.Linear) -> Tensor:
    """The norm of every column of W (I,)."""
    norm_I: Tensor = torch.linalg.vector_norm(linear.weight.float(), dim=0)
    return norm_I
