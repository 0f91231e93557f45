"""The least time that a model can take, over the dense model's.

A prompt waits for multiply-accumulates, a token for the weights that are read. Both are
counted, not measured: no engine gets below, and one that is not well made stays above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moesaic.bench.regimes import Regime
from moesaic.evaluate.weight_bytes import WeightBytes, count_bytes
from moesaic.evaluate.work import Macs, count_macs, is_converted, meta_model


@dataclass(frozen=True)
class Floor:
    """Time over the dense model's that its work alone would take."""

    prefill: float
    decode: float


@dataclass(frozen=True)
class Counted:
    """Work of a model: of the tokens of a prompt, and bytes for one token more."""

    macs: Macs
    bytes: WeightBytes
    running: float  # share of the routed experts, or of inputs, that one token chooses

    @classmethod
    def of(cls, config: Any, prompt: int) -> Counted:
        """Counts from a configuration alone."""
        skeleton = meta_model(config)
        macs = count_macs(skeleton, prompt)
        return cls(macs, count_bytes(skeleton), _running(config))


def floor_of(dense: Counted, ours: Counted, regime: Regime) -> Floor:
    """What the counted work allows.

    A prompt needs the head for its last token only. Tokens of several sequences read an
    expert once if any of them runs it.
    """
    prefill = _of_prompt(ours.macs, regime.prompt) / _of_prompt(
        dense.macs, regime.prompt
    )
    read = batch_bytes(dense.bytes, ours.bytes, ours.running, regime.batch)
    decode = (read + ours.bytes.rest) / dense.bytes.total
    return Floor(prefill, decode)


def batch_bytes(
    dense: WeightBytes, ours: WeightBytes, running: float, batch: int
) -> float:
    """Bytes of FFN weights that one token of each of `batch` sequences reads together.

    One token runs a share p of the routed experts, so an expert rests for all of them
    with probability (1 - p)^batch, where tokens choose evenly and by themselves. No more
    is read than the dense FFNs hold, or one token of ours reads.
    """
    whole = max(dense.ffn, ours.ffn)
    spared = whole - ours.ffn
    return whole - spared * (1 - running) ** (batch - 1)


def _of_prompt(macs: Macs, prompt: int) -> float:
    """Multiply-accumulates of a prompt, attention scores among them."""
    last_token = macs.head / prompt
    return macs.total - macs.head + last_token + macs.scores


def _running(config: Any) -> float:
    """Share of what it could read that a token chooses; 0 where nothing is chosen."""
    if not is_converted(config):
        return 0.0
    moe = config.moesaic
    if moe.linears is not None:
        return float(moe.linears.share)
    if moe.router is None:
        return 0.0
    sizes = moe.first_sizes
    return float(sizes.num_active / max(sizes.num_routed, 1))
