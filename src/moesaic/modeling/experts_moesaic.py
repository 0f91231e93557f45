"""Experts on transformers' seam: fused weights, one grouped computation for all of them.

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: T tokens, D hidden_size, R experts, M neurons of one, N rows of an
expert's first matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.activations import ACT2FN
from transformers.integrations import use_experts_implementation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .moe_config_moesaic import BlockConfig, padded
from .projections_moesaic import ALONE, random_parameter


@use_experts_implementation
class _SeamExperts(nn.Module):
    """Experts as transformers 5 keeps them: fused 3-D weights, run by its kernels.

    `forward` is the plain loop over experts ("eager"); `set_experts_implementation` of
    the model switches to `grouped_mm` (the default) or `batched_mm`.
    """

    def __init__(
        self, config: object, block: BlockConfig, count: int, neurons: int
    ):
        super().__init__()
        size = padded(neurons)
        rows = size
        name = "up_proj"
        if block.gated:
            rows = 2 * size
            name = "gate_up_proj"
        hidden = block.hidden_size
        self.neurons = neurons
        self.num_experts = count  # the name that transformers' kernels read
        self.act_fn = ACT2FN[block.activation]
        first_matrix = random_parameter(count, rows, hidden)
        self.register_parameter(name, first_matrix)
        self.down_proj = random_parameter(count, hidden, size)
        if block.bias:
            first_bias = random_parameter(count, rows)
            self.register_parameter(f"{name}_bias", first_bias)
        self._clear_filling(name, size)

    @torch.no_grad()
    def _clear_filling(self, first_name: str, size: int) -> None:
        """Zeros in place of the random neurons that fill experts up to their stored size."""
        self.down_proj[:, :, self.neurons :] = 0
        for name in (first_name, f"{first_name}_bias"):
            rows = getattr(self, name, None)
            if rows is not None:  # gate and up, or up alone, each of that size
                rows.unflatten(1, (-1, size))[:, :, self.neurons :] = 0

    @property
    def down_proj_bias(self) -> Tensor:
        """Zeros, which the kernels ask for: the block adds the output bias once."""
        shape_RD = self.down_proj.shape[:2]
        return self.down_proj.new_zeros(shape_RD)

    @property
    def first_name(self) -> str:
        return "gate_up_proj" if self.has_gate else "up_proj"

    @property
    def first_matrix(self) -> Tensor:
        """Gate and up of every expert (R, 2 M, D), or up alone (R, M, D)."""
        # No parameter of its own where PEFT adds to it.
        matrix: Tensor = getattr(self, self.first_name)
        return matrix

    @property
    def first_bias(self) -> Tensor | None:
        name = f"{self.first_name}_bias"
        return getattr(self, name, None)

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
    ) -> Tensor:
        output_TD = torch.zeros_like(hidden_states)
        weight = self.first_matrix
        bias = self.first_bias
        for expert in range(self.num_experts):
            token, slot = torch.where(top_k_index == expert)
            expert_bias = None if bias is None else bias[expert]
            x = hidden_states[token]
            h = linear(x, weight[expert], expert_bias)
            h = self._activate(h)
            y = linear(h, self.down_proj[expert])
            gate = top_k_weights[token, slot, None]
            y = y * gate
            y = y.to(output_TD.dtype)
            output_TD.index_add_(0, token, y)
        return output_TD

    def _activate(self, h: Tensor) -> Tensor:
        if self.has_gate:
            return self._apply_gate(h)
        return self.act_fn(h)


class MoesaicExperts(_SeamExperts):
    """Routed experts: `count` of `neurons`, each stored as a multiple of 8 neurons.

    The neurons that fill up are zero and add nothing: torch's grouped product wants
    rows of whole 16 bytes. Called without an index of chosen experts, it computes all
    of them on every token, with gates (T, R).
    """

    def __init__(self, block: BlockConfig, count: int, neurons: int):
        super().__init__(ALONE, block, count, neurons)
        # The decorator sets these per class; ours is per family.
        self.has_gate = block.gated
        self.has_bias = block.bias

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None,
        top_k_weights: Tensor,
    ) -> Tensor:
        if top_k_index is None:
            return self._under_mask(hidden_states, top_k_weights)
        return super().forward(hidden_states, top_k_index, top_k_weights)

    def has_own_kernel(self, x_TD: Tensor) -> bool:
        """Whether these experts run by a function that says which ones it is for."""
        fits = getattr(self.own_function(), "fits", None)
        return fits is not None and fits(self, x_TD)

    def own_function(self) -> Any:
        """What transformers would run these experts by, None for the plain loop."""
        kind = self.config._experts_implementation
        return ALL_EXPERTS_FUNCTIONS.get(kind)

    def _under_mask(self, x_TD: Tensor, gate_TR: Tensor) -> Tensor:
        """Sum over all experts of gate * expert(x); 6 T D R M FLOPs.

        The same as running the chosen ones, up to rounding, and the same gradients but
        for the router's, which also learns from experts that did not run. Where a
        large part of the experts run anyway this is faster than gathering tokens.
        """
        h_TRM = self.hidden(x_TD)
        gate_TR1 = gate_TR[:, :, None].to(h_TRM.dtype)
        h_TRM = h_TRM * gate_TR1
        down_RDM = self.down_proj[:, :, : self.neurons]
        down_DRM = down_RDM.transpose(0, 1)
        return linear(h_TRM.flatten(1), down_DRM.flatten(1))

    def hidden(self, x_TD: Tensor) -> Tensor:
        """Hidden states of every expert's neurons (T, R, M)."""
        bias = self.first_bias
        if bias is not None:
            bias = self._rows(bias)
        matrix = self._rows(self.first_matrix)
        h = linear(x_TD, matrix, bias)
        h_TRN = h.unflatten(1, (self.num_experts, -1))
        return self._activate(h_TRN)

    def output_norms(self, x_TD: Tensor) -> Tensor:
        """Norm of every expert's output (T, R), an expert after the other."""
        h_TRM = self.hidden(x_TD)
        norms = []
        for expert in range(self.num_experts):
            down_DM = self.down_proj[expert, :, : self.neurons]
            y_TD = linear(h_TRM[:, expert], down_DM)
            norms.append(y_TD.float().norm(dim=1))
        return torch.stack(norms, dim=1)

    def _rows(self, stacked: Tensor) -> Tensor:
        """The rows of all experts one after the other, without those that fill up."""
        num_matrices = 2 if self.has_gate else 1
        parts = stacked.unflatten(1, (num_matrices, -1))
        used = parts[:, :, : self.neurons]
        return used.flatten(0, 2)


def some_are_nobodys(experts: Any, x_TD: Tensor) -> bool:
    """Whether these run by a kernel to which an index beyond them is nobody's.

    So tokens may run unlike numbers of experts, in one call.
    """
    if not x_TD.is_cpu or not isinstance(experts, MoesaicExperts):
        return False
    return experts.has_own_kernel(x_TD)
