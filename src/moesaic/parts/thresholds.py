"""Thresholds: each expert runs for its own share of the tokens, however many that is for one.

Shape suffixes: T tokens, R routed experts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

SOFTNESS = 0.3  # width of a choice's sigmoid, in standard deviations of a token's scores
ALWAYS = 1e30  # further from any score than float32 tells apart


def soft_choice(value_TR: Tensor, threshold_T1: Tensor | float = 0.0) -> Tensor:
    """How surely each expert runs (T, R), in (0, 1): a sigmoid of its distance from the threshold.

    What a choice's gradient is taken for (straight-through).
    """
    with torch.no_grad():
        spread_T1 = value_TR.std(dim=-1, keepdim=True, unbiased=False).clamp(
            min=1e-20
        )
    return ((value_TR - threshold_T1) / (SOFTNESS * spread_T1)).sigmoid()


@torch.no_grad()
def thresholds(score_TR: Tensor, share: float) -> Tensor:
    """A threshold (R,) per expert that round(share * T) of the tokens' scores exceed.

    Loads are equal by construction, and the mean number of experts a token runs is share * R, up
    to ties and rounding. A threshold lies half-way between two scores; where they are equal, and
    for a share of no tokens, it lies at the score below; for all tokens it is below any score.
    O(T R log T).
    """
    tokens = len(score_TR)
    above = min(max(round(share * tokens), 0), tokens)
    return _cut(_descending(score_TR), above)


def _descending(score_TR: Tensor) -> Tensor:
    """Every expert's scores, the largest first; numpy sorts them many times faster on a CPU."""
    if score_TR.device.type != "cpu" or score_TR.dtype != torch.float32:
        return score_TR.sort(dim=0, descending=True).values
    rising_RT = np.sort(score_TR.detach().T.contiguous().numpy(), axis=1)
    return torch.from_numpy(rising_RT).T.flip(0)


def _cut(sorted_TR: Tensor, above: int) -> Tensor:
    if above == len(sorted_TR):
        return torch.full_like(sorted_TR[0], -ALWAYS)
    if above == 0:
        return sorted_TR[0].clone()
    upper_R, lower_R = sorted_TR[above - 1], sorted_TR[above]
    middle_R = lower_R + (upper_R - lower_R) / 2
    return torch.where(middle_R < upper_R, middle_R, lower_R)


@torch.no_grad()
def budget_thresholds(
    score_TR: Tensor, mean_active: float, count: Callable[[Tensor], int]
) -> Tensor:
    """Thresholds (R,) of equal loads for which `count` pairs run, mean_active * T at the most.

    `count` maps thresholds to the pairs that the gating really runs: an expert for every token
    that passes none comes on top of the loads, and a cap takes some away. Searches over the tokens
    of each expert; the mean is exact up to R pairs, one token more or less for every expert.
    """
    tokens, routed = score_TR.shape
    if mean_active >= routed:
        return thresholds(score_TR, 1.0)
    sorted_TR = _descending(score_TR)
    fits, exceeds, above, probes = (
        0,
        tokens,
        round(mean_active / routed * tokens),
        0,
    )
    while exceeds - fits > 1:
        probes += 1
        if (
            probes % 3 == 0
        ):  # half-way now and then, for counts that are far from a line
            above = (fits + exceeds) // 2
        above = min(max(above, fits + 1), exceeds - 1)
        missing = mean_active * tokens - count(_cut(sorted_TR, above))
        if missing >= 0:
            fits = above
        else:
            exceeds = above
        # A token more adds about R pairs; a little further, to close in from the other side.
        above += round(1.2 * missing / routed)
    return _cut(sorted_TR, fits)


@torch.no_grad()
def single_threshold(score_TR: Tensor, mean_active: int) -> float:
    """One threshold for all experts, which mean_active * T of the T R scores exceed, up to ties.

    Unlike `thresholds` it lets loads differ: what runs are the largest scores of all. O(T R).
    """
    below = score_TR.numel() - mean_active * len(score_TR)
    if below <= 0:
        return -ALWAYS
    return float(score_TR.flatten().kthvalue(below).values)
