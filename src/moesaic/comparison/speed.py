"""How fast a converted model writes, over the dense one: one token at a time.

Shape suffixes: L tokens.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from moesaic.parts.products import emulated_products

PROMPT_TOKENS = 32
NEW_TOKENS = 32
ROUNDS = 5


@torch.no_grad()
def decode_seconds(model: Any, ids_L: Tensor, prompt: int) -> float:
    """Seconds for the tokens after the first `prompt` ones, one pass a token.

    The tokens are given, so that every model does the same number of the same passes.
    """
    ids_1L = ids_L[None].to(model.get_input_embeddings().weight.device)
    outputs = model(input_ids=ids_1L[:, :prompt], use_cache=True)
    _wait_for(outputs)
    started = time.perf_counter()
    for place in range(prompt, len(ids_L)):
        outputs = model(
            input_ids=ids_1L[:, place : place + 1],
            past_key_values=outputs.past_key_values,
            use_cache=True,
        )
    _wait_for(outputs)
    return time.perf_counter() - started


def speed_over_dense(
    dense: Any, converted: Any, ids_L: Tensor, rounds: int = ROUNDS
) -> float:
    """Tokens per second over the dense model's: medians of alternating rounds.

    A first round of each warms up. `ids_L` are cut to a prompt and some tokens more.
    Products are what they are where the models are used.
    """
    ids_L = ids_L[: PROMPT_TOKENS + NEW_TOKENS]
    prompt = len(ids_L) // 2
    dense_seconds = []
    our_seconds = []
    for number in range(rounds + 1):
        with emulated_products():
            of_dense = decode_seconds(dense, ids_L, prompt)
            ours = decode_seconds(converted, ids_L, prompt)
        if number > 0:
            dense_seconds.append(of_dense)
            our_seconds.append(ours)
    return statistics.median(dense_seconds) / statistics.median(our_seconds)


def _wait_for(outputs: Any) -> None:
    """A GPU runs behind; a number from it has to be waited for."""
    outputs.logits[0, -1, 0].item()
