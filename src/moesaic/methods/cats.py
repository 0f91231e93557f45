"""CATS: all gates are computed, and neurons whose gates are small are skipped.

Lee et al., CATS: Contextually-Aware Thresholding for Sparsity in Large Language Models,
arXiv:2404.08763. A neuron runs where abs(act(w_gate x)) is above its layer's threshold,
a quantile of these over all neurons on the calibration text. W_gate is read in whole,
rows of W_up and columns of W_down where a neuron runs. It saves time for a few tokens
at once, and only FFNs with a gate have it.

Shape suffixes: T tokens, F neurons.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.statistics import SAMPLE_TOKENS
from moesaic.families import DenseFFN
from moesaic.layout import Layout
from moesaic.methods.base import (
    Budget,
    FFNMethod,
    FFNShape,
    ModelShape,
    block_config,
    neuron_layout,
    refuse_mixture,
    refuse_without_gate,
    shape_of,
)
from moesaic.methods.contents import METHODS
from moesaic.methods.expert_method import Made
from moesaic.modeling import (
    BlockConfig,
    MoEConfig,
    MoesaicNeurons,
    RouterConfig,
    Sizes,
    new_neuron_router,
)
from moesaic.parts.carve import carve_neurons
from moesaic.parts.partition import Partition
from moesaic.parts.thresholds import set_neuron_thresholds


@dataclass(frozen=True)
class CATS(FFNMethod):
    """The neurons of largest gates, by one threshold a layer."""

    description = METHODS["cats"]
    takes_grain = False

    def layouts(self, shape: ModelShape, budget: Budget) -> list[Layout]:
        """Every neuron alone. Raises MoesaicError for a mixture or FFNs without gates."""
        refuse_mixture(self, shape, "is for FFNs of dense models")
        refuse_without_gate(self, shape)
        return [neuron_layout(budget, shape.ffn.intermediate_size)]

    def block(self, ffn: FFNShape) -> BlockConfig:
        router = RouterConfig("gates-alone", "threshold")
        return block_config(ffn, router, True, replacement="neurons")

    @torch.no_grad()
    def convert_ffn(
        self,
        weights: DenseFFN,
        inputs: FFNInputs,
        sizes: Sizes,
        generator: np.random.Generator,
    ) -> MoesaicNeurons:
        """The FFN with a threshold, from the gates of about SAMPLE_TOKENS tokens."""
        block = self.block(shape_of(weights))
        router = new_neuron_router(block, sizes).to(weights.up_FD.device)
        scores = []
        for x_TD in inputs.apart(SAMPLE_TOKENS).fit():
            score_TF = router(x_TD, weights.gates(x_TD))
            scores.append(score_TF)
        set_neuron_thresholds(router, torch.cat(scores))
        replacement = carve_neurons(weights, router, block, sizes)
        neurons_F = np.arange(weights.intermediate_size)
        alone = Partition(neurons_F[:0], neurons_F[:, None])
        replacement.made = Made(partition=alone)
        return replacement

    def words(self, moe: MoEConfig) -> str:
        sizes = moe.first_sizes
        return (
            f"on average {sizes.num_active} of {sizes.num_routed} neurons, those of "
            "largest gates"
        )
