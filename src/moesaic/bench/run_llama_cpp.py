"""Times a GGUF file in llama.cpp: python run_llama_cpp.py, then lines of JSON."""

from __future__ import annotations

import time
from typing import Any

from worker import peak, rows_of, serve


def load(settings: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    """The model with room for the most sequences, and its ids of the text."""
    import llama_cpp

    on_gpu = (
        settings["device"] != "cpu" and llama_cpp.llama_supports_gpu_offload()
    )
    llama = llama_cpp.Llama(
        settings["model"],
        n_ctx=32,
        n_gpu_layers=-1 if on_gpu else 0,
        verbose=False,
    )
    ids = llama.tokenize(settings["text"].encode())
    sequences = settings["most_at_once"]
    tokens = sequences * settings["context"]
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = tokens
    params.n_batch = tokens
    params.n_seq_max = sequences
    if settings["threads"]:
        params.n_threads = settings["threads"]
        params.n_threads_batch = settings["threads"]
    context = llama_cpp.llama_init_from_model(llama.model, params)
    if not context:
        raise MemoryError(f"no context for {tokens} tokens")
    about = {
        "version": llama_cpp.__version__,
        "device": "gpu" if on_gpu else "cpu",
    }
    batch = llama_cpp.llama_batch_init(tokens, 0, 1)
    return (llama, context, batch, ids), about


def measure(
    loaded: Any, batch: int, prompt: int, new: int
) -> tuple[float, float]:
    """The tokens are given, so that all models do the same passes."""
    import llama_cpp

    _, context, tokens, ids = loaded
    rows = rows_of(ids, batch, prompt + new)
    memory = llama_cpp.llama_get_memory(context)
    llama_cpp.llama_memory_clear(memory, True)
    started = time.perf_counter()
    prompts = [row[:prompt] for row in rows]
    decode(context, tokens, prompts, 0)
    prefill = time.perf_counter() - started

    started = time.perf_counter()
    for place in range(prompt, prompt + new):
        following = [row[place : place + 1] for row in rows]
        decode(context, tokens, following, place)
    return prefill, time.perf_counter() - started


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
