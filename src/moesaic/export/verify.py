"""Compares an exported model with the one it was made from, on the same tokens.

Shape suffixes: N samples, L tokens of a sample, V vocabulary, T tokens, R routed experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moesaic.evaluate.perplexity import perplexity
from moesaic.export.scale import chosen
from moesaic.export.stock import blocks, sizes_of
from moesaic.kernels.experts import NAME, runs_by_itself

SAMPLES = 8  # windows whose logits are compared


@contextmanager
def experts_by_kernel(stock: Any) -> Iterator[None]:
    """A stock model's experts run by moesaic's function, where that is fast.

    On a CPU transformers' own takes ten times as long with 256 experts. `agreement`
    has compared that one with the original.
    """
    own = getattr(stock.config, "_experts_implementation", None)
    has_experts = any(hasattr(part, "experts") for part in stock.modules())
    if not has_experts or not runs_by_itself():
        yield
        return
    stock.set_experts_implementation(NAME)
    try:
        yield
    finally:
        stock.set_experts_implementation(own)


@dataclass(frozen=True)
class Comparison:
    """Differences of logits over the rms of the original's.

    `changed` is the share of the choices of experts that fall otherwise, by layer.
    """

    tokens: int
    largest: float
    mean: float
    changed: list[float]
    perplexity: float
    original_perplexity: float


@torch.no_grad()
def compare_models(
    model: Any, stock: Any, ids: Tensor, length: int, most_tokens: int
) -> Comparison:
    """Logits and choices on SAMPLES windows, perplexity on at most `most_tokens` of the text.

    Two forward passes of each model over the windows and the text.
    """
    windows_NL = _windows(ids, length)
    sizes = sizes_of(model.config)
    routers, stock_routers = _routers(model, stock)
    largest = 0.0
    total = 0.0
    energy = 0.0
    changed = [0] * len(routers)  # choices that fall otherwise, by layer
    for window_L in windows_NL:
        with calls(routers) as router_calls:
            logit_LV = _logits(model, window_L)
        with calls(stock_routers) as stock_calls:
            stock_LV = _logits(stock, window_L)
        difference_LV = (logit_LV - stock_LV).abs()
        largest = max(largest, difference_LV.max().item())
        vocabulary = logit_LV.shape[1]
        total += difference_LV.sum(dtype=torch.float64).item() / vocabulary
        energy_L = logit_LV.square().mean(1)
        energy += energy_L.sum(dtype=torch.float64).item()
        pairs = zip(router_calls, stock_calls, strict=True)
        for layer, (router_call, stock_call) in enumerate(pairs):
            _, (index_TK, _) = router_call
            _, (_, _, stock_index_TK) = stock_call
            runs_TR = chosen(index_TK, sizes.num_routed)
            stock_runs_TR = chosen(stock_index_TK, sizes.num_routed)
            changed[layer] += int((runs_TR & ~stock_runs_TR).sum())
    tokens = windows_NL.numel()
    rms = max((energy / tokens) ** 0.5, 1e-30)
    mean = total / tokens
    stock_perplexity, _ = perplexity(stock, ids, length, most_tokens)
    original_perplexity, _ = perplexity(model, ids, length, most_tokens)
    return Comparison(
        tokens=tokens,
        largest=largest / rms,
        mean=mean / rms,
        changed=[
            count / (tokens * router.num_active)
            for count, router in zip(changed, routers, strict=True)
        ],
        perplexity=stock_perplexity,
        original_perplexity=original_perplexity,
    )


@dataclass(frozen=True)
class Agreement:
    """Of two models that run the same experts, whoever chose them.

    `difference`: of logits, its mean over the rms of the original's. `changed`: the
    choices that the original would have made otherwise, over those that would differ
    by chance, in the worst layer. (Tokens of which any choice differs say little: of 250
    experts near ties take half of them.)
    """

    difference: float
    changed: float


@torch.no_grad()
def agreement(model: Any, stock: Any, ids: Tensor, length: int) -> Agreement:
    """How far two models agree where the original runs what the stock model chose.

    Near ties fall differently for the last bit of a number, and in a deep model every
    such token runs other experts further on, which says nothing of the architecture.
    Two forward passes over SAMPLES windows.
    """
    windows_NL = _windows(ids, length)
    routers, stock_routers = _routers(model, stock)
    total = 0.0
    energy = 0.0
    changed = [0] * len(routers)  # choices, by layer
    for window_L in windows_NL:
        with calls(stock_routers) as stock_calls:
            stock_LV = _logits(stock, window_L)
        index_TK_by_layer = [output[2] for _, output in stock_calls]
        with forced(routers, index_TK_by_layer, changed):
            logit_LV = _logits(model, window_L)
        difference_LV = (logit_LV - stock_LV).abs()
        total += difference_LV.mean(1).sum(dtype=torch.float64).item()
        energy_L = logit_LV.square().mean(1)
        energy += energy_L.sum(dtype=torch.float64).item()
    tokens = windows_NL.numel()
    rms = max((energy / tokens) ** 0.5, 1e-30)
    by_chance = [tokens * _changed_by_chance(router) for router in routers]
    pairs = zip(changed, by_chance, strict=True)
    shares = [count / most for count, most in pairs if most > 0]
    return Agreement(total / tokens / rms, max(shares, default=0.0))


def _changed_by_chance(router: Any) -> float:
    """How many of a token's K choices of R experts differ from K others drawn at random."""
    active: int = router.num_active
    routed: int = router.num_routed
    return active * (1 - active / routed)


