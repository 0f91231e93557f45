"""Equal work: the sparsity at which a method does as much work as it is asked to.

Found on plans, and so from config.json alone, before anything is converted. Nothing is
interpolated: a method that cannot spend the work is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moesaic.comparison.options import FFN_BYTES, NEAR, Goal
from moesaic.conversion.plan import Plan, make_plan
from moesaic.errors import MoesaicError
from moesaic.methods.base import Budget, Method


@dataclass(frozen=True)
class OverDense:
    """A plan's work for one token: over the dense model's, and over the dense FFNs'."""

    macs: float
    bytes: float
    ffn_macs: float
    ffn_bytes: float


def over_dense(plan: Plan) -> OverDense:
    """Routers count as parts of FFNs."""
    dense_ffn_macs = plan.dense_macs.ffn_and_routers
    return OverDense(
        macs=plan.macs.total / plan.dense_macs.total,
        bytes=plan.bytes.total / plan.dense_bytes.total,
        ffn_macs=plan.macs.ffn_and_routers / dense_ffn_macs,
        ffn_bytes=plan.bytes.ffn / plan.dense_bytes.ffn,
    )


@dataclass
class Steps:
    """A method's plans by the neurons of an FFN that a token skips, made when needed.

    Step 1 of `neurons` skips one, the last all but one. Steps between which a method
    makes no difference have equal plans. `domains` counts calibration texts.
    """

    config: Any
    model: str
    method: Method
    grain: str
    neurons: int
    domains: int = 1
    refusal: MoesaicError | None = None
    known: dict[int, tuple[Plan, OverDense] | None] = field(
        default_factory=dict
    )

    def sparsity(self, step: int) -> float:
        return step / self.neurons

    def nearest(self, goal: Goal) -> tuple[float, Plan]:
        """The sparsity and the plan that come nearest to a goal's work.

        Raises MoesaicError with the nearest works where none is near, and the method's
        own reason where it takes no sparsity at all. About log2(neurons) plans are
        counted.
        """
        assert goal.at is not None

        def work_at(step: int) -> float | None:
            return self._work(step, goal.equal)

        around = neighbours(work_at, self.neurons - 1, goal.at)
        if not around:
            assert self.refusal is not None
            raise self.refusal
        distances = {step: abs(work - goal.at) for step, work in around.items()}
        step = min(distances, key=lambda step: distances[step])
        if distances[step] > NEAR:
            works = " or ".join(f"{work:.3f}" for work in around.values())
            raise MoesaicError(
                f"the nearest that method {self.method.name!r} can spend is {works}; "
                "ask for that, or for another grain"
            )
        found = self.known[step]
        assert found is not None
        plan, _ = found
        return self.sparsity(step), plan

    def _work(self, step: int, equal: str) -> float | None:
        """What a step spends; None where the method refuses it."""
        if step not in self.known:
            self.known[step] = self._counted(step)
        found = self.known[step]
        if found is None:
            return None
        _, work = found
        return work.ffn_bytes if equal == FFN_BYTES else work.ffn_macs

    def _counted(self, step: int) -> tuple[Plan, OverDense] | None:
        budget = Budget(None, self.sparsity(step), self.grain)
        try:
            plan = make_plan(
                self.config,
                self.model,
                self.method,
                budget,
                domains=self.domains,
            )
        except MoesaicError as error:
            self.refusal = self.refusal or error
            return None
        # To count takes far longer than to plan.
        for found in self.known.values():
            if found is not None and found[0].moe == plan.moe:
                return found
        return plan, over_dense(plan)


def neighbours(
    work_at: Callable[[int], float | None], last: int, wanted: float
) -> dict[int, float]:
    """The works on both sides of the one wanted, by their steps out of 1 to `last`.

    `work_at` falls from step to step. It is None for steps that are out of reach, which
    lie before the first or behind the last that are not. One side is missing where all
    works lie on the other; both are where no step was found in reach.
    """
    inside = _any_in_reach(work_at, last)
    if inside is None:
        return {}
    more = 0  # a step that spends more than is wanted, or lies before the first
    less = last + 1  # one that spends at most that, or lies behind the last
    while less - more > 1:
        middle = (more + less) // 2
        work = work_at(middle)
        too_much = middle < inside if work is None else work > wanted
        if too_much:
            more = middle
        else:
            less = middle
    works = {}
    for step in (more, less):
        work = work_at(step) if 1 <= step <= last else None
        if work is not None:
            works[step] = work
    return works


def _any_in_reach(
    work_at: Callable[[int], float | None], last: int
) -> int | None:
    """A step that is not refused: the middle, quarters, eighths, and so on."""
    parts = 2
    while parts <= 64:
        for part in range(1, parts, 2):
            step = max(1, part * (last + 1) // parts)
            if work_at(step) is not None:
                return step
        parts *= 2
    return None
