"""Perplexity, with its convention.

The text is one row of tokens cut into consecutive windows of L tokens that do not overlap; each
window is scored on its own and its first token is not predicted. Perplexity is
exp(sum of the token losses / number of predicted tokens). A last, shorter window counts if it
predicts anything. (Not the mean of per-window means, which weighs a short window too much.)

Shape suffixes: B windows of a batch, L tokens, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from moesaic.errors import MoesaicError

_BATCH_TOKENS = 2048
_CHUNK = 256  # tokens whose logits are held in float32 at once


@torch.no_grad()
def perplexity(
    model: Any,
    ids: Tensor,
    sequence_length: int,
    max_tokens: int | None = None,
    progress: Callable[[int], Any] | None = None,
) -> tuple[float, int]:
    """Perplexity of a row of token ids, and the number of tokens predicted.

    Costs one forward pass over the first `max_tokens` tokens. Raises MoesaicError for a text of
    fewer than two tokens, ids outside the vocabulary and a loss that is not finite.
    """
    if sequence_length < 2:
        raise MoesaicError(
            f"windows of {sequence_length} tokens predict nothing; take 2 or more"
        )
    if max_tokens is not None and max_tokens < 0:
        raise MoesaicError(f"at most {max_tokens} tokens is fewer than none")
    ids = ids[:max_tokens]
    if len(ids) < 2:
        raise MoesaicError(
            f"perplexity needs at least 2 tokens, the text has {len(ids)}"
        )
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if int(ids.max()) >= vocabulary or int(ids.min()) < 0:
        raise MoesaicError(
            f"the text has tokens {int(ids.min())}..{int(ids.max())}, the model knows "
            f"0..{vocabulary - 1}: the tokenizer is not this model's"
        )
    device = model.get_input_embeddings().weight.device
    total, count = 0.0, 0
    for ids_BL in _windows(ids, sequence_length):
        logits_BLV = model(input_ids=ids_BL.to(device), use_cache=False).logits
        targets_BL = ids_BL.to(logits_BLV.device)
        for end in range(1, ids_BL.shape[1], _CHUNK):
            some_BCV = logits_BLV[:, end - 1 : end - 1 + _CHUNK].float()
            next_BC = targets_BL[:, end : end + _CHUNK]
            some_BCV = some_BCV[:, : next_BC.shape[1]]
            total += cross_entropy(some_BCV.mT, next_BC, reduction="sum").item()
        count += ids_BL.shape[0] * (ids_BL.shape[1] - 1)
        if progress is not None:
            progress(ids_BL.numel())
    if not math.isfinite(total):
        raise MoesaicError(
            f"the model's loss is {total / count}: its weights or activations broke"
        )
    return math.exp(min(total / count, 700.0)), count


def _windows(ids: Tensor, length: int) -> Iterator[Tensor]:
    whole = len(ids) // length * length
    if whole:
        yield from (
            ids[:whole].view(-1, length).split(max(1, _BATCH_TOKENS // length))
        )
    if len(ids) - whole >= 2:
        yield ids[None, whole:]
