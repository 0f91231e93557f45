"""Thresholds: each expert runs for its share of the tokens.

How many experts run for one token is left open.

Shape suffixes: T tokens, R routed experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Width of a choice's sigmoid, in standard deviations of a token's scores.
SOFTNESS = 0.3
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
    the next, and below all values where all run.
    """
    if router.chooser == "threshold":
        return 0.0
    if router.num_active >= value_TR.shape[-1]:
        return -torch.inf
    count = router.num_active + 1
    best = value_TR.topk(count, dim=-1).values
    last_two = best[:, -2:]
    return last_two.mean(dim=-1, keepdim=True)


@torch.no_grad()
def thresholds(score_TR: Tensor, share: float) -> Tensor:
    """A threshold (R,) per expert that round(share * T) of its scores exceed.

    Loads are equal by construction, and the mean number of experts a token runs is
    share * R, up to ties and rounding. A threshold lies half-way between two scores;
    where they are equal, and for a share of no tokens, it lies at the score below; for
    all tokens it is below any score. O(T R log T).
    """
    tokens = len(score_TR)
    above = round(share * tokens)
    above = min(max(above, 0), tokens)
    sorted_TR = _descending(score_TR)
    return _cut(sorted_TR, above)


def _descending(score_TR: Tensor) -> Tensor:
    """Every expert's scores (T, R), the largest first.

    numpy sorts them many times faster on a CPU.
    """
    on_cpu = score_TR.device.type == "cpu"
    if not on_cpu or score_TR.dtype != torch.float32:
        return score_TR.sort(dim=0, descending=True).values
    score_RT = score_TR.detach().T.contiguous()
    rising_RT = np.sort(score_RT.numpy(), axis=1)
    return torch.from_numpy(rising_RT).T.flip(0)


def _cut(sorted_TR: Tensor, above: int) -> Tensor:
    """Thresholds (R,) that so many of each expert's sorted scores exceed."""
    if above == len(sorted_TR):
        return torch.full_like(sorted_TR[0], -ALWAYS)
    if above == 0:
        return sorted_TR[0].clone()
    upper_R = sorted_TR[above - 1]
    lower_R = sorted_TR[above]
    middle_R = lower_R + (upper_R - lower_R) / 2
    return torch.where(middle_R < upper_R, middle_R, lower_R)


@torch.no_grad()
def budget_thresholds(
    score_TR: Tensor,
    mean_active: float,
    count: Callable[[Tensor], int],
) -> Tensor:
    """Thresholds (R,) of equal loads for which at most mean_active * T pairs run.

    `count` maps thresholds to the pairs that the gating really runs: an expert for
    every token that passes none comes on top of the loads, and a cap takes some away.
    Searches over the tokens of each expert; the mean is exact up to R pairs, one token
    more or less for every expert.
    """
    tokens, routed = score_TR.shape
    if mean_active >= routed:
        return thresholds(score_TR, 1.0)

    sorted_TR = _descending(score_TR)
    budget = mean_active * tokens
    fits = 0
    exceeds = tokens
    above = round(mean_active / routed * tokens)
    probes = 0
    while exceeds - fits > 1:
        probes += 1
        # Half-way now and then, for counts that are far from a line.
        if probes % 3 == 0:
            above = (fits + exceeds) // 2
        above = max(above, fits + 1)
        above = min(above, exceeds - 1)
        pairs = count(_cut(sorted_TR, above))
        missing = budget - pairs
        if missing >= 0:
            fits = above
        else:
            exceeds = above
        # A token more adds about R pairs; a little further, to close in from the
        # other side.
        above += round(1.2 * missing / routed)
    return _cut(sorted_TR, fits)


@torch.no_grad()
def single_threshold(score_TR: Tensor, mean_active: int) -> float:
    """One threshold for all experts, which mean_active * T of the scores exceed.

    Unlike `thresholds` it lets loads differ: what runs are the largest scores of all,
    up to ties. O(T R).
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
