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
class Teal(LinearMethod):
    """The largest inputs by magnitude."""

    description = METHODS["teal"]

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


def scale_of(linear: nn.Linear) -> Tensor:
    """Ones (I,): magnitude alone counts."""
    return torch.ones(linear.in_features, device=linear.weight.device)
