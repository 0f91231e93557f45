"""moesaic, ours: experts by contribution, a router in closed form, repaired outputs.

docs/method.md holds the equations. `moesaic` has a linear router and a fixed number of
experts for every token, which stock architectures hold. `moesaic-dynamic` runs every
expert whose expected energy is above a threshold of its layer, reads products of
directions too, and lets layers share one budget. Both cost about 4.5 forward passes over
the calibration tokens; sharing a budget takes some three more.

Shape suffixes: T tokens, S tokens of the sample, D hidden_size, P features, R routed
experts, C directions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.calibration.share import Rows
from moesaic.calibration.statistics import StatisticsKind
from moesaic.errors import MoesaicError
from moesaic.families import DenseFFN
from moesaic.layout import Layout
from moesaic.methods.base import (
    LAYER_BUDGETS,
    REPAIRS,
    UNDO_DRIFT_HELP,
    Budget,
    FFNShape,
    ModelShape,
    setting,
)
from moesaic.methods.contents import METHODS
from moesaic.methods.expert_method import (
    ExpertMethod,
    LayerFit,
    fit_repair,
    mask_of,
)
from moesaic.modeling import MoEConfig, RouterConfig, new_router
from moesaic.parts.clustering import (
    best_of_tokens,
    contribution_kmeans,
    largest_of_all,
    random_groups,
    reassign,
)
from moesaic.parts.directions import directions
from moesaic.parts.energies import expert_energies, expert_grams
from moesaic.parts.importance import (
    contribution,
    observability,
    split_shared,
    variance,
)
from moesaic.parts.partition import Partition
from moesaic.parts.ridge_router import (
    Ridge,
    fit_linear_router,
    log_energy,
    mean_of,
)
from moesaic.parts.thresholds import budget_thresholds

IMPORTANCE = ("contribution", "observability", "random", "variance")
GROUPS = ("contribution-kmeans", "random")


@dataclass(frozen=True)
class Moesaic(ExpertMethod):
    """Experts of one size, K of them for every token, chosen by a matrix product.

    With `directions` the router also reads products of pairs of so many directions of
    its input, at the price of stock architectures; our kernels on a GPU take up to 16.
    """

    description = METHODS["moesaic"]
    fits_weights = True
    searches_layouts = True
    chooser: ClassVar[str] = "topk"

    importance: str = setting(
        "contribution",
        "What decides which neurons are shared.",
        choices=IMPORTANCE,
    )
    groups: str = setting(
        "contribution-kmeans",
        "How the other neurons are grouped.",
        choices=GROUPS,
    )
    kmeans_rounds: int = setting(4, "Rounds of balanced k-means, at most.", 1)
    reassign_rounds: int = setting(
        6, "Rounds in which neurons move to experts the router picks.", 0
    )
    directions: int = setting(
        0, "Directions whose products the router reads as well; 0: none.", 0
    )
    repair_by: str = setting(
        "least-squares", "How output weights are refitted.", choices=REPAIRS
    )
    intercept: bool = setting(
        False, "Whether the repair may add an output bias."
    )
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
        "How many experts each layer runs: uniform, all in the first layers and fewer in "
        "the others (dense-first), or as many as gradients say. Stock exports need one of "
        "the first two.",
        choices=(*LAYER_BUDGETS, "dense-first"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        repaired = self.repair_by != "none"
        if self.intercept and not repaired:
            raise self._contradiction(
                "an intercept comes from a repair; choose one, or intercept=false"
            )
        if self.up_steps and not repaired:
            raise self._contradiction(
                "rows of W_up are refitted between two repairs; choose one, or "
                "up_steps=0"
            )

    @property
    def output_bias(self) -> bool:  # type: ignore[override]
        return self.intercept

    @property
    def undoes_drift(self) -> bool:
        return super().undoes_drift and self.repair_by != "none"

    @property
    def statistics_kind(self) -> StatisticsKind:  # type: ignore[override]
        grouped = self.groups == "contribution-kmeans"
        return StatisticsKind(
            sample=grouped or self.reassign_rounds > 0,
            gram=self.importance == "observability",
        )

    def router_config(self, ffn: FFNShape) -> RouterConfig:
        return RouterConfig(
            kind="quadratic" if self.directions else "linear",
            chooser=self.chooser,
            directions=min(self.directions, ffn.hidden_size),
        )

    def partition(self, fit: LayerFit) -> Partition:
        """Shared: the neurons of largest importance. The others are grouped."""
        importance_F = self._importance(fit)
        shared_S, candidates_N = split_shared(importance_F, fit.sizes.shared)
        experts_RM = self._groups(fit, candidates_N)
        if not self.reassign_rounds:
            return Partition(shared_S, experts_RM)
        experts_RM, kept_energy = self._reassigned(fit, experts_RM)
        return Partition(shared_S, experts_RM, kept_energy)

    def make_router(self, fit: LayerFit) -> Any:
        return fit_router(fit)

    def repair(self, fit: LayerFit) -> DenseFFN:
        if self.repair_by == "none":
            return fit.ffn
        mask = mask_of(fit.partition, fit.router)
        return fit_repair(
            fit,
            self.repair_by,
            self.intercept,
            self.up_steps,
            mask,
            undo_drift=self.undo_drift,
        )

    def _importance(self, fit: LayerFit) -> NDArray[np.float64]:
        if self.importance == "contribution":
            return contribution(fit.statistics, fit.ffn)
        if self.importance == "variance":
            return variance(fit.statistics, fit.ffn)
        if self.importance == "observability":
            return observability(fit.statistics, fit.ffn)
        neurons = fit.ffn.intermediate_size
        random_F = fit.generator.permutation(neurons)
        return random_F.astype(np.float64)

    def _groups(
        self, fit: LayerFit, candidates_N: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        routed = fit.sizes.num_routed
        if self.groups == "random":
            return random_groups(candidates_N, routed, fit.generator)
        return contribution_kmeans(
            fit.statistics, fit.ffn, candidates_N, routed, self.kmeans_rounds
        )

    def _reassigned(
        self, fit: LayerFit, experts_RM: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], list[float]]:
        """Experts after neurons moved, and the energy that ran after every round.

        The router's choices are made as they will be: by token, or by a threshold.
        """
        x_SD = fit.statistics.sample_x_SD
        assert x_SD is not None

        rows = Rows(lambda: [x_SD])
        by_threshold = self.chooser == "threshold"
        ridge = Ridge.of(rows, centre=by_threshold)
        dim = 0 if by_threshold else 1
        choose = largest_of_all if by_threshold else best_of_tokens

        def route(energy_SR: Tensor) -> Tensor:
            log_SR = log_energy(energy_SR)
            mean = log_SR.mean(dim, keepdim=True)
            weight_DR = ridge.solve(rows, log_SR - mean)
            score_SR = ridge.scores(rows, weight_DR)
            return choose(score_SR + mean, fit.sizes.num_active)

        return reassign(
            fit.statistics,
            fit.ffn,
            experts_RM,
            self.reassign_rounds,
            route,
        )

    def _contradiction(self, reason: str) -> MoesaicError:
        return MoesaicError(f"method {self.name!r}: {reason}")


@dataclass(frozen=True)
class MoesaicDynamic(Moesaic):
    """Every expert above its layer's threshold runs.

    A token runs as many as it needs, an expert for as many tokens as need it.
    """

    description = METHODS["moesaic-dynamic"]
    chooser = "threshold"

    directions: int = setting(
        8, "Directions whose products the router reads as well; 0: none.", 0
    )
    intercept: bool = setting(
        True, "Whether the repair may add an output bias."
    )
    cap: int | None = setting(None, "Most experts of one token.", 1)
    layer_budgets: str = setting(  # type: ignore[misc]
        "gradient",
        "How many experts each layer runs: uniform, or as many as are worth most.",
        choices=LAYER_BUDGETS,
    )

    def router_config(self, ffn: FFNShape) -> RouterConfig:
        config = super().router_config(ffn)
        return replace(config, cap=self.cap)

    def layouts(self, shape: ModelShape, budget: Budget) -> list[Layout]:
        """Those within the cap, where there are any."""
        found = super().layouts(shape, budget)
        if self.cap is None:
            return found
        allowed = [layout for layout in found if layout.num_active <= self.cap]
        return allowed or found

    def plan(self, shape: ModelShape, layout: Layout) -> MoEConfig:
        moe = super().plan(shape, layout)
        mean = moe.first_sizes.num_active
        if self.cap is not None and self.cap < mean:
            raise self._contradiction(
                f"cap {self.cap} is less than the {mean} experts that run on average in "
                f"{layout}; take {mean} or more"
            )
        return moe


def fit_router(fit: LayerFit) -> Any:
    """A linear or quadratic router, fitted to the experts' energies.

    Its weights are rounded to the model's dtype before thresholds are taken from its
    scores.
    """
    router: Any = new_router(fit.block, fit.sizes)
    router.to(fit.device)
    by_threshold = router.chooser == "threshold"
    features = _Features(fit, router, by_threshold)
    energy_TR = _energies(fit)
    weight_RP = fit_linear_router(
        features.rows,
        energy_TR,
        by_threshold,
        features.centred,
        features.dtype,
    )
    router.score_proj.weight.data = weight_RP.to(fit.dtype)
    if by_threshold:
        set_thresholds(router, fit, energy_TR)
    return router


def _energies(fit: LayerFit) -> Tensor:
    """Energies of the experts' outputs (T, R), for all tokens to fit on."""
    experts_RM = torch.from_numpy(fit.partition.experts_RM)
    experts_RM = experts_RM.to(fit.device)
    gram_RMM = expert_grams(fit.ffn, experts_RM)

    def energies(h_TF: Tensor) -> Tensor:
        return expert_energies(h_TF, experts_RM, gram_RMM)

    return fit.inputs.map_hidden(fit.ffn, energies).whole()


