"""Thresholds: each expert runs for its own share of the tokens, however many that is for one.

Shape suffixes: T tokens, R routed experts.
"""

from __future__ import annotations

import torch


@torch.no_grad()
def thresholds(score_TR: torch.Tensor, share: float) -> torch.Tensor:
    """A threshold (R,) per expert that round(share * T) of the tokens' scores exceed.

    Loads are equal by construction, and the mean number of experts a token runs is share * R, up
    to ties and rounding. A threshold lies half-way between two scores; where they are equal, and
    for a share of all or no tokens, it lies at the score below. O(T R log T).
    """
    tokens = len(score_TR)
    above = min(max(round(share * tokens), 0), tokens)
    sorted_TR = score_TR.sort(dim=0, descending=True).values
    if above == tokens:
        return sorted_TR[-1] - 1
    if above == 0:
        return sorted_TR[0]
    upper_R, lower_R = sorted_TR[above - 1], sorted_TR[above]
    middle_R = lower_R + (upper_R - lower_R) / 2
    return torch.where(middle_R < upper_R, middle_R, lower_R)
