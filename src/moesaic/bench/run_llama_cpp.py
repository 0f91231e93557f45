"""Times a GGUF file in llama.cpp: python run_llama_cpp.py, then lines of JSON."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from worker import peak, rows_of, serve

UBATCH = 512  # tokens that are multiplied at once: llama.cpp's default


def load(settings: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    """The model, and its tokenizer's ids of the text."""
    import llama_cpp

    on_gpu = (
        settings["device"] != "cpu" and llama_cpp.llama_supports_gpu_offload()
    )
    threads = settings["threads"] or os.cpu_count()
    llama = llama_cpp.Llama(
        settings["model"],
        n_ctx=settings["context"],
        n_threads=threads,
        n_threads_batch=threads,
        n_gpu_layers=-1 if on_gpu else 0,
        verbose=False,
    )
    ids = llama.tokenize(settings["text"].encode())
    about = {
        "version": llama_cpp.__version__,
        "device": "gpu" if on_gpu else "cpu",
    }
    return (llama, ids), about


def measure(
    loaded: Any, batch: int, prompt: int, new: int
) -> tuple[float, float]:
    """The tokens are given, so that all models do the same passes."""
    llama, ids = loaded
    rows = rows_of(ids, batch, prompt + new)
    with context_for(llama, batch, prompt + new) as (context, tokens):
        started = time.perf_counter()
        prompts = [row[:prompt] for row in rows]
        decode(context, tokens, prompts, 0)
        prefill = time.perf_counter() - started

        started = time.perf_counter()
        for place in range(prompt, prompt + new):
            following = [row[place : place + 1] for row in rows]
            decode(context, tokens, following, place)
        return prefill, time.perf_counter() - started


@contextmanager
def context_for(
    llama: Any, sequences: int, length: int
) -> Iterator[tuple[Any, Any]]:
    """Room for so many sequences, and a batch for all of their tokens; as `llama`'s own."""
    import llama_cpp

    most = llama_cpp.llama_max_parallel_sequences()
    if sequences > most:
        raise ValueError(f"llama.cpp runs at most {most} sequences at once")
    room = sequences * length
    params = llama.context_params
    params.n_ctx = room
    params.n_batch = room
    params.n_ubatch = min(room, UBATCH)
    params.n_seq_max = sequences
    context = llama_cpp.llama_init_from_model(llama.model, params)
    if not context:
        raise MemoryError(f"out of memory: no context for {room} tokens")
    tokens = llama_cpp.llama_batch_init(room, 0, 1)
    try:
        yield context, tokens
    finally:
        llama_cpp.llama_batch_free(tokens)
        llama_cpp.llama_free(context)


def decode(
    context: Any, tokens: Any, rows: list[list[int]], first: int
) -> None:
    """Reads some tokens of every sequence, from place `first` on; logits of the last."""
    import llama_cpp

    number = 0
    for sequence, row in enumerate(rows):
        for offset, token in enumerate(row):
            tokens.token[number] = token
            tokens.pos[number] = first + offset
            tokens.n_seq_id[number] = 1
            tokens.seq_id[number][0] = sequence
            tokens.logits[number] = offset == len(row) - 1
            number += 1
    tokens.n_tokens = number
    failed = llama_cpp.llama_decode(context, tokens)
    if failed:
        raise RuntimeError(f"llama_decode gave {failed}")
    llama_cpp.llama_synchronize(context)


if __name__ == "__main__":
    serve(load, measure, peak)
