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
from moesaic.modeling import RouterConfig, new_router
from moesaic.parts.carve import neuron_rows
from moesaic.parts.clustering import balanced_kmeans
from moesaic.parts.importance import activation_rate, by_importance
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
        order_F = by_importance(activation_rate(fit.statistics))
        shared_S = np.sort(order_F[: fit.sizes.shared])
        candidates_N = np.sort(order_F[fit.sizes.shared :])
        routed = fit.sizes.num_routed
        experts_RM = balanced_kmeans(
            fit.statistics, candidates_N, routed, self.kmeans_rounds
        )
        return Partition(shared_S, experts_RM)

    def make_router(self, fit: LayerFit) -> Any:
        """Eqs. 7 and 8: each expert's representative neuron scores it."""
        neurons_R = representative(fit.statistics, fit.partition.experts_RM)
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
    ffn = fit.ffn.with_unit_rows() if normalise else fit.ffn
    router: Any = new_router(fit.block, fit.sizes).to(ffn.up_FD.device)
    router.gate_proj = (
        None
        if router.gate_proj is None
        else router.gate_proj.to(ffn.up_FD.dtype)
    )
    router.up_proj = router.up_proj.to(ffn.up_FD.dtype)
    router.load_state_dict(neuron_rows(ffn, neurons_R), strict=False)
    return router
