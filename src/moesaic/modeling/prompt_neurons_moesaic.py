"""An FFN whose neurons a prompt chooses, for all tokens that follow it (GRIFFIN).

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: B sequences, L tokens of one, D hidden_size, F neurons, K those that are
chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.activations import ACT2FN

from .moe_config_moesaic import BlockConfig, Sizes
from .replacement_moesaic import MoesaicReplacement, are_hooked


class MoesaicPromptNeurons(MoesaicReplacement):
    """The first tokens of a sequence run all neurons and choose K for the others.

    A call with several tokens begins a sequence: its first `prompt` tokens (0: all of
    them) are the prompt. A call with one token goes on with the neurons of the last
    sequence; it runs all of them where there was none of as many sequences. Each
    sequence has its own neurons. For one sequence their rows are gathered once, else
    all are computed, under a mask. The choice is not saved. It is the model's, so one
    thread at a time may run it.
    """

    def __init__(self, block: BlockConfig, sizes: Sizes):
        super().__init__()
        assert block.router is not None
        hidden = block.hidden_size
        neurons = sizes.num_routed
        bias = block.bias
        self.block = block
        self.sizes = sizes
        self.prompt = block.router.prompt
        self.router = None
        self.gate_proj = None
        if block.gated:
            self.gate_proj = nn.Linear(hidden, neurons, bias=bias)
        self.up_proj = nn.Linear(hidden, neurons, bias=bias)
        self.down_proj = nn.Linear(neurons, hidden, bias=block.output_bias)
        self.act_fn = ACT2FN[block.activation]
        self.chosen_BK: Tensor | None = None
        self._rows: list[tuple[Tensor, Tensor | None]] = []
        self._rows_are_of: list[tuple[int, int]] = []

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.ndim == 2:  # a conversion's tokens, as one sequence
            return self(hidden_states[None])[0]
        sequences, length, _ = hidden_states.shape
        if length == 1:
            if self.chosen_BK is None or len(self.chosen_BK) != sequences:
                return self.down_proj(self._hidden(hidden_states))
            return self._continued(hidden_states)
        prompt = min(self.prompt or length, length)
        h_BLF = self._hidden(hidden_states[:, :prompt])
        self._choose(h_BLF)
        y_BLD = self.down_proj(h_BLF)
        if prompt == length:
            return y_BLD
        rest_BLD = self._continued(hidden_states[:, prompt:])
        return torch.cat([y_BLD, rest_BLD], dim=1)

    def _hidden(self, x_BLD: Tensor) -> Tensor:
        """Hidden states of all neurons (B, L, F)."""
        up_BLF = self.up_proj(x_BLD)
        if self.gate_proj is None:
            return self.act_fn(up_BLF)
        gate_BLF = self.act_fn(self.gate_proj(x_BLD))
        return gate_BLF * up_BLF

    @torch.no_grad()
    def _choose(self, h_BLF: Tensor) -> None:
        """The neurons of largest statistic, for each sequence."""
        s_BF = flocking(h_BLF)
        best = s_BF.topk(self.sizes.num_active, dim=1)
        # In their order, so that memory is read in one direction.
        self.chosen_BK = best.indices.sort(dim=1).values
        self._rows = []

    def _continued(self, x_BLD: Tensor) -> Tensor:
        """The output (B, L, D) with the chosen neurons only."""
        chosen_BK = self.chosen_BK
        assert chosen_BK is not None
        if len(chosen_BK) == 1 and self._can_gather():
            return self._of_rows(x_BLD)
        h_BLF = self._hidden(x_BLD)
        mask_BF = torch.zeros_like(h_BLF[:, 0])
        mask_BF.scatter_(1, chosen_BK, 1.0)
        return self.down_proj(h_BLF * mask_BF[:, None])

    def _can_gather(self) -> bool:
        """Not while weights may change, nor of modules that are wrapped or hooked."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        projections = (self.gate_proj, self.up_proj, self.down_proj)
        if are_hooked(*projections):
            return False
        return all(
            type(projection) is nn.Linear and not projection.weight.is_meta
            for projection in projections
            if projection is not None
        )

    def _of_rows(self, x_BLD: Tensor) -> Tensor:
        """The same from rows and columns that are gathered at the first such call.

        And again where the weights have changed since.
        """
        weights_now = [_version_of(weight) for weight in self.parameters()]
        if not self._rows or self._rows_are_of != weights_now:
            self._rows = self._gathered()
            self._rows_are_of = weights_now
        down, up, *gate = self._rows
        h_BLK = linear(x_BLD, *up)
        if gate:
            gate_BLK = self.act_fn(linear(x_BLD, *gate[0]))
            h_BLK = gate_BLK * h_BLK
        else:
            h_BLK = self.act_fn(h_BLK)
        return linear(h_BLK, *down)

    def _gathered(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weight and bias of down, up, and gate if there is one."""
        assert self.chosen_BK is not None
        chosen_K = self.chosen_BK[0]
        columns_DK = self.down_proj.weight[:, chosen_K].contiguous()
        rows: list[tuple[Tensor, Tensor | None]] = [
            (columns_DK, self.down_proj.bias)
        ]
        for projection in (self.up_proj, self.gate_proj):
            if projection is None:
                continue
            bias = projection.bias
            if bias is not None:
                bias = bias[chosen_K]
            rows.append((projection.weight[chosen_K], bias))
        return rows

    def hidden(self, x_TD: Tensor) -> Tensor:
        return self._hidden(x_TD)

    def active_weights(self) -> float:
        """Of a token that follows the prompt."""
        neuron_weights = self.block.matrices * self.block.hidden_size
        return float(neuron_weights * self.sizes.num_active)


def flocking(h_BLF: Tensor) -> Tensor:
    """The statistic s (B, F): hidden states of unit length, their norm over tokens."""
    h_BLF = h_BLF.float()
    length_BL1 = h_BLF.norm(dim=-1, keepdim=True)
    relative_BLF = h_BLF / length_BL1.clamp(min=1e-30)
    return relative_BLF.norm(dim=1)


def _version_of(weight: Tensor) -> tuple[int, int]:
    """Where a weight lies, and how often it was changed there."""
    changes = 0 if weight.is_inference() else weight._version
    return weight.data_ptr(), changes
