"""Linear layers that read their largest inputs only: one threshold for each.

Shape suffixes: T tokens, I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.statistics import SAMPLE_TOKENS
from moesaic.modeling import MoesaicThresholdedLinear
from moesaic.parts.thresholds import threshold_above


@torch.no_grad()
def keep_largest(
    linear: nn.Linear, inputs: FFNInputs, share: float, scale_I: Tensor
) -> MoesaicThresholdedLinear:
    """The layer on that share of its inputs whose abs(x_i) * scale_i is largest.

    The threshold is the quantile of these sizes, over all inputs of about
    SAMPLE_TOKENS tokens: how many a token reads is left open. Nothing is skipped at a
    share of 1. Costs one copy of the weights, and 4 T I bytes.
    """
    kept = MoesaicThresholdedLinear.like(linear, share)
    state = {name: value.clone() for name, value in linear.state_dict().items()}
    state["input_scale"] = scale_I.float()
    state["threshold"] = torch.tensor(_threshold(inputs, share, scale_I))
    kept.load_state_dict(state, assign=True)
    return kept.to(linear.weight.device)


def _threshold(inputs: FFNInputs, share: float, scale_I: Tensor) -> float:
    if share == 1:
        return -1.0
    sample = inputs.apart(SAMPLE_TOKENS)
    sizes = [x_TI.abs().float() * scale_I for x_TI in sample.fit()]
    size_TI = torch.cat(sizes)
    count = round(share * size_TI.numel())
    return threshold_above(size_TI, count)
