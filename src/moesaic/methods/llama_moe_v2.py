"""LLaMA-MoE v2: experts by the gradient, a residual one, and a router of centroids.

Source: Qu et al., LLaMA-MoE v2: Exploring Sparsity of LLaMA from Perspective of
Mixture-of-Experts with Post-Training, 2024, https://arxiv.org/abs/2411.15708, and the
released code (Gradient Split Plus, residual). The inputs of every dense FFN are cut
into balanced clusters, whose centroids are the router; a neuron's importance to a
cluster is the sum over its tokens of abs(h_i dL/dh_i). Attention experts and the
post-training are left out. Where we depart: docs/deviations.md.

Shape suffixes: T tokens, D hidden_size, F neurons, R clusters, which are the routed
experts.
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
from moesaic.calibration.checks import check_inputs, check_on
from moesaic.calibration.hidden_states import Stream
from moesaic.errors import MoesaicError
from moesaic.methods.base import (
    Budget,
    FFNShape,
    ModelShape,
    refuse_mixture,
    setting,
)
from moesaic.methods.contents import METHODS
from moesaic.methods.expert_method import LayerFit
from moesaic.methods.router_choice import RouterChoice, router_setting
from moesaic.modeling import MoEConfig, RouterConfig, new_router
from moesaic.parts.clustering import rows_kmeans
from moesaic.parts.gradient_split import greedy_split, residual_neurons
from moesaic.parts.gradients import visit_gradients
from moesaic.parts.importance import cluster_importance
from moesaic.parts.partition import Partition

CLUSTERED_TOKENS = 8192
GRADIENT_TOKENS = 16_384


@dataclass(frozen=True)
class Profile:
    """Of one dense FFN: centroids of its inputs, and how important neurons are to each."""

    centroid_RD: Tensor
    importance_RF: NDArray[np.float64]


@dataclass(frozen=True)
class LlamaMoEV2(RouterChoice):
    """One expert for each cluster of inputs, and a residual one that always runs."""

    description = METHODS["llama-moe-v2"]
    needs = frozenset({"gradients"})
    experts = 8
    shared_experts = 1

    kmeans_rounds: int = setting(
        10, "Rounds of balanced k-means on inputs, at most.", 1
    )
    router: str = router_setting("centroids", "its cluster's centroid")

    def plans(self, shape: ModelShape, budget: Budget) -> list[MoEConfig]:
        refuse_mixture(
            self, shape, "takes gradients at the FFNs of a dense model"
        )
        return super().plans(shape, budget)

    def own_router_config(self, ffn: FFNShape) -> RouterConfig:
        return RouterConfig("linear", "topk")

    def convert(self, model: Any, calibration: Any, plan: Any, run: Any) -> Any:
        """Profiles all layers of the dense model, then replaces one after the other."""
        stream = run.stream
        check_on(model, stream.device, f"method {self.name!r} differentiates")
        profiles = profile_layers(
            model,
            calibration,
            stream,
            plan.sizes.num_routed,
            self.kmeans_rounds,
            run.seed,
        )
        run.clock("profile")
        profiled = ProfiledLlamaMoEV2(**self.settings, profiles=profiles)
        return run.replace_ffns(profiled)

    def partition(self, fit: LayerFit) -> Partition:
        importance_RF = self.profile_of(fit).importance_RF
        sizes = fit.sizes
        shared_S = residual_neurons(importance_RF, sizes.shared, sizes.expert)
        all_F = np.arange(importance_RF.shape[1])
        others_N = np.setdiff1d(all_F, shared_S)
        experts_RM = greedy_split(importance_RF, others_N)
        return Partition(shared_S, experts_RM)

    def make_own_router(self, fit: LayerFit) -> Any:
        router: Any = new_router(fit.block, fit.sizes).to(fit.device)
        centroid_RD = self.profile_of(fit).centroid_RD
        router.score_proj.weight.data = centroid_RD.to(fit.device, fit.dtype)
        return router

    def profile_of(self, fit: LayerFit) -> Profile:
        """What the dense model's gradients said of this layer."""
        raise MoesaicError(
            f"method {self.name!r} needs gradients of the whole model, and was given "
            "one FFN; convert the model"
        )


@dataclass(frozen=True)
class ProfiledLlamaMoEV2(LlamaMoEV2):
    """The same once the dense model's layers are profiled."""

    profiles: Mapping[int, Profile] = field(default_factory=dict)

    def profile_of(self, fit: LayerFit) -> Profile:
        assert fit.inputs.layer is not None
        return self.profiles[fit.inputs.layer]


def profile_layers(
    model: Any,
    calibration: CalibrationSet,
    stream: Stream,
    clusters: int,
    rounds: int,
    seed: int,
) -> dict[int, Profile]:
    """Of every converted layer. Costs two forward passes and a backward pass."""
    ffns = stream.ffns
    windows = max(CLUSTERED_TOKENS // calibration.length, 1)
    clustered = calibration.fewer(windows).windows_NL
    centroids = {}
    dense = Stream(ffns, clustered, stream.device)
    for layer in range(len(ffns.layers)):
        check_inputs(dense, layer)
        blocks = list(dense.ffn_inputs(layer))
        if layer in ffns.converted:
            generator = np.random.default_rng([seed, layer])
            x_TD = torch.cat(blocks).float()
            centroids[layer] = cluster_centroids(
                x_TD, clusters, rounds, generator
            )
        dense.advance(layer, blocks)

    importance = {
        layer: torch.zeros(
            clusters, ffns.read(layer).intermediate_size, device=stream.device
        )
        for layer in ffns.converted
    }

    def visit(layer: int, x_TD: Tensor, gradient_TD: Tensor) -> None:
        cluster_T = (x_TD.float() @ centroids[layer].T).argmax(1)
        ffn = ffns.read(layer)
        importance[layer] += cluster_importance(
            ffn, x_TD, gradient_TD, cluster_T, clusters
        )

    windows = max(GRADIENT_TOKENS // calibration.length, 1)
    differentiated = calibration.fewer(windows).windows_NL
    visit_gradients(model, ffns, differentiated, visit)
    profiles = {}
    for layer in ffns.converted:
        importance_RF = importance[layer].cpu().double().numpy()
        profiles[layer] = Profile(centroids[layer], importance_RF)
    return profiles


def cluster_centroids(
    x_TD: Tensor, clusters: int, rounds: int, generator: np.random.Generator
) -> Tensor:
    """Centroids (R, D) of balanced clusters of tokens; the last few may be left out.

    Raises MoesaicError for fewer tokens than clusters.
    """
    size = len(x_TD) // clusters
    if not size:
        raise MoesaicError(
            f"{len(x_TD)} calibration tokens cannot be cut into {clusters} clusters, "
            "one for each routed expert; take more --samples or fewer experts"
        )
    x_TD = x_TD[: size * clusters]
    tokens_T = np.arange(len(x_TD))
    token_RM = rows_kmeans(x_TD, tokens_T, clusters, rounds, generator)
    index_RM = torch.from_numpy(token_RM).to(x_TD.device)
    return x_TD[index_RM].mean(dim=1)
