"""Linear layers of routers: in float32, and one per expert of an existing mixture.

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: P pairs of a token and an outer expert, E outer experts, I inputs,
R outputs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import maybe_autocast

from .moe_config_moesaic import padded

# Stands for the model's configuration until a replacement is installed in a model.
ALONE: Any = SimpleNamespace(_experts_implementation="eager")


def random_parameter(*shape: int) -> nn.Parameter:
    # Self-made start values: transformers initialises by the class of the enclosing
    # family model, which does not know these modules. None when weights are loaded.
    values = torch.empty(*shape)
    if not values.is_meta:
        values.normal_(std=0.02)
    return nn.Parameter(values)


class MoesaicProjection(nn.Module):
    """A linear layer that multiplies in float32, as stock routers do.

    In bf16 close experts would change places. No nn.Linear: vLLM's Transformers
    backend puts its own in their place, which keep the model's dtype.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__()
        self.out_features = out_features
        self.weight = random_parameter(out_features, in_features)
        zeros_N = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.register_parameter("bias", zeros_N)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias
        if bias is not None:
            bias = bias.float()
        weight = self.weight.float()
        with maybe_autocast(x.device.type, enabled=False):
            return nn.functional.linear(x.float(), weight, bias)


def can_group(rows: Tensor) -> bool:
    """Whether torch has a grouped product for these rows.

    They must be of whole 16 bytes, in no double precision, and on no old GPU.
    """
    if not hasattr(nn.functional, "grouped_mm") or rows.dtype == torch.float64:
        return False
    row_bytes = rows.shape[1] * rows.element_size()
    if row_bytes % 16:
        return False
    if not rows.is_cuda:
        return True
    capability = torch.cuda.get_device_capability(rows.device)
    return capability >= (8, 0)


class MoesaicPairProjection(nn.Module):
    """A linear layer per outer expert, on pairs: y_P = W[expert_P] x_P.

    `exact` multiplies in float32 whatever the dtype of the weights. Rows and columns
    are stored padded with zeros. transformers' kernels are for whole FFNs; this one
    follows the same choice of implementation.
    """

    def __init__(
        self, experts: int, inputs: int, outputs: int, bias: bool, exact: bool
    ):
        super().__init__()
        self.config = ALONE
        self.inputs = inputs
        self.outputs = outputs
        self.exact = exact
        rows = padded(outputs)
        columns = padded(inputs)
        self.weight = random_parameter(experts, rows, columns)
        self.bias = None
        if bias:
            zeros_ER = torch.zeros(experts, rows)
            self.bias = nn.Parameter(zeros_ER)

    def forward(self, x_PI: Tensor, expert_P: Tensor) -> Tensor:
        """(P, outputs), in float32 where exact, under autocast too."""
        if not self.exact:
            return self._products(x_PI, expert_P)
        with maybe_autocast(x_PI.device.type, enabled=False):
            return self._products(x_PI, expert_P)

    def _products(self, x_PI: Tensor, expert_P: Tensor) -> Tensor:
        weight_ERI = self.weight.float() if self.exact else self.weight
        filling = padded(self.inputs) - self.inputs
        x_PI = x_PI.to(weight_ERI.dtype)
        x_PI = nn.functional.pad(x_PI, (0, filling))
        kind = self.config._experts_implementation
        if kind == "batched_mm" or torch.compiler.is_compiling():
            y_PR1 = torch.bmm(weight_ERI[expert_P], x_PI[:, :, None])
            y_PR = y_PR1[:, :, 0]
        else:
            grouped = kind != "eager"
            y_PR = self._by_expert(x_PI, weight_ERI, expert_P, grouped)
        if self.bias is not None:
            bias_ER = self.bias.to(y_PR.dtype)
            y_PR = y_PR + bias_ER[expert_P]
        return y_PR[:, : self.outputs]

    def _by_expert(
        self,
        x_PI: Tensor,
        weight_ERI: Tensor,
        expert_P: Tensor,
        grouped: bool,
    ) -> Tensor:
        """Pairs sorted by expert, one product for each, and back in their order."""
        order_P = expert_P.argsort(stable=True)
        # A bincount would make a GPU wait for the size of its result.
        ones_P = torch.ones_like(expert_P)
        count_E = expert_P.new_zeros(len(weight_ERI))
        count_E = count_E.scatter_add(0, expert_P, ones_P)
        sorted_PI = x_PI[order_P]
        if grouped and can_group(sorted_PI):
            ends_E = count_E.cumsum(0, dtype=torch.int32)
            weight_EIR = weight_ERI.mT
            y_PR = nn.functional.grouped_mm(sorted_PI, weight_EIR, offs=ends_E)
        else:
            inputs = sorted_PI.split(count_E.tolist())
            outputs = [
                nn.functional.linear(x, weight_RI)
                for x, weight_RI in zip(inputs, weight_ERI, strict=True)
            ]
            y_PR = torch.cat(outputs)
        inverse_P = order_P.argsort()
        return y_PR[inverse_P]
