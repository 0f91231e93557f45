"""Perplexity, with its convention.

The text is one row of tokens cut into consecutive windows of L tokens that do not
overlap; each window is scored on its own and its first token is not predicted.
Perplexity is exp(sum of the token losses / number of predicted tokens). A last, shorter
window counts if it predicts anything. (Not the mean of per-window means, which weighs a
short window too much.)

As in the papers compared here, a token that begins texts stands before the text only, not
before each window. Models that cannot do without it (Gemma) have it before each: a window
is then that token and L - 1 of the text, all of which are predicted.

Shape suffixes: B windows of a batch, L tokens, T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from moesaic.calibration.first_token import first_token
from moesaic.calibration.share import ALONE, Share
from moesaic.errors import MoesaicError
from moesaic.modeling import MoEConfig, chosen_for_each_token
from moesaic.parts.products import widened_products

_BATCH_TOKENS = 2048
_CHUNK = 256  # tokens whose logits are held in float32 at once


@torch.no_grad()
def perplexity(
    model: Any,
    ids: Tensor,
    sequence_length: int,
    max_tokens: int | None = None,
    progress: Callable[[int], Any] | None = None,
    share: Share = ALONE,
) -> tuple[float, int]:
    """Perplexity of a row of token ids, and the number of tokens predicted.

    Every token runs what is chosen for it, as in an answer. Costs one forward pass over
    the first `max_tokens` tokens; with a `share` each of several processes runs some of
    its batches, and all get the whole. Raises MoesaicError for a text of fewer than two
    tokens, ids outside the vocabulary and a loss that is not finite.
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
    embeddings = model.get_input_embeddings().weight
    _check_ids(ids, len(embeddings))

    loss = 0.0
    predicted = 0
    first = first_token(model.config)
    batches = list(_windows(ids, sequence_length, first))
    for ids_BL in batches[share.own(len(batches))]:
        inputs_BL = ids_BL.to(embeddings.device)
        with (
            widened_products(embeddings.dtype, embeddings.device),
            chosen_for_each_token(model),
        ):
            logits_BLV = model(input_ids=inputs_BL, use_cache=False).logits
        for chunk_loss in _losses(logits_BLV, ids_BL):
            loss += chunk_loss
        windows, length = ids_BL.shape
        predicted += windows * (length - 1)
        if progress is not None:
            of_text = length if first is None else length - 1
            progress(windows * of_text)
    loss = share.total(loss)
    predicted = int(share.total(predicted))
    mean_loss = loss / predicted
    if not math.isfinite(loss):
        raise MoesaicError(
            f"the model's loss is {mean_loss}: its weights or activations broke"
        )
    return math.exp(min(mean_loss, 700.0)), predicted


def _check_ids(ids: Tensor, vocabulary: int) -> None:
    smallest = int(ids.min())
    largest = int(ids.max())
    if smallest < 0 or largest >= vocabulary:
        raise MoesaicError(
            f"the text has tokens {smallest}..{largest}, the model knows "
            f"0..{vocabulary - 1}: the tokenizer is not this model's"
        )


def _losses(logits_BLV: Tensor, ids_BL: Tensor) -> Iterator[float]:
    """Each chunk's sum of losses, of all tokens but the first of each window."""
    targets_BL = ids_BL.to(logits_BLV.device)
    last = targets_BL.shape[1] - 1
    for start in range(0, last, _CHUNK):
        end = min(start + _CHUNK, last)
        chunk_TV = logits_BLV[:, start:end].flatten(0, 1).float()
        next_T = targets_BL[:, start + 1 : end + 1].flatten()
        yield cross_entropy(chunk_TV, next_T, reduction="sum").item()


def _windows(ids: Tensor, length: int, first: int | None) -> Iterator[Tensor]:
    """Batches (B, L) of windows; before each stands `first`, where there is one."""
    if first is None:
        yield from _cut(ids, length, least=2)
        return
    if ids[0] == first:
        ids = ids[1:]
    for text_BL in _cut(ids, length - 1, least=1):
        first_B1 = text_BL.new_full((len(text_BL), 1), first)
        yield torch.cat([first_B1, text_BL], dim=1)


def _cut(ids: Tensor, length: int, least: int) -> Iterator[Tensor]:
    """Batches of stretches of the text; a shorter last one by itself, from `least` on."""
    in_stretches = len(ids) // length * length
    if in_stretches > 0:
        stretches = ids[:in_stretches].view(-1, length)
        batch_size = max(1, _BATCH_TOKENS // length)
        yield from stretches.split(batch_size)
    last = ids[in_stretches:]
    if len(last) >= least:
        yield last[None]


def skips_nothing(moe: MoEConfig, length: int) -> bool:
    """Whether windows of that length are all prompt, over which every neuron runs."""
    router = moe.router
    if router is None or router.prompt is None:
        return False
    return not 0 < router.prompt < length


def check_windows(moe: MoEConfig, length: int) -> None:
    """Raises MoesaicError where windows of that length would show nothing skipped.

    So for a method that runs the first tokens of a window whole, and windows that have
    no others.
    """
    if not skips_nothing(moe, length):
        return
    assert moe.router is not None
    prompt = moe.router.prompt
    first = f"the first {prompt}" if prompt else "all"
    raise MoesaicError(
        f"method {moe.name!r} with prompt={prompt} runs {first} tokens of a "
        f"window whole, and windows have {length}: perplexity would be the dense "
        "model's; take a prompt shorter than --sequence-length and the text"
    )
