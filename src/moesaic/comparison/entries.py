"""What is compared: every method at every budget, with its plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from moesaic.comparison.equal_work import Steps
from moesaic.comparison.labels import labels_of
from moesaic.comparison.missing import PLANNING, Missing
from moesaic.comparison.options import SPARSITY, CompareOptions, Goal
from moesaic.conversion.options import make_budget
from moesaic.conversion.plan import Plan, make_plan
from moesaic.conversion.prepare import check_needs
from moesaic.errors import MoesaicError, reason_of
from moesaic.evaluate.perplexity import check_windows
from moesaic.evaluate.work import meta_model
from moesaic.families import find_ffns
from moesaic.families.load import window_length
from moesaic.layout import Layout
from moesaic.methods.base import Budget, FFNMethod, Method
from moesaic.methods.load import load_method

METHOD = "method"
REFERENCE = "reference"
EQUAL_WORK = "equal work"


@dataclass(frozen=True)
class Entry:
    """One method at one budget.

    `role` says why it is there: asked for, a reference, or static pruning that may
    spend another method's work. `sparsity` is what it was planned with, if so.
    """

    label: str
    role: str
    goal: Goal
    sparsity: float | None
    plan: Plan

    @property
    def method(self) -> Method:
        return self.plan.method

    def key(self, seed: int) -> str:
        """Names a cell; methods of one name but other settings differ in it."""
        return f"{self.label}, {self.goal.words}, {self.conversion(seed)}"

    def conversion(self, seed: int) -> str:
        """The end of its key: equal where the same is converted for two tables."""
        text = json.dumps(self.plan.moe.to_dict(), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return f"seed {seed}, {digest[:12]}"


@dataclass(frozen=True)
class Entries:
    """All that is compared, and what is not, with the reasons."""

    entries: list[Entry]
    missing: list[Missing]


def make_entries(options: CompareOptions, config: Any) -> Entries:
    """Plans every method and reference at every budget.

    One that is not for this model, or cannot meet a budget, is left out there. Raises
    MoesaicError, with the first reason, where no method is left.
    """
    methods = options.methods + options.references
    labels = labels_of(methods)
    roles = [METHOD] * len(options.methods)
    roles += [REFERENCE] * len(options.references)
    planner = _Planner(options, config)
    entries: list[Entry] = []
    missing: list[Missing] = []
    for goal in options.goals:
        for method, label, role in zip(methods, labels, roles, strict=True):
            try:
                entry = planner.entry(method, label, role, goal)
            except Exception as error:  # whatever a method file does
                missing.append(_left_out(label, role, goal, error))
            else:
                entries.append(entry)
    _check_some_left(entries, missing)
    if "static-repaired" in {method.name for method in methods}:
        for goal in options.goals:
            equal_work = _static_of_equal_work(entries, config, goal)
            if equal_work is not None:
                entries.append(equal_work)
    return Entries(entries, missing)


def without_short_windows(planned: Entries, window: int) -> Entries:
    """Without those that run every token of windows of that length whole.

    Raises MoesaicError where no method is left.
    """
    entries = []
    missing = list(planned.missing)
    for entry in planned.entries:
        try:
            check_windows(entry.plan.moe, window)
        except MoesaicError as error:
            missing.append(
                _left_out(entry.label, entry.role, entry.goal, error)
            )
        else:
            entries.append(entry)
    _check_some_left(entries, missing)
    return Entries(entries, missing)


def _left_out(label: str, role: str, goal: Goal, error: Exception) -> Missing:
    reason = reason_of(error)
    return Missing(label, role, goal.equal, goal.at, PLANNING, reason)


def _check_some_left(entries: list[Entry], missing: list[Missing]) -> None:
    """Raises MoesaicError, with the first reason, where no method that was asked is left."""
    if any(entry.role == METHOD for entry in entries):
        return
    for row in missing:
        if row.role == METHOD:
            raise MoesaicError(row.words)


@dataclass
class _Planner:
    """Makes entries; keeps what it has planned of each method on the way to a work."""

    options: CompareOptions
    config: Any
    steps: dict[str, Steps] = field(default_factory=dict)

    @cached_property
    def length(self) -> int:
        """Tokens of the windows that perplexities are measured on."""
        return window_length([self.config], self.options.sequence_length)

    @cached_property
    def neurons(self) -> int:
        """Of one dense FFN."""
        ffns = find_ffns(meta_model(self.config))
        first_ffn = ffns.read(ffns.converted[0])
        return first_ffn.intermediate_size

    def entry(self, method: Method, label: str, role: str, goal: Goal) -> Entry:
        """Raises MoesaicError for a budget that the method cannot meet."""
        check_needs(method, len(self.options.calibration))
        entry = self._planned(method, label, role, goal)
        check_windows(entry.plan.moe, self.length)
        return entry

    def _planned(
        self, method: Method, label: str, role: str, goal: Goal
    ) -> Entry:
        if goal.is_work:
            steps = self._steps(method, label)
            sparsity, plan = steps.nearest(goal)
            return Entry(label, role, goal, sparsity, plan)
        options = self.options
        budget = Budget(None, goal.at, options.grain)
        if options.layout is not None:
            budget = make_budget(options.layout)
        domains = len(options.calibration)
        plan = make_plan(
            self.config, options.model, method, budget, domains=domains
        )
        return Entry(label, role, goal, goal.at, plan)

    def _steps(self, method: Method, label: str) -> Steps:
        if label not in self.steps:
            options = self.options
            self.steps[label] = Steps(
                self.config,
                options.model,
                method,
                options.grain,
                self.neurons,
                len(options.calibration),
            )
        return self.steps[label]


def _static_of_equal_work(
    entries: Sequence[Entry], config: Any, goal: Goal
) -> Entry | None:
    """Static pruning, repaired, that may also spend what a method's router costs.

    Equal neurons are not equal work where the router is large beside them, as in a
    small model with many experts. None where the router leaves nothing saved, and where
    all rows do equal work already.
    """
    if goal.is_work:
        return None
    routed = [
        entry
        for entry in entries
        if entry.goal == goal and _is_fitted_and_routed(entry)
    ]
    neurons = None
    for entry in routed:
        plan = entry.plan
        neurons = _neurons_of_equal_work(plan)
        if neurons is not None:
            break
    if neurons is None:
        return None
    total = plan.sizes.total
    static = load_method("static-repaired")
    layout = Layout(1, neurons - 1, total)
    static_budget = Budget(layout)
    static_plan = make_plan(config, plan.model, static, static_budget)
    label = f"{static.name}, MACs of {plan.method.name}"
    sparsity = goal.at if goal.equal == SPARSITY else None
    return Entry(label, EQUAL_WORK, goal, sparsity, static_plan)


def _neurons_of_equal_work(plan: Plan) -> int | None:
    """How many neurons static pruning may keep; None where the router costs too much."""
    total = plan.sizes.total
    if plan.sizes.active == total:
        return None
    saved = plan.dense_macs.total - plan.macs.total
    saved_neurons = int(saved / _work_of_a_neuron(plan))
    neurons = total - saved_neurons
    if not 2 <= neurons < total:
        return None
    return neurons


def _is_fitted_and_routed(entry: Entry) -> bool:
    """Whether a model of ours has a router that was fitted: a rival of static pruning."""
    method = entry.method
    if not isinstance(method, FFNMethod) or not method.saves:
        return False
    return method.fits_weights and entry.plan.moe.router is not None


def _work_of_a_neuron(plan: Plan) -> float:
    """Multiply-accumulates per token of one neuron in every converted FFN."""
    moe = plan.moe
    neuron_weights = moe.block.matrices * moe.block.hidden_size
    of_all_layers = neuron_weights * len(moe.layers)
    if moe.outer is None:
        return float(of_all_layers)
    # A shared expert counts by its width, as a part of a routed one.
    experts = float(moe.outer.num_active)
    shared = moe.outer.shared_sizes
    if shared is not None:
        experts += shared.total / plan.sizes.total
    return of_all_layers * experts
