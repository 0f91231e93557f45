"""Methods that cut an FFN into a shared expert and routed ones, in four steps.

Profile, partition, router, repair: a subclass overrides what it does otherwise.

Shape suffixes: T tokens, F neurons, N neurons that are held.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.statistics import PLAIN, Statistics, StatisticsKind
from moesaic.errors import MoesaicError
from moesaic.families import DenseFFN
from moesaic.methods.base import FFNMethod, FFNShape, block_config, shape_of
from moesaic.modeling import (
    BlockConfig,
    MoEConfig,
    MoesaicReplacement,
    RouterConfig,
    Sizes,
)
from moesaic.parts.carve import carve
from moesaic.parts.importance import output_norms, split_shared
from moesaic.parts.partition import Partition
from moesaic.parts.repair import Kept, Repair, choose_repairs, with_up_rows

FLOAT32_MOST = 1e38


@dataclass
class Made:
    """How a replacement came about: what reports say of it. Not saved.

    `repair` is what was done to the output weights. `static_N` are the neurons that
    static pruning keeps at this budget, `static_repair` is what was done to their
    output weights, where that was fitted in the same pass. `energy_F` is that of every
    neuron's contribution.
    """

    partition: Partition | None = None
    energy_F: NDArray[np.float64] | None = None
    static_N: Tensor | None = None
    repair: Repair | None = None
    static_repair: Repair | None = None
    notes: list[str] = field(default_factory=list)

    def forget_repairs(self) -> None:
        """They are as large as the layer."""
        self.repair = None
        self.static_repair = None


@dataclass
class LayerFit:
    """One FFN on its way: what is known of it, and what the steps so far have made.

    `dense` is the FFN as it was. `ffn` is what is cut: the same, but with copies of
    neurons where experts share them.
    """

    ffn: DenseFFN
    dense: DenseFFN
    inputs: FFNInputs
    sizes: Sizes
    block: BlockConfig
    generator: np.random.Generator
    statistics: Statistics
    partition: Partition = field(init=False)
    router: Any = None
    made: Made = field(default_factory=Made)

    @property
    def device(self) -> torch.device:
        """Of the FFN's weights."""
        return self.ffn.up_FD.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the FFN's weights."""
        return self.ffn.up_FD.dtype


