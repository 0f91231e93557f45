"""Expert methods whose router may also be the analytical one of CMoE.

The ablation of that paper (Pei et al., ACL 2026) asks what each grouping of neurons is
worth under its own router and under the analytical one ("+ ours").
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from moesaic.calibration.statistics import PLAIN, StatisticsKind
from moesaic.methods.base import FFNShape, setting
from moesaic.methods.expert_method import ExpertMethod, LayerFit
from moesaic.modeling import RouterConfig
from moesaic.parts.representatives import analytical_router, own_members

ANALYTICAL = "analytical"
ANALYTICAL_TOP_K = 10  # K_a of that paper


def router_setting(own: str, what: str) -> Any:
    """The setting `router` of a method whose own router is called `own`."""
    return setting(
        own,
        f"What scores an expert: {what}, or one neuron as in cmoe.",
        choices=(own, ANALYTICAL),
    )


@dataclass(frozen=True)
class RouterChoice(ExpertMethod):
    """Shared and routed experts, under the method's own router or the analytical one.

    A subclass defines the setting `router`, and `own_router_config` and
    `make_own_router` for its own one.
    """

    router: str

    @abstractmethod
    def own_router_config(self, ffn: FFNShape) -> RouterConfig:
        """What the method's own router computes, and what chooses."""

    @abstractmethod
    def make_own_router(self, fit: LayerFit) -> Any:
        """The method's own router of the partition's experts."""

    @property
    def statistics_kind(self) -> StatisticsKind:  # type: ignore[override]
        if self.router == ANALYTICAL:
            return StatisticsKind(ANALYTICAL_TOP_K)
        return PLAIN

    def router_config(self, ffn: FFNShape) -> RouterConfig:
        if self.router == ANALYTICAL:
            return RouterConfig("neuron-copies", "topk")
        return self.own_router_config(ffn)

    def make_router(self, fit: LayerFit) -> Any:
        if self.router == ANALYTICAL:
            # Where experts overlap, one neuron would score several alike.
            before_copies = fit.made.partition
            assert before_copies is not None
            return analytical_router(
                fit.statistics,
                fit.partition.experts_RM,
                own_members(before_copies.experts_RM),
                fit.ffn,
                fit.block,
                fit.sizes,
            )
        return self.make_own_router(fit)
