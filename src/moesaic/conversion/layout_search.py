"""Searches a layout: by held-out layer error at one sparsity, or by perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console

from moesaic.calibration.checks import check_on
from moesaic.calibration.hidden_states import Stream
from moesaic.calibration.share import ALONE, Share
from moesaic.conversion.layer_error import measure_layer
from moesaic.conversion.plan import Plan, make_plan
from moesaic.conversion.prepare import Prepared, check_windows
from moesaic.conversion.run import Run, ffn_inputs, set_view
from moesaic.errors import MoesaicError
from moesaic.evaluate.perplexity import perplexity
from moesaic.families import FFNs
from moesaic.methods.base import Budget, FFNMethod
from moesaic.modeling import Sizes

# Tokens on which perplexities of a conversion are measured.
HELDOUT_TOKENS = 16_384
# Calibration tokens that layouts are compared on.
SAMPLE_TOKENS = 8192


@dataclass(frozen=True)
class Search:
    """The plan that was taken, and what each layout that was tried came to.

    That is the mean error of a few layers, or, for a target, a perplexity ratio.
    """

    plan: Plan
    tried: dict[str, float]


def search_plan(
    dense: Any,
    ffns: FFNs,
    prepared: Prepared,
    device: torch.device,
    share: Share = ALONE,
) -> Search:
    """The plan to convert by: the only one, the best of several, or for a target.

    Of several processes each compares layouts by itself, on the same few tokens; for a
    target they share every conversion. All take the plan of the first.
    """
    options = prepared.options
    if options.target_ratio is not None:
        return _search_target(dense, ffns, prepared, device, share)
    if len(prepared.plans) > 1:
        return choose_plan(prepared, ffns, device, share)
    return Search(prepared.plans[0], {})


def choose_plan(
    prepared: Prepared, ffns: FFNs, device: torch.device, share: Share = ALONE
) -> Search:
    """The plan whose layers lose least on held-out tokens.

    Converts three layers (at a quarter, half and three quarters of those to convert)
    of the model once per plan, on at most SAMPLE_TOKENS calibration tokens, and keeps
    nothing of it.
    """
    plans = prepared.plans
    seed = prepared.options.seed
    labels = ", ".join(plan.label for plan in plans)
    log = Console(stderr=True, quiet=not prepared.options.progress).print
    log(f"comparing {labels}")
    full_set = prepared.calibration
    windows = max(1, SAMPLE_TOKENS // full_set.length)
    calibration = full_set.fewer(windows)
    stream = Stream(ffns, calibration.windows_NL, device)
    probed = _probed_layers(ffns)
    errors = {plan.label: 0.0 for plan in plans}
    for layer in range(probed[-1] + 1):
        module = ffns.layers[layer]
        home = next(module.parameters()).device
        module.to(device)
        calls = None
        if layer in probed:
            inputs = ffn_inputs(stream, layer, calibration, hold_out=True)
            for plan in plans:
                error = _layer_error(plan, ffns, layer, inputs, seed)
                errors[plan.label] += error / len(probed)
            calls = inputs.own()
        stream.advance(layer, calls)
        module.to(home)
    errors = share.agreed(errors)
    best = min(plans, key=lambda plan: errors[plan.label])
    return Search(best, errors)


def _probed_layers(ffns: FFNs) -> list[int]:
    layers = ffns.converted
    count = len(layers)
    quarters = (count // 4, count // 2, 3 * count // 4)
    probed = {layers[place] for place in quarters}
    return sorted(probed)


def _layer_error(
    plan: Plan, ffns: FFNs, layer: int, inputs: Any, seed: int
) -> float:
    method = plan.method
    assert isinstance(method, FFNMethod)
    ffn = ffns.read(layer)
    generator = np.random.default_rng([seed, layer])
    try:
        replacement = method.convert_ffn(ffn, inputs, plan.sizes, generator)
    except MoesaicError as error:
        raise MoesaicError(f"layer {layer} of {plan.model}: {error}") from error
    set_view(replacement, masked=True)
    report = measure_layer(layer, inputs, ffn, replacement, plan.sizes, seed)
    return report.relative_error


def check_target(prepared: Prepared) -> None:
    """Raises MoesaicError where a target contradicts other options.

    Or where it cannot be measured.
    """
    options = prepared.options
    target = options.target_ratio
    if target is None:
        return
    if not isinstance(options.method, FFNMethod):
        raise MoesaicError(
            f"a target ratio counts experts, and method {options.method.name!r} has "
            "none; give a sparsity"
        )
    if options.budget.layout is not None or options.budget.sparsity is not None:
        raise MoesaicError(
            "a target ratio chooses the sparsity itself; give no layout and no sparsity "
            "with it"
        )
    if not 1 < target < 1000:
        raise MoesaicError(
            f"target ratio {target} is outside (1, 1000); 1.03 allows 3 % more perplexity"
        )
    check_windows(prepared.plans[0], prepared.length)
    if prepared.validation is None:
        raise MoesaicError(
            "a target ratio needs held-out text, and the calibration text is too short "
            "to keep a tenth of it; give a longer text"
        )


def _search_target(
    dense: Any,
    ffns: FFNs,
    prepared: Prepared,
    device: torch.device,
    share: Share,
) -> Search:
    """The plan with the fewest active experts that stays within the target."""
    options = prepared.options
    validation = prepared.validation
    assert options.target_ratio is not None
    assert validation is not None
    check_on(dense, device, "a target ratio evaluates")
    calibration = prepared.calibration
    length = prepared.length
    base, _ = perplexity(
        dense, validation.ids, length, HELDOUT_TOKENS, share=share
    )
    first = prepared.plans[0]
    log = Console(stderr=True, quiet=not options.progress).print

    def make(layout: Any) -> Plan:
        budget = Budget(layout)
        return make_plan(
            first.dense_config,
            first.model,
            first.method,
            budget,
            options.scope,
            len(options.sources),
        )

    def ratio_of(plan: Plan) -> float:
        with ffns.restored():
            part = calibration.part(share, plan.method.fits_weights)
            stream = Stream(ffns, calibration.windows_NL, device, part)
            run = Run(stream, plan, calibration, options.seed, trial=True)
            plan.method.convert(dense, calibration, plan, run)
            value, _ = perplexity(
                dense, validation.ids, length, HELDOUT_TOKENS, share=share
            )
        return share.agreed(value / base)

    return find_plan(first, make, options.target_ratio, ratio_of, log)


def find_plan(
    first: Plan,
    make: Callable[[Any], Plan],
    target_ratio: float,
    ratio_of: Callable[[Plan], float],
    log: Callable[[str], Any],
) -> Search:
    """The plan with the fewest active experts whose ratio is within the target.

    Bisects over the number of active experts of the first plan's shared and routed
    ones: each step is a conversion and an evaluation, about log2 of the number of
    routed experts of them. Raises MoesaicError where even one expert less than all
    exceeds the target.
    """
    layout = first.layout
    tried: dict[str, float] = {}

    def within(active: int) -> bool:
        fewer = replace(layout, num_active=active)
        plan = make(fewer)
        try:
            ratio = ratio_of(plan)
        except MoesaicError as error:  # diverged; with more experts it need not
            if not tried:
                raise
            log(f"{plan.label}: {error}")
            return False
        tried[plan.label] = ratio
        skipped = 1 - _active_share(plan.sizes)
        log(
            f"{plan.label}: {skipped:.1%} skipped, perplexity ratio {ratio:.4f}"
        )
        return ratio <= target_ratio

    most = layout.num_routed - 1
    if most < 1 or not within(most):
        best = min(tried.values(), default=math.nan)
        raise MoesaicError(
            f"no layout with {layout.num_total} experts stays within {target_ratio}: "
            f"skipping one expert of {layout.num_routed} gives {best:.4f}; allow more, "
            "or take a finer --grain, another method or more calibration tokens"
        )
    too_few = 0
    enough = most
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if within(middle):
            enough = middle
        else:
            too_few = middle
    best_layout = replace(layout, num_active=enough)
    return Search(make(best_layout), tried)


def _active_share(sizes: Sizes) -> float:
    return sizes.active / sizes.total
