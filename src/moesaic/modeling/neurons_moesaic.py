"""An FFN each of whose neurons is an expert: gates of all, the rest of those that run.

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: T tokens, D hidden_size, F neurons, C directions, P pairs of a token and
a neuron that runs for it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from .moe_config_moesaic import BlockConfig, Sizes
from .projections_moesaic import MoesaicProjection
from .replacement_moesaic import MoesaicReplacement

FEW_TOKENS = 2  # up to which pairs are computed one by one on a CPU
LOWEST_SCORE = -10.0  # nats, the threshold at 0: lower ones say no more


class MoesaicNeuronRouter(nn.Module):
    """Scores a neuron by the log of the energy it is expected to add to the output.

    With the gate g = act(w_gate x) known, the energy of neuron f is g^2 (w_up x)^2
    |w_down|^2. Of W_up the router knows C directions: (w_up x)^2 is taken to be the
    square of what they say plus `up_variance`, what they leave open on average.
    `selection_bias` holds log |w_down|^2 less one threshold for the layer; a neuron
    runs where its score is above zero, so that their number is the budget on average
    and not for each token.
    """

    up_variance: Tensor
    selection_bias: Tensor
    float32_names = ("up_variance", "selection_bias")
    chooser = "threshold"
    choice_width = 0.3  # nats of energy (docs/log.md, 2026-11-22)
    counts_loads = False  # as many experts as neurons: loads are not evened
    rate_share = 1.0

    def __init__(self, block: BlockConfig, sizes: Sizes):
        super().__init__()
        assert block.router is not None
        hidden = block.hidden_size
        neurons = sizes.num_routed
        directions = block.router.directions
        self.num_active = sizes.num_active
        self.num_routed = neurons
        self.sketch_in = MoesaicProjection(hidden, directions, bias=False)
        self.sketch_out = MoesaicProjection(directions, neurons, bias=True)
        ones_F = torch.ones(neurons, dtype=torch.float32)
        zeros_F = torch.zeros_like(ones_F)
        self.register_buffer("up_variance", ones_F)
        self.register_buffer("selection_bias", zeros_F)

    def forward(self, x_TD: Tensor, gate_TF: Tensor) -> Tensor:
        """Scores (T, F) in float32, bias included; `gate_TF` is act(gate x)."""
        z_TC = self.sketch_in(x_TD)
        up_TF = self.sketch_out(z_TC)
        # In place of (w_up x)^2, which would take all of W_up.
        expected_TF = up_TF.square() + self.up_variance
        energy_TF = gate_TF.float().square() * expected_TF
        energy_TF = energy_TF.clamp(min=1e-38)
        return energy_TF.log() + self.selection_bias

    def active_weights(self) -> int:
        """Weights of the products that score one token."""
        weights_in = self.sketch_in.weight.numel()
        weights_out = self.sketch_out.weight.numel()
        return weights_in + weights_out


class MoesaicNeurons(MoesaicReplacement):
    """F(x) = W_down (runs * act(W_gate x) * (W_up x)) + b.

    Gates are computed for all neurons; products with rows of W_up and of W_down, which
    is kept transposed for that, only matter where a neuron runs. For FEW_TOKENS on a
    CPU in float32 they are only made there; elsewhere all are, and masked.
    """

    def __init__(self, block: BlockConfig, sizes: Sizes):
        super().__init__()
        hidden = block.hidden_size
        neurons = sizes.num_routed
        bias = block.bias
        self.block = block
        self.sizes = sizes
        self.gate_proj = nn.Linear(hidden, neurons, bias=bias)
        self.up_proj = nn.Linear(hidden, neurons, bias=bias)
        # Its bias is the FFN's, or the repair's intercept.
        self.down_proj = Conv1D(hidden, neurons)
        self.act_fn = ACT2FN[block.activation]
        self.router = MoesaicNeuronRouter(block, sizes)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden = hidden_states.shape[-1]
        x_TD = hidden_states.reshape(-1, hidden)
        gate_TF = self._gates(x_TD)
        score_TF = self.router(x_TD, gate_TF)
        if self.view is not None:
            y_TD = self._under_mask(x_TD, gate_TF, score_TF)
        elif self._pairs_pay(x_TD):
            y_TD = self._pairs(x_TD, gate_TF, score_TF > 0)
        else:
            h_TF = gate_TF * self.up_proj(x_TD)
            h_TF = torch.where(score_TF > 0, h_TF, 0)
            y_TD = self.down_proj(h_TF)
        return y_TD.view_as(hidden_states)

    def _gates(self, x_TD: Tensor) -> Tensor:
        """act(W_gate x) of every neuron (T, F)."""
        gate_TF = self.gate_proj(x_TD)
        return self.act_fn(gate_TF)

    def _under_mask(
        self, x_TD: Tensor, gate_TF: Tensor, score_TF: Tensor
    ) -> Tensor:
        def values() -> Tensor:
            # Gates of exactly 0 score far below all others: they would decide the
            # scores' spread.
            return score_TF.clamp(min=LOWEST_SCORE)

        runs_TF = score_TF > 0
        mask_TF = runs_TF.to(score_TF.dtype)
        mask_TF = self.view(self.router, values, mask_TF)
        h_TF = gate_TF * self.up_proj(x_TD)
        h_TF = h_TF * mask_TF.to(gate_TF.dtype)
        return self.down_proj(h_TF)

    def chosen(self, x_TD: Tensor) -> Tensor:
        """Which neurons run (T, F)."""
        gate_TF = self._gates(x_TD)
        score_TF = self.router(x_TD, gate_TF)
        return score_TF > 0

    def active_weights(self) -> float:
        gate_rows = self.sizes.num_routed
        up_and_down_rows = 2 * self.sizes.num_active
        rows = gate_rows + up_and_down_rows
        return float(self.block.hidden_size * rows)

    def router_weights(self) -> float:
        weights = self.router.active_weights()
        return float(weights)

    def router_modules(self) -> dict[str, nn.Module]:
        return {"router": self.router}

    def mask_pays(self) -> bool:
        return True

    def _pairs_pay(self, x_TD: Tensor) -> bool:
        """Whether pair by pair is faster and can be done.

        Never while training, compiling or exporting, nor with modules that are wrapped
        or whose weights are elsewhere until they are called.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if torch.jit.is_tracing():  # type: ignore[no-untyped-call]
            return False
        if type(self.up_proj) is not nn.Linear:
            return False
        if type(self.down_proj) is not Conv1D:
            return False
        if x_TD.device.type != "cpu" or x_TD.dtype != torch.float32:
            return False
        for weight in (self.up_proj.weight, self.down_proj.weight):
            if weight.device != x_TD.device or weight.dtype != torch.float32:
                return False
        return 0 < len(x_TD) <= FEW_TOKENS

    def _pairs(self, x_TD: Tensor, gate_TF: Tensor, runs_TF: Tensor) -> Tensor:
        count_T = runs_TF.sum(1)
        end_T = count_T.cumsum(0)
        start_T1 = nn.functional.pad(end_T, (1, 0))
        pair_P2 = runs_TF.nonzero()
        neuron_P = pair_P2[:, 1]
        up_P = self._up_of_pairs(x_TD, runs_TF, start_T1, neuron_P)
        if self.up_proj.bias is not None:
            up_P = up_P + self.up_proj.bias[neuron_P]
        h_P = gate_TF[runs_TF] * up_P
        y_TD = nn.functional.embedding_bag(
            neuron_P,
            self.down_proj.weight,
            start_T1[:-1],
            mode="sum",
            per_sample_weights=h_P,
        )
        return y_TD + self.down_proj.bias

    def _up_of_pairs(
        self,
        x_TD: Tensor,
        runs_TF: Tensor,
        start_T1: Tensor,
        neuron_P: Tensor,
    ) -> Any:
        """w_up x of the pairs that run (P,)."""
        zeros_P = x_TD.new_zeros(len(neuron_P))
        weight_DF = self.up_proj.weight.T
        with warnings.catch_warnings():  # that sparse matrices are new to torch
            warnings.filterwarnings("ignore", message="Sparse CSR")
            pattern_TF = torch.sparse_csr_tensor(
                start_T1,
                neuron_P,
                zeros_P,
                runs_TF.shape,
                check_invariants=False,
            )
            up_TF = torch.sparse.sampled_addmm(
                pattern_TF, x_TD, weight_DF, beta=0.0
            )
        return up_TF.values()
