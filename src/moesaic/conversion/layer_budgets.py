"""How many experts each layer runs, or neurons it keeps: layers can share one budget.

With equal budgets a token runs the same share of the experts in every layer, but one
more expert is worth more in some than in others. To first order, an expert more per
token in layer l takes

    m_l = - sum_tj w_tj dL/dg_tj / sum_tj w_tj

off the loss L, the KL divergence from the dense model's predictions, summed over
tokens; g_tj is the gate of expert j for token t, and w a bump around the threshold, or
where the K best run half-way between the K-th score and the next: the experts that a
small shift of it would add. Where nothing is routed, an expert is a neuron that is kept,
and m_l is what `next_neurons` says. Where budgets are best, all m_l are equal,
so each round moves experts from layers below their mean to layers above. A round
converts anew, since a repair depends on who runs.

Shape suffixes: N windows, L layers, T tokens, D hidden_size, R routed experts, V words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moesaic.calibration.calibration_set import HELD_OUT, CalibrationSet
from moesaic.calibration.checks import check_on
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.hidden_states import Stream
from moesaic.calibration.share import ALONE, Share
from moesaic.conversion.dense_first import search_split
from moesaic.conversion.next_neurons import adds_neurons, next_neurons
from moesaic.conversion.plan import Plan
from moesaic.conversion.run import Run, ffn_inputs
from moesaic.conversion.trial_set import trial_set
from moesaic.errors import MoesaicError
from moesaic.families import DenseFFN, FFNs, Mixtures
from moesaic.memory import lent_to
from moesaic.methods.base import FFNMethod
from moesaic.modeling import MoesaicReplacement, Sizes, View
from moesaic.parts.gradients import without_gradients
from moesaic.parts.thresholds import choice_thresholds, soft_choice

ROUNDS = 2  # four of half the step do no better (docs/log.md)
# Tokens whose probabilities of all words are held at once, in float32.
CHUNK = 256
STEP = 0.2  # of a layer's experts: the most that a round adds or takes, before all move alike
EQUAL_LAYERS = "--set layer_budgets=uniform, or --device cpu"
LEAST = 0.05  # of a layer's experts that run on average; one at least
# To convert on in a round; more where least squares needs more.
TRIAL_TOKENS = 8192
PROBE_TOKENS = 4096  # that no weight of a round is fitted to

Budgets = tuple[int, ...]


@dataclass(frozen=True)
class Trial:
    """What an expert more is worth in every layer (L,), where asked, and the KL divergence."""

    value_L: Tensor | None
    divergence: float


@dataclass(frozen=True)
class Trials:
    """Conversions on few tokens, and how far each is from the dense model."""

    dense: Any
    ffns: FFNs
    calibration: CalibrationSet
    probe_NL: Tensor
    dense_logits: list[Tensor]  # (1, T, V) of every window
    device: torch.device
    seed: int

    @contextmanager
    def converted(self, plan: Plan) -> Iterator[list[Any]]:
        """What stands in for the FFNs of the plan's layers; then the FFNs are back."""
        assert isinstance(plan.method, FFNMethod)
        with self.ffns.restored():
            stream = Stream(self.ffns, self.calibration.windows_NL, self.device)
            run = Run(
                stream,
                plan,
                self.calibration,
                self.seed,
                trial=True,
                reported=False,
                undo_drift=False,
            )
            run.replace_ffns(plan.method)
            yield [self.ffns.replaced(layer) for layer in plan.moe.layers]

    def divergence(self, plan: Plan) -> float:
        """KL divergence from the dense model's predictions, a mean over tokens."""
        with self.converted(plan):
            return divergence(self.dense, self.probe_NL, self.dense_logits)

    def values(self, plan: Plan) -> Trial:
        """The same, and what an expert or a neuron more is worth in every layer."""
        following = None
        if plan.moe.router is None:
            dense_ffns = [self.ffns.read(layer) for layer in plan.moe.layers]
        with self.converted(plan) as blocks:
            if plan.moe.router is None:
                pairs = zip(dense_ffns, blocks, strict=True)
                following = [
                    next_neurons(ffn, block.made) for ffn, block in pairs
                ]
            return marginal_values(
                self.dense, blocks, self.probe_NL, self.dense_logits, following
            )


