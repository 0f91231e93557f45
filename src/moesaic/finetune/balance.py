"""Equal loads without a loss of their own: the selection bias moves after every optimiser step.

Paper, Section 4.3: b_j falls by gamma where expert j runs for more than its share, rises where it
runs for less. The gate never sees the bias.

Shape suffixes: T tokens, R routed experts, K routed experts run per token, G groups of experts that
compete: one in a block, one for each of its experts in a layer that was a mixture before; L groups
of all layers, P pairs of a token and an expert of such a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.finetune.lora import active_copy, named_routers, routers_of
from moesaic.modeling import MoesaicNeurons, choose_experts
from moesaic.parts.thresholds import budget_thresholds, single_threshold

BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Loads:
    """How often each expert of a group ran (L, R) for the group's `tokens_L`.

    `spread_L`: standard deviation over the experts of a token of what they are chosen by, root
    mean square over tokens. `names` tell the groups.
    """

    names: list[str]
    count_LR: Tensor
    tokens_L: Tensor
    spread_L: Tensor

    def to_dict(self) -> list[dict[str, Any]]:
        """Per group: pairs per token, each expert's share, largest over mean, dead experts."""
        rows = []
        groups = zip(
            self.names,
            self.count_LR.double(),
            self.tokens_L.tolist(),
            strict=True,
        )
        for name, count_R, tokens in groups:
            share_R = count_R / count_R.sum().clamp(min=1)
            even = 1 / len(share_R)
            rows.append(
                {
                    "group": name,
                    "experts_per_token": float(count_R.sum()) / max(tokens, 1),
                    "max_over_mean": float(share_R.max()) / even,
                    "dead": int((share_R < 0.05 * even).sum()),
                    "share": [round(float(share), 6) for share in share_R],
                }
            )
        return rows


def moved(
    bias_R: Tensor,
    load_R: Tensor,
    target: float,
    rate: float,
    centre_R: Tensor,
    bound: float | Tensor,
) -> Tensor:
    """The bias after one step: by `rate` against every load above or below `target`.

    Loads are pairs per token and expert; the paper's p* = 1 / R of all pairs is a load of K / R,
    which also holds the budget where thresholds let loads differ from token to token. The bias
    stays within `bound` of `centre_R`, so that it never decides more than the scores do.
    """
    step_R = rate * (load_R - target).sign()
    return (bias_R - step_R).clamp(centre_R - bound, centre_R + bound)


def selection_values(router: Any, *args: Tensor) -> Tensor:
    """What the bias is added to (T, R), or (P, R), for what a router is called with."""
    score_TR: Tensor = router.scores(*args[:2])
    return score_TR.softmax(-1) if router.ranks_by_probability else score_TR


