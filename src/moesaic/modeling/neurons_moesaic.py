"""An FFN each of whose neurons is an expert: gates of all, the rest of those that run.

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: T tokens, D hidden_size, F neurons, C directions, P pairs of a token and a neuron
that runs for it.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from .configuration_moesaic import MoesaicConfig
from .routing_moesaic import MoesaicProjection

FEW_TOKENS = 2  # up to which pairs are computed one by one on a CPU


class MoesaicNeuronRouter(nn.Module):
    """Scores a neuron by the log of the energy it is expected to add to the output.

    With the gate g = act(w_gate x) known, the energy of neuron f is g^2 (w_up x)^2 |w_down|^2. Of
    W_up the router knows C directions: (w_up x)^2 is taken to be the square of what they say plus
    `up_variance`, what they leave open on average. `selection_bias` holds log |w_down|^2 less one
    threshold for the layer; a neuron runs where its score is above zero, so that their number is
    the budget on average and not for each token.
    """

    def __init__(self, config: MoesaicConfig):
        super().__init__()
        moe = config.moesaic
        self.num_active, directions = moe["num_active"], moe["router"]["features"]
        self.sketch_in = MoesaicProjection(config.hidden_size, directions, bias=False)
        self.sketch_out = MoesaicProjection(directions, moe["num_routed"], bias=True)
        self.register_buffer(
            "up_variance", torch.ones(moe["num_routed"], dtype=torch.float32)
        )
        self.register_buffer(
            "selection_bias", torch.zeros(moe["num_routed"], dtype=torch.float32)
        )

    def forward(self, x_TD: torch.Tensor, gate_TF: torch.Tensor) -> torch.Tensor:
        """Scores (T, F) in float32, selection bias included; `gate_TF` is act(gate x)."""
        up_TF = self.sketch_out(self.sketch_in(x_TD))
        energy_TF = gate_TF.float().square() * (up_TF.square() + self.up_variance)
        return energy_TF.clamp(min=1e-38).log() + self.selection_bias


class MoesaicNeurons(nn.Module):
    """F(x) = W_down (runs * act(W_gate x) * (W_up x)) + b.

    Gates are computed for all neurons, products with rows of W_up and of W_down, which is kept
    transposed for that, only matter where a neuron runs. For FEW_TOKENS on a CPU in float32 they
    are only made there; elsewhere all are, and masked.
    """

    def __init__(self, config: MoesaicConfig):
        super().__init__()
        moe = config.moesaic
        ffn, hidden, neurons = moe["ffn"], config.hidden_size, moe["num_routed"]
        self.gate_proj = nn.Linear(hidden, neurons, bias=ffn["bias"])
        self.up_proj = nn.Linear(hidden, neurons, bias=ffn["bias"])
        self.down_proj = Conv1D(
            hidden, neurons
        )  # its bias is the FFN's or the repair's
        self.act_fn = ACT2FN[ffn["activation"]]
        self.router = MoesaicNeuronRouter(config)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        gate_TF = self.act_fn(self.gate_proj(x_TD))
        runs_TF = self.router(x_TD, gate_TF) > 0
        if self._pays(x_TD):
            return self._pairs(x_TD, gate_TF, runs_TF)
        h_TF = gate_TF * self.up_proj(x_TD)
        return self.down_proj(torch.where(runs_TF, h_TF, 0))

    def _pays(self, x_TD: torch.Tensor) -> bool:
        """Whether pair by pair is faster and can be done.

        Never while training, compiling or exporting, nor with modules that are wrapped or whose
        weights are elsewhere until they are called.
        """
        traced = torch.jit.is_tracing()  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or traced:
            return False
        plain = type(self.up_proj) is nn.Linear and type(self.down_proj) is Conv1D
        weights = [self.up_proj.weight, self.down_proj.weight] if plain else []
        at_hand = all(
            w.device == x_TD.device and w.dtype == torch.float32 for w in weights
        )
        on_cpu = x_TD.device.type == "cpu" and x_TD.dtype == torch.float32
        return plain and at_hand and on_cpu and 0 < len(x_TD) <= FEW_TOKENS

    def _pairs(
        self, x_TD: torch.Tensor, gate_TF: torch.Tensor, runs_TF: torch.Tensor
    ) -> torch.Tensor:
        start_T1 = nn.functional.pad(runs_TF.sum(1).cumsum(0), (1, 0))
        neuron_P = runs_TF.nonzero()[:, 1]
        with warnings.catch_warnings():  # that sparse matrices are new to torch
            warnings.filterwarnings("ignore", message="Sparse CSR")
            empty = torch.sparse_csr_tensor(
                start_T1,
                neuron_P,
                x_TD.new_zeros(len(neuron_P)),
                runs_TF.shape,
                check_invariants=False,
            )
            product = torch.sparse.sampled_addmm(
                empty, x_TD, self.up_proj.weight.T, beta=0.0
            )
        up_P = product.values()
        if self.up_proj.bias is not None:
            up_P = up_P + self.up_proj.bias[neuron_P]
        y_TD = nn.functional.embedding_bag(
            neuron_P,
            self.down_proj.weight,
            start_T1[:-1],
            mode="sum",
            per_sample_weights=gate_TF[runs_TF] * up_P,
        )
        return y_TD + self.down_proj.bias
