"""LLaMA-MoE: neurons split at random, outputs scaled up, a gate that is yet to learn.

Source: Zhu et al., LLaMA-MoE: Building Mixture-of-Experts from LLaMA with Continual
Pre-training, EMNLP 2024, https://arxiv.org/abs/2406.16554: the random split, which the
paper found best, the gate Linear-Tanh-Linear and the factor N / k. The paper trains
gate and model on 200 billion tokens. At a conversion nothing is known to
the gate: it is drawn as linear layers are, and a token runs experts that mean nothing.
The gate's noise belongs to its training. Where we depart: docs/deviations.md.

Shape suffixes: D hidden_size, F neurons, R routed experts, M neurons of one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.families import DenseFFN
from moesaic.methods.base import FFNShape
from moesaic.methods.contents import METHODS
from moesaic.methods.expert_method import LayerFit
from moesaic.methods.router_choice import RouterChoice, router_setting
from moesaic.modeling import RouterConfig, new_router
from moesaic.parts.clustering import random_groups
from moesaic.parts.importance import contribution, split_shared
from moesaic.parts.partition import Partition


@dataclass(frozen=True)
class LlamaMoE(RouterChoice):
    """Experts of random neurons, scaled by N / k.

    Where a layout has shared neurons, which the paper has not, they are those that add
    most; they are not scaled.
    """

    description = METHODS["llama-moe"]
    experts = 8
    shared_experts = 0

    router: str = router_setting("mlp", "the untrained gate")

    def own_router_config(self, ffn: FFNShape) -> RouterConfig:
        return RouterConfig("mlp", "topk")

    def partition(self, fit: LayerFit) -> Partition:
        contribution_F = contribution(fit.statistics, fit.ffn)
        shared_S, others_N = split_shared(contribution_F, fit.sizes.shared)
        experts_RM = random_groups(
            others_N, fit.sizes.num_routed, fit.generator
        )
        return Partition(shared_S, experts_RM)

    def make_own_router(self, fit: LayerFit) -> Any:
        """Drawn evenly from +-1 / sqrt(inputs), as torch starts linear layers."""
        router: Any = new_router(fit.block, fit.sizes).to(fit.device)
        for projection in (router.hidden_proj, router.score_proj):
            drawn = _drawn(projection.weight, fit.generator)
            projection.weight.data = drawn.to(fit.dtype)
        return router

    def repair(self, fit: LayerFit) -> DenseFFN:
        """The output vectors of routed neurons times N / k."""
        index_N = torch.from_numpy(fit.partition.experts_RM.reshape(-1))
        down_DF = fit.ffn.down_DF.clone()
        scale = fit.sizes.num_routed / fit.sizes.num_active
        down_DF[:, index_N.to(fit.device)] *= scale
        return replace(fit.ffn, down_DF=down_DF)


def _drawn(weight: Tensor, generator: np.random.Generator) -> Tensor:
    """Random numbers for a weight, on its device."""
    bound = weight.shape[1] ** -0.5
    values = generator.uniform(-bound, bound, tuple(weight.shape))
    return torch.from_numpy(values).to(weight)
