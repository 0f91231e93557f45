"""Compares an exported model with the one it was made from, on the same tokens.

Shape suffixes: N samples, L tokens of a sample, V vocabulary, T tokens, R routed experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moesaic.evaluate.perplexity import perplexity
from moesaic.export.scale import chosen
from moesaic.export.stock import blocks, sizes_of

SAMPLES = 8  # windows whose logits are compared


@dataclass(frozen=True)
class Comparison:
    """Differences of logits over the rms of the original's; `changed` by layer, of tokens."""

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
    windows_NL = ids[: len(ids) // length * length].view(-1, length)[:SAMPLES]
    if not len(windows_NL):
        windows_NL = ids[None]
    moe = model.config.moesaic
    sizes = sizes_of(model.config)
    layers = blocks(model)
    stock_layers = [stock.model.layers[layer] for layer in moe.layers]
    largest, total, energy = 0.0, 0.0, 0.0
    differ = torch.zeros(len(layers), dtype=torch.float64)
    for window_L in windows_NL:
        with calls([block.router for block in layers]) as own:
            own_LV = (
                model(input_ids=window_L[None], use_cache=False)
                .logits[0]
                .float()
            )
        with calls([layer.mlp.gate for layer in stock_layers]) as routed:
            stock_LV = (
                stock(input_ids=window_L[None], use_cache=False)
                .logits[0]
                .float()
            )
        difference_LV = (own_LV - stock_LV).abs()
        largest = max(largest, difference_LV.max().item())
        total += difference_LV.sum(dtype=torch.float64).item() / own_LV.shape[1]
        energy += own_LV.square().mean(1).sum(dtype=torch.float64).item()
        for layer, ((_, (own_TK, _)), (_, output)) in enumerate(
            zip(own, routed, strict=True)
        ):
            own_TR = chosen(own_TK, sizes.num_routed)
            differ[layer] += (
                (own_TR != chosen(output[2], sizes.num_routed))
                .any(1)
                .sum()
                .item()
            )
    tokens = windows_NL.numel()
    rms = max((energy / tokens) ** 0.5, 1e-30)
    return Comparison(
        tokens,
        largest / rms,
        total / tokens / rms,
        (differ / tokens).tolist(),
        perplexity(stock, ids, length, most_tokens)[0],
        perplexity(model, ids, length, most_tokens)[0],
    )


@contextmanager
def calls(modules: list[Any]) -> Iterator[list[tuple[Tensor, Any]]]:
    """What each module is given and gives, in their order."""
    seen: list[tuple[Tensor, Any]] = []
    handles = [
        module.register_forward_hook(
            lambda module, args, output: seen.append((args[0], output))
        )
        for module in modules
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def router_inputs(model: Any, ids: Tensor, length: int) -> list[Tensor]:
    """Inputs (T, D) of every layer's router on a text, in windows of `length`."""
    found: list[list[Tensor]] = [[] for _ in blocks(model)]
    for window_L in ids.split(length):
        with calls([block.router for block in blocks(model)]) as seen:
            model(input_ids=window_L[None], use_cache=False)
        for kept, (x_TD, _) in zip(found, seen, strict=True):
            kept.append(x_TD)
    return [torch.cat(kept) for kept in found]