def chosen(
    router: Any, args: tuple[Tensor, ...], output: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """How often each expert was chosen (G, R), by how many tokens of its group (G,)."""
    bias = router.selection_bias
    pairs = len(output) == 3  # as thresholds choose: rows, experts and gates
    row, expert = (output[0], output[1]) if pairs else (None, output[0])
    if (
        bias.ndim == 2
    ):  # a group for each outer expert; the second argument says which
        group_P = args[1]
        expert = expert + len(bias[0]) * (
            group_P[:, None] if row is None else group_P[row]
        )
        ones_P = torch.ones_like(group_P)
        tokens_G = group_P.new_zeros(len(bias)).scatter_add_(0, group_P, ones_P)
    else:
        tokens_G = expert.new_tensor([len(args[0])])
    expert = expert.flatten()
    count = expert.new_zeros(bias.numel()).scatter_add_(
        0, expert, torch.ones_like(expert)
    )
    return count.view(len(tokens_G), -1), tokens_G


class Balancer:
    """Counts which experts run during training steps, and moves every layer's selection bias."""

    def __init__(
        self, model: Any, rate: float, centre: list[Tensor], bound_L: Tensor
    ):
        self.routers, self.rate = routers_of(model), rate
        self.centre, self.bound_L = centre, bound_L
        self.counting = False
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(self._hook(layer))
        self.clear()

    def clear(self) -> None:
        grouped = [
            r.selection_bias.view(-1, r.selection_bias.shape[-1])
            for r in self.routers
        ]
        self.count = [torch.zeros_like(bias_GR) for bias_GR in grouped]
        self.tokens = [torch.zeros_like(bias_GR[:, 0]) for bias_GR in grouped]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass whose choices count; recomputed activations do not count again."""
        self.counting = True
        try:
            yield
        finally:
            self.counting = False

    def _hook(self, layer: int) -> Any:
        def count(router: Any, args: Any, output: tuple[Tensor, ...]) -> None:
            if self.counting:
                count_GR, tokens_G = chosen(router, args, output)
                self.count[layer] = (
                    self.count[layer].to(count_GR.device) + count_GR
                )
                self.tokens[layer] = (
                    self.tokens[layer].to(count_GR.device) + tokens_G
                )

        return count

    @torch.no_grad()
    def step(self) -> list[Tensor]:
        """Moves the biases by the loads since the last step, summed over all processes.

        Returns every layer's loads (G, R), in pairs per token. A group without tokens stays.
        """
        parts = [*self.count, *self.tokens]
        sums = torch.cat([part.flatten().to(parts[0].device) for part in parts])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        found = [
            values.view(part.shape)
            for values, part in zip(
                sums.split([p.numel() for p in parts]), parts, strict=True
            )
        ]
        loads, start = [], 0
        for layer, router in enumerate(self.routers):
            count_GR, tokens_G = (
                found[layer],
                found[len(self.routers) + layer][:, None],
            )
            bias = router.selection_bias
            bias_GR, centre_GR = (
                b.view(count_GR.shape) for b in (bias, self.centre[layer])
            )
            target = router.num_active / count_GR.shape[1]
            load_GR = torch.where(
                tokens_G > 0, count_GR / tokens_G.clamp(min=1), target
            )
            bound_G1 = self.bound_L[start : start + len(count_GR), None]
            moved_GR = moved(
                bias_GR,
                load_GR.to(bias.device),
                target,
                self.rate,
                centre_GR.to(bias.device),
                bound_G1.to(bias),
            )
            bias.copy_(moved_GR.view_as(bias))
            loads.append(load_GR)
            start += len(count_GR)
        self.clear()
        return loads


@contextmanager
def hooked(
    routers: list[Any], hook: Any, before: bool = False
) -> Iterator[None]:
    """Calls hook(layer, router, args[, output]) at every router for a while."""
    handles = []
    for layer, router in enumerate(routers):

        def call(module: Any, *seen: Any, layer: int = layer) -> None:
            hook(layer, module, *seen)

        register = (
            router.register_forward_pre_hook
            if before
            else router.register_forward_hook
        )
        handles.append(register(call))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run(model: Any, windows_NL: Tensor) -> None:
    """One forward pass over all windows, in evaluation mode, whose outputs nobody reads."""
    training = model.training
    model.eval()
    device = model.get_input_embeddings().weight.device
    for ids_BL in windows_NL.split(max(1, BATCH_TOKENS // windows_NL.shape[1])):
        model(input_ids=ids_BL.to(device), use_cache=False)
    model.train(training)


@torch.no_grad()
def measure_loads(model: Any, windows_NL: Tensor) -> Loads | None:
    """Loads of every layer over all windows; None for a model without routers. One forward pass."""
    routers = routers_of(model)
    if not routers:
        return None
    counts: list[Any] = [0] * len(routers)
    tokens: list[Any] = [0] * len(routers)
    squares: list[Any] = [0] * len(routers)

    def count(layer: int, router: Any, args: Any, output: Any) -> None:
        count_GR, tokens_G = chosen(router, args, output)
        square_T = (
            selection_values(router, *args).double().var(dim=1, unbiased=False)
        )
        group_T = (
            args[1] if len(tokens_G) > 1 else torch.zeros_like(square_T).long()
        )
        square_G = torch.zeros_like(tokens_G, dtype=torch.double)
        counts[layer] = counts[layer] + count_GR.cpu()
        tokens[layer] = tokens[layer] + tokens_G.cpu()
        squares[layer] = (
            squares[layer] + square_G.index_add_(0, group_T, square_T).cpu()
        )

    with hooked(routers, count):
        run(model, windows_NL)
    names = [
        name if len(tokens_G) == 1 else f"{name}, expert {group}"
        for name, tokens_G in zip(named_routers(model), tokens, strict=True)
        for group in range(len(tokens_G))
    ]
    tokens_L, square_L = torch.cat(tokens), torch.cat(squares)
    return Loads(
        names,
        torch.cat(counts),
        tokens_L,
        (square_L / tokens_L.clamp(min=1)).sqrt(),
    )


@torch.no_grad()
def refit_thresholds(model: Any, windows_NL: Tensor) -> None:
    """Threshold gating: the mean budget again, whatever training moved, and equal loads of experts.

    One forward pass over all windows at once, in which every layer's thresholds are set before its
    experts run, so that later layers see them.
    """
    routers = [
        router for router in routers_of(model) if router.chooser == "threshold"
    ]

    def refit(layer: int, router: Any, args: Any) -> None:
        score_TR, bias = router.scores(*args[:2]), router.selection_bias
        group_T = (
            args[1]
            if bias.ndim == 2
            else torch.zeros_like(score_TR[:, 0]).long()
        )
        for group, bias_R in enumerate(bias.view(-1, bias.shape[-1])):
            own_TR = score_TR[group_T == group]
            if len(own_TR):
                _refit(router, own_TR, bias_R)

    def refit_neurons(layer: int, neurons: Any, args: Any) -> None:
        router = active_copy(neurons.router)
        x_TD = args[0].flatten(0, -2)
        score_TF = router(x_TD, neurons.act_fn(neurons.gate_proj(x_TD)))
        router.selection_bias -= single_threshold(score_TF, router.num_active)

    alone = [
        module
        for module in model.modules()
        if isinstance(module, MoesaicNeurons)
    ]
    if routers or alone:
        model.eval()
        device = model.get_input_embeddings().weight.device
        with (
            hooked(routers, refit, before=True),
            hooked(alone, refit_neurons, before=True),
        ):
            model(input_ids=windows_NL.to(device), use_cache=False)


def _refit(router: Any, score_TR: Tensor, bias_R: Tensor) -> None:
    """Sets one group's thresholds, in place."""

    def count(threshold_R: Tensor) -> int:
        ran_TR = choose_experts(
            score_TR - threshold_R, "threshold", 0, router.cap
        )
        return int(ran_TR.sum())

    bias_R.copy_(-budget_thresholds(score_TR, router.num_active, count))