@dataclass(frozen=True)
class ExpertMethod(FFNMethod):
    """Shared and routed experts, by four steps.

    A subclass defines `partition` and `router`, and `router_config`. `profile` gives
    the statistics of kind `statistics_kind`; `repair` leaves the weights as they are.
    """

    statistics_kind: ClassVar[StatisticsKind] = PLAIN
    output_bias: ClassVar[bool] = False

    @abstractmethod
    def router_config(self, ffn: FFNShape) -> RouterConfig | None:
        """What the router computes, and what chooses; None without routing."""

    def profile(self, ffn: DenseFFN, inputs: FFNInputs) -> Statistics:
        """Activation statistics of the FFN on its calibration inputs."""
        return inputs.statistics(ffn, self.statistics_kind)

    @abstractmethod
    def partition(self, fit: LayerFit) -> Partition:
        """Which neurons are shared, and which make up each routed expert."""

    @abstractmethod
    def make_router(self, fit: LayerFit) -> Any:
        """The router of the partition's experts; None without routing."""

    def repair(self, fit: LayerFit) -> DenseFFN:
        """The FFN's weights, refitted to what the router lets through."""
        return fit.ffn

    def assemble(self, fit: LayerFit, repaired: DenseFFN) -> MoesaicReplacement:
        """The module that holds the partition's neurons and the router."""
        return carve(repaired, fit.partition, fit.router, fit.block, fit.sizes)

    def block(self, ffn: FFNShape) -> BlockConfig:
        router = self.router_config(ffn)
        return block_config(ffn, router, self.output_bias)

    def statistics_kinds(self) -> tuple[StatisticsKind, ...]:
        if self._plain_kind == self.statistics_kind:
            return (self.statistics_kind,)
        return (self.statistics_kind, self._plain_kind)

    @property
    def _plain_kind(self) -> StatisticsKind:
        """Of the FFN as it is, where the profile is of a normalised one."""
        if self.statistics_kind.normalise:
            return PLAIN
        return self.statistics_kind

    @torch.no_grad()
    def convert_ffn(
        self,
        weights: DenseFFN,
        inputs: FFNInputs,
        sizes: Sizes,
        generator: np.random.Generator,
    ) -> MoesaicReplacement:
        """The four steps in order. Raises MoesaicError where h is not finite.

        Of several processes all take them, on sums over all of their tokens; each step
        goes on from what the first process made, so that rounding parts no one.
        """
        fit = self.begin(weights, inputs, sizes, generator)
        share = inputs.share
        fit.partition = share.agreed(self.partition(fit))
        fit = spread_out(fit)
        fit.router = self.make_router(fit)
        if isinstance(fit.router, nn.Module):
            share.same_(fit.router)
        repaired = self.repair(fit)
        replacement = self.assemble(fit, repaired)
        replacement.made = fit.made
        return replacement

    def begin(
        self,
        weights: DenseFFN,
        inputs: FFNInputs,
        sizes: Sizes,
        generator: np.random.Generator,
    ) -> LayerFit:
        """Profiles the FFN, and notes what is odd about it."""
        if inputs.device.type == "mps":
            raise MoesaicError(
                "conversions solve in float64, which mps has not; take --device cpu"
            )
        statistics = self.profile(weights, inputs)
        plain = statistics
        if self.statistics_kind.normalise:
            plain = inputs.statistics(weights, self._plain_kind)
        energy_F = plain.energy_F * output_norms(weights)
        energy_F = inputs.share.agreed(energy_F)
        total = energy_F.sum()
        if not total * len(energy_F) < FLOAT32_MOST:
            raise MoesaicError(
                f"the FFN's outputs have an energy of {total:.2g}, beyond float32's "
                "range: its weights or activations are broken"
            )
        shape = shape_of(weights)
        fit = LayerFit(
            ffn=weights,
            dense=weights,
            inputs=inputs,
            sizes=sizes,
            block=self.block(shape),
            generator=generator,
            statistics=statistics,
        )
        fit.made.energy_F = energy_F
        fit.made.static_N = static_neurons(energy_F, sizes, fit.device)
        dead = np.count_nonzero(energy_F == 0)
        if dead:
            fit.made.notes.append(
                f"{dead} neurons of {len(energy_F)} add nothing on any token"
            )
        return fit

    def words(self, moe: MoEConfig) -> str:
        router = moe.router
        if router is None:
            return super().words(moe)
        sizes = moe.first_sizes
        active = active_words(moe)
        if not router.fixed_count:
            active = f"on average {active}"
        kind = "experts" if moe.outer is None else "sub-experts"
        return (
            f"{sizes.shared} shared neurons, {active} of {sizes.num_routed} routed "
            f"{kind} of {sizes.expert}"
        )


def active_words(moe: MoEConfig) -> str:
    """Routed experts per token, and how far layers differ in them."""
    budgets = moe.budgets
    if not budgets:
        return str(moe.first_sizes.num_active)
    mean = sum(budgets) / len(budgets)
    least = min(budgets)
    most = max(budgets)
    return f"{round(mean)} ({least} to {most} in a layer)"


def spread_out(fit: LayerFit) -> LayerFit:
    """Where index lists overlap, the FFN with every copy as a neuron of its own.

    So are its statistics. The steps that follow then refit each copy by itself.
    Repairs still aim at the output of the FFN as it was.
    """
    partition = fit.partition
    fit.made.partition = partition
    neurons_N = partition.neurons_N
    distinct = np.unique(neurons_N)
    if len(distinct) == len(neurons_N):
        return fit
    index_N = torch.from_numpy(neurons_N).to(fit.device)
    fit.ffn = fit.ffn.subset(index_N)
    fit.statistics = fit.statistics.subset(neurons_N)
    # The copies lie in the partition's order: shared ones first, then every expert's.
    shared = len(partition.shared_S)
    places_N = np.arange(len(neurons_N))
    shared_S = places_N[:shared]
    experts_RM = places_N[shared:].reshape(partition.experts_RM.shape)
    fit.partition = Partition(shared_S, experts_RM)
    return fit


