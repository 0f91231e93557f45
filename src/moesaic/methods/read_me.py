"""Read-ME: an expert for each kind of text, and one router ahead of all layers.

Source: Cai et al., Read-ME: Refactorizing LLMs as Router-Decoupled Mixture of Experts
with System Co-Design, NeurIPS 2024, https://arxiv.org/abs/2410.19123, and the released
code. Every calibration text is a domain. A domain's expert holds the neurons that are most active
on it, so experts overlap. One router, which knows the token alone, chooses one expert
for all layers. Where we depart: docs/deviations.md.

Shape suffixes: T tokens, D hidden_size, F neurons, R domains (and experts), M neurons of
one, N windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.calibration.calibration_set import CalibrationSet
from moesaic.calibration.checks import check_inputs
from moesaic.calibration.hidden_states import Stream
from moesaic.errors import MoesaicError
from moesaic.layout import Layout
from moesaic.memory import lent_to
from moesaic.methods.base import (
    Budget,
    FFNShape,
    ModelShape,
    neuron_layout,
    refuse_mixture,
)
from moesaic.methods.contents import METHODS
from moesaic.methods.expert_method import LayerFit
from moesaic.methods.router_choice import RouterChoice, router_setting
from moesaic.modeling import (
    MoEConfig,
    RouterConfig,
    Sizes,
    TokenIds,
    new_router,
    token_ids_of,
)
from moesaic.parts.domains import (
    domain_experts,
    domain_sums,
    fit_token_router,
    overlap_targets,
)
from moesaic.parts.partition import NO_EXPERTS, Partition


@dataclass(frozen=True)
class Refactored:
    """What the dense model said on texts of all domains.

    `experts` of every layer; `weight_RD` and `bias_R` of the one router; `token_ids` of
    the model.
    """

    experts: Mapping[int, NDArray[np.int64]]
    weight_RD: Tensor
    bias_R: Tensor
    token_ids: TokenIds


@dataclass(frozen=True)
class ReadMe(RouterChoice):
    """As many experts as texts; a token runs one, the same in every layer."""

    description = METHODS["read-me"]
    takes_grain = False
    needs = frozenset({"domains", "token ids"})

    router: str = router_setting("global", "one router for all layers")

    def plans(self, shape: ModelShape, budget: Budget) -> list[MoEConfig]:
        refuse_mixture(self, shape, "routes by token, not by outer expert")
        return super().plans(shape, budget)

    def plan(self, shape: ModelShape, layout: Layout) -> MoEConfig:
        """One expert for each calibration text."""
        moe = super().plan(shape, layout)
        sizes = [replace(one, num_routed=shape.domains) for one in moe.sizes]
        return replace(moe, sizes=tuple(sizes))

    def layouts(self, shape: ModelShape, budget: Budget) -> list[Layout]:
        """The neurons that run, of all, whatever layout or sparsity they come from."""
        return [neuron_layout(budget, shape.ffn.intermediate_size)]

    def sizes(self, layout: Layout, intermediate_size: int) -> Sizes:
        """Experts as wide as what runs for a token."""
        active = layout.sizes(intermediate_size).active
        return Sizes(0, active, 1, 1, intermediate_size)

    def own_router_config(self, ffn: FFNShape) -> RouterConfig:
        return RouterConfig("embedding", "topk")

    def convert(self, model: Any, calibration: Any, plan: Any, run: Any) -> Any:
        """Finds all experts and the router on the dense model, then replaces FFNs."""
        if calibration.domain_N is None:
            raise MoesaicError(
                f"{self.name} wants texts of at least two domains; give --calibration "
                "once for each"
            )
        refactored = refactor(run.stream, calibration, plan.sizes.expert)
        run.clock("domains")
        known = KnownReadMe(**self.settings, refactored=refactored)
        return run.replace_ffns(known)

    def partition(self, fit: LayerFit) -> Partition:
        known = self.known()
        assert fit.inputs.layer is not None
        experts_RM = known.experts[fit.inputs.layer]
        return Partition(NO_EXPERTS.reshape(-1), experts_RM)

    def make_own_router(self, fit: LayerFit) -> Any:
        """The one router, a copy in every layer."""
        known = self.known()
        router: Any = new_router(fit.block, fit.sizes).to(fit.device)
        weight_RD = known.weight_RD.to(fit.device, fit.dtype)
        router.score_proj.weight.data = weight_RD.clone()
        router.selection_bias.copy_(known.bias_R)
        router.token_ids = known.token_ids
        return router

    def words(self, moe: MoEConfig) -> str:
        sizes = moe.first_sizes
        return (
            f"one of {sizes.num_routed} experts of {sizes.expert} neurons, each the "
            "most active of a domain"
        )

    def known(self) -> Refactored:
        """What the dense model said."""
        raise MoesaicError(
            f"method {self.name!r} reads all layers on texts of several domains, and "
            "was given one FFN; convert the model"
        )


@dataclass(frozen=True)
class KnownReadMe(ReadMe):
    """The same once experts and router are found."""

    refactored: Refactored | None = field(default=None)

    def known(self) -> Refactored:
        assert self.refactored is not None
        return self.refactored


@torch.no_grad()
def refactor(
    stream: Stream, calibration: CalibrationSet, size: int
) -> Refactored:
    """Experts of `size` neurons in every converted layer, and the router.

    A router's target is the mean over layers of how well experts fit a token: cross
    entropies with one prediction add up to that with the mean target. Costs a forward
    pass, and every FFN's hidden states twice more.
    """
    domain_N = calibration.domain_N
    assert domain_N is not None
    ffns = stream.ffns
    domains = int(domain_N.max()) + 1
    domain_T = domain_N.repeat_interleave(calibration.length)
    dense = Stream(ffns, calibration.windows_NL, stream.device)
    experts = {}
    target_TR = torch.zeros(len(domain_T), domains)
    for layer, module in enumerate(ffns.layers):
        with lent_to(stream.device, module):
            check_inputs(dense, layer)
            blocks = list(dense.ffn_inputs(layer))
            if layer in ffns.converted:
                ffn = ffns.read(layer)
                hidden_blocks = (ffn.hidden(x_TD) for x_TD in blocks)
                activity_RF = _activity(hidden_blocks, domain_T, domains)
                experts[layer] = domain_experts(activity_RF, size)
                targets = [
                    overlap_targets(ffn.hidden(x_TD), experts[layer])
                    for x_TD in blocks
                ]
                target_TR += torch.cat(targets).cpu()
            dense.advance(layer, blocks)
    target_TR /= len(ffns.converted)

    token_ids = token_ids_of(ffns.base)
    token_ids.current = calibration.windows_NL.flatten()
    embedded_TD = token_ids.embedded(target_TR.to(stream.device))
    weight_RD, bias_R = fit_token_router(
        embedded_TD, target_TR.to(stream.device)
    )
    return Refactored(experts, weight_RD, bias_R, token_ids)


def _activity(
    hidden_blocks: Any, domain_T: Tensor, domains: int
) -> NDArray[np.float64]:
    """The mean of abs(h_i) over each domain's tokens (R, F)."""
    total_RF: Any = 0.0
    start = 0
    for h_TF in hidden_blocks:
        end = start + len(h_TF)
        domain_of_block_T = domain_T[start:end].to(h_TF.device)
        total_RF = total_RF + domain_sums(h_TF, domain_of_block_T, domains)
        start = end
    count_R1 = torch.bincount(domain_T, minlength=domains)[:, None]
    mean_RF: NDArray[np.float64] = (
        (total_RF.cpu().double() / count_R1).cpu().numpy()
    )
    return mean_RF
