"""One dense FFN in canonical form, whatever its family calls the parts.

Shape suffixes: T tokens, D hidden_size, F intermediate_size (neurons).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize
from transformers.activations import ACT2FN


def unit_rows(x_RD: Tensor) -> Tensor:
    """Rows of length 1, and those of zeros as they are.

    In float32: what keeps a row of zeros from a division by zero is none in float16.
    """
    return normalize(x_RD.float(), dim=-1).to(x_RD.dtype)


@dataclass(frozen=True)
class DenseFFN:
    """h = act(gate x) * (up x), or act(up x) without a gate (paper, eq. 3).

    F(x) = down h. Biases of gate and up move with their neurons; the bias of down
    belongs to the output.
    """

    up_FD: Tensor
    down_DF: Tensor
    activation: str
    gate_FD: Tensor | None = None
    up_bias_F: Tensor | None = None
    gate_bias_F: Tensor | None = None
    down_bias_D: Tensor | None = None

    @property
    def gated(self) -> bool:
        return self.gate_FD is not None

    @property
    def intermediate_size(self) -> int:
        return self.up_FD.shape[0]

    def hidden(self, x_TD: Tensor) -> Tensor:
        """Hidden state h (T, F) of each token; 2 or 4 T D F FLOPs."""
        up_TF = linear(x_TD, self.up_FD, self.up_bias_F)
        if self.gate_FD is None:
            return self._activate(up_TF)
        gates_TF = self.gates(x_TD)
        # An activation may keep its output for its gradient.
        if gates_TF.requires_grad:
            return gates_TF * up_TF
        # In place, so that no third (T, F) is held.
        return gates_TF.mul_(up_TF)

    def gates(self, x_TD: Tensor) -> Tensor:
        """act(gate x) (T, F), by which up x is multiplied; for an FFN with a gate."""
        assert self.gate_FD is not None
        gate_TF = linear(x_TD, self.gate_FD, self.gate_bias_F)
        return self._activate(gate_TF)

    def _activate(self, x_TF: Tensor) -> Tensor:
        activation: Any = ACT2FN[self.activation]
        activated_TF: Tensor = activation(x_TF)
        return activated_TF

    def output(self, h_TF: Tensor) -> Tensor:
        """F(x) (T, D) from the hidden state; 2 T D F FLOPs."""
        return linear(h_TF, self.down_DF, self.down_bias_D)

    def with_unit_rows(self) -> DenseFFN:
        """The same FFN, every row of gate and up of unit length (method cmoe-code)."""
        up_FD = unit_rows(self.up_FD)
        gate_FD = self.gate_FD
        if gate_FD is not None:
            gate_FD = unit_rows(gate_FD)
        return replace(self, up_FD=up_FD, gate_FD=gate_FD)

    def subset(self, index_N: Tensor) -> DenseFFN:
        """The FFN of some neurons, in the order given; the output bias stays."""
        parts: dict[str, Any] = self.tensors()
        parts.pop("down_bias_D", None)
        down_DF = parts.pop("down_DF")
        for name, rows in parts.items():
            parts[name] = rows[index_N]
        parts["down_DF"] = down_DF[:, index_N]
        return replace(self, **parts)

    def tensors(self) -> dict[str, Tensor]:
        return {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }

    def to(self, device: torch.device) -> DenseFFN:
        moved: dict[str, Any] = {
            name: tensor.to(device) for name, tensor in self.tensors().items()
        }
        return replace(self, **moved)
