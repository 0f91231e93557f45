"""An FFN whose neurons are chosen one by one, in 8 bits a weight.

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: T tokens, D hidden_size, F neurons, G groups of a row, B bits, P bytes of
a row's bit plane.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .copies_moesaic import GROUP, MoesaicCopy, ceil_div
from .neurons_moesaic import MoesaicNeurons

REST_BITS = 4


class MoesaicRest(MoesaicCopy):
    """What a copy of a matrix leaves of it, in REST_BITS more.

    Only rows of it are read, so the bit planes of a row lie side by side: `planes` is
    (F, B, P).
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, REST_BITS, bias=False)
        self.planes = self.planes.transpose(0, 1).contiguous()

    def planes_first(self) -> Tensor:
        return self.planes.transpose(0, 1)


class MoesaicInt8Rows(nn.Module):
    """y = h W + b, W (F, D) of whole numbers from -128 to 127.

    GROUP of them in a row share a scale. `scales` and `bias` have the model's dtype.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor

    def __init__(self, rows: int, columns: int):
        super().__init__()
        groups = ceil_div(columns, GROUP)
        codes_FD = torch.zeros(rows, columns, dtype=torch.int8)
        self.register_buffer("codes", codes_FD)
        self.register_buffer("scales", torch.zeros(rows, groups))
        self.register_buffer("bias", torch.zeros(columns))

    @property
    def weight(self) -> Tensor:
        """The matrix that it stands for (F, D), in the dtype of the scales."""
        columns = self.codes.shape[1]
        scale_FD = self.scales.repeat_interleave(GROUP, dim=1)[:, :columns]
        return self.codes.to(scale_FD.dtype) * scale_FD

    def forward(self, h_TF: Tensor) -> Tensor:
        weight_FD = self.weight.to(h_TF.dtype)
        return torch.addmm(self.bias.to(h_TF.dtype), h_TF, weight_FD)

    def row_bytes(self) -> float:
        """Bytes of the codes and scales of one row."""
        return (self.codes.nbytes + self.scales.nbytes) / len(self.codes)


class MoesaicInt8Neurons(MoesaicNeurons):
    """The same FFN where an exact row is the row of the copy and what that leaves.

    So the copies cost no memory: they are half of the weights' bits. Exact rows read
    the other half only, since the products of the first are there. W_down is in 8 bits
    too. Nothing of it is trained.
    """

    def _add_projections(self, hidden: int, neurons: int, bias: bool) -> None:
        # Biases are those of the copies.
        self.gate_proj = MoesaicRest(hidden, neurons)
        self.up_proj = MoesaicRest(hidden, neurons)
        self.down_proj = MoesaicInt8Rows(neurons, hidden)

    def _gates(self, x_TD: Tensor) -> Tensor:
        gate_TF = _together(self.router.gate_copy, self.gate_proj, x_TD)
        return self.act_fn(gate_TF)

    def _ups(self, x_TD: Tensor) -> Tensor:
        return _together(self.router.up_copy, self.up_proj, x_TD)

    def _pairs_pay(self, x_TD: Tensor) -> bool:
        return False

    def weight_bytes(self) -> float:
        rests = self.gate_proj.weight_bytes() + self.up_proj.weight_bytes()
        exact = self.router.num_exact / self.sizes.num_routed
        down_bytes = self.sizes.num_active * self.down_proj.row_bytes()
        return rests * exact + down_bytes + self.router.weight_bytes()


def _together(copy: MoesaicCopy, rest: MoesaicCopy, x_TD: Tensor) -> Tensor:
    """(copy + rest) x + b: one product, of the matrix in the scales' dtype."""
    weight_FD = (copy.weight() + rest.weight()).to(x_TD.dtype)
    bias_F = copy.bias
    if bias_F is not None:
        bias_F = bias_F.to(x_TD.dtype)
    return nn.functional.linear(x_TD, weight_FD, bias_F)