def share_budgets(
    dense: Any,
    ffns: FFNs,
    plan: Plan,
    calibration: CalibrationSet,
    device: torch.device,
    seed: int,
    log: Callable[[str], Any] = lambda line: None,
    share: Share = ALONE,
) -> Plan:
    """The plan with the budgets of layers that its method's strategy gives.

    Unchanged where the strategy is uniform. The method's own: see `own_sizes`. Dense
    first: see `dense_first`; fewer layers are converted then. By gradient: equal budgets
    are the first of 1 + ROUNDS that are tried, and those of the least KL divergence are
    taken. Costs at most so many conversions on TRIAL_TOKENS (as many as least squares
    needs, if that is more; 8 windows at least) and forward passes on PROBE_TOKENS, whose
    dense logits it holds, and backward passes for all but the last; of several processes
    each does so by itself.
    The layers of a mixture keep equal budgets. Raises MoesaicError for a model that is not
    in whole on `device`, under inference mode, and where equal budgets diverge.
    """
    method = plan.method
    if not isinstance(method, FFNMethod) or method.layer_budgets == "uniform":
        return plan
    if method.layer_budgets == "own":
        return own_sizes(method, ffns, plan, calibration, device, log, share)
    if not _can_differ(plan, ffns, log):
        return plan
    if method.layer_budgets == "dense-first":
        why = "trying how many layers stay dense runs"
        check_on(dense, device, why, EQUAL_LAYERS)
        trials = _trials(dense, ffns, plan, calibration, device, seed)
        return search_split(plan, trials.divergence, log)
    why = "sharing a budget between layers differentiates"
    check_on(dense, device, why, EQUAL_LAYERS)
    if torch.is_inference_mode_enabled():
        raise MoesaicError(
            "layer budgets come from gradients, which torch.inference_mode has none of; "
            "convert outside of it, or with layer_budgets=uniform"
        )
    trials = _trials(dense, ffns, plan, calibration, device, seed)

    def with_budgets(budgets: Budgets) -> Plan:
        return plan.with_moe(plan.moe.with_budgets(budgets))

    def measure(budgets: Budgets) -> Trial:
        return trials.values(with_budgets(budgets))

    def judge(budgets: Budgets) -> Trial:
        return Trial(None, trials.divergence(with_budgets(budgets)))

    budgets = search_budgets(plan, measure, judge, log)
    return plan.with_moe(plan.moe.with_budgets(budgets))


def _trials(
    dense: Any,
    ffns: FFNs,
    plan: Plan,
    calibration: CalibrationSet,
    device: torch.device,
    seed: int,
) -> Trials:
    # At least as many windows as leave one held out in eight.
    tokens = max(TRIAL_TOKENS, HELD_OUT * calibration.length)
    # All that a layer may come to hold.
    held = plan.sizes.total if plan.method.fits_weights else 0
    few = trial_set(calibration, tokens, held)
    probe_NL = _probe_windows(calibration, few).to(device)
    dense_logits = _logits(dense, probe_NL)
    return Trials(dense, ffns, few, probe_NL, dense_logits, device, seed)


@torch.no_grad()
def _logits(model: Any, windows_NL: Tensor) -> list[Tensor]:
    """Logits (1, T, V) of every window."""
    logits = []
    for ids_NL in windows_NL.split(1):
        outputs = model(input_ids=ids_NL, use_cache=False)
        logits.append(outputs.logits)
    return logits


def search_budgets(
    plan: Plan,
    measure: Callable[[Budgets], Trial],
    judge: Callable[[Budgets], Trial],
    log: Callable[[str], Any],
) -> Budgets:
    """The budgets of least KL divergence, of 1 + ROUNDS that are tried at most.

    Nothing is moved after the last one, so `judge` tells no values, which a backward
    pass would cost.
    """
    routed, active = _units(plan.sizes)
    layers = len(plan.moe.layers)
    total = active * layers
    mean = active / routed
    one_expert = 1 / routed
    least = max(min(LEAST, mean / 2), one_expert)
    most = _most(plan)
    share_L = torch.full((layers,), mean, dtype=torch.float64)
    unit = "experts" if plan.sizes.expert > 1 else "neurons"
    tried: dict[Budgets, Trial] = {}
    for number in range(1 + ROUNDS):
        is_last = number == ROUNDS
        budgets = whole_budgets(share_L, routed, total, most)
        if budgets not in tried:  # else too little has moved for whole experts
            numbers = ", ".join(map(str, budgets))
            line = f"{unit} per token {numbers}"
            try:
                trial = judge(budgets) if is_last else measure(budgets)
            except MoesaicError as error:
                # It diverged; what was tried before has not.
                if not tried:
                    raise
                log(f"{line}: {error}")
                break
            tried[budgets] = trial
            log(f"{line}: KL divergence {trial.divergence:.4f}")
        if not is_last:
            value_L = tried[budgets].value_L
            assert value_L is not None
            share_L = moved(share_L, value_L, least, most / routed)
    return min(tried, key=lambda budgets: tried[budgets].divergence)


def _units(sizes: Sizes) -> tuple[int, int]:
    """How many experts there are, and run; neurons where none is routed."""
    if sizes.num_routed:
        return sizes.num_routed, sizes.num_active
    return sizes.total, sizes.shared