def _routers(model: Any, stock: Any) -> tuple[list[Any], list[Any]]:
    """Those of the original and of the stock model, layer by layer; none if nothing routes."""
    moe = model.config.moesaic
    if moe.router is None:
        return [], []
    routers = [block.router for block in blocks(model)]
    stock_layers = [stock.model.layers[layer] for layer in moe.layers]
    return routers, [layer.mlp.gate for layer in stock_layers]


@contextmanager
def forced(
    routers: list[Any], indices: list[Tensor], changed: list[int]
) -> Iterator[None]:
    """Routers choose what they are told (T, K); counts what they had chosen otherwise."""

    def force(layer: int, router: Any, args: Any, output: Any) -> Any:
        told_TK = indices[layer]
        own_TR = chosen(output[0], router.num_routed)
        told_TR = chosen(told_TK, router.num_routed)
        changed[layer] += int((own_TR & ~told_TR).sum())
        gate_TR = router.gates(router.scores(args[0]))
        return told_TK, gate_TR.gather(1, told_TK)

    handles = [
        router.register_forward_hook(partial(force, layer))
        for layer, router in enumerate(routers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _windows(ids: Tensor, length: int) -> Tensor:
    """The first SAMPLES windows (N, L) of a text; all of it where it is shorter."""
    whole = len(ids) // length * length
    windows_NL = ids[:whole].view(-1, length)[:SAMPLES]
    if not len(windows_NL):
        return ids[None]
    return windows_NL


def _logits(model: Any, window_L: Tensor) -> Tensor:
    """Logits (L, V) of one window, in float32."""
    output = model(input_ids=window_L[None], use_cache=False)
    logit_LV: Tensor = output.logits[0]
    return logit_LV.float()


@contextmanager
def calls(modules: list[Any]) -> Iterator[list[tuple[Tensor, Any]]]:
    """What each module is given and gives, in their order."""
    recorded: list[tuple[Tensor, Any]] = []

    def record(module: Any, args: Any, output: Any) -> None:
        recorded.append((args[0], output))

    handles = [module.register_forward_hook(record) for module in modules]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def router_inputs(model: Any, ids: Tensor, length: int) -> list[Tensor]:
    """Inputs (T, D) of every layer's router on a text, in windows of `length`."""
    routers = [block.router for block in blocks(model)]
    layers: list[list[Tensor]] = [[] for _ in routers]
    for window_L in ids.split(length):
        with calls(routers) as router_calls:
            model(input_ids=window_L[None], use_cache=False)
        for inputs, (x_TD, _) in zip(layers, router_calls, strict=True):
            inputs.append(x_TD)
    return [torch.cat(inputs) for inputs in layers]
