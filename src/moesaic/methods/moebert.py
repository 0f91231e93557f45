"""MoEBERT: the most important neurons in every expert, and a hash of the token chooses.

Source: Zuo et al., MoEBERT: from BERT to Mixture-of-Experts via Importance-Guided
Adaptation, NAACL 2022, https://arxiv.org/abs/2204.07675, and the released code. One
expert runs for a token; the least important neurons may be in none. The paper's
distillation is `moesaic finetune`. Where we depart: docs/deviations.md.

Shape suffixes: F neurons, R experts, M neurons of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.calibration.calibration_set import CalibrationSet
from moesaic.calibration.checks import check_on
from moesaic.calibration.hidden_states import Stream
from moesaic.errors import MoesaicError
from moesaic.layout import Layout
from moesaic.methods.base import (
    Budget,
    FFNShape,
    ModelShape,
    neuron_layout,
    refuse_mixture,
    setting,
)
from moesaic.methods.contents import METHODS
from moesaic.methods.expert_method import ExpertMethod, LayerFit
from moesaic.modeling import (
    MoEConfig,
    MoesaicHashRouter,
    RouterConfig,
    Sizes,
    new_router,
)
from moesaic.parts.gradients import visit_gradients
from moesaic.parts.importance import by_importance, weight_importance
from moesaic.parts.partition import NO_EXPERTS, Partition

GRADIENT_TOKENS = 16_384


@dataclass(frozen=True)
class MoEBERT(ExpertMethod):
    """A few wide experts that share a core; a token runs the one that its id hashes to."""

    description = METHODS["moebert"]
    takes_grain = False
    needs = frozenset({"gradients", "token ids"})

    num_experts: int = setting(
        4, "Experts of a layer; one runs for a token.", 2
    )
    core: float = setting(
        0.667,
        "Of an expert's neurons, the share that all experts have; more where they "
        "could not be filled otherwise.",
        0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.core > 1:
            raise self._bad_setting("core", "it is a share of at most 1")

    def plans(self, shape: ModelShape, budget: Budget) -> list[MoEConfig]:
        refuse_mixture(self, shape, "routes by token, not by outer expert")
        return super().plans(shape, budget)

    def layouts(self, shape: ModelShape, budget: Budget) -> list[Layout]:
        """The neurons that run, of all, whatever layout or sparsity they come from."""
        return [neuron_layout(budget, shape.ffn.intermediate_size)]

    def sizes(self, layout: Layout, intermediate_size: int) -> Sizes:
        """Experts as wide as what runs for a token."""
        active = layout.sizes(intermediate_size).active
        return Sizes(0, active, self.num_experts, 1, intermediate_size)

    def router_config(self, ffn: FFNShape) -> RouterConfig:
        return RouterConfig("hash", "topk")

    def convert(self, model: Any, calibration: Any, plan: Any, run: Any) -> Any:
        """Importance in all layers of the dense model, then one after the other."""
        stream = run.stream
        check_on(model, stream.device, f"method {self.name!r} differentiates")
        importance = importance_of_layers(model, calibration, stream)
        run.clock("importance")
        known = KnownMoEBERT(**self.settings, importance=importance)
        return run.replace_ffns(known)

    def partition(self, fit: LayerFit) -> Partition:
        importance_F = self.importance_of(fit)
        core = self.core_of(fit.sizes)
        experts_RM = adapted_experts(
            importance_F, self.num_experts, fit.sizes.expert, core
        )
        return Partition(NO_EXPERTS.reshape(-1), experts_RM)

    def make_router(self, fit: LayerFit) -> Any:
        """Another hash in every layer."""
        router = new_router(fit.block, fit.sizes).to(fit.device)
        assert isinstance(router, MoesaicHashRouter)
        salt = int(fit.generator.integers(2**31))
        router.salt.fill_(salt)
        return router

    def words(self, moe: MoEConfig) -> str:
        sizes = moe.first_sizes
        core = self.core_of(sizes)
        return (
            f"one of {sizes.num_routed} experts of {sizes.expert} neurons, {core} of "
            "them in every expert"
        )

    def core_of(self, sizes: Sizes) -> int:
        """How many neurons all experts have."""
        return core_size(sizes.total, sizes.expert, self.num_experts, self.core)

    def importance_of(self, fit: LayerFit) -> NDArray[np.float64]:
        """What the dense model's gradients said of this layer's neurons."""
        raise MoesaicError(
            f"method {self.name!r} needs gradients of the whole model, and was given "
            "one FFN; convert the model"
        )


@dataclass(frozen=True)
class KnownMoEBERT(MoEBERT):
    """The same once the importance of all neurons is known."""

    importance: Mapping[int, NDArray[np.float64]] = field(default_factory=dict)

    def importance_of(self, fit: LayerFit) -> NDArray[np.float64]:
        assert fit.inputs.layer is not None
        return self.importance[fit.inputs.layer]


def importance_of_layers(
    model: Any, calibration: CalibrationSet, stream: Stream
) -> dict[int, NDArray[np.float64]]:
    """The sum over windows of abs(w_i . dL/dw_i) for every neuron of every layer.

    Costs a forward and a backward pass, and three passes through the FFNs.
    """
    ffns = stream.ffns
    importance = {
        layer: torch.zeros(
            ffns.read(layer).intermediate_size, device=stream.device
        )
        for layer in ffns.converted
    }

    def visit(layer: int, x_TD: Tensor, gradient_TD: Tensor) -> None:
        slope_F = weight_importance(ffns.read(layer), x_TD, gradient_TD)
        importance[layer] += slope_F.abs()

    windows = max(GRADIENT_TOKENS // calibration.length, 1)
    windows_NL = calibration.fewer(windows).windows_NL
    visit_gradients(model, ffns, windows_NL, visit)
    return {
        layer: sum_F.cpu().double().numpy()
        for layer, sum_F in importance.items()
    }


def core_size(neurons: int, expert: int, experts: int, share: float) -> int:
    """Neurons that all experts have: a share, or as many as it takes to fill them.

    With s in the core, (neurons - s) / experts are there for each to have alone.
    """
    wanted = round(share * expert)
    least = -(-(experts * expert - neurons) // (experts - 1))
    return min(max(wanted, least), expert)


def adapted_experts(
    importance_F: NDArray[np.float64], experts: int, size: int, core: int
) -> NDArray[np.int64]:
    """Neurons of each expert (R, M), ascending.

    The core, and of the others in order of importance every R-th one.
    """
    order_F = by_importance(importance_F)
    core_neurons = order_F[:core]
    rest = order_F[core:]
    own_size = size - core
    members = []
    for expert in range(experts):
        own = rest[expert::experts][:own_size]
        both = np.concatenate([core_neurons, own])
        members.append(np.sort(both))
    return np.stack(members)