def _most(plan: Plan) -> int:
    """Experts that a layer can run on average: all, or the most that one token may."""
    routed, _ = _units(plan.sizes)
    router = plan.moe.router
    if router is None or router.cap is None:
        return routed
    return min(router.cap, routed)


def _can_differ(plan: Plan, ffns: FFNs, log: Callable[[str], Any]) -> bool:
    """Whether there is anything to share."""
    units, active = _units(plan.sizes)
    if len(plan.moe.layers) < 2 or active == units:
        return False
    return not _is_mixture(ffns, log)


def _is_mixture(ffns: FFNs, log: Callable[[str], Any]) -> bool:
    """Whether layers keep equal budgets since they are mixtures; says so."""
    if not isinstance(ffns, Mixtures):
        return False
    log("the layers of a model that is a mixture already keep equal budgets")
    return True


def own_sizes(
    method: FFNMethod,
    ffns: FFNs,
    plan: Plan,
    calibration: CalibrationSet,
    device: torch.device,
    log: Callable[[str], Any] = lambda line: None,
    share: Share = ALONE,
) -> Plan:
    """The plan with the sizes that the method gives the layers, from all of them.

    One pass of all calibration tokens through the dense model, layer by layer, which
    several processes share.
    """
    if _is_mixture(ffns, log):
        return plan
    layers = _dense_layers(method, ffns, calibration, device, share)
    sizes = method.sizes_of_layers(layers, plan.sizes)
    numbers = [row.active for row in sizes]
    what = "neurons"
    if len(set(numbers)) == 1:
        numbers = [row.shared for row in sizes]
        what = "shared neurons"
    log(f"{what} by layer {', '.join(map(str, numbers))}")
    return plan.with_moe(plan.moe.with_sizes(tuple(sizes)))


def _dense_layers(
    method: FFNMethod,
    ffns: FFNs,
    calibration: CalibrationSet,
    device: torch.device,
    share: Share,
) -> Iterator[tuple[DenseFFN, FFNInputs]]:
    """Every FFN to convert and its inputs in the dense model, one after the other."""
    part = calibration.part(share, method.fits_weights)
    stream = Stream(ffns, calibration.windows_NL, device, part)
    for layer, module in enumerate(ffns.layers):
        with lent_to(device, module):
            if layer in ffns.converted:
                inputs = ffn_inputs(
                    stream, layer, calibration, method.fits_weights
                )
                yield ffns.read(layer), inputs
                stream.advance(layer, inputs.own())
            else:
                stream.advance(layer)


