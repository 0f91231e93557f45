"""CMoE, the paper's training-free method, and what the authors' released code does.

Pei et al., *Analytical FFN-to-MoE Restructuring via Activation Pattern Analysis*, ACL
2026, https://arxiv.org/abs/2502.04416, Sections 4.1 and 4.2. Shared are the neurons
that are most often among the K_a most active; the others are grouped by balanced
k-means on binary activation columns; an expert is scored by its representative neuron.
Where we depart from the paper: docs/deviations.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from moesaic.calibration.statistics import StatisticsKind
from moesaic.methods.base import FFNShape, setting
from moesaic.methods.contents import METHODS
from moesaic.methods.expert_method import ExpertMethod, LayerFit
from moesaic.modeling import RouterConfig
from moesaic.parts import representatives
from moesaic.parts.clustering import balanced_kmeans
from moesaic.parts.importance import activation_rate, split_shared
from moesaic.parts.partition import Partition
from moesaic.parts.representatives import representative


@dataclass(frozen=True)
class CMoE(ExpertMethod):
    """The paper's method to the letter: half of the active experts shared, E = 8."""

    description = METHODS["cmoe"]
    experts = 8
    normalise: ClassVar[bool] = False
    absolute: ClassVar[bool] = False

    activation_top_k: int = setting(
        10, "K_a: neurons of a token that count as active.", 1
    )
    kmeans_rounds: int = setting(20, "Rounds of balanced k-means, at most.", 1)

    @property
    def statistics_kind(self) -> StatisticsKind:  # type: ignore[override]
        return StatisticsKind(self.activation_top_k, self.normalise)

    def router_config(self, ffn: FFNShape) -> RouterConfig:
        return RouterConfig("neuron-copies", "topk", absolute=self.absolute)

    def partition(self, fit: LayerFit) -> Partition:
        """Eqs. 16 to 21: shared by rate, the others by balanced k-means."""
        rate_F = activation_rate(fit.statistics)
        shared_S, candidates_N = split_shared(rate_F, fit.sizes.shared)
        experts_RM = balanced_kmeans(
            fit.statistics,
            candidates_N,
            fit.sizes.num_routed,
            self.kmeans_rounds,
        )
        return Partition(shared_S, experts_RM)

    def make_router(self, fit: LayerFit) -> Any:
        """Eqs. 7 and 8: each expert's representative neuron scores it."""
        experts_RM = fit.partition.experts_RM
        neurons_R = representative(fit.statistics, experts_RM)
        return copied_neurons(fit, neurons_R, self.normalise)


@dataclass(frozen=True)
class CMoECode(CMoE):
    """As released: unit-length inputs and rows, one assignment, absolute scores."""

    description = METHODS["cmoe-code"]
    normalise = True
    absolute = True

    kmeans_rounds: int = setting(1, "Rounds of balanced k-means, at most.", 1)


def copied_neurons(
    fit: LayerFit, neurons_R: NDArray[np.int64], normalise: bool = False
) -> Any:
    """A router that scores an expert by the hidden activation of one neuron."""
    ffn = fit.ffn
    if normalise:
        ffn = ffn.with_unit_rows()
    return representatives.copied_neurons(ffn, neurons_R, fit.block, fit.sizes)
