"""FLAP: neurons that fluctuate least are replaced by their mean.

An et al., Fluctuation-based Adaptive Structured Pruning for Large Language Models,
arXiv:2312.11983, its form for FFNs: neuron f counts by var(h_f) norm(w_down_f)^2 (the
paper's WIFV), those that count least go, and what they add on average becomes an output
bias. These metrics, standardised in every layer, are compared over all layers: widths
differ by layer, from one budget. Nothing is chosen per token.

Shape suffixes: D hidden_size, F neurons.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.families import DenseFFN
from moesaic.layout import Layout
from moesaic.methods.base import FFNShape, setting
from moesaic.methods.contents import METHODS
from moesaic.methods.expert_method import ExpertMethod, LayerFit
from moesaic.modeling import Sizes
from moesaic.parts.importance import split_shared, variance
from moesaic.parts.partition import NO_EXPERTS, Partition
from moesaic.parts.widths import global_widths

WIDTHS = ("global", "equal")


@dataclass(frozen=True)
class Flap(ExpertMethod):
    """Keeps the neurons of largest fluctuation, and the mean of the others."""

    description = METHODS["flap"]
    output_bias = True

    widths: str = setting(
        "global",
        "Whether layers share one budget of neurons, or all keep the same number.",
        choices=WIDTHS,
    )

    @property
    def layer_budgets(self) -> str:  # type: ignore[override]
        return "own" if self.widths == "global" else "uniform"

    def sizes_of_layers(
        self, layers: Iterable[tuple[DenseFFN, FFNInputs]], sizes: Sizes
    ) -> list[Sizes]:
        """Widths by the standardised fluctuation; their sum is that of equal ones."""
        scores = []
        for ffn, inputs in layers:
            statistics = self.profile(ffn, inputs)
            scores.append(variance(statistics, ffn))
        widths = global_widths(scores, total=sizes.active * len(scores))
        return [replace(sizes, shared=width) for width in widths]

    def sizes(self, layout: Layout, intermediate_size: int) -> Sizes:
        """As many neurons as the layout runs for a token, and no experts."""
        active = layout.sizes(intermediate_size).active
        return Sizes(active, 0, 0, 0, intermediate_size)

    def router_config(self, ffn: FFNShape) -> None:
        return None

    def partition(self, fit: LayerFit) -> Partition:
        fluctuation_F = variance(fit.statistics, fit.ffn)
        kept_S, _ = split_shared(fluctuation_F, fit.sizes.shared)
        return Partition(kept_S, NO_EXPERTS)

    def make_router(self, fit: LayerFit) -> Any:
        return None

    def repair(self, fit: LayerFit) -> DenseFFN:
        """The FFN with an output bias: what the pruned neurons add on average."""
        mean_F = fit.statistics.sum_F / fit.statistics.tokens
        kept_S = fit.partition.shared_S
        bias_D = mean_of_pruned(fit.ffn, mean_F, kept_S)
        if fit.ffn.down_bias_D is not None:
            bias_D = bias_D + fit.ffn.down_bias_D.double()
        return replace(fit.ffn, down_bias_D=bias_D.to(fit.dtype))


def mean_of_pruned(
    ffn: DenseFFN, mean_F: NDArray[np.float64], kept_S: NDArray[np.int64]
) -> Tensor:
    """W_down times the mean hidden state of all neurons but `kept_S` (D,), float64."""
    pruned_mean_F = mean_F.copy()
    pruned_mean_F[kept_S] = 0
    pruned_F = torch.from_numpy(pruned_mean_F).to(ffn.down_DF.device)
    return ffn.down_DF.double() @ pruned_F