def _probe_windows(calibration: CalibrationSet, few: CalibrationSet) -> Tensor:
    """The last windows, of those that a round does not fit to; one at least.

    In the end the model is fitted to some of them: they judge the rounds, and not it.
    """
    wanted = max(PROBE_TOKENS // calibration.length, 1)
    fitted = few.samples - few.heldout_samples
    unseen = max(calibration.samples - fitted, 1)
    count = min(wanted, unseen)
    return calibration.windows_NL[-count:]


def marginal_values(
    model: Any,
    blocks: list[MoesaicReplacement],
    probe_NL: Tensor,
    dense_logits: list[Tensor],
    following: list[DenseFFN] | None = None,
) -> Trial:
    """m_l of every block (L,), and the KL divergence from the dense model's logits.

    These are (1, T, V) of each window. `following` are the neurons that come next in
    each block, where nothing is routed. One forward and backward pass, window by window;
    the weights get no gradients. A block all of whose experts run gets the mean of the
    others. Raises MoesaicError where a figure is not finite.
    """
    device = probe_NL.device
    shift_L = [
        torch.zeros((), device=device, requires_grad=True) for _ in blocks
    ]
    bump_L = [torch.zeros((), device=device) for _ in blocks]
    for layer, block in enumerate(blocks):
        shift = shift_L[layer]
        if following is None:
            block.view = _shifted(shift, layer, bump_L)
        else:
            hook = adds_neurons(following[layer], shift, layer, bump_L)
            block.register_forward_hook(hook)
    total = 0.0
    windows = zip(probe_NL.split(1), dense_logits, strict=True)
    with without_gradients(model), torch.enable_grad():
        for ids_NL, dense_NTV in windows:
            logits_TV = model(input_ids=ids_NL, use_cache=False).logits[0]
            slope_TV = torch.empty_like(logits_TV, requires_grad=False)
            for start in range(0, len(logits_TV), CHUNK):
                chunk = slice(start, start + CHUNK)
                more, slope_TV[chunk] = _divergence(
                    dense_NTV[0, chunk], logits_TV[chunk].detach()
                )
                total += more
            logits_TV.backward(slope_TV)
    mean = total / probe_NL.numel()
    gradients = [shift.grad for shift in shift_L if shift.grad is not None]
    slope_L = torch.stack(gradients).double()
    weight_L = torch.stack(bump_L).double()
    value_L = _values(slope_L, weight_L)
    if not math.isfinite(mean) or not torch.isfinite(value_L).all():
        raise MoesaicError(
            f"the KL divergence from the dense model is {mean}, or its gradient is "
            "not finite: weights or activations are broken"
        )
    return Trial(value_L, mean)


@torch.no_grad()
def divergence(
    model: Any, probe_NL: Tensor, dense_logits: list[Tensor]
) -> float:
    """Mean KL divergence from the logits (1, T, V) of each window; a forward pass.

    Raises MoesaicError where it is not finite.
    """
    total = 0.0
    windows = zip(probe_NL.split(1), dense_logits, strict=True)
    for ids_NL, dense_NTV in windows:
        logits_TV = model(input_ids=ids_NL, use_cache=False).logits[0]
        chunks = zip(
            dense_NTV[0].split(CHUNK), logits_TV.split(CHUNK), strict=True
        )
        for dense_TV, chunk_TV in chunks:
            total += _divergence(dense_TV, chunk_TV)[0]
    mean = total / probe_NL.numel()
    if not math.isfinite(mean):
        raise MoesaicError(
            f"the KL divergence from the dense model is {mean}: weights or activations "
            "are broken"
        )
    return mean


def _divergence(dense_TV: Tensor, logits_TV: Tensor) -> tuple[float, Tensor]:
    """KL(dense || model), summed over tokens, and its gradient by the logits."""
    log_p_TV = dense_TV.float().log_softmax(-1)
    log_q_TV = logits_TV.float().log_softmax(-1)
    p_TV = log_p_TV.exp()
    total = (p_TV * (log_p_TV - log_q_TV)).sum()
    return float(total), log_q_TV.exp() - p_TV


def _values(slope_L: Tensor, weight_L: Tensor) -> Tensor:
    """m_l; the mean of the others for a layer that has no expert to add."""
    is_free_L = weight_L > 0
    value_L = -slope_L / weight_L.clamp(min=1e-30)
    value_L = torch.where(is_free_L, value_L, 0.0).cpu()
    is_free_L = is_free_L.cpu()
    free = int(is_free_L.sum())
    value_L[~is_free_L] = value_L.sum() / max(free, 1)
    return value_L


def _shifted(shift: Tensor, layer: int, bump_L: list[Tensor]) -> View:
    """A view whose gates rise near the threshold with `shift`, a 0."""

    def gates(
        router: Any, values: Callable[[], Tensor], gate_TR: Tensor
    ) -> Tensor:
        with torch.no_grad():
            value_TR = values()
            threshold = choice_thresholds(router, value_TR)
            soft_TR = soft_choice(value_TR, threshold)
            bump_TR = soft_TR * (1 - soft_TR)
            bump_L[layer] = bump_L[layer] + bump_TR.sum()
        return gate_TR.detach().float() + shift * bump_TR

    return gates


def moved(
    share_L: Tensor, value_L: Tensor, least: float, most: float = 1.0
) -> Tensor:
    """Shares of the same mean, larger where an expert is worth more.

    By at most STEP, and then all by the same, which keeps the mean. They stay within
    [least, most].
    """
    scale = value_L.abs().mean().clamp(min=1e-30)
    above_mean_L = (value_L - value_L.mean()) / scale
    step_L = STEP * above_mean_L.clamp(-1, 1)
    stepped_L = share_L + step_L
    # By bisection: what is added to all, so that the mean stays within the bounds.
    low = -1.0
    high = 1.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = (stepped_L + middle).clamp(least, most).mean()
        if mean < share_L.mean():
            low = middle
        else:
            high = middle
    return (stepped_L + high).clamp(least, most)


def whole_budgets(
    share_L: Tensor, routed: int, total: int, most: int | None = None
) -> tuple[int, ...]:
    """Whole experts of the given sum, at least 1 and at most `most` of them in a layer.

    That is `routed` unless it is given. By the largest remainders.
    """
    if most is None:
        most = routed
    exact = []
    budgets = []
    for share in share_L:
        value = float(share) * routed
        at_least_one = max(int(value), 1)
        exact.append(value)
        budgets.append(min(at_least_one, most))
    missing = total - sum(budgets)
    while missing != 0:
        step = 1 if missing > 0 else -1
        nearest = _nearest(exact, budgets, step, most)
        budgets[nearest] += step
        missing -= step
    return tuple(budgets)


def _nearest(
    exact: list[float], budgets: list[int], step: int, most: int
) -> int:
    """The layer that a step brings closest to its exact budget."""
    can_step = [
        layer
        for layer, budget in enumerate(budgets)
        if 1 <= budget + step <= most
    ]
    return max(
        can_step, key=lambda layer: step * (exact[layer] - budgets[layer])
    )
