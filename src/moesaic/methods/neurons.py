"""moesaic-neurons, ours: every neuron is an expert, chosen by its own gate.

A neuron runs where act(gate x)^2 ((B A x)^2 + v) |w|^2 is above one threshold of the
layer: gates are computed for all neurons, and B A of low rank stands in for W_up. It
saves time for one to four tokens at once, and only FFNs with a gate have it. docs/
method.md holds the equations, and what the work amounts to.

Shape suffixes: T tokens, D hidden_size, F neurons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.calibration.statistics import PLAIN, SAMPLE_TOKENS
from moesaic.errors import MoesaicError, unknown
from moesaic.families import DenseFFN
from moesaic.layout import GRAINS, Layout
from moesaic.methods.base import (
    LAYER_BUDGETS,
    REPAIRS,
    Budget,
    FFNShape,
    ModelShape,
    block_config,
    setting,
)
from moesaic.methods.contents import METHODS
from moesaic.methods.expert_method import (
    ExpertMethod,
    LayerFit,
    active_words,
    fit_repair,
)
from moesaic.modeling import (
    BlockConfig,
    MoEConfig,
    MoesaicNeuronRouter,
    MoesaicReplacement,
    RouterConfig,
)
from moesaic.parts.carve import carve_neurons
from moesaic.parts.partition import Partition
from moesaic.parts.sketches import sketch_up
from moesaic.parts.thresholds import single_threshold


@dataclass(frozen=True)
class MoesaicNeurons(ExpertMethod):
    """A budget of neurons per token, on average, spent where they add most."""

    description = METHODS["moesaic-neurons"]
    fits_weights = True
    can_share_budgets = True
    statistics_kind = PLAIN
    output_bias = True

    directions: int = setting(24, "Rank of the stand-in for W_up.", 1)
    repair_by: str = setting(
        "least-squares", "How output weights are refitted.", choices=REPAIRS
    )
    intercept: bool = setting(
        True, "Whether the repair may add an output bias."
    )
    up_steps: int = setting(4, "Steps that refit the rows of W_up too.", 0)
    layer_budgets: str = setting(  # type: ignore[misc]
        "gradient",
        "How many neurons each layer runs: uniform, or as many as are worth most.",
        choices=LAYER_BUDGETS,
    )

    def layouts(self, shape: ModelShape, budget: Budget) -> list[Layout]:
        """One neuron per expert, of the budget that a layout or a sparsity gives.

        Any known grain is the same: there is none finer.
        """
        if budget.grain not in GRAINS:
            raise unknown("grain", budget.grain, GRAINS)
        if shape.outer is not None or not shape.ffn.gated:
            what = "FFNs without a gate"
            if shape.outer is not None:
                what = "experts of a mixture"
            raise MoesaicError(
                f"method {self.name!r} chooses neurons by their gates in the FFNs of a "
                f"dense model; {shape.name} has {what}; take another method"
            )
        total = shape.ffn.intermediate_size
        if budget.layout is not None:
            active = budget.layout.sizes(total).active
            return [Layout(0, active, total)]
        sparsity = budget.skipped
        if not 0 < sparsity < 1:
            raise MoesaicError(
                f"sparsity {sparsity} is outside (0, 1); 0.25 skips a quarter"
            )
        active = round((1 - sparsity) * total)
        if not 1 <= active < total:
            raise MoesaicError(
                f"sparsity {sparsity}: {active} of {total} neurons would run; at least "
                "1 has to, and at least 1 not"
            )
        return [Layout(0, active, total)]

    def router_config(self, ffn: FFNShape) -> RouterConfig:
        rank = min(self.directions, ffn.hidden_size)
        return RouterConfig("gates", "threshold", rank)

    def block(self, ffn: FFNShape) -> BlockConfig:
        return block_config(
            ffn,
            self.router_config(ffn),
            output_bias=True,
            replacement="neurons",
        )

    def partition(self, fit: LayerFit) -> Partition:
        """Nothing is grouped: every neuron stands alone, in order."""
        neurons_F = np.arange(fit.ffn.intermediate_size)
        no_shared_S = neurons_F[:0]
        experts_F1 = neurons_F[:, None]
        return Partition(no_shared_S, experts_F1)

    def make_router(self, fit: LayerFit) -> Any:
        return fit_neuron_router(fit)

    def assemble(self, fit: LayerFit, repaired: DenseFFN) -> MoesaicReplacement:
        return carve_neurons(repaired, fit.router, fit.block, fit.sizes)

    def repair(self, fit: LayerFit) -> DenseFFN:
        if self.repair_by == "none":
            return fit.ffn
        mask = neuron_mask(fit.router, fit.ffn)
        return fit_repair(
            fit, self.repair_by, self.intercept, self.up_steps, mask
        )

    def words(self, moe: MoEConfig) -> str:
        routed = moe.first_sizes.num_routed
        return (
            f"on average {active_words(moe)} of {routed} neurons, gates of all"
        )


def neuron_mask(router: Any, ffn: DenseFFN) -> Callable[[Tensor], Tensor]:
    """1.0 where a neuron runs for inputs x (T, F)."""

    def mask(x_TD: Tensor) -> Tensor:
        gate_TF = ffn.gates(x_TD)
        score_TF: Tensor = router(x_TD, gate_TF)
        runs_TF = score_TF > 0
        return runs_TF.float()

    return mask


def fit_neuron_router(fit: LayerFit) -> Any:
    """The router of a layer, from about SAMPLE_TOKENS of the tokens to fit on.

    Its weights are rounded to the model's dtype before the threshold is taken from its
    scores.
    """
    ffn = fit.ffn
    router: Any = MoesaicNeuronRouter(fit.block, fit.sizes)
    router.to(fit.device)
    sample = fit.inputs.apart(SAMPLE_TOKENS)
    x_TD = torch.cat(list(sample.fit()))

    # B A of low rank, which stands in for W_up.
    rank = router.sketch_in.out_features
    sketch = sketch_up(x_TD, ffn, rank)
    router.sketch_in.weight.data = sketch.in_CD.to(fit.dtype)
    router.sketch_out.weight.data = sketch.out_FC.to(fit.dtype)
    router.sketch_out.bias.data = sketch.bias_F.to(fit.dtype)
    router.up_variance.copy_(sketch.variance_F)

    # log |w|^2, less the threshold.
    norm_F = ffn.down_DF.float().square().sum(0)
    log_norm_F = norm_F.clamp(min=1e-38).log()
    router.selection_bias.copy_(log_norm_F)
    gate_TF = ffn.gates(x_TD)
    score_TF = router(x_TD, gate_TF)
    threshold = single_threshold(score_TF, fit.sizes.num_active)
    router.selection_bias -= threshold
    return router
