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

from moesaic.calibration.statistics import Statistics
from moesaic.families import DenseFFN
from moesaic.methods.base import (
    Budget,
    FFNShape,
    ModelShape,
    block_config,
    refuse_mixture,
)
from moesaic.methods.contents import METHODS
from moesaic.methods.expert_method import LayerFit
from moesaic.methods.moefication import MoEfication
from moesaic.modeling import (
    BlockConfig,
    MoEConfig,
    MoesaicReplacement,
)
from moesaic.parts.carve import carve
from moesaic.parts.mlp_router import trained_mlp_router


@dataclass(frozen=True)
class GMoEfication(MoEfication):
    """MoEfication's experts; neurons that do not run take their mean and not 0."""

    description = METHODS["g-moefication"]

    def plans(self, shape: ModelShape, budget: Budget) -> list[MoEConfig]:
        refuse_mixture(self, shape, "keeps a mean for every expert of a layer")
        return super().plans(shape, budget)

    def block(self, ffn: FFNShape) -> BlockConfig:
        router = self.router_config(ffn)
        return block_config(ffn, router, replacement="experts-with-means")

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
