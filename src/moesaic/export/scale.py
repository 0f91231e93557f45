"""How far the scores are scaled down, so that a stock router's gates are 1 and its choice ours.

Stock routers turn scores into gates with a sigmoid or softmax and normalise the chosen ones. Near
zero both are almost constant: the smaller the scores, the nearer the gates are to 1, and the more
scores differ by less than float32 resolves there. Scales are powers of two: exact in any dtype.

Shape suffixes: T tokens, D hidden_size, R routed experts, K routed experts run per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moesaic.errors import MoesaicError

EXPONENTS = range(-16, -3)  # of the scale times the scores' standard deviation
# Root mean square of gate - 1 that is spent on keeping the choices. Gates that are further from 1
# move what later layers choose by; nearer ones leave scores that float32 cannot tell apart.
GATE_ERROR = 2.1e-4
# Share of tokens that run other experts, above which LENIENCE times as much is spent.
MOST_CHANGED = 1 / 2000
LENIENCE = 8

# Scaled scores (T, R) and scaled selection bias (R,) to chosen experts and their gates (T, K).
Route = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Scale:
    """A power of two, and what the stock router makes of it on the tokens it was chosen on.

    `gate_error` is the root mean square of gate - 1, `changed` the share of tokens that run other
    experts.
    """

    factor: float
    gate_error: float
    changed: float
    layer: int = 0  # of the model


def chosen(index_TK: Tensor, num_routed: int) -> Tensor:
    """Whether each expert runs (T, R)."""
    tokens = len(index_TK)
    runs_TR = torch.zeros(
        tokens, num_routed, dtype=torch.bool, device=index_TK.device
    )
    return runs_TR.scatter_(1, index_TK, True)


@torch.no_grad()
def choose_scale(
    x_TD: Tensor,
    weight_RD: Tensor,
    bias_R: Tensor,
    num_active: int,
    route: Route,
    epsilon: float | None = None,
    logit_dtype: torch.dtype = torch.float32,
) -> Scale:
    """The largest scale that leaves the gates within GATE_ERROR of 1: the fewest changed choices.

    Where more than MOST_CHANGED of the tokens run other experts then, larger ones up to eight times
    that error. `epsilon` asks for the power of two nearest to epsilon / (standard deviation of the
    scores). A router that rounds its logits to `logit_dtype` changes more choices, at any scale.
    2 T D R FLOPs per scale tried.
    """
    x_TD = x_TD.float()
    weight_RD = weight_RD.float()
    bias_R = bias_R.float()
    num_routed = len(weight_RD)
    score_TR = x_TD @ weight_RD.T
    spread = _spread(score_TR)
    biased_TR = score_TR + bias_R
    index_TK = biased_TR.topk(num_active, dim=1).indices
    original_TR = chosen(index_TK, num_routed)
    exponents = list(EXPONENTS)
    if epsilon is not None:
        exponents = [round(math.log2(epsilon))]
    best = None
    for exponent in exponents:
        factor = 2.0 ** (exponent - round(math.log2(spread)))
        scaled_RD = weight_RD * factor
        logit_TR = x_TD @ scaled_RD.T
        index_TK, gate_TK = route(logit_TR, bias_R * factor, num_active)
        changed = _changed(index_TK, original_TR)
        scale = Scale(factor, _gate_error(gate_TK), changed)
        if best is not None:
            few_changed = best.changed <= MOST_CHANGED
            most = GATE_ERROR if few_changed else LENIENCE * GATE_ERROR
            if scale.gate_error > most:
                break
        best = scale
    assert best is not None
    logit_TR = x_TD @ (weight_RD * best.factor).T
    rounded_TR = logit_TR.to(logit_dtype).float()
    index_TK, _ = route(rounded_TR, bias_R * best.factor, num_active)
    return replace(best, changed=_changed(index_TK, original_TR))


def _changed(index_TK: Tensor, original_TR: Tensor) -> float:
    """The share of tokens that run other experts."""
    num_routed = original_TR.shape[1]
    changed_T = (chosen(index_TK, num_routed) != original_TR).any(1)
    return changed_T.double().mean().item()


def _spread(score_TR: Tensor) -> float:
    """Standard deviation of the scores around each token's mean; 1 where it is 0.

    Raises MoesaicError where it is not finite.
    """
    mean_T1 = score_TR.mean(1, keepdim=True)
    centred_TR = score_TR - mean_T1
    spread = float(centred_TR.std()) or 1.0
    if not math.isfinite(spread):
        raise MoesaicError(
            "the router's scores are not finite: the model is broken"
        )
    return spread


def _gate_error(gate_TK: Tensor) -> float:
    """Root mean square of gate - 1."""
    error_TK = gate_TK.double() - 1
    mean_square = error_TK.square().mean()
    return mean_square.sqrt().item()
