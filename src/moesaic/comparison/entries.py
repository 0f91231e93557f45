"""What is compared: every method at every budget, with its plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moesaic.comparison.options import CompareOptions
from moesaic.conversion.plan import Plan, make_plan
from moesaic.errors import MoesaicError
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
    spend another method's work.
    """

    label: str
    role: str
    sparsity: float | None
    plan: Plan

    @property
    def method(self) -> Method:
        return self.plan.method

    def key(self, seed: int) -> str:
        """Names a cell; methods of one name but other settings differ in it."""
        settings = self.method.to_dict() | {"layout": self.plan.label}
        text = json.dumps(settings, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        budget = self.sparsity or self.plan.label
        return f"{self.label} {budget} {seed} {digest[:12]}"


@dataclass(frozen=True)
class Entries:
    """All that is compared, and why some references are not."""

    entries: list[Entry]
    left_out: list[str]


def make_entries(options: CompareOptions, config: Any) -> Entries:
    """Plans every method and reference at every budget.

    Raises MoesaicError for a method that cannot meet a budget; a reference that cannot
    is left out.
    """
    entries: list[Entry] = []
    left_out: list[str] = []
    for budget in options.budgets:
        entries += [
            _entry(options, config, method, METHOD, budget)
            for method in options.methods
        ]
        for method in options.references:
            try:
                reference = _entry(options, config, method, REFERENCE, budget)
            except MoesaicError as error:
                left_out.append(f"without {method.name}: {error}")
            else:
                entries.append(reference)
    reference_names = [method.name for method in options.references]
    if "static-repaired" in reference_names:
        for budget in options.budgets:
            equal_work = _static_of_equal_work(entries, config, budget)
            if equal_work is not None:
                entries.append(equal_work)
    return Entries(entries, left_out)


def _entry(
    options: CompareOptions,
    config: Any,
    method: Method,
    role: str,
    budget: Budget,
) -> Entry:
    plan = make_plan(config, options.model, method, budget)
    return Entry(method.name, role, budget.sparsity, plan)


def _static_of_equal_work(
    entries: Sequence[Entry], config: Any, budget: Budget
) -> Entry | None:
    """Static pruning, repaired, that may also spend what a method's router costs.

    Equal neurons are not equal work where the router is large beside them, as in a
    small model with many experts. None where the router leaves nothing saved.
    """
    routed = [
        entry
        for entry in entries
        if entry.sparsity == budget.sparsity and _is_fitted_and_routed(entry)
    ]
    if not routed:
        return None
    plan = routed[0].plan
    total = plan.sizes.total
    if plan.sizes.active == total:
        return None
    saved = plan.dense_macs.total - plan.macs.total
    saved_neurons = int(saved / _work_of_a_neuron(plan))
    neurons = total - saved_neurons
    if not 2 <= neurons < total:
        return None
    static = load_method("static-repaired")
    layout = Layout(1, neurons - 1, total)
    static_budget = Budget(layout)
    static_plan = make_plan(config, plan.model, static, static_budget)
    label = f"{static.name}, MACs of {plan.method.name}"
    return Entry(label, EQUAL_WORK, budget.sparsity, static_plan)


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
