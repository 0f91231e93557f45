"""G-MoEfication: MoEfication for any activation; experts that rest put out their mean.

Source: Lee et al., Breaking ReLU Barrier: Generalized MoEfication for Dense Pretrained
Models, EMNLP 2024, https://aclanthology.org/2024.emnlp-main.563, and the released code.
The router learns where activations deviate most from their means, which is what a
token loses of an expert that does not run. Where we depart: docs/deviations.md.

Shape suffixes: T tokens, D hidden_size, F neurons, R routed
experts, M neurons of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from moesaic.calibration.statistics import Statistics
from moesaic.families import DenseFFN
from moesaic.methods.base import (
    Budget,
    FFNShape,
    ModelShape,
    block_config,
    refuse_mixture,
    setting,
)
from moesaic.methods.contents import METHODS
from moesaic.methods.expert_method import LayerFit
from moesaic.methods.router_choice import RouterChoice, router_setting
from moesaic.modeling import (
    BlockConfig,
    MoEConfig,
    MoesaicReplacement,
    RouterConfig,
)
from moesaic.parts.carve import carve
from moesaic.parts.clustering import alike_rows
from moesaic.parts.mlp_router import trained_mlp_router
from moesaic.parts.partition import Partition


@dataclass(frozen=True)
class GMoEfication(RouterChoice):
    """MoEfication's experts; neurons that do not run take their mean and not 0."""

    description = METHODS["g-moefication"]
    experts = 8
    shared_experts = 0
    fits_weights = True

    kmeans_rounds: int = setting(20, "Rounds of balanced k-means, at most.", 1)
    epochs: int = setting(
        30, "Passes over the tokens that train the router.", 0
    )
    rate: float = setting(0.01, "Adam's rate while it trains.", 0)
    router: str = router_setting("mlp", "the trained network")

    def plans(self, shape: ModelShape, budget: Budget) -> list[MoEConfig]:
        refuse_mixture(self, shape, "keeps a mean for every expert of a layer")
        return super().plans(shape, budget)

    def own_router_config(self, ffn: FFNShape) -> RouterConfig:
        return RouterConfig("unit-mlp", "topk")

    def block(self, ffn: FFNShape) -> BlockConfig:
        router = self.router_config(ffn)
        return block_config(ffn, router, replacement="experts-with-means")

    def partition(self, fit: LayerFit) -> Partition:
        """MoEfication's: balanced k-means on unit rows of W_up."""
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
        """Trained on the sum of every expert's (h - mean h)^2."""
        mean_F = mean_activation(fit.statistics).to(fit.device)

        def deviation(h_TF: Tensor) -> Tensor:
            return (h_TF - mean_F).square()

        return trained_mlp_router(
            fit.inputs,
            fit.ffn,
            fit.partition.experts_RM,
            deviation,
            fit.block,
            fit.sizes,
            self.epochs,
            self.rate,
            fit.generator,
        )

    def assemble(self, fit: LayerFit, repaired: DenseFFN) -> MoesaicReplacement:
        mean_RD = expert_means(
            mean_activation(fit.statistics), repaired, fit.partition.experts_RM
        )
        more = {"expert_means": mean_RD.to(fit.dtype)}
        return carve(
            repaired, fit.partition, fit.router, fit.block, fit.sizes, more
        )


def mean_activation(statistics: Statistics) -> Tensor:
    """The mean over tokens of every neuron's activation (F,), in float32."""
    mean_F = torch.from_numpy(statistics.sum_F / statistics.tokens)
    return mean_F.float()


def expert_means(
    mean_F: Tensor, ffn: DenseFFN, experts_RM: NDArray[np.int64]
) -> Tensor:
    """What every expert puts out on average (R, D): its mean activations through W_down."""
    device = ffn.up_FD.device
    index_RM = torch.from_numpy(experts_RM).to(device)
    mean_RM1 = mean_F.to(device)[index_RM][:, :, None]
    down_RMD = ffn.down_DF.float().T[index_RM]
    return (mean_RM1 * down_RMD).sum(dim=1)
