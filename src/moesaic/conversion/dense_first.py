"""How many of the first layers stay dense, so that the others may run fewer experts.

With k of L layers dense, the others run K of R routed experts, the most with

    k R + (L - k) K <= L A,

A being what each of them runs with equal budgets. A token runs no more neurons than
with those, and fewer routers. Where the first layers are worth most, as in
SmolLM2-135M, this is nearly as good as a budget for every layer, and stock engines can
hold it. Splits are tried with more and more dense layers while the model comes closer to
the dense one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from moesaic.conversion.plan import Plan
from moesaic.errors import MoesaicError
from moesaic.layout import Layout

TRIES = 5
STEP = 32  # K falls by at least this part of the routed experts from try to try

# Dense layers, and experts that each of the others runs.
Split = tuple[int, int]


def splits(layers: int, routed: int, active: int) -> Iterator[Split]:
    """Splits of one budget, by dense layers; the first has none."""
    yield 0, active
    step = max(round(routed / STEP), 1)
    previous = 0
    for fewer in range(active - step, 0, -step):
        dense = layers * (active - fewer) // (routed - fewer)
        if dense > previous:
            left = layers * active - dense * routed
            yield dense, left // (layers - dense)
            previous = dense


def search_split(
    plan: Plan,
    divergence_of: Callable[[Plan], float],
    log: Callable[[str], Any],
) -> Plan:
    """The plan whose split has the least KL divergence, of TRIES at most.

    Ends where one more is no better than the last, or cannot be converted. Raises
    MoesaicError where equal budgets cannot.
    """
    sizes = plan.sizes
    layers = len(plan.moe.layers)
    best = plan
    least = None
    candidates = splits(layers, sizes.num_routed, sizes.num_active)
    for dense, active in islice(candidates, TRIES):
        split = with_split(plan, dense, active)
        line = f"dense layers {dense}, experts in the others {active}"
        try:
            divergence = divergence_of(split)
        except MoesaicError as error:
            if least is None:
                raise
            log(f"{line}: {error}")
            break
        log(f"{line}: KL divergence {divergence:.4f}")
        if least is not None and divergence >= least:
            break
        best = split
        least = divergence
    return best


def with_split(plan: Plan, dense: int, active: int) -> Plan:
    """The plan with its first layers dense and so many routed experts in the others."""
    layout = replace(Layout.parse(plan.moe.layout), num_active=active)
    layers = plan.moe.layers[dense:]
    moe = replace(
        plan.moe,
        layout=str(layout),
        layers=layers,
        sizes=plan.moe.sizes[dense:],
    )
    return plan.with_moe(moe.with_budgets((active,) * len(layers)))
