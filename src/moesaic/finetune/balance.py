"""Equal loads, or a budget, without a loss of their own: biases move after every step.

Paper, Section 4.3: b_j falls by gamma where expert j runs for more than its share,
and rises where it runs for less. Where thresholds choose, all of a layer move alike,
against their mean load. The gate never sees the bias.

Shape suffixes: T tokens, N windows, B windows of a batch, L tokens of a window or
groups of all layers, R routed experts, K routed experts run per token, D hidden_size,
F neurons. G groups of experts that compete: one in a block, one for each of its experts
in a layer that was a mixture before. P pairs of a token and an expert of such a layer.
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
from moesaic.modeling import (
    MoesaicNeurons,
    choose_experts,
    chosen_for_each_token,
)
from moesaic.parts.thresholds import budget_thresholds, set_neuron_thresholds

BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Loads:
    """How often each expert of a group ran (L, R) for the group's `tokens_L`.

    `spread_L`: standard deviation over the experts of a token of what they are chosen
    by, root mean square over tokens. `names` tell the groups.
    """

    names: list[str]
    count_LR: Tensor
    tokens_L: Tensor
    spread_L: Tensor

    def to_dict(self) -> list[dict[str, Any]]:
        """Per group: pairs per token, each expert's share, and how uneven they are."""
        rows = []
        groups = zip(
            self.names,
            self.count_LR.double(),
            self.tokens_L.tolist(),
            strict=True,
        )
        for name, count_R, tokens in groups:
            row = _load_row(name, count_R, tokens)
            rows.append(row)
        return rows


def _load_row(name: str, count_R: Tensor, tokens: int) -> dict[str, Any]:
    """An expert is dead that has less than a twentieth of an even share."""
    pairs = count_R.sum()
    share_R = count_R / pairs.clamp(min=1)
    even_share = 1 / len(share_R)
    is_dead_R = share_R < 0.05 * even_share
    return {
        "group": name,
        "experts_per_token": float(pairs) / max(tokens, 1),
        "max_over_mean": float(share_R.max()) / even_share,
        "dead": int(is_dead_R.sum()),
        "share": [round(float(share), 6) for share in share_R],
    }


def moved(
    bias_R: Tensor,
    load_R: Tensor,
    target: float,
    rate: float,
    centre_R: Tensor,
    bound: float | Tensor,
) -> Tensor:
    """The bias after one step: by `rate` against every load above or below `target`.

    Loads are pairs per token and expert. The paper's p* = 1 / R of all pairs is a load
    of K / R. Where thresholds choose, every expert's load is the mean of all, so that the
    budget holds, and no more. The bias stays within `bound` of `centre_R`, so that it
    never decides more than the scores do.
    """
    excess_R = load_R - target
    step_R = rate * excess_R.sign()
    moved_R = bias_R - step_R
    return moved_R.clamp(centre_R - bound, centre_R + bound)


def selection_values(router: Any, *args: Tensor) -> Tensor:
    """What the bias is added to (T, R), or (P, R), for what a router is called with."""
    score_TR: Tensor = router.scores(*args[:2])
    if router.ranks_by_probability:
        return score_TR.softmax(-1)
    return score_TR


