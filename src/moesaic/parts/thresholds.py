"""Thresholds: a budget of experts that tokens share.

How many run for one token is left open, and for how many tokens one expert runs.

Shape suffixes: T tokens, R routed experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Width of a choice's sigmoid, in standard deviations of a token's scores.
SOFTNESS = 0.3
BISECTIONS = 40  # of a range of scores, down to rounding in float32
ALWAYS = 1e30  # further from any score than float32 tells apart


def soft_choice(value_TR: Tensor, threshold_T1: Tensor | float = 0.0) -> Tensor:
    """How surely each expert runs (T, R), in (0, 1).

    A sigmoid of its distance from the threshold: what a choice's gradient is taken
    for (straight-through). Where a token's values are all equal up to rounding, no
    expert is preferred, and there is no gradient.
    """
    with torch.no_grad():
        spread_T1 = value_TR.std(dim=-1, keepdim=True, unbiased=False)
        largest_T1 = value_TR.abs().amax(dim=-1, keepdim=True)
        rounding_T1 = torch.finfo(value_TR.dtype).eps * largest_T1
        is_tied_T1 = spread_T1 <= rounding_T1
        spread_T1 = spread_T1.clamp(min=1e-20)
    value_TR = torch.where(is_tied_T1, value_TR.detach(), value_TR)
    distance_TR = value_TR - threshold_T1
    width_T1 = SOFTNESS * spread_T1
    return (distance_TR / width_T1).sigmoid()


@torch.no_grad()
def choice_thresholds(router: Any, value_TR: Tensor) -> Tensor | float:
    """What a router's values are compared with, for `soft_choice`.

    0 where thresholds choose; else (T, 1), half-way between the last value that runs and
    the next, and below all values where all run. Where a cap is below that, as by top-k.
    """
    if router.chooser == "threshold":
        routed = value_TR.shape[-1]
        cap = getattr(router, "cap", routed)  # of neurons as many run as pass
        if cap >= routed:
            return 0.0
        return _between(value_TR, cap).clamp(min=0)
    if router.num_active >= value_TR.shape[-1]:
        return -torch.inf
    return _between(value_TR, router.num_active)


def _between(value_TR: Tensor, count: int) -> Tensor:
    """Half-way between the value that is last of the `count` largest and the next (T, 1)."""
    best = value_TR.topk(count + 1, dim=-1).values
    last_two = best[:, -2:]
    return last_two.mean(dim=-1, keepdim=True)


@torch.no_grad()
def budget_thresholds(
    score_TR: Tensor,
    level_R: Tensor,
    mean_active: float,
    count: Callable[[Tensor], int],
) -> Tensor:
    """Thresholds level_R + t, with the least t for which mean_active * T pairs run at most.

    t is one number for all experts, so their loads differ. `count` maps thresholds to
    the pairs that the gating really runs: an expert for every token that passes none
    comes on top of what exceeds them, and a cap takes some away. The mean is exact up to
    ties. Where all experts are to run, thresholds are below any score. O(T R), 40 times.
    """
    tokens, routed = score_TR.shape
    if mean_active >= routed:
        return torch.full_like(level_R, -ALWAYS)
    budget = mean_active * tokens
    excess_TR = score_TR - level_R
    exceeds = float(excess_TR.min()) - 1
    fits = float(excess_TR.max())
    for _ in range(BISECTIONS):
        middle = (exceeds + fits) / 2
        if count(level_R + middle) > budget:
            exceeds = middle
        else:
            fits = middle
    return level_R + fits


@torch.no_grad()
def single_threshold(score_TR: Tensor, mean_active: int) -> float:
    """One threshold for all experts, which mean_active * T of the scores exceed.

    What runs are the largest scores of all, up to ties. O(T R).
    """
    active = mean_active * len(score_TR)
    return threshold_above(score_TR, active)


@torch.no_grad()
def threshold_above(values: Tensor, count: int) -> float:
    """The threshold that the `count` largest of all values exceed, up to ties.

    It is the largest of the others; below any value where there are no others.
    """
    others = values.numel() - count
    if others <= 0:
        return -ALWAYS
    largest_other = values.flatten().kthvalue(others)
    return float(largest_other.values)


@torch.no_grad()
def set_neuron_thresholds(router: Any, score_TF: Tensor) -> None:
    """Moves the thresholds of a router of neurons to its budgets, in place.

    `score_TF` are its scores as it is. A router of copies has two: of the neurons that
    run, and of those among them that are exact.
    """
    threshold = single_threshold(score_TF, router.num_active)
    router.selection_bias -= threshold
    if not router.reads_gates:
        exact_threshold = single_threshold(score_TF, router.num_exact)
        router.exact_margin.fill_(exact_threshold - threshold)