def static_neurons(
    energy_F: NDArray[np.float64], sizes: Sizes, device: torch.device
) -> Tensor:
    """The neurons of largest contribution, as many as run for a token."""
    best_N, _ = split_shared(energy_F, sizes.active)
    return torch.from_numpy(best_N).to(device)


def mask_of(
    partition: Partition, router: Any
) -> Callable[[Tensor], Tensor] | None:
    """The mask (T, N) of held neurons that run for inputs x; None without a router."""
    if router is None:
        return None

    def mask(x_TD: Tensor) -> Tensor:
        scores_TR = router.scores(x_TD)
        runs_TR = router.choose(scores_TR)
        return partition.mask(runs_TR)

    return mask


def fit_repair(
    fit: LayerFit,
    method: str,
    intercept: bool,
    up_steps: int = 0,
    mask: Callable[[Tensor], Tensor] | None = None,
    stand_in: Callable[[Tensor], Tensor] | None = None,
    undo_drift: float = 0.0,
) -> DenseFFN:
    """W_down refitted, and with `up_steps` the rows of W_up too, if that helps.

    `mask` and `stand_in` as `Kept` has them, `undo_drift` as `choose_repairs` has it.
    Notes in `fit.made` what was done. The static reference is fitted in the same pass,
    where nothing was copied and a report will tell of it.
    """
    made = fit.made
    neurons_N = torch.from_numpy(fit.partition.neurons_N)
    kept = Kept(neurons_N.to(fit.device), mask, stand_in)
    repair = _fit_outputs(fit, kept, method, intercept, undo_drift)
    repaired = repair.apply(fit.ffn, kept)
    if up_steps and not fit.ffn.gated:
        made.notes.append(
            "rows of W_up kept: up_steps refits them where FFNs have a gate"
        )
    elif up_steps:
        refitted = with_up_rows(
            fit.inputs, fit.dense, repaired, kept, up_steps, undo_drift
        )
        (second_repair,) = choose_repairs(
            fit.inputs,
            refitted,
            [kept],
            method,
            intercept,
            target=fit.dense,
            undo_drift=undo_drift,
        )
        if second_repair.error_after < repair.error_after:
            repaired = second_repair.apply(refitted, kept)
            repair = second_repair.after_up_rows(repair)
        else:
            made.notes.append(
                "rows of W_up kept: refitted, they lose more on held-out tokens"
            )
    if repair.note:
        made.notes.append(repair.note)
    if not _is_finite(repaired):
        repaired = fit.ffn
        repair = repair.undone()
        note = f"repair skipped: it exceeds the range of {fit.dtype}"
        made.notes.append(note)
    made.repair = repair
    return repaired


def _is_finite(ffn: DenseFFN) -> bool:
    """Whether all weights are."""
    weights = ffn.tensors().values()
    return all(torch.isfinite(weight).all() for weight in weights)


def _fit_outputs(
    fit: LayerFit,
    kept: Kept,
    method: str,
    intercept: bool,
    undo_drift: float,
) -> Repair:
    """The repair of W_down; beside it, in the same pass, that of static pruning."""
    if fit.ffn is not fit.dense:
        (repair,) = choose_repairs(
            fit.inputs,
            fit.ffn,
            [kept],
            method,
            intercept,
            target=fit.dense,
            undo_drift=undo_drift,
        )
        return repair
    static_N = fit.made.static_N
    assert static_N is not None
    candidates = [kept]
    # Static pruning by contribution is its own reference.
    is_reference = kept.mask is None and torch.equal(kept.neurons_N, static_N)
    if fit.inputs.reported and not is_reference:
        candidates.append(Kept(static_N))
    repairs = choose_repairs(
        fit.inputs,
        fit.ffn,
        candidates,
        method,
        intercept,
        undo_drift=undo_drift,
    )
    if fit.inputs.reported:
        fit.made.static_repair = repairs[-1]
    return repairs[0]


def fit_static_reference(
    inputs: FFNInputs, ffn: DenseFFN, static_N: Tensor
) -> Repair:
    """Least squares for static pruning, on a sample of the tokens."""
    kept = Kept(static_N)
    (repair,) = choose_repairs(
        inputs, ffn, [kept], "least-squares", intercept=False
    )
    return repair
