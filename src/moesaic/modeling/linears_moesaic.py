"""Linear layers that skip inputs: what stands in for any nn.Linear of a model.

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: B sequences, L tokens of one, T tokens, I inputs, N outputs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .projections_moesaic import random_parameter
from .replacement_moesaic import MoesaicReplacement, own_kernels


class MoesaicThresholdedLinear(MoesaicReplacement):
    """y = W (x where abs(x_i) * input_scale_i > threshold, else 0) + b.

    With `input_scale` of ones the largest inputs count; with the norms of W's columns
    those that add most. All inputs count at a threshold below 0. The package's kernel
    reads no other columns, for a few tokens on a CPU; else all are multiplied.

    Of a prompt x (B, L, I) the first tokens read all: a share `dense_start` of L, rounded
    up. Later ones read of them all the time, and their outputs may be very large.
    """

    threshold: Tensor
    input_scale: Tensor
    float32_names = ("threshold", "input_scale")
    unit = "input"

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        share: float,
        dense_start: float = 0.0,
    ):
        super().__init__()
        self.in_features = inputs
        self.out_features = outputs
        self.share = share
        self.dense_start = dense_start
        self.weight = random_parameter(outputs, inputs)
        zeros_N = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.register_parameter("bias", zeros_N)
        below_all = torch.tensor(-1.0, dtype=torch.float32)
        self.register_buffer("threshold", below_all)
        ones_I = torch.ones(inputs, dtype=torch.float32)
        self.register_buffer("input_scale", ones_I)

    @classmethod
    def like(
        cls, dense: Any, share: float, dense_start: float = 0.0
    ) -> MoesaicThresholdedLinear:
        """Without weights, of a dense layer's shape."""
        bias = dense.bias is not None
        inputs = dense.in_features
        outputs = dense.out_features
        with torch.device("meta"):
            return cls(inputs, outputs, bias, share, dense_start)

    def forward(self, x: Tensor) -> Tensor:
        own = own_kernels()
        if own is not None and not self._dense_tokens(x):
            y_TN = own.linear(self, x.reshape(-1, self.in_features))
            if y_TN is not None:
                return y_TN.view(*x.shape[:-1], self.out_features)
        x = torch.where(self._counts(x), x, 0)
        return linear(x, self.weight, self.bias)

    def _counts(self, x: Tensor) -> Tensor:
        """Which inputs are read."""
        size = x.abs().float() * self.input_scale
        # What is no number counts, and shows.
        counts = ~(size <= self.threshold)
        dense_tokens = self._dense_tokens(x)
        if dense_tokens:
            counts[:, :dense_tokens] = True
        return counts

    def _dense_tokens(self, x: Tensor) -> int:
        """How many tokens, from a sequence's first, read all; of an answer's none."""
        if x.ndim < 3 or x.shape[1] == 1:
            return 0
        return math.ceil(self.dense_start * x.shape[1])

    def planned_share(self) -> float | None:
        return self.share

    def chosen(self, *inputs: Tensor) -> Tensor:
        """Which inputs are read (T, I)."""
        return self._counts(inputs[0]).flatten(0, -2)

    def units(self, *inputs: Tensor) -> tuple[Tensor, Tensor] | None:
        x = inputs[0]
        norm_I = self.weight.float().norm(dim=0)
        added = x.float().abs() * norm_I
        return self.chosen(x), added.flatten(0, -2)

    def active_weights(self) -> float:
        return self.share * self.weight.numel()

    def weight_bytes(self) -> float:
        """Bytes of the columns that one token reads on average."""
        return self.active_weights() * self.weight.element_size()


LINEAR_REPLACEMENTS: dict[str, Any] = {"thresholded": MoesaicThresholdedLinear}
