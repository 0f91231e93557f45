"""Budgets of layers from one pass: what each layer loses by the experts it leaves out.

Where layer l runs K of its experts, its output for token t lacks d_t(K). The KL
divergence from the dense model's predictions then grows, to second order, by

    c_l(K) = mean_t |g_t|^2 |d_t(K)|^2 / 2 D

g_t is the gradient of the log probability of words drawn from the dense model's own
predictions, by the layer's output for t: the expectation of g g^T is the Fisher
information, here taken as equal in all directions. The sum of these curves is least at
some budgets; layers get the mean of those and of equal ones. All the way is too far: a
curve is that of a layer by itself, without a repair.

Shape suffixes: N windows, L tokens of a window, T tokens, D hidden_size, R routed
experts, F neurons, V words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.calibration.calibration_set import CalibrationSet, Split
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.hidden_states import Stream
from moesaic.conversion.plan import Plan
from moesaic.errors import MoesaicError
from moesaic.families import FFNs
from moesaic.methods.expert_method import ExpertMethod
from moesaic.modeling import Sizes
from moesaic.parts.gradients import without_gradients
from moesaic.parts.partition import Partition

FIT_TOKENS = 8192  # that experts and routers are fitted to
PROBE_TOKENS = 2048  # held out, on which what is left out is measured
# Shares of the routed experts that curves are measured at. No layer gets fewer.
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)

Curve = dict[int, float]


def budgets_by_curves(
    dense: Any,
    ffns: FFNs,
    plan: Plan,
    calibration: CalibrationSet,
    device: torch.device,
    seed: int,
    log: Callable[[str], Any] = lambda line: None,
) -> tuple[int, ...]:
    """How many experts each converted layer runs; their sum is that of equal budgets.

    Costs a forward and backward pass over PROBE_TOKENS, and about a forward pass and a
    half over FIT_TOKENS: every layer is converted once, without a repair, on the dense
    model's own inputs. Raises MoesaicError where figures are not finite.
    """
    fit_NL, probe_NL = _windows(calibration)
    weight_by_layer = sensitivities(dense, ffns, probe_NL, seed)
    windows_NL = torch.cat([fit_NL, probe_NL])
    split = Split(windows_NL.numel(), first_heldout=fit_NL.numel())
    assert isinstance(plan.method, ExpertMethod)
    method = plan.method.without_repair()
    stream = Stream(ffns, windows_NL, device)
    curves = []
    for layer in range(len(ffns.layers)):
        calls = None
        if layer in ffns.converted:
            inputs = FFNInputs(
                stream.ffn_inputs(layer), split, True, stream.storage, device
            )
            sizes = plan.moe.sizes_of(layer)
            generator = np.random.default_rng([seed, layer])
            ffn = ffns.read(layer)
            replacement = method.convert_ffn(ffn, inputs, sizes, generator)
            weight_T = weight_by_layer[layer]
            curve = measure_curve(ffn, replacement, inputs, sizes, weight_T)
            curves.append(curve)
            calls = inputs.own()
        if curves and len(curves) == len(ffns.converted):
            break
        stream.advance(layer, calls)
    mean = plan.sizes.num_active
    best = spend(curves, total=mean * len(curves))
    budgets = half_way(best, mean)
    numbers = ", ".join(map(str, budgets))
    log(f"experts per token {numbers}")
    return budgets


def _windows(calibration: CalibrationSet) -> tuple[Tensor, Tensor]:
    """Windows to fit on (N, L), and others to measure on: some of those held out."""
    length = calibration.length
    probes = max(PROBE_TOKENS // length, 1)
    probe_NL = calibration.heldout(probes)
    windows = max(FIT_TOKENS // length, 1)
    heldout = len(calibration.heldout(calibration.samples))
    fitted = max(calibration.samples - heldout, 1)
    fit_NL = calibration.windows_NL[: min(windows, fitted)]
    return fit_NL, probe_NL


def sensitivities(
    dense: Any, ffns: FFNs, probe_NL: Tensor, seed: int
) -> dict[int, Tensor]:
    """|g_t|^2 / D of every converted layer's FFN, for all tokens of the windows (T,).

    One forward and backward pass, window by window; the weights get no gradients.
    Raises MoesaicError where a gradient is not finite.
    """
    device = next(dense.parameters()).device
    # On the CPU: the same words are drawn wherever the model is.
    generator = torch.Generator().manual_seed(seed)
    shifts: list[Tensor] = []

    def add_shift(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        shift = torch.zeros_like(output, requires_grad=True)
        shifts.append(shift)
        return output + shift

    handles = [
        ffns.last_module(layer).register_forward_hook(add_shift)
        for layer in ffns.converted
    ]
    rows: dict[int, list[Tensor]] = {layer: [] for layer in ffns.converted}
    try:
        with without_gradients(dense), torch.enable_grad():
            for ids_NL in probe_NL.split(1):
                shifts.clear()
                ids = ids_NL.to(device)
                logits_TV = dense(input_ids=ids, use_cache=False).logits[0]
                log_p_TV = logits_TV.float().log_softmax(-1)
                p_TV = log_p_TV.detach().exp().cpu()
                word_T1 = torch.multinomial(p_TV, 1, generator=generator)
                drawn_T1 = log_p_TV.gather(1, word_T1.to(device))
                drawn_T1.sum().backward()
                for layer, shift in zip(ffns.converted, shifts, strict=True):
                    assert shift.grad is not None
                    gradient_TD = shift.grad.flatten(0, -2).float()
                    rows[layer].append(gradient_TD.square().mean(1))
    finally:
        for handle in handles:
            handle.remove()
    weights = {layer: torch.cat(parts) for layer, parts in rows.items()}
    if not all(torch.isfinite(weight_T).all() for weight_T in weights.values()):
        raise MoesaicError(
            "the gradient of the dense model's predictions is not finite: weights or "
            "activations are broken"
        )
    return weights


@torch.no_grad()
def measure_curve(
    ffn: Any,
    replacement: Any,
    inputs: FFNInputs,
    sizes: Sizes,
    weight_T: Tensor,
) -> Curve:
    """c_l by the number of experts that run: the best K of every token's scores.

    `weight_T` are a layer's |g_t|^2 / D on the tokens held out. Costs a pass of those
    tokens through W_down for each number.
    """
    x_TD = torch.cat(list(inputs.heldout()))
    weight_T = weight_T.to(x_TD.device)
    partition: Partition = replacement.made.partition
    neurons_N = torch.from_numpy(partition.neurons_N).to(x_TD.device)
    router = replacement.router
    score_TR = router.biased(router.scores(x_TD))
    order_TR = score_TR.argsort(dim=1, descending=True, stable=True)
    rank_TR = order_TR.argsort(dim=1)
    h_TF = ffn.hidden(x_TD).float()
    down_FD = ffn.down_DF.float().T
    dense_TD = h_TF @ down_FD
    h_TN = h_TF[:, neurons_N]
    down_ND = down_FD[neurons_N]
    curve: Curve = {}
    for count in counts(sizes):
        mask_TN = partition.mask(rank_TR < count)
        missing_TD = dense_TD - (h_TN * mask_TN) @ down_ND
        missing_T = missing_TD.square().sum(1)
        curve[count] = float((weight_T * missing_T).mean()) / 2
    curve[sizes.num_routed] = 0.0
    return curve


def counts(sizes: Sizes) -> list[int]:
    """The numbers of experts that curves are measured at, fewer than all."""
    routed = sizes.num_routed
    found = {max(sizes.num_active // 2, 1), sizes.num_active}
    for share in SHARES:
        count = round(share * routed)
        if 1 <= count < routed:
            found.add(count)
    return sorted(found)


def spend(curves: Sequence[Curve], total: int) -> tuple[int, ...]:
    """Budgets of the given sum for which the sum of the curves is least.

    Each curve is replaced by its lower convex hull; one more expert then goes where it
    takes off most, the first such layer. That is exact for convex curves.
    """
    hulls = [convex_hull(curve) for curve in curves]
    budgets = [min(curve) for curve in curves]
    for _ in range(total - sum(budgets)):
        gains = [
            _slope(hull, budget)
            for hull, budget in zip(hulls, budgets, strict=True)
        ]
        best = gains.index(max(gains))
        budgets[best] += 1
    return tuple(budgets)


def convex_hull(curve: Curve) -> list[tuple[int, float]]:
    """The corners of a curve's lower convex hull, from left to right."""
    corners: list[tuple[int, float]] = []
    for point in sorted(curve.items()):
        while len(corners) > 1 and not _is_convex(
            corners[-2], corners[-1], point
        ):
            corners.pop()
        corners.append(point)
    return corners


def _is_convex(
    left: tuple[int, float],
    middle: tuple[int, float],
    right: tuple[int, float],
) -> bool:
    """Whether the middle point lies below the line between the others."""
    width = right[0] - left[0]
    share = (middle[0] - left[0]) / width
    line = left[1] + share * (right[1] - left[1])
    return middle[1] < line


def _slope(hull: list[tuple[int, float]], budget: int) -> float:
    """What one expert more takes off; less than anything where all run."""
    for left, right in pairwise(hull):
        if left[0] <= budget < right[0]:
            return (left[1] - right[1]) / (right[0] - left[0])
    return float("-inf")


def half_way(budgets: Sequence[int], mean: int) -> tuple[int, ...]:
    """The mean of budgets and of equal ones, `mean` in every layer; the same sum.

    Of the layers where that leaves a half, every other one is rounded up, those with
    the larger budgets.
    """
    halved = [(budget + mean) // 2 for budget in budgets]
    missing = mean * len(budgets) - sum(halved)
    with_half = [
        layer
        for layer, budget in enumerate(budgets)
        if (budget + mean) % 2 == 1
    ]
    with_half.sort(key=lambda layer: -budgets[layer])
    for layer in with_half[:missing]:
        halved[layer] += 1
    return tuple(halved)