def chosen(
    router: Any, args: tuple[Tensor, ...], output: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """How often each expert was chosen (G, R), by how many tokens of its group (G,).

    `args` is what the router was called with, `output` what it returned: experts and
    gates, after their rows where thresholds choose.
    """
    bias = router.selection_bias
    expert = output[-2]
    if bias.ndim == 1:
        tokens = len(args[0])
        tokens_G = expert.new_tensor([tokens])
    else:
        # A group for each outer expert; the second argument says which it is.
        group_P = args[1]
        groups, experts_of_group = bias.shape
        tokens_G = _occurrences(group_P, groups)
        if len(output) == 3:
            row = output[0]
            group = group_P[row]
        else:
            group = group_P[:, None]
        expert = expert + experts_of_group * group
    count = _occurrences(expert.flatten(), bias.numel())
    return count.view(len(tokens_G), -1), tokens_G


def _occurrences(index: Tensor, size: int) -> Tensor:
    """How often each number below `size` occurs."""
    ones = torch.ones_like(index)
    count = index.new_zeros(size)
    return count.scatter_add_(0, index, ones)


def _grouped(bias: Tensor) -> Tensor:
    """A selection bias as (G, R), also where there is only one group."""
    return bias.view(-1, bias.shape[-1])


class Balancer:
    """Counts which experts run in training, and moves every layer's selection bias."""

    def __init__(
        self, model: Any, rate: float, centre: list[Tensor], bound_L: Tensor
    ):
        self.routers = routers_of(model)
        self.rate = rate
        self.centre = centre
        self.bound_L = bound_L
        self.counting = False
        self._handles = [
            router.register_forward_hook(self._hook(layer))
            for layer, router in enumerate(self.routers)
        ]
        self.clear()

    def remove_hooks(self) -> None:
        """After training, whose model counts no more."""
        for handle in self._handles:
            handle.remove()

    def clear(self) -> None:
        """Sets all counts to zero."""
        self.count = []
        self.tokens = []
        for router in self.routers:
            bias_GR = _grouped(router.selection_bias)
            self.count.append(torch.zeros_like(bias_GR))
            self.tokens.append(torch.zeros_like(bias_GR[:, 0]))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass whose choices count.

        Activations that are computed again do not count again.
        """
        self.counting = True
        try:
            yield
        finally:
            self.counting = False

    def _hook(self, layer: int) -> Any:
        def count(router: Any, args: Any, output: tuple[Tensor, ...]) -> None:
            if not self.counting:
                return
            count_GR, tokens_G = chosen(router, args, output)
            device = count_GR.device
            earlier_GR = self.count[layer].to(device)
            earlier_G = self.tokens[layer].to(device)
            self.count[layer] = earlier_GR + count_GR
            self.tokens[layer] = earlier_G + tokens_G

        return count

    @torch.no_grad()
    def step(self) -> list[Tensor]:
        """Moves the biases by the loads since the last step, over all processes.

        Returns every layer's loads (G, R), in pairs per token. A group without tokens
        stays.
        """
        counts, tokens = self._sums_of_processes()
        loads = []
        start = 0
        for layer, router in enumerate(self.routers):
            count_GR = counts[layer]
            tokens_G1 = tokens[layer][:, None]
            target = router.num_active / count_GR.shape[1]
            mean_GR = count_GR / tokens_G1.clamp(min=1)
            load_GR = torch.where(tokens_G1 > 0, mean_GR, target)
            against_GR = load_GR
            if router.chooser == "threshold":
                # Its experts add unlike energies, so their loads differ: all move alike.
                mean_G1 = load_GR.mean(1, keepdim=True)
                against_GR = mean_G1.expand_as(load_GR)
            end = start + len(count_GR)
            bound_G1 = self.bound_L[start:end, None]
            centre = self.centre[layer]
            self._move(router, against_GR, target, centre, bound_G1)
            loads.append(load_GR)
            start = end
        self.clear()
        return loads

    def _sums_of_processes(self) -> tuple[list[Tensor], list[Tensor]]:
        """All layers' counts of experts and of tokens."""
        parts = [*self.count, *self.tokens]
        device = parts[0].device
        flat = torch.cat([part.flatten().to(device) for part in parts])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(flat)
        sizes = [part.numel() for part in parts]
        sums = []
        for values, part in zip(flat.split(sizes), parts, strict=True):
            sums.append(values.view(part.shape))
        layers = len(self.routers)
        return sums[:layers], sums[layers:]

    def _move(
        self,
        router: Any,
        load_GR: Tensor,
        target: float,
        centre: Tensor,
        bound_G1: Tensor,
    ) -> None:
        """Moves one router's bias, in place."""
        bias = router.selection_bias
        centre_GR = centre.view(load_GR.shape)
        moved_GR = moved(
            bias.view(load_GR.shape),
            load_GR.to(bias.device),
            target,
            self.rate,
            centre_GR.to(bias.device),
            bound_G1.to(bias),
        )
        bias.copy_(moved_GR.view_as(bias))


@contextmanager
def hooked(
    routers: list[Any], hook: Any, before: bool = False
) -> Iterator[None]:
    """Calls hook(layer, router, args[, output]) at every router for a while."""
    handles = []
    for layer, router in enumerate(routers):

        def call(module: Any, *args: Any, layer: int = layer) -> None:
            hook(layer, module, *args)

        if before:
            handle = router.register_forward_pre_hook(call)
        else:
            handle = router.register_forward_hook(call)
        handles.append(handle)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run(model: Any, windows_NL: Tensor) -> None:
    """One forward pass over all windows, in evaluation mode, without the head."""
    training = model.training
    model.eval()
    layers = model.get_decoder()
    device = model.get_input_embeddings().weight.device
    length = windows_NL.shape[1]
    batch_size = max(1, BATCH_TOKENS // length)
    for ids_BL in windows_NL.split(batch_size):
        layers(input_ids=ids_BL.to(device), use_cache=False)
    model.train(training)


@torch.no_grad()
def measure_loads(model: Any, windows_NL: Tensor) -> Loads | None:
    """Loads of every layer over all windows; None for a model without routers.

    One forward pass.
    """
    routers = routers_of(model)
    if not routers:
        return None
    layers = len(routers)
    counts: list[Any] = [0] * layers
    tokens: list[Any] = [0] * layers
    squares: list[Any] = [0] * layers

    def count(layer: int, router: Any, args: Any, output: Any) -> None:
        count_GR, tokens_G = chosen(router, args, output)
        square_G = _summed_variance(router, args, len(tokens_G))
        counts[layer] += count_GR.cpu()
        tokens[layer] += tokens_G.cpu()
        squares[layer] += square_G.cpu()

    with hooked(routers, count):
        run(model, windows_NL)
    names = []
    for name, tokens_G in zip(named_routers(model), tokens, strict=True):
        groups = len(tokens_G)
        names += _group_names(name, groups)
    tokens_L = torch.cat(tokens)
    square_L = torch.cat(squares)
    variance_L = square_L / tokens_L.clamp(min=1)
    return Loads(
        names=names,
        count_LR=torch.cat(counts),
        tokens_L=tokens_L,
        spread_L=variance_L.sqrt(),
    )


def _group_names(name: str, groups: int) -> list[str]:
    if groups == 1:
        return [name]
    return [f"{name}, expert {group}" for group in range(groups)]


def _summed_variance(router: Any, args: Any, groups: int) -> Tensor:
    """Variance, over a token's experts, of what they are chosen by; group sums (G,)."""
    value_TR = selection_values(router, *args).double()
    variance_T = value_TR.var(dim=1, unbiased=False)
    if groups > 1:
        group_T = args[1]
    else:
        group_T = torch.zeros_like(variance_T).long()
    sum_G = variance_T.new_zeros(groups)
    return sum_G.index_add_(0, group_T, variance_T)


@torch.no_grad()
def refit_thresholds(model: Any, windows_NL: Tensor) -> None:
    """Thresholds that give the mean budget again, after training: all move alike.

    One forward pass over all windows at once, in which every layer's thresholds are set
    before its experts run, so that later layers see them.
    """
    routers = [
        router for router in routers_of(model) if router.chooser == "threshold"
    ]
    neuron_blocks = [
        module
        for module in model.modules()
        if isinstance(module, MoesaicNeurons)
    ]
    if not routers and not neuron_blocks:
        return
    model.eval()
    layers = model.get_decoder()
    device = model.get_input_embeddings().weight.device
    with (
        chosen_for_each_token(model),
        hooked(routers, _refit_router, before=True),
        hooked(neuron_blocks, _refit_neurons, before=True),
    ):
        layers(input_ids=windows_NL.to(device), use_cache=False)


def _refit_router(layer: int, router: Any, args: Any) -> None:
    """Sets the thresholds of all groups of a router, in place."""
    score_TR = router.scores(*args[:2])
    bias = router.selection_bias
    if bias.ndim == 2:
        group_T = args[1]
    else:
        group_T = torch.zeros_like(score_TR[:, 0]).long()
    for group, bias_R in enumerate(_grouped(bias)):
        group_score_TR = score_TR[group_T == group]
        if len(group_score_TR):
            _refit_group(router, group_score_TR, bias_R)


def _refit_group(router: Any, score_TR: Tensor, bias_R: Tensor) -> None:
    """Sets one group's thresholds, in place."""

    def count(threshold_R: Tensor) -> int:
        margin_TR = score_TR - threshold_R
        runs_TR = choose_experts(margin_TR, "threshold", 0, router.cap)
        return int(runs_TR.sum())

    threshold_R = budget_thresholds(score_TR, -bias_R, router.num_active, count)
    bias_R.copy_(-threshold_R)


def _refit_neurons(layer: int, neurons: Any, args: Any) -> None:
    """Sets the thresholds of a layer whose experts are neurons, in place."""
    router = active_copy(neurons.router)
    x_TD = args[0].flatten(0, -2)
    score_TF = neurons.scores(x_TD)
    set_neuron_thresholds(router, score_TF)
