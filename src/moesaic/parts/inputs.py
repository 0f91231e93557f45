"""Linear layers that read their largest inputs only: one threshold for each.

Shape suffixes: T tokens, I inputs, S sizes of them, in rising order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import mul

import torch
from torch import Tensor, nn

from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.linear_trial import LinearTrial
from moesaic.calibration.statistics import SAMPLE_TOKENS
from moesaic.modeling import MoesaicThresholdedLinear
from moesaic.parts.thresholds import threshold_above

SHARES = ("greedy", "equal")
STEP = 0.02  # of a decoder layer's weights, which one step skips more
MOST = 0.95  # of a matrix's inputs that are skipped, while others can skip more
ROUNDING = 1e-9


@torch.no_grad()
def keep_largest(
    linear: nn.Linear,
    inputs: FFNInputs,
    share: float,
    scale_I: Tensor,
    dense_start: float = 0.0,
) -> MoesaicThresholdedLinear:
    """The layer on that share of its inputs whose abs(x_i) * scale_i is largest.

    The threshold is the quantile of these sizes, over all inputs of about
    SAMPLE_TOKENS tokens: how many a token reads is left open. Nothing is skipped at a
    share of 1. Costs one copy of the weights, and 4 T I bytes.
    """
    weights = {
        name: value.clone() for name, value in linear.state_dict().items()
    }
    kept = _with_weights(linear, weights, share, scale_I, dense_start)
    if share < 1:
        size_TI = _sizes(inputs, SAMPLE_TOKENS, scale_I)
        count = round(share * size_TI.numel())
        kept.threshold.fill_(threshold_above(size_TI, count))
    return kept


def _with_weights(
    linear: nn.Linear,
    state: dict[str, Tensor],
    share: float,
    scale_I: Tensor,
    dense_start: float,
) -> MoesaicThresholdedLinear:
    """With these weights and a threshold below all inputs."""
    kept = MoesaicThresholdedLinear.like(linear, share, dense_start)
    below_all = torch.tensor(-1.0)
    scales = {"input_scale": scale_I.float(), "threshold": below_all}
    kept.load_state_dict(state | scales, assign=True)
    return kept.to(linear.weight.device)


def _sizes(inputs: FFNInputs, most: int, scale_I: Tensor) -> Tensor:
    """abs(x_i) * scale_i (T, I) of about so many tokens to fit on."""
    sample = inputs.apart(most)
    sizes = [x_TI.abs().float() * scale_I for x_TI in sample.fit()]
    return torch.cat(sizes)


@torch.no_grad()
def greedy_shares(
    trial: LinearTrial,
    share: float,
    scales: Sequence[Tensor],
    tokens: int,
    dense_start: float = 0.0,
) -> list[float]:
    """Shares of a decoder layer's linear layers, of mean `share`, by TEAL's search.

    `scales` (I,) are those of `keep_largest`, for each. See `spend_greedily`; the error
    is that of the decoder layer's output for about `tokens` tokens. Costs a pass of
    them through the layer for every linear layer and step.
    """
    samples = max(tokens // trial.length, 1)
    error_with = trial.error(samples)
    replacements = []
    sorted_sizes = []
    for linear, inputs, scale_I in zip(
        trial.linears, trial.inputs, scales, strict=True
    ):
        weights = linear.state_dict()
        replacement = _with_weights(linear, weights, 1.0, scale_I, dense_start)
        replacements.append(replacement)
        size_TI = _sizes(inputs, tokens, scale_I)
        sorted_sizes.append(size_TI.flatten().sort().values)

    def error(sparsities: Sequence[float]) -> float:
        for replacement, size_S, sparsity in zip(
            replacements, sorted_sizes, sparsities, strict=True
        ):
            dropped = round(sparsity * len(size_S))
            threshold = size_S[dropped - 1] if dropped else -1.0
            replacement.threshold.fill_(threshold)
        return error_with(replacements)

    weights_of = [linear.weight.numel() for linear in trial.linears]
    sparsities = spend_greedily(weights_of, 1 - share, error)
    return [1 - sparsity for sparsity in sparsities]


def spend_greedily(
    weights: Sequence[int],
    target: float,
    error: Callable[[Sequence[float]], float],
    step: float = STEP,
) -> list[float]:
    """Sparsities of matrices, of mean `target`, by steps that cost least (TEAL, Alg. 1).

    `weights` are the matrices' sizes, and their mean is weighted by these. A step gives
    one matrix more sparsity, such that `step` of all weights are skipped more: the one
    with which `error` is least. The last step is what is left. No matrix goes beyond
    MOST, or the target if that is higher.
    """
    total = sum(weights)
    parts = [count / total for count in weights]
    most = max(MOST, target)
    sparsities = [0.0] * len(weights)
    left = target
    while left > ROUNDING:
        best: list[float] = []
        least = math.inf
        for place, part in enumerate(parts):
            added = min(min(step, left) / part, most - sparsities[place])
            if added * part < ROUNDING:
                continue
            tried = list(sparsities)
            tried[place] += added
            found = error(tried)
            if found < least or not best:
                best = tried
                least = found
        if not best:
            break
        sparsities = best
        spent = sum(map(mul, parts, sparsities))
        left = target - spent
    return sparsities
