"""How many experts each layer runs: where thresholds choose, layers can share one budget.

With equal budgets a token runs the same share of the experts in every layer, but one more expert
is worth more in some than in others. To first order, an expert more per token in layer l takes

    m_l = - sum_tj w_tj dL/dg_tj / sum_tj w_tj

off the loss L, the KL divergence from the dense model's predictions; g_tj is the gate of expert j
for token t, and w a bump around the threshold: the experts that a small shift of it would add.
Where budgets are best, all m_l are equal, so each round moves experts from layers below their mean
to layers above. A round converts anew, since experts' repair depends on who runs.

Shape suffixes: N windows, L layers, T tokens, D hidden_size, R routed experts, V words.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from moesaic.adapters import FFNs, Mixtures
from moesaic.data import HELD_OUT, fewer_windows
from moesaic.errors import MoesaicError
from moesaic.gating import soft_choice
from moesaic.layers import convert_layers
from moesaic.masked import MaskedBlock
from moesaic.plan import Plan
from moesaic.repair import TOKENS_PER_NEURON
from moesaic.soundness import check_on
from moesaic.stream import Stream

ROUNDS = 4
STEP = 0.1  # of a layer's experts: the most that a round adds or takes
LEAST = 0.05  # of a layer's experts that run on average; one at least
TRIAL_TOKENS = 8192  # to convert on in a round; more where least squares wants more
PROBE_TOKENS = 4096  # of the last eighth, which no weight is fitted to


def share_budgets(
    dense: Any,
    ffns: FFNs,
    plan: Plan,
    windows_NL: torch.Tensor,
    device: torch.device,
    seed: int,
    tell: Callable[[str], Any] = lambda line: None,
) -> Plan:
    """The plan with a budget for each layer, of the same sum; unchanged if its recipe has none.

    Equal budgets are the first of 1 + ROUNDS that are tried, and those of the least KL divergence
    are taken. Costs so many conversions on TRIAL_TOKENS (twice the active neurons, if that is
    more) and forward and backward passes on PROBE_TOKENS, whose dense logits it holds. The layers
    of a mixture keep equal budgets. Raises MoesaicError for a model that is not in whole on
    `device`.
    """
    layers, moe = ffns.converted, plan.config.moesaic
    if not plan.recipe.layer_budgets or len(layers) < 2 or isinstance(ffns, Mixtures):
        return plan
    check_on(dense, device, "sharing a budget between layers differentiates")
    length = windows_NL.shape[1]
    tokens = max(TRIAL_TOKENS, TOKENS_PER_NEURON * plan.sizes.active * HELD_OUT // (HELD_OUT - 1))
    trial_NL = fewer_windows(windows_NL, -(-tokens // length))
    held = max(len(windows_NL) // HELD_OUT, 1)
    probe_NL = windows_NL[-min(max(PROBE_TOKENS // length, 1), held) :].to(device)
    with torch.no_grad():
        wanted = [dense(input_ids=ids_NL, use_cache=False).logits for ids_NL in probe_NL.split(1)]
    routed, mean = moe["num_routed"], moe["num_active"]
    share_L = torch.full((len(layers),), mean / routed, dtype=torch.float64)
    tried: list[tuple[float, Plan]] = []
    for number in range(1 + ROUNDS):
        budgets = whole_budgets(share_L, routed, mean * len(layers))
        one = with_budgets(plan, budgets)
        try:
            with ffns.restored():
                stream = Stream(ffns, trial_NL, device)
                convert_layers(stream, one, seed, {}, trial=True)
                blocks: list[Any] = [ffns.replaced(layer) for layer in layers]
                value_L, loss = marginal_values(dense, blocks, probe_NL, wanted)
        except MoesaicError:  # diverged; what was tried before need not
            if not tried:
                raise
            break
        tell(f"experts per token {', '.join(map(str, budgets))}: KL divergence {loss:.4f}")
        tried.append((loss, one))
        if number < ROUNDS:
            share_L = moved(share_L, value_L, max(LEAST, 1 / routed))
    return min(tried, key=lambda found: found[0])[1]


def with_budgets(plan: Plan, budgets: list[int]) -> Plan:
    """The plan whose l-th converted layer runs budgets[l] routed experts per token on average."""
    config = copy.copy(plan.config)
    config.moesaic = plan.config.moesaic | {"budgets": budgets}
    return replace(plan, config=config)


def marginal_values(
    model: Any, blocks: list[MaskedBlock], probe_NL: torch.Tensor, wanted: list[torch.Tensor]
) -> tuple[torch.Tensor, float]:
    """m_l of every block (L,), and the KL divergence from the `wanted` logits (1, T, V) of windows.

    One forward and backward pass, window by window; the weights get no gradients.
    """
    shift_L = [torch.zeros((), device=probe_NL.device, requires_grad=True) for _ in blocks]
    bump_L: list[Any] = [0.0 for _ in blocks]
    for layer, block in enumerate(blocks):
        block.choose = _shifted(block, shift_L[layer], layer, bump_L)
    loss = 0.0
    with _without_gradients(model):
        for ids_NL, wanted_NTV in zip(probe_NL.split(1), wanted, strict=True):
            log_q_TV = model(input_ids=ids_NL, use_cache=False).logits[0].float().log_softmax(-1)
            log_p_TV = wanted_NTV[0].float().log_softmax(-1)
            kl = (log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1).mean() / len(wanted)
            kl.backward()
            loss += float(kl.detach())
    tokens = probe_NL[0].numel()  # a window's loss is a mean over its tokens, bumps are sums
    value = [
        -float(shift.grad) * len(wanted) * tokens / max(float(bump), 1e-30)
        for shift, bump in zip(shift_L, bump_L, strict=True)
        if shift.grad is not None
    ]
    return torch.tensor(value, dtype=torch.float64), loss


def _shifted(
    block: MaskedBlock, shift: torch.Tensor, layer: int, bump_L: list[Any]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The block's choices as gates (T, R), which rise near the threshold with `shift`, a 0."""
    choose, scores = block.choose, block.scores
    assert choose is not None
    assert scores is not None

    def gates(x_TD: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            soft_TR = soft_choice(scores(x_TD))
            bump_TR = soft_TR * (1 - soft_TR)
            bump_L[layer] = bump_L[layer] + bump_TR.sum()
            chosen_TR = choose(x_TD).float()
        return chosen_TR + shift * bump_TR

    return gates


@contextmanager
def _without_gradients(model: Any) -> Iterator[None]:
    """No weight of a model gets a gradient for a while."""
    wanting = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in wanting:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanting:
            parameter.requires_grad_(True)


def moved(share_L: torch.Tensor, value_L: torch.Tensor, least: float) -> torch.Tensor:
    """Shares of the same mean, by at most about STEP larger where an expert is worth more.

    They stay within [least, 1].
    """
    scale = value_L.abs().mean().clamp(min=1e-30)
    step_L = STEP * ((value_L - value_L.mean()) / scale).clamp(-1, 1)
    low, high = -1.0, 1.0
    for _ in range(60):  # what is added to all, so that the mean stays within the bounds
        middle = (low + high) / 2
        mean = (share_L + step_L + middle).clamp(least, 1).mean()
        low, high = (middle, high) if mean < share_L.mean() else (low, middle)
    return (share_L + step_L + high).clamp(least, 1)


def whole_budgets(share_L: torch.Tensor, routed: int, total: int) -> list[int]:
    """Whole experts (at least 1, at most `routed`) of the given sum, by the largest remainders."""
    exact = [float(share) * routed for share in share_L]
    budgets = [min(max(int(value), 1), routed) for value in exact]
    while (missing := total - sum(budgets)) != 0:
        step = 1 if missing > 0 else -1
        free = [i for i, budget in enumerate(budgets) if 1 <= budget + step <= routed]
        nearest = max(free, key=lambda i: step * (exact[i] - budgets[i]))
        budgets[nearest] += step
    return budgets
