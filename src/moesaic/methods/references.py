"""References: what every method has to beat, and what no router can beat.

`random` is a model like any other. The oracles compute every neuron to know which to
run, so they save nothing, and no model can hold them.

Shape suffixes: T tokens, D hidden_size, F neurons, R routed experts, M neurons of one,
K that run for a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.statistics import PLAIN
from moesaic.families import DenseFFN
from moesaic.layout import Layout
from moesaic.methods.base import FFNMethod, FFNShape, block_config
from moesaic.methods.cmoe import copied_neurons
from moesaic.methods.contents import METHODS
from moesaic.methods.expert_method import ExpertMethod, LayerFit
from moesaic.methods.moesaic import Moesaic
from moesaic.modeling import (
    BlockConfig,
    MoEConfig,
    MoesaicReplacement,
    RouterConfig,
    Sizes,
)
from moesaic.modeling.routers_moesaic import choose_experts
from moesaic.parts.clustering import random_groups
from moesaic.parts.energies import expert_energies, expert_grams
from moesaic.parts.importance import split_shared
from moesaic.parts.partition import Partition
from moesaic.parts.representatives import random_members


@dataclass(frozen=True)
class Random(ExpertMethod):
    """Random shared neurons, random experts, and a router of random members."""

    description = METHODS["random"]
    experts = 8

    def router_config(self, ffn: FFNShape) -> RouterConfig:
        return RouterConfig("neuron-copies", "topk")

    def partition(self, fit: LayerFit) -> Partition:
        neurons = fit.ffn.intermediate_size
        random_F = fit.generator.permutation(neurons)
        importance_F = random_F.astype(np.float64)
        shared_S, candidates_N = split_shared(importance_F, fit.sizes.shared)
        routed = fit.sizes.num_routed
        experts_RM = random_groups(candidates_N, routed, fit.generator)
        return Partition(shared_S, experts_RM)

    def make_router(self, fit: LayerFit) -> Any:
        experts_RM = fit.partition.experts_RM
        neurons_R = random_members(experts_RM, fit.generator)
        return copied_neurons(fit, neurons_R)


@dataclass(frozen=True)
class Oracle(Moesaic):
    """The experts of moesaic; each token runs those whose output is largest."""

    description = METHODS["oracle"]
    saves = False
    searches_layouts = False

    def make_router(self, fit: LayerFit) -> Any:
        experts_RM = torch.from_numpy(fit.partition.experts_RM)
        experts_RM = experts_RM.to(fit.device)
        return OracleRouter(fit.ffn, experts_RM, fit.sizes.num_active)


class OracleRouter(nn.Module):
    """Scores an expert by its output's energy, which it computes all experts for."""

    chooser = "topk"

    def __init__(self, ffn: DenseFFN, experts_RM: Tensor, num_active: int):
        super().__init__()
        self.ffn = ffn
        self.experts_RM = experts_RM
        self.gram_RMM = expert_grams(ffn, experts_RM)
        self.num_active = num_active
        self.num_routed = len(experts_RM)

    def scores(self, x_TD: Tensor) -> Tensor:
        """Energies of all experts (T, R); 2 T F M FLOPs besides the hidden state."""
        h_TF = self.ffn.hidden(x_TD)
        return expert_energies(h_TF, self.experts_RM, self.gram_RMM)

    def biased(self, scores_TR: Tensor) -> Tensor:
        return scores_TR

    def choose(self, scores_TR: Tensor) -> Tensor:
        """Which experts run (T, R)."""
        return choose_experts(
            scores_TR, self.chooser, self.num_active, self.num_routed
        )

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        scores_TR = self.scores(x_TD)
        index_TK = scores_TR.topk(self.num_active, dim=1).indices
        gate_TK = torch.ones_like(index_TK, dtype=torch.float32)
        return index_TK, gate_TK

    def gates_of_all(self, x_TD: Tensor) -> Tensor:
        """1 for experts that run, else 0 (T, R)."""
        scores_TR = self.scores(x_TD)
        runs_TR = self.choose(scores_TR)
        return runs_TR.float()

    def active_weights(self) -> int:
        return 0  # as if to know were free


@dataclass(frozen=True)
class NeuronOracle(FFNMethod):
    """Each token runs its neurons of largest contribution."""

    description = METHODS["neuron-oracle"]
    saves = False

    def sizes(self, layout: Layout, intermediate_size: int) -> Sizes:
        """The layout's budget in single neurons."""
        active = layout.sizes(intermediate_size).active
        return Sizes(0, 1, intermediate_size, active)

    def block(self, ffn: FFNShape) -> BlockConfig:
        return block_config(ffn, RouterConfig("linear", "topk"))

    def convert_ffn(
        self,
        weights: DenseFFN,
        inputs: FFNInputs,
        sizes: Sizes,
        generator: np.random.Generator,
    ) -> MoesaicReplacement:
        inputs.statistics(weights, PLAIN)  # says whether activations are finite
        return BestNeurons(weights, sizes.num_active)

    def words(self, moe: MoEConfig) -> str:
        sizes = moe.first_sizes
        return f"the {sizes.num_active} of {sizes.num_routed} neurons that add most"


class BestNeurons(MoesaicReplacement):
    """A dense FFN of whose neurons only the largest contributions count."""

    def __init__(self, ffn: DenseFFN, num_active: int):
        super().__init__()
        self.ffn = ffn
        self.num_active = num_active
        down_DF = ffn.down_DF.float()
        self.norm_F = torch.linalg.vector_norm(down_DF, dim=0)

    def forward(self, hidden_states: Tensor) -> Tensor:
        width = hidden_states.shape[-1]
        x_TD = hidden_states.reshape(-1, width)
        h_TF = self.ffn.hidden(x_TD)
        contribution_TF = h_TF.float().abs() * self.norm_F
        best = contribution_TF.topk(self.num_active, dim=1, sorted=False)
        mask_TF = torch.zeros_like(h_TF)
        mask_TF.scatter_(1, best.indices, 1.0)
        y_TD = self.ffn.output(h_TF * mask_TF)
        return y_TD.view_as(hidden_states)

    def active_weights(self) -> float:
        matrices = 3 if self.ffn.gated else 2
        hidden_size = self.ffn.up_FD.shape[1]
        return float(matrices * hidden_size * self.num_active)
