"""What methods share that read the inputs of largest score: a threshold, and TEAL's search."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.linear_trial import LinearTrial
from moesaic.methods.base import LINEARS, LinearMethod, ModelShape, setting
from moesaic.modeling import MoesaicThresholdedLinear
from moesaic.parts.inputs import SHARES, greedy_shares, keep_largest


@dataclass(frozen=True)
class LargestInputs(LinearMethod):
    """Reads an input x_i of a matrix where abs(x_i) scale_i is above its threshold."""

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

    dense_start: float = setting(  # type: ignore[misc]
        0.01,
        "Share of a prompt's tokens, from its first, that skip nothing.",
        0,
        most=1,
    )

    @abstractmethod
    def scale_of(self, linear: nn.Linear) -> Tensor:
        """What the magnitude of every input counts by (I inputs)."""

    def chosen_paths(self, shape: ModelShape) -> tuple[str, ...]:
        return shape.linears_where(self.where)

    def shares_of_layer(self, trial: LinearTrial, share: float) -> list[float]:
        if self.shares == "equal" or share == 1:
            return []
        scales = [self.scale_of(linear) for linear in trial.linears]
        return greedy_shares(
            trial, share, scales, self.tokens, self.dense_start
        )

    def convert_linear(
        self,
        weights: nn.Linear,
        inputs: FFNInputs,
        share: float,
        generator: np.random.Generator,
    ) -> MoesaicThresholdedLinear:
        scale_I = self.scale_of(weights)
        return keep_largest(weights, inputs, share, scale_I, self.dense_start)
