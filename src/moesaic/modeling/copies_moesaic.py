"""Low-bit copies of weight matrices, which tell routers about what the rows would give.

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: T tokens, I inputs, R rows, G groups of inputs, B bits, P bytes of a
row's bit plane.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .replacement_moesaic import own_kernels

GROUP = 64  # inputs that share a scale


class MoesaicCopy(nn.Module):
    """y = (scale * code) x + b, codes of a few bits, a scale for GROUP inputs of a row.

    A code is a whole number from -2^(bits - 1) to 2^(bits - 1) - 1. It is kept as that
    plus 2^(bits - 1), bit by bit: a byte of `planes` holds one bit of eight inputs.
    `scales` and `bias` have the model's dtype. Nothing of it is trained. The weights
    are unpacked at every call, in 10 I R simple steps; the package's kernel takes one.
    """

    planes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, inputs: int, outputs: int, bits: int, bias: bool):
        super().__init__()
        self.in_features = inputs
        self.out_features = outputs
        self.bits = bits
        row_bytes = ceil_div(inputs, 8)
        planes_BRP = torch.zeros(bits, outputs, row_bytes, dtype=torch.uint8)
        self.register_buffer("planes", planes_BRP)
        groups = ceil_div(inputs, GROUP)
        self.register_buffer("scales", torch.zeros(outputs, groups))
        zeros_R = torch.zeros(outputs) if bias else None
        self.register_buffer("bias", zeros_R)

    def forward(self, x_TI: Tensor) -> Tensor:
        weight_RI = self.weight().to(x_TI.dtype)
        bias_R = self.bias
        if bias_R is not None:
            bias_R = bias_R.to(x_TI.dtype)
        return linear(x_TI, weight_RI, bias_R)

    def weight(self) -> Tensor:
        """The matrix that it stands for (R, I), in the dtype of the scales."""
        own = own_kernels()
        weight_RI = None if own is None else own.copy_weight(self)
        return self._unpacked() if weight_RI is None else weight_RI

    def planes_first(self) -> Tensor:
        """The bit planes as (B, R, P), however they lie in memory."""
        return self.planes

    def _unpacked(self) -> Tensor:
        code_RI = unpacked(self.planes_first(), self.in_features)
        scale_RI = self.scales.repeat_interleave(GROUP, dim=1)
        scale_RI = scale_RI[:, : self.in_features]
        return code_RI.to(scale_RI.dtype) * scale_RI

    def weight_bytes(self) -> float:
        """Bytes of its codes and scales."""
        weights = self.in_features * self.out_features
        scale_bytes = self.scales.numel() * self.scales.element_size()
        return weights * self.bits / 8 + scale_bytes

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bits={self.bits}"


def packed(code_RI: Tensor, bits: int) -> Tensor:
    """Bit planes (B, R, P) of whole numbers in `bits` bits, signs included."""
    inputs = code_RI.shape[1]
    filling = ceil_div(inputs, 8) * 8 - inputs
    positive_RI = (code_RI + 2 ** (bits - 1)).to(torch.uint8)
    positive_RI = nn.functional.pad(positive_RI, (0, filling))
    positive_RP8 = positive_RI.unflatten(1, (-1, 8))
    place_8 = torch.arange(8, dtype=torch.uint8, device=code_RI.device)
    planes = []
    for bit in range(bits):
        bit_RP8 = (positive_RP8 >> bit) & 1
        byte_RP = (bit_RP8 << place_8).sum(-1, dtype=torch.uint8)
        planes.append(byte_RP)
    return torch.stack(planes)


def unpacked(planes_BRP: Tensor, inputs: int) -> Tensor:
    """The whole numbers (R, I) that `packed` made bit planes of, as int8."""
    bits = len(planes_BRP)
    place_8 = torch.arange(8, dtype=torch.uint8, device=planes_BRP.device)
    first_RP = planes_BRP[0]
    positive_RP8 = torch.zeros_like(first_RP)[:, :, None].repeat(1, 1, 8)
    for bit, byte_RP in enumerate(planes_BRP):
        bit_RP8 = (byte_RP[:, :, None] >> place_8) & 1
        positive_RP8 |= bit_RP8 << bit
    code_RI = positive_RP8.flatten(1)[:, :inputs].to(torch.int8)
    return code_RI - 2 ** (bits - 1)


def ceil_div(count: int, size: int) -> int:
    """Rounded up."""
    return -(-count // size)
