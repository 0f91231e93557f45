"""MoEfication: experts of neurons whose weights are alike; an MLP learns who is active.

Source: Zhang et al., MoEfication: Transformer Feed-forward Layers are Mixtures of
Experts, Findings of ACL 2022, https://arxiv.org/abs/2110.01786, Sections 3.2
(parameter clustering) and 3.3 (MLP selection), and the released code. Where we depart
from it: docs/deviations.md.

Shape suffixes: D hidden_size, F neurons, N neurons to group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from moesaic.calibration.statistics import PLAIN, StatisticsKind
from moesaic.methods.base import FFNShape, setting
from moesaic.methods.contents import METHODS
from moesaic.methods.expert_method import ExpertMethod, LayerFit, split_shared
from moesaic.modeling import RouterConfig
from moesaic.parts.clustering import rows_kmeans
from moesaic.parts.importance import contribution
from moesaic.parts.mlp_router import trained_mlp_router
from moesaic.parts.partition import Partition
from moesaic.parts.representatives import (
    ANALYTICAL,
    ANALYTICAL_TOP_K,
    analytical_router,
)


@dataclass(frozen=True)
class MoEfication(ExpertMethod):
    """Balanced k-means on rows of W_up; experts are scored by two small matrices.

    Where a layout has shared neurons, which the paper has not, they are those that add
    most.
    """

    description = METHODS["moefication"]
    experts = 8
    shared_experts = 0
    fits_weights = True

    kmeans_rounds: int = setting(20, "Rounds of balanced k-means, at most.", 1)
    epochs: int = setting(
        30, "Passes over the tokens that train the router.", 0
    )
    rate: float = setting(0.01, "Adam's rate while it trains.", 0)
    router: str = setting(
        "mlp",
        "What scores an expert: the trained network, or one neuron as in cmoe.",
        choices=("mlp", ANALYTICAL),
    )

    @property
    def statistics_kind(self) -> StatisticsKind:  # type: ignore[override]
        if self.router == ANALYTICAL:
            return StatisticsKind(ANALYTICAL_TOP_K)
        return PLAIN

    def router_config(self, ffn: FFNShape) -> RouterConfig:
        if self.router == ANALYTICAL:
            return RouterConfig("neuron-copies", "topk")
        return RouterConfig("unit-mlp", "topk")

    def partition(self, fit: LayerFit) -> Partition:
        """Balanced k-means on rows of W_up, scaled to unit length (Section 3.2)."""
        contribution_F = contribution(fit.statistics, fit.ffn)
        shared_S, others_N = split_shared(contribution_F, fit.sizes.shared)
        index_N = torch.from_numpy(others_N).to(fit.device)
        row_ND = normalize(fit.ffn.up_FD[index_N].float(), dim=1)
        experts_RM = rows_kmeans(
            row_ND,
            others_N,
            fit.sizes.num_routed,
            self.kmeans_rounds,
            fit.generator,
        )
        return Partition(shared_S, experts_RM)

    def make_router(self, fit: LayerFit) -> Any:
        """Trained on the sum of every expert's abs(h) (Section 3.3)."""
        experts_RM = fit.partition.experts_RM
        if self.router == ANALYTICAL:
            return analytical_router(
                fit.statistics, experts_RM, fit.ffn, fit.block, fit.sizes
            )
        return trained_mlp_router(
            fit.inputs,
            fit.ffn,
            experts_RM,
            Tensor.abs,
            fit.block,
            fit.sizes,
            self.epochs,
            self.rate,
            fit.generator,
        )
