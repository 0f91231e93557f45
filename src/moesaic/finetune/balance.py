"""Equal loads without a loss of their own: the selection bias moves after every optimiser step.

Paper, Section 4.3: b_j falls by gamma where expert j runs for more than its share, rises where it
runs for less. The gate never sees the bias.

Shape suffixes: T tokens, R routed experts, K routed experts run per token, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moesaic.finetune.lora import routers_of
from moesaic.gating import budget_thresholds

BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Loads:
    """How many experts ran (L, R) over `tokens` tokens, and the spread of what they are chosen by.

    `spread_L`: standard deviation over the experts of a token, root mean square over tokens.
    """

    count_LR: torch.Tensor
    tokens: int
    num_active: int
    spread_L: torch.Tensor

    def to_dict(self) -> list[dict[str, Any]]:
        """Per layer: pairs per token, each expert's share, largest over mean, dead experts."""
        rows = []
        for count_R in self.count_LR.double():
            share_R = count_R / count_R.sum()
            even = 1 / len(share_R)
            rows.append(
                {
                    "experts_per_token": float(count_R.sum()) / self.tokens,
                    "max_over_mean": float(share_R.max()) / even,
                    "dead": int((share_R < 0.05 * even).sum()),
                    "share": [round(float(share), 6) for share in share_R],
                }
            )
        return rows


def moved(
    bias_R: torch.Tensor,
    load_R: torch.Tensor,
    target: float,
    rate: float,
    centre_R: torch.Tensor,
    bound: float,
) -> torch.Tensor:
    """The bias after one step: by `rate` against every load above or below `target`.

    Loads are pairs per token and expert; the paper's p* = 1 / R of all pairs is a load of K / R,
    which also holds the budget where thresholds let loads differ from token to token. The bias
    stays within `bound` of `centre_R`, so that it never decides more than the scores do.
    """
    step_R = rate * (load_R - target).sign()
    return (bias_R - step_R).clamp(centre_R - bound, centre_R + bound)


def selection_values(router: Any, x_TD: torch.Tensor) -> torch.Tensor:
    """What the bias is added to (T, R)."""
    score_TR: torch.Tensor = router.scores(x_TD)
    return score_TR.softmax(-1) if router.by_probability else score_TR


class Balancer:
    """Counts which experts run during training steps, and moves every layer's selection bias."""

    def __init__(self, model: Any, rate: float, centre: list[torch.Tensor], bound_L: torch.Tensor):
        self.routers, self.rate = routers_of(model), rate
        self.centre, self.bound_L = centre, bound_L
        self.counting = False
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(self._hook(layer))
        self.clear()

    def clear(self) -> None:
        self.count = [torch.zeros_like(r.selection_bias) for r in self.routers]
        self.tokens = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass whose choices count; recomputed activations do not count again."""
        self.counting = True
        try:
            yield
        finally:
            self.counting = False

    def _hook(self, layer: int) -> Any:
        def count(router: Any, args: tuple[torch.Tensor], output: tuple[torch.Tensor, ...]) -> None:
            if self.counting:
                total_R = self.count[layer].to(args[0].device)
                self.count[layer] = total_R + pairs_per_expert(router, output).float()
                self.tokens += len(args[0]) if layer == 0 else 0

        return count

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """Moves the biases by the loads since the last step, summed over all processes.

        Returns the loads (L, R), in pairs per token.
        """
        device = self.count[0].device
        sums = torch.cat([*self.count, torch.tensor([float(self.tokens)], device=device)])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        load_LR = (sums[:-1] / sums[-1]).view(len(self.routers), -1)
        for layer, router in enumerate(self.routers):
            bias_R = router.selection_bias
            target = router.num_active / len(bias_R)
            centre_R = self.centre[layer].to(bias_R.device)
            bound = float(self.bound_L[layer])
            bias_R.copy_(moved(bias_R, load_LR[layer], target, self.rate, centre_R, bound))
        self.clear()
        return load_LR


def pairs_per_expert(router: Any, output: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """How often each expert was chosen (R,), from a router's output under either gating."""
    expert = output[1] if router.gating == "threshold" else output[0]
    zero_R = torch.zeros(len(router.selection_bias), dtype=torch.long, device=expert.device)
    return zero_R.scatter_add_(0, expert.flatten(), torch.ones_like(expert.flatten()))


@contextmanager
def hooked(routers: list[Any], hook: Any, before: bool = False) -> Iterator[None]:
    """Calls hook(layer, router, args[, output]) at every router for a while."""
    handles = []
    for layer, router in enumerate(routers):

        def call(module: Any, *seen: Any, layer: int = layer) -> None:
            hook(layer, module, *seen)

        register = router.register_forward_pre_hook if before else router.register_forward_hook
        handles.append(register(call))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run(model: Any, windows_NL: torch.Tensor) -> None:
    """One forward pass over all windows, in evaluation mode, whose outputs nobody reads."""
    training = model.training
    model.eval()
    device = model.get_input_embeddings().weight.device
    for ids_BL in windows_NL.split(max(1, BATCH_TOKENS // windows_NL.shape[1])):
        model(input_ids=ids_BL.to(device), use_cache=False)
    model.train(training)


@torch.no_grad()
def measure_loads(model: Any, windows_NL: torch.Tensor) -> Loads | None:
    """Loads of every layer over all windows; None for a model without routers. One forward pass."""
    routers = routers_of(model)
    if not routers:
        return None
    count_LR = torch.zeros(len(routers), len(routers[0].selection_bias), dtype=torch.long)
    square_L = torch.zeros(len(routers), dtype=torch.double)

    def count(layer: int, router: Any, args: Any, output: Any) -> None:
        count_LR[layer] += pairs_per_expert(router, output).cpu()
        value_TR = selection_values(router, args[0]).double()
        square_L[layer] += value_TR.var(dim=1, unbiased=False).sum().cpu()

    with hooked(routers, count):
        run(model, windows_NL)
    tokens = windows_NL.numel()
    return Loads(count_LR, tokens, routers[0].num_active, (square_L / tokens).sqrt())


@torch.no_grad()
def refit_thresholds(model: Any, windows_NL: torch.Tensor) -> None:
    """Threshold gating: equal loads and the mean budget again, whatever training moved.

    One forward pass over all windows at once, in which every layer's thresholds are set before its
    experts run, so that later layers see them.
    """
    routers = [router for router in routers_of(model) if router.gating == "threshold"]

    def refit(layer: int, router: Any, args: Any) -> None:
        score_TR = router.scores(args[0])

        def count(threshold_R: torch.Tensor) -> int:
            router.selection_bias.copy_(-threshold_R)
            return int(router.choose(score_TR).sum())

        router.selection_bias.copy_(-budget_thresholds(score_TR, router.num_active, count))

    if routers:
        model.eval()
        device = model.get_input_embeddings().weight.device
        with hooked(routers, refit, before=True):
            model(input_ids=windows_NL.to(device), use_cache=False)
