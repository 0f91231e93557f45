"""Static pruning: the best neurons of each FFN stay, the others are dropped.

The rival that every router has to beat at equal work: nothing is chosen per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moesaic.families import DenseFFN
from moesaic.layout import Layout
from moesaic.methods.base import (
    LAYER_BUDGETS,
    UNDO_DRIFT_HELP,
    FFNShape,
    setting,
)
from moesaic.methods.contents import METHODS
from moesaic.methods.expert_method import (
    ExpertMethod,
    LayerFit,
    fit_repair,
)
from moesaic.modeling import Sizes
from moesaic.parts.importance import contribution, split_shared
from moesaic.parts.partition import NO_EXPERTS, Partition


@dataclass(frozen=True)
class Static(ExpertMethod):
    """Keeps the neurons of largest contribution."""

    description = METHODS["static"]

    def sizes(self, layout: Layout, intermediate_size: int) -> Sizes:
        """As many neurons as the layout runs for a token, and no experts."""
        active = layout.sizes(intermediate_size).active
        return Sizes(active, 0, 0, 0, intermediate_size)

    def router_config(self, ffn: FFNShape) -> None:
        return None

    def partition(self, fit: LayerFit) -> Partition:
        contribution_F = contribution(fit.statistics, fit.ffn)
        kept_S, _ = split_shared(contribution_F, fit.sizes.shared)
        return Partition(kept_S, NO_EXPERTS)

    def make_router(self, fit: LayerFit) -> Any:
        return None


@dataclass(frozen=True)
class StaticRepaired(Static):
    """The same, with W_down refitted by least squares to the dense output."""

    description = METHODS["static-repaired"]
    fits_weights = True

    up_steps: int = setting(
        0,
        "Steps that refit the rows of W_up too; 4 loses less, takes longer.",
        0,
    )

    undo_drift: float = setting(  # type: ignore[misc]
        0.5, UNDO_DRIFT_HELP, 0, most=1
    )
    layer_budgets: str = setting(  # type: ignore[misc]
        "uniform",
        "How many neurons each layer keeps: uniform, or as many as gradients say; other "
        "engines need uniform.",
        choices=LAYER_BUDGETS,
    )

    def repair(self, fit: LayerFit) -> DenseFFN:
        return fit_repair(
            fit,
            "least-squares",
            intercept=False,
            up_steps=self.up_steps,
            undo_drift=self.undo_drift,
        )
