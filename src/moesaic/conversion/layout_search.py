"""Searches a layout: by held-out layer error at one sparsity, or by perplexity for a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rich.console import Console

from moesaic.calibration.checks import check_on
from moesaic.calibration.hidden_states import Stream
from moesaic.calibration.text import fewer_windows
from moesaic.conversion.layer_error import measure_layer
from moesaic.conversion.layers import convert_layers, stream_inputs
from moesaic.conversion.plan import Plan, make_plan
from moesaic.conversion.prepare import Prepared
from moesaic.errors import MoesaicError
from moesaic.evaluate.perplexity import perplexity
from moesaic.families import FFNs
from moesaic.layout import Layout
from moesaic.methods.fit import fit_layer

HELDOUT_TOKENS = 16_384  # tokens on which perplexities of a conversion are measured
SAMPLE_TOKENS = 8192  # calibration tokens that layouts are compared on


def choose_plan(
    plans: list[Plan],
    ffns: FFNs,
    windows_NL: torch.Tensor,
    device: torch.device,
    seed: int,
) -> tuple[Plan, dict[str, float]]:
    """The plan whose layers lose least on held-out tokens, and each layout's mean error.

    Converts three layers (at a quarter, half and three quarters of those to convert) of the model
    once per plan, on at most SAMPLE_TOKENS calibration tokens, and keeps nothing of it.
    """
    windows_NL = fewer_windows(windows_NL, max(1, SAMPLE_TOKENS // windows_NL.shape[1]))
    stream = Stream(ffns, windows_NL, device)
    found, count = ffns.converted, len(ffns.converted)
    probes = sorted({found[count // 4], found[count // 2], found[3 * count // 4]})
    errors: dict[str, float] = {str(plan.layout): 0.0 for plan in plans}
    for layer in range(probes[-1] + 1):
        home = next(ffns.layers[layer].parameters()).device
        ffns.layers[layer].to(device)
        inputs = None
        if layer in probes:
            ffn, inputs = ffns.read(layer), stream_inputs(stream, layer, hold_out=True)
            for plan in plans:
                generator = np.random.default_rng([seed, layer])
                try:
                    fitted = fit_layer(
                        inputs, ffn, plan.recipe, plan.sizes, plan.config, generator
                    )
                except MoesaicError as error:
                    raise MoesaicError(
                        f"layer {layer} of {plan.model}: {error}"
                    ) from error
                report = measure_layer(layer, inputs, ffn, fitted, plan.sizes, seed)
                errors[str(plan.layout)] += report.relative_error / len(probes)
        stream.advance(layer, inputs.all() if inputs else None)
        ffns.layers[layer].to(home)
    return min(plans, key=lambda plan: errors[str(plan.layout)]), errors


def search_plan(
    dense: Any,
    ffns: FFNs,
    ready: Prepared,
    target_ratio: float | None,
    device: torch.device,
    seed: int,
    trust_remote_code: bool,
    progress: bool,
) -> tuple[Plan, dict[str, float]]:
    """The plan to carry out, and what each layout that was tried gave."""
    first, windows_NL, ids = ready.plans[0], ready.windows_NL, ready.heldout_ids
    tell = Console(stderr=True, quiet=not progress).print
    if target_ratio is None:
        if len(ready.plans) == 1:
            return first, {}
        tell(f"comparing {', '.join(str(plan.layout) for plan in ready.plans)}")
        return choose_plan(ready.plans, ffns, windows_NL, device, seed)
    assert ids is not None
    check_on(dense, device, "a target ratio evaluates")
    length = first.sequence_length
    base, _ = perplexity(dense, ids, length, HELDOUT_TOKENS)

    def make(layout: Layout) -> Plan:
        return make_plan(
            ready.config,
            first.model,
            first.recipe,
            layout,
            sequence_length=length,
            trust_remote_code=trust_remote_code,
            dense_layers=ffns.kept,
            **first.config.moesaic.get("asked", {}),
        )

    def ratio_of(plan: Plan) -> float:
        with ffns.restored():
            convert_layers(Stream(ffns, windows_NL, device), plan, seed, {}, trial=True)
            return perplexity(dense, ids, length, HELDOUT_TOKENS)[0] / base

    return find_plan(first, make, target_ratio, ratio_of, tell)


def check_target(
    target_ratio: float, layout: Any, sparsity: float | None, heldout: Any
) -> None:
    """Raises MoesaicError where a target contradicts other choices or cannot be measured."""
    if layout is not None or sparsity is not None:
        raise MoesaicError(
            "a target ratio chooses the sparsity itself; give no layout and no sparsity with it"
        )
    if not 1 < target_ratio < 1000:
        raise MoesaicError(
            f"target ratio {target_ratio} is outside (1, 1000); 1.03 allows 3 % more perplexity"
        )
    if heldout is None:
        raise MoesaicError(
            "a target ratio needs held-out text, and the calibration text is too short to keep a "
            "tenth of it; give a longer text"
        )


def find_plan(
    first: Plan,
    make: Callable[[Any], Plan],
    target_ratio: float,
    ratio_of: Callable[[Plan], float],
    tell: Callable[[str], Any],
) -> tuple[Plan, dict[str, float]]:
    """The plan with the fewest active experts whose ratio is within the target; all ratios tried.

    Bisects over the number of active experts of the first plan's shared and routed ones: each
    step is a conversion and an evaluation, about log2 of the number of routed experts of them.
    Raises MoesaicError where even one expert less than all exceeds the target.
    """
    tried: dict[str, float] = {}

    def within(active: int) -> bool:
        plan = make(replace(first.layout, num_active=active))
        try:
            ratio = ratio_of(plan)
        except MoesaicError as error:  # diverged; with more experts it need not
            if not tried:
                raise
            tell(f"{plan.layout}: {error}")
            return False
        tried[str(plan.layout)] = ratio
        skipped = 1 - plan.sizes.active / plan.sizes.total
        tell(f"{plan.layout}: {skipped:.1%} skipped, perplexity ratio {ratio:.4f}")
        return ratio <= target_ratio

    most = first.layout.num_routed - 1
    if most < 1 or not within(most):
        best = min(tried.values(), default=float("nan"))
        raise MoesaicError(
            f"no layout with {first.layout.num_total} experts stays within {target_ratio}: "
            f"skipping one expert of {first.layout.num_routed} gives {best:.4f}; allow more, or "
            "take a finer --grain, another recipe or more calibration tokens"
        )
    too_few, enough = 0, most
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if within(middle):
            enough = middle
        else:
            too_few = middle
    return make(replace(first.layout, num_active=enough)), tried
