"""MoEfication: experts of neurons whose weights are alike; an MLP learns who is active.

Source: Zhang et al., MoEfication: Transformer Feed-forward Layers are Mixtures of
Experts, Findings of ACL 2022, https://arxiv.org/abs/2110.01786, Sections 3.2
(parameter clustering) and 3.3 (MLP selection), and the released code. Where we depart
from it: docs/deviations.md.

Shape suffixes: D hidden_size, F neurons.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import normalize

from moesaic.methods.base import FFNShape, setting
from moesaic.methods.contents import METHODS
from moesaic.methods.expert_method import LayerFit
from moesaic.methods.router_choice import RouterChoice, router_setting
from moesaic.modeling import RouterConfig
from moesaic.parts.clustering import alike_rows
from moesaic.parts.mlp_router import trained_mlp_router
from moesaic.parts.partition import Partition


@dataclass(frozen=True)
class MoEfication(RouterChoice):
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
    router: str = router_setting("mlp", "the trained network")

    def own_router_config(self, ffn: FFNShape) -> RouterConfig:
        return RouterConfig("unit-mlp", "topk")

    def partition(self, fit: LayerFit) -> Partition:
        """Balanced k-means on rows of W_up, scaled to unit length (Section 3.2)."""
        row_FD = normalize(fit.ffn.up_FD.float(), dim=1)
        return alike_rows(
            row_FD,
            fit.statistics,
            fit.ffn,
            fit.sizes,
            self.kmeans_rounds,
            fit.generator,
        )

    def make_own_router(self, fit: LayerFit) -> Any:
        """Trained on the sum of every expert's abs(h) (Section 3.3)."""
        return trained_mlp_router(
            fit.inputs,
            fit.ffn,
            fit.partition.experts_RM,
            Tensor.abs,
            fit.block,
            fit.sizes,
            self.epochs,
            self.rate,
            fit.generator,
        )