class _Features:
    """What the router multiplies, as `rows`.

    Products of directions are read about ten times: they are stored, T P floats, rather
    than made anew.
    """

    def __init__(self, fit: LayerFit, router: Any, by_threshold: bool):
        self.inputs = fit.inputs
        self.rows = fit.inputs.map(Tensor.float)
        self.stored: list[Tensor] = []
        self.centred = False
        self.dtype = fit.dtype  # that the features are exact in
        config = fit.block.router
        if config is not None and config.directions:
            self._find_directions(router, fit.dtype)
            self._store(router)
            if by_threshold:
                self._centre()

    def _find_directions(self, router: Any, dtype: torch.dtype) -> None:
        projection = router.feature_proj
        weight_CD, bias_C = directions(self.rows, projection.out_features)
        projection.weight.data = weight_CD.to(dtype)
        projection.bias.data = bias_C.to(dtype)

    def _store(self, router: Any) -> None:
        self.dtype = torch.float32
        made = self.inputs.map(router.features)
        self.stored = [
            phi_TP.to(self.inputs.storage) for phi_TP in made.blocks()
        ]
        self.rows = replace(made, blocks=self._read)

    def _read(self) -> Iterator[Tensor]:
        for phi_TP in self.stored:
            yield phi_TP.to(self.inputs.device)

    def _centre(self) -> None:
        """Takes the mean off, in place."""
        mean_P = mean_of(self.rows).to(self.inputs.storage)
        for phi_TP in self.stored:
            phi_TP -= mean_P
        self.centred = True


def set_thresholds(router: Any, fit: LayerFit, energy_TR: Tensor) -> None:
    """One threshold for the expected energy of all experts: the mean budget runs.

    A score is the logarithm of that energy but for a constant of each expert's. That is
    here such that expected and real energies have the same sum over all tokens.
    """
    score_TR = fit.inputs.map(router.scores).whole()
    real_R = energy_TR.double().mean(0).clamp(min=1e-30).log()
    expected_R = score_TR.double().logsumexp(0) - math.log(len(score_TR))
    level_R = (expected_R - real_R).float()

    def count(threshold_R: Tensor) -> int:
        router.selection_bias.copy_(-threshold_R)
        runs_TR = router.choose(score_TR)
        return int(runs_TR.sum())

    threshold_R = budget_thresholds(
        score_TR, level_R, fit.sizes.num_active, count
    )
    router.selection_bias.copy_(-threshold_R)
