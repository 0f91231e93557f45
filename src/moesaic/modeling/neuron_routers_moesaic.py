"""Routers of single neurons: which of them are expected to add most to the output.

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: T tokens, D hidden_size, F neurons, C directions.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .copies_moesaic import MoesaicCopy
from .moe_config_moesaic import BlockConfig, Sizes
from .projections_moesaic import MoesaicProjection


class MoesaicNeuronRouter(nn.Module):
    """Scores a neuron by the log of the energy it is expected to add to the output.

    That is h^2 |w_down|^2 with h = act(w_gate x) (w_up x), of which a subclass has a
    guess. `selection_bias` holds log |w_down|^2 less one threshold for the layer; a
    neuron runs where its score is above zero, so that their number is the budget on
    average and not for each token.
    """

    selection_bias: Tensor
    float32_names: ClassVar[tuple[str, ...]] = ("selection_bias",)
    # Whether it is told the gates of all neurons.
    reads_gates = False
    chooser = "threshold"
    choice_width = 0.3  # nats of energy (docs/log.md, 2026-11-22)
    counts_loads = False  # as many experts as neurons: loads are not evened
    rate_share = 1.0

    def __init__(self, block: BlockConfig, sizes: Sizes):
        super().__init__()
        neurons = sizes.num_routed
        self.num_active = sizes.num_active
        self.num_routed = neurons
        zeros_F = torch.zeros(neurons, dtype=torch.float32)
        self.register_buffer("selection_bias", zeros_F)

    def forward(self, x_TD: Tensor, told_TF: Tensor) -> Tensor:
        """Scores (T, F) in float32, bias included, from what it is told."""
        energy_TF = self.energy(x_TD, told_TF).clamp(min=1e-38)
        return energy_TF.log() + self.selection_bias

    def energy(self, x_TD: Tensor, told_TF: Tensor) -> Tensor:
        """The guess of h^2 (T, F), in float32."""
        raise NotImplementedError(f"{type(self).__name__} guesses nothing")

    def active_weights(self) -> int:
        """Weights of the products that score one token."""
        raise NotImplementedError(f"{type(self).__name__} counts no weights")

    def weight_bytes(self) -> float:
        """Bytes of those weights."""
        raise NotImplementedError(f"{type(self).__name__} counts no bytes")


class MoesaicSketchRouter(MoesaicNeuronRouter):
    """Is told the gates act(W_gate x), and knows C directions of W_up.

    (w_up x)^2 is taken to be the square of what those say plus `up_variance`, what they
    leave open on average.
    """

    up_variance: Tensor
    float32_names = ("up_variance", "selection_bias")
    reads_gates = True

    def __init__(self, block: BlockConfig, sizes: Sizes):
        super().__init__(block, sizes)
        assert block.router is not None
        hidden = block.hidden_size
        neurons = sizes.num_routed
        directions = block.router.directions
        self.sketch_in = MoesaicProjection(hidden, directions, bias=False)
        self.sketch_out = MoesaicProjection(directions, neurons, bias=True)
        ones_F = torch.ones(neurons, dtype=torch.float32)
        self.register_buffer("up_variance", ones_F)

    def energy(self, x_TD: Tensor, told_TF: Tensor) -> Tensor:
        z_TC = self.sketch_in(x_TD)
        up_TF = self.sketch_out(z_TC)
        # In place of (w_up x)^2, which would take all of W_up.
        expected_TF = up_TF.square() + self.up_variance
        return told_TF.float().square() * expected_TF

    def active_weights(self) -> int:
        weights_in = self.sketch_in.weight.numel()
        weights_out = self.sketch_out.weight.numel()
        return weights_in + weights_out

    def weight_bytes(self) -> float:
        element_size = self.sketch_in.weight.element_size()
        return float(self.active_weights() * element_size)


class MoesaicGateRouter(MoesaicNeuronRouter):
    """Is told the gates act(W_gate x), and goes by their size alone (CATS).

    `selection_bias` is the same for all neurons: minus the log of a squared threshold.
    """

    reads_gates = True

    def energy(self, x_TD: Tensor, told_TF: Tensor) -> Tensor:
        return told_TF.float().square()

    def active_weights(self) -> int:
        return 0

    def weight_bytes(self) -> float:
        return 0.0


class MoesaicCopyRouter(MoesaicNeuronRouter):
    """Is told the hidden states that low-bit copies of W_gate and W_up give.

    They are what a neuron runs on, too, whose score is not above `exact_margin`.
    """

    exact_margin: Tensor
    float32_names = ("exact_margin", "selection_bias")

    def __init__(self, block: BlockConfig, sizes: Sizes):
        super().__init__(block, sizes)
        router = block.router
        assert router is not None
        hidden = block.hidden_size
        neurons = sizes.num_routed
        self.num_exact = router.num_exact(sizes)
        self.gate_copy = MoesaicCopy(hidden, neurons, router.bits, block.bias)
        self.up_copy = MoesaicCopy(hidden, neurons, router.bits, block.bias)
        self.act_fn = ACT2FN[block.activation]
        zero = torch.zeros((), dtype=torch.float32)
        self.register_buffer("exact_margin", zero)

    def copied(self, x_TD: Tensor) -> Tensor:
        """act(gate x) * (up x) by the copies (T, F)."""
        gate_TF = self.act_fn(self.gate_copy(x_TD))
        return gate_TF * self.up_copy(x_TD)

    def energy(self, x_TD: Tensor, told_TF: Tensor) -> Tensor:
        return told_TF.float().square()

    def active_weights(self) -> int:
        copies = (self.gate_copy, self.up_copy)
        return sum(copy.in_features * copy.out_features for copy in copies)

    def weight_bytes(self) -> float:
        return self.gate_copy.weight_bytes() + self.up_copy.weight_bytes()


NEURON_ROUTERS: dict[str, type[MoesaicNeuronRouter]] = {
    "gates": MoesaicSketchRouter,
    "gates-alone": MoesaicGateRouter,
    "copies": MoesaicCopyRouter,
}


def new_neuron_router(block: BlockConfig, sizes: Sizes) -> MoesaicNeuronRouter:
    """The router of single neurons that a configuration names."""
    assert block.router is not None
    router_class = NEURON_ROUTERS[block.router.kind]
    return router_class(block, sizes)
