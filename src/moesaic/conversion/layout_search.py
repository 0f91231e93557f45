"""Searches a layout: by held-out layer error at one sparsity, or by perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from moesaic.calibration.checks import check_on
from moesaic.calibration.hidden_states import Stream
from moesaic.calibration.share import ALONE, Share
from moesaic.conversion.layer_error import relative_error
from moesaic.conversion.masks import set_view
from moesaic.conversion.options import ConvertOptions
from moesaic.conversion.plan import Plan, make_plan
from moesaic.conversion.prepare import Prepared
from moesaic.conversion.run import Run, ffn_inputs
from moesaic.conversion.trial_set import trial_set
from moesaic.errors import MoesaicError
from moesaic.evaluate.perplexity import check_windows, perplexity
from moesaic.families import FFNs
from moesaic.layout import Layout
from moesaic.memory import lent_to
from moesaic.methods.base import Budget, FFNMethod
from moesaic.modeling import Sizes
from moesaic.progress import step_log

# Tokens on which perplexities of a conversion are measured.
HELDOUT_TOKENS = 16_384
# Calibration tokens that layouts are compared on.
SAMPLE_TOKENS = 8192
# A search begins at this share of the experts skipped. From one loss to another it takes
# this power of it, until two losses are known (SmolLM2 from 12.5 to 62.5 %: 1.6).
USUAL_SHARE = 0.25
USUAL_POWER = 1.6
LEAST_POWER = 0.2
PATIENCE = 2
FINEST = 128  # of all experts, or neurons: nearer a target is not met


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
    of the model once per plan, on SAMPLE_TOKENS calibration tokens, or as many as least
    squares needs if that is more, and keeps nothing of it.
    """
    plans = prepared.plans
    seed = prepared.options.seed
    labels = ", ".join(plan.label for plan in plans)
    log = step_log(prepared.options.progress)
    log(f"comparing {labels}")
    full_set = prepared.calibration
    held = [plan.sizes.total for plan in plans if plan.method.fits_weights]
    calibration = trial_set(full_set, SAMPLE_TOKENS, max(held, default=0))
    stream = Stream(ffns, calibration.windows_NL, device)
    probed = _probed_layers(ffns)
    errors = {plan.label: 0.0 for plan in plans}
    for layer in range(probed[-1] + 1):
        with lent_to(device, ffns.layers[layer]):
            calls = None
            if layer in probed:
                inputs = ffn_inputs(stream, layer, calibration, hold_out=True)
                inputs.reported = False
                for plan in plans:
                    error = _layer_error(plan, ffns, layer, inputs, seed)
                    errors[plan.label] += error / len(probed)
                calls = inputs.own()
            stream.advance(layer, calls)
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
    return relative_error(inputs, ffn, replacement)


def with_equal_layers(options: ConvertOptions) -> ConvertOptions:
    """The options without budgets of layers, which a search for a target does not share.

    Raises MoesaicError where the method has no setting for that.
    """
    method: Any = options.method
    if _has_equal_layers(method):
        return options
    if not can_have_equal_layers(method):
        raise MoesaicError(
            f"a target ratio gives all layers the same budget, and method {method.name!r} "
            "has its own; give a sparsity, or settings by which layers are alike "
            f"(moesaic methods {method.name})"
        )
    log = step_log(options.progress)
    log("all layers get the same budget, by which the target is met")
    return replace(options, method=replace(method, layer_budgets="uniform"))


def can_have_equal_layers(method: Any) -> bool:
    """Whether a target ratio can be searched for, which gives all layers the same."""
    return _has_equal_layers(method) or "layer_budgets" in method.settings


def _has_equal_layers(method: Any) -> bool:
    return bool(getattr(method, "layer_budgets", "uniform") == "uniform")


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
    check_windows(prepared.plans[0].moe, prepared.length)
    if prepared.validation is None:
        raise MoesaicError(
            "a target ratio needs held-out text, and the calibration text is too short "
            "to keep a tenth of it; give a longer text"
        )
    # The search may come to any number of experts but all: none is to fail in the middle.
    first = prepared.plans[0]
    most = max(first.layout.num_routed - 1, 1)
    _plan_of(prepared, replace(first.layout, num_active=most))


