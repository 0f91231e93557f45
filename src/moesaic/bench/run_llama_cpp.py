"""Times a GGUF file in llama.cpp: python run_llama_cpp.py, then lines of JSON."""

from __future__ import annotations

import time
from typing import Any

from worker import peak, repeated, serve


def load(settings: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    """The model, and its tokenizer's ids of the text."""
    import llama_cpp

    on_gpu = (
        settings["device"] != "cpu" and llama_cpp.llama_supports_gpu_offload()
    )
    threads = settings["threads"] or None
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
    """The tokens are given, so that all models do the same passes. One sequence."""
    assert batch == 1, batch
    llama, ids = loaded
    given = repeated(ids, prompt + new)
    llama.reset()
    started = time.perf_counter()
    llama.eval(given[:prompt])
    prefill = time.perf_counter() - started

    started = time.perf_counter()
    for token in given[prompt:]:
        llama.eval([token])
    return prefill, time.perf_counter() - started


if __name__ == "__main__":
    serve(load, measure, peak)
