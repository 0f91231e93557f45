"""The time that a model's counted work would take, over the dense model's.

A prompt waits for multiply-accumulates, a token for the weights that are read. The cache
of keys and values, which both models read alike, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moesaic.bench.regimes import Regime
from moesaic.evaluate.weight_bytes import count_bytes
from moesaic.evaluate.work import (
    Macs,
    count_macs,
    is_converted,
    meta_model,
    routed_weights,
)
from moesaic.families import Mixtures, find_ffns
from moesaic.modeling import MoEConfig


@dataclass(frozen=True)
class RoutedBytes:
    """Bytes of one layer's routed experts, and the share of them that a token runs."""

    all: float
    running: float

    def beyond_one_token(self, batch: int) -> float:
        """What one token of each of `batch` sequences reads more than one token does.

        An expert rests for all of them with probability (1 - p)^batch, where tokens
        choose evenly and by themselves.
        """
        read = 1 - (1 - self.running) ** batch
        return self.all * (read - self.running)


@dataclass(frozen=True)
class Counted:
    """Work of a model: of a prompt, and for one token after it.

    `prompt_macs` is None where a prompt runs other weights than the tokens after it.
    `routed` is None where it is not known what several tokens read together.
    """

    prompt_macs: float | None
    token_bytes: float
    routed: Sequence[RoutedBytes] | None = ()

    def decode_bytes(self, batch: int) -> float | None:
        """Bytes for one token of each of `batch` sequences."""
        if batch == 1:
            return self.token_bytes
        if self.routed is None:
            return None
        more = sum(layer.beyond_one_token(batch) for layer in self.routed)
        return self.token_bytes + more


def count(config: Any, prompt: int) -> Counted:
    """Counts from a configuration alone, for a prompt of so many tokens.

    Raises MoesaicError for a family whose FFNs are not recognised.
    """
    skeleton = meta_model(config)
    macs = count_macs(skeleton, prompt)
    prompt_macs: float | None = macs_of_prompt(macs, prompt)
    token_bytes = count_bytes(skeleton).total
    weight = next(skeleton.parameters())
    routed = _routed(config, skeleton, weight.element_size())
    if is_converted(config):
        moe = config.moesaic
        run_all = [moe.block.all_run_in_prompts(sizes) for sizes in moe.sizes]
        by_prompt = moe.router is not None and moe.router.prompt is not None
        if by_prompt or (any(run_all) and not all(run_all)):
            prompt_macs = None
        elif any(run_all):
            weights = ffn_weights(moe) * config.num_hidden_layers
            prompt_macs += weights * prompt - macs.ffn_and_routers
    return Counted(prompt_macs, token_bytes, routed)


def ffn_weights(moe: MoEConfig) -> int:
    """Of one dense FFN."""
    block = moe.block
    return block.matrices * block.hidden_size * block.intermediate_size


def macs_of_prompt(macs: Macs, prompt: int) -> float:
    """Of attention, its scores, FFNs and routers, and of the head for the last token."""
    last_token = macs.head / prompt
    return macs.total - macs.head + last_token + macs.scores


def floor_of(
    ours: Counted | None, dense: Counted | None, regime: Regime, kind: str
) -> float | None:
    """The ratio of the counted works; None where one of them is not known."""
    if ours is None or dense is None:
        return None
    if kind == "prefill":
        ours_work, dense_work = ours.prompt_macs, dense.prompt_macs
    else:
        ours_work = ours.decode_bytes(regime.batch)
        dense_work = dense.decode_bytes(regime.batch)
    if ours_work is None or dense_work is None:
        return None
    return ours_work / dense_work


def _routed(
    config: Any, skeleton: Any, item_bytes: int
) -> list[RoutedBytes] | None:
    """The routed experts of every layer; None where that does not describe the model."""
    if is_converted(config):
        return _of_converted(config.moesaic, item_bytes)
    ffns = find_ffns(skeleton)
    if not isinstance(ffns, Mixtures):
        return []
    of_one = routed_weights(ffns) / ffns.outer_active
    running = ffns.outer_active / ffns.num_outer
    return [RoutedBytes(of_one * ffns.num_outer * item_bytes, running)]


def _of_converted(moe: MoEConfig, item_bytes: int) -> list[RoutedBytes] | None:
    if moe.linears is not None or moe.outer is not None:
        return None
    if moe.router is None:
        return []
    if not moe.block.replacement.startswith("experts"):
        return None
    routed = []
    for sizes in moe.sizes:
        if sizes.stored > sizes.total:  # experts that share neurons
            return None
        neurons = sizes.num_routed * sizes.expert
        weights = neurons * moe.block.matrices * moe.block.hidden_size
        running = sizes.num_active / max(sizes.num_routed, 1)
        routed.append(RoutedBytes(weights * item_bytes, running))
    return routed