def _plan_of(prepared: Prepared, layout: Layout) -> Plan:
    """The plan by a layout, all else as it was prepared."""
    options = prepared.options
    first = prepared.plans[0]
    return make_plan(
        first.dense_config,
        first.model,
        first.method,
        Budget(layout),
        options.scope,
        len(options.sources),
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
    log = step_log(options.progress)

    def make(layout: Layout) -> Plan:
        return _plan_of(prepared, layout)

    def ratio_of(plan: Plan) -> float:
        with ffns.restored():
            part = calibration.part(share, plan.method.fits_weights)
            stream = Stream(ffns, calibration.windows_NL, device, part)
            run = Run(
                stream,
                plan,
                calibration,
                options.seed,
                trial=True,
                reported=False,
            )
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

    Searches over the number of active experts of the first plan's shared and routed
    ones, to the expert, or to 1 / FINEST of them where there are more. Each step is a
    conversion and an evaluation: four or five where losses follow a power of what is
    skipped, at most three times log2 of the number of routed experts.
    Raises MoesaicError where even one expert less than all exceeds the target.
    """
    layout = first.layout
    routed = layout.num_routed
    tried: dict[str, float] = {}
    losses: dict[int, float] = {}
    diverged: MoesaicError | None = None
    log(
        f"searching among 1 to {routed - 1} of {routed} routed experts: at most "
        f"{most_steps(routed)} conversions, usually four or five"
    )
    too_few = 0
    enough = routed  # all: the dense model, which need not be tried
    slow = 0  # guesses in a row that left more than half
    while enough - too_few > max(1, routed // FINEST):
        width = enough - too_few
        active = (too_few + enough) // 2
        if slow < PATIENCE:
            active = likely_budget(
                losses, routed, target_ratio - 1, too_few, enough
            )
        plan = make(replace(layout, num_active=active))
        try:
            ratio = ratio_of(plan)
        except MoesaicError as error:  # with more experts it need not
            log(f"{plan.label}: {error}")
            diverged = error
            too_few = active
        else:
            tried[plan.label] = ratio
            losses[active] = ratio - 1
            skipped = 1 - _active_share(plan.sizes)
            log(
                f"{plan.label}: {skipped:.1%} skipped, perplexity ratio {ratio:.4f}"
            )
            if ratio <= target_ratio:
                enough = active
            else:
                too_few = active
        left = enough - too_few
        slow = slow + 1 if 2 * left > width else 0
    if enough < routed:
        return Search(make(replace(layout, num_active=enough)), tried)
    if not losses:
        assert diverged is not None  # or something would have been tried
        raise diverged
    most = max(losses)
    raise MoesaicError(
        f"no layout with {layout.num_total} experts stays within {target_ratio}: "
        f"skipping {routed - most} of {routed} gives {1 + losses[most]:.4f}; allow more, "
        "or take a finer --grain, another method or more calibration tokens"
    )


def most_steps(routed: int) -> int:
    """So many conversions at most: one after PATIENCE others halves what is left."""
    halvings = math.ceil(math.log2(routed))
    return (PATIENCE + 1) * max(1, halvings)


def likely_budget(
    losses: dict[int, float],
    routed: int,
    target: float,
    too_few: int,
    enough: int,
) -> int:
    """The active experts at which the loss should just be met, inside the bracket.

    `losses` (perplexity over dense, less 1) by active experts are taken to follow
    a power of the number of experts that are skipped, through the two that lie nearest to
    the target. Without any, a quarter is skipped.
    """
    points = [
        (math.log(routed - active), math.log(loss))
        for active, loss in losses.items()
        if loss > 0
    ]
    goal = math.log(target)
    points.sort(key=lambda point: abs(point[1] - goal))
    skipped = routed * USUAL_SHARE
    if points:
        x, y = points[0]
        power = USUAL_POWER
        if len(points) > 1:
            other_x, other_y = points[1]
            power = (y - other_y) / (x - other_x)
        # A power near 0 or below says nothing: those losses are noise.
        if power < LEAST_POWER:
            power = USUAL_POWER
        skipped = math.exp(min(x + (goal - y) / power, math.log(routed)))
    active = routed - math.floor(skipped)
    return min(max(active, too_few + 1), enough - 1)


def _active_share(sizes: Sizes) -> float:
    return sizes.active / sizes.total
