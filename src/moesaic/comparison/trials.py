"""One conversion after the other in memory, each measured and undone.

Shape suffixes: N windows, L tokens of one, B windows of a batch.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moesaic.calibration.calibration_set import CalibrationSet
from moesaic.calibration.checks import check_on, digest_of_tokens
from moesaic.calibration.hidden_states import BLOCK_TOKENS, Stream
from moesaic.comparison.entries import Entry
from moesaic.comparison.equal_work import over_dense
from moesaic.comparison.rows import DEAD, Cell
from moesaic.comparison.speed import speed_over_dense
from moesaic.conversion.convert import become_ours
from moesaic.conversion.layer_budgets import share_budgets
from moesaic.conversion.layer_error import LayerReport
from moesaic.conversion.masks import set_views
from moesaic.conversion.plan import Plan
from moesaic.conversion.run import Run
from moesaic.errors import reason_of
from moesaic.evaluate.choices import ChosenShare, count_choices
from moesaic.evaluate.perplexity import perplexity
from moesaic.families import FFNs, Mixtures
from moesaic.finetune.in_memory import Recovery, tuned, tuned_dense, why_not
from moesaic.methods.base import FFNMethod

TOLD = 0.01  # that more or less runs than was planned


@dataclass(frozen=True)
class Evaluation:
    """The texts that every model is measured on."""

    texts: dict[str, Tensor]
    length: int
    max_tokens: int

    @property
    def window(self) -> int:
        """Tokens of a window, as far as the shortest text gives them."""
        texts = [ids[: self.max_tokens] for ids in self.texts.values()]
        return min(self.length, *(len(ids) for ids in texts))

    def perplexities(self, model: Any) -> dict[str, float]:
        values = {}
        for name, ids in self.texts.items():
            value, _ = perplexity(model, ids, self.length, self.max_tokens)
            values[name] = value
        return values

    def perplexities_and_choices(
        self, model: Any
    ) -> tuple[dict[str, float], dict[str, ChosenShare]]:
        """The same, and what thresholds chose on each text, if they decide."""
        values = {}
        shares = {}
        for name, ids in self.texts.items():
            with count_choices(model) as choices:
                value, _ = perplexity(model, ids, self.length, self.max_tokens)
            values[name] = value
            share = choices.share()
            if share is not None:
                shares[name] = share
        return values, shares

    def digests(self) -> dict[str, str]:
        digests = {}
        for name, ids in self.texts.items():
            evaluated = ids[: self.max_tokens]
            digests[name] = digest_of_tokens(evaluated)
        return digests


@torch.no_grad()
def pass_seconds(model: Any, windows_NL: Tensor) -> float:
    """Seconds of a forward pass over all windows, after one batch that warms up."""
    device = model.get_input_embeddings().weight.device
    batch_size = max(1, BLOCK_TOKENS // windows_NL.shape[1])
    batches = windows_NL.split(batch_size)

    def run(ids_BL: Tensor) -> None:
        logits = model(input_ids=ids_BL.to(device), use_cache=False).logits
        logits[0, 0, 0].item()  # waits for a GPU

    run(batches[0])
    started = time.perf_counter()
    for ids_BL in batches:
        run(ids_BL)
    return time.perf_counter() - started


@dataclass(frozen=True)
class _Tuned:
    """Perplexities after fine-tuning, or why there are none."""

    perplexity: dict[str, float] | None = None
    untuned: str | None = None
    failed: bool = False


@dataclass(frozen=True)
class Trials:
    """The dense model, which every conversion starts from and leaves as it was.

    `dense_seconds` are those of its pass over the calibration tokens. What is to be
    fine-tuned or timed is a copy of the converted model: the dense one is the teacher
    then, or what is timed in turn.
    """

    dense: Any
    ffns: FFNs
    device: torch.device
    evaluation: Evaluation
    dense_seconds: float
    recovery: Recovery | None = None
    speed: bool = False

    def cell(
        self, entry: Entry, calibration: CalibrationSet, seed: int
    ) -> Cell:
        """Converts in memory, measures, and puts the dense model back."""
        method = entry.method
        if "gradients" in method.needs:
            check_on(
                self.dense,
                self.device,
                f"method {method.name!r} differentiates",
            )
        refusal = self._why_not_tuned(entry)
        wants_copy = self._wants_copy(entry, refusal)
        started = time.perf_counter()
        plan = share_budgets(
            self.dense, self.ffns, entry.plan, calibration, self.device, seed
        )
        student = None
        with self.ffns.restored():
            stream = Stream(self.ffns, calibration.windows_NL, self.device)
            # A mixture's experts are stacked only where the model is to run.
            stacked = wants_copy and isinstance(self.ffns, Mixtures)
            run = Run(stream, plan, calibration, seed, trial=not stacked)
            layers = method.convert(self.dense, calibration, plan, run)
            seconds = time.perf_counter() - started
            plan = plan.settled(layers)
            values, shares = self.evaluation.perplexities_and_choices(
                self.dense
            )
            if wants_copy:
                student = own_model(self.dense, plan)
        speed = None
        if self.speed and student is not None:
            speed = self._speed(student)
        recovered = _Tuned(untuned=refusal)
        if self.recovery is not None and refusal is None:
            recovered = self._tuned(student, self.recovery)
        notes = _notes(layers) + _note_on_prompt(plan, self.evaluation)
        work = over_dense(plan)
        repairs = isinstance(method, FFNMethod) and method.fits_weights
        loads = [layer.expert_load for layer in layers if layer.expert_load]
        errors = [layer.relative_error for layer in layers]
        better_static = [layer.layer for layer in layers if layer.better_static]
        return Cell(
            method=entry.label,
            role=entry.role,
            saves=method.saves,
            routes=plan.moe.router is not None,
            repairs=repairs,
            equal=entry.goal.equal,
            at=entry.goal.at,
            sparsity=entry.sparsity,
            seed=seed,
            layout=plan.label,
            shape=plan.words,
            active_ffn_fraction=plan.macs.active_ffn_fraction,
            macs=work.macs,
            bytes=work.bytes,
            ffn_macs=work.ffn_macs,
            ffn_bytes=work.ffn_bytes,
            perplexity=values,
            relative_error=errors,
            better_static=better_static,
            load_max_over_mean=_unevenness(loads),
            dead_experts=_dead_experts(loads),
            notes=notes + _notes_on_thresholds(shares),
            seconds=seconds,
            router_recall=_mean_recall(layers),
            passes=seconds / self.dense_seconds,
            tuned_perplexity=recovered.perplexity,
            untuned=recovered.untuned,
            tuning_failed=recovered.failed,
            speed=speed,
        )

    def tuned_dense(self, recovery: Recovery) -> dict[str, float]:
        """Perplexities of a copy of the dense model after the same training."""
        model = tuned_dense(copy.deepcopy(self.dense), recovery)
        return self.evaluation.perplexities(model)

    def _wants_copy(self, entry: Entry, refusal: str | None) -> bool:
        """Whether the converted model is to be fine-tuned or timed."""
        if not entry.method.saves:
            return False
        return self.speed or (self.recovery is not None and refusal is None)

    def _why_not_tuned(self, entry: Entry) -> str | None:
        """Why such a model is not fine-tuned, where others are."""
        if self.recovery is None:
            return None
        if not entry.method.saves:
            return "no model can hold it"
        return why_not(entry.plan.moe)

    def _tuned(self, student: Any, recovery: Recovery) -> _Tuned:
        """Where training fails, the reason: what was measured before is kept."""
        try:
            model = tuned(student, recovery, self.dense)
            values = self.evaluation.perplexities(model)
        except Exception as error:  # of memory, of libraries
            reason = reason_of(error)
            return _Tuned(untuned=reason, failed=True)
        return _Tuned(values)

    def _speed(self, student: Any) -> float:
        text = next(iter(self.evaluation.texts.values()))
        ids_L = text[: self.evaluation.length]
        return speed_over_dense(self.dense, student, ids_L)


def own_model(converted: Any, plan: Plan) -> Any:
    """A copy of a converted model, as loading it would give it, ready to run.

    Shares no weights with the model, which is about to be dense again.
    """
    model = copy.deepcopy(converted)
    set_views(model, masked=False)
    if plan.is_ordinary:
        return model
    config = copy.deepcopy(plan.config)
    config.dtype = model.dtype
    become_ours(model, config)
    kernels = model.get_correct_experts_implementation(None)
    config._experts_implementation = kernels
    return model


def _note_on_prompt(plan: Plan, evaluation: Evaluation) -> list[str]:
    """What of a window runs whole, where its first tokens choose for the others.

    Work is that of the others.
    """
    router = plan.moe.router
    if router is None or router.prompt is None:
        return []
    return [
        f"the first {router.prompt} of {evaluation.window} tokens of every window run "
        "whole; work is that of a token after them"
    ]


def _notes_on_thresholds(shares: dict[str, ChosenShare]) -> list[str]:
    """Where more or less runs on a text than was planned on the calibration text.

    Only thresholds allow that, and work is as planned.
    """
    notes = []
    for name, share in shares.items():
        if abs(share.ran - share.planned) > TOLD:
            notes.append(
                f"on {name} {share.ran:.1%} of what is chosen from runs, and work is "
                f"counted as planned, {share.planned:.1%}"
            )
    return notes


def _unevenness(loads: list[list[float]]) -> float | None:
    """The most used expert's load over the mean, in the worst layer."""
    ratios = []
    for load in loads:
        ratio = max(load) * len(load) / sum(load)
        ratios.append(ratio)
    return max(ratios, default=None)


def _dead_experts(loads: list[list[float]]) -> int:
    """Experts that hardly run, in all layers."""
    dead = 0
    for load in loads:
        mean = sum(load) / len(load)
        least = DEAD * mean
        dead += sum(share < least for share in load)
    return dead


def _mean_recall(layers: list[LayerReport]) -> float | None:
    """Over the layers that have a router."""
    recalls = [
        layer.router_recall
        for layer in layers
        if layer.router_recall is not None
    ]
    if not recalls:
        return None
    return sum(recalls) / len(recalls)


def _notes(layers: list[LayerReport]) -> list[str]:
    notes: set[str] = set()
    for layer in layers:
        notes.update(layer.notes)
    return sorted(notes)
