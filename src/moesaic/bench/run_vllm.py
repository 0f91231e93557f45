"""Times a model in vLLM, offline: python run_vllm.py, then lines of JSON."""

from __future__ import annotations

import os
import time
from typing import Any

from worker import rows_of, serve

GPU_SHARE = 0.9  # of its memory, for all models together


def load(settings: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    """The model, and its tokenizer's ids of the text."""
    # On a CPU vLLM would take nearly all memory for keys and values.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(settings["cache_gib"]))
    # An engine in a process of its own begins with the first prompt while others are on
    # their way: 16 prompts took one step or two by chance, and tokens after them the rest.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm
    from vllm.platforms import current_platform

    more: dict[str, Any] = {"trust_remote_code": settings["trust_remote_code"]}
    if settings["own_architecture"] and settings["trust_remote_code"]:
        more["model_impl"] = "transformers"  # else moesaic's plug-in says so
    llm = vllm.LLM(
        settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["context"],
        max_num_seqs=settings["most_at_once"],
        gpu_memory_utilization=GPU_SHARE / settings["models"],
        enable_prefix_caching=False,
        **more,
    )
    ids = llm.get_tokenizer()(settings["text"])["input_ids"]
    about = {
        "version": vllm.__version__,
        "device": current_platform.device_type,
    }
    return (llm, ids), about


def measure(
    loaded: Any, batch: int, prompt: int, new: int
) -> tuple[float, float]:
    """Seconds for one token after the prompts, and for `new` more."""
    llm, ids = loaded
    prompts = [{"prompt_token_ids": row} for row in rows_of(ids, batch, prompt)]
    first = timed(llm, prompts, 1)
    whole = timed(llm, prompts, 1 + new)
    return first, whole - first


def timed(llm: Any, prompts: list[Any], tokens: int) -> float:
    """Seconds for so many tokens after every prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - started


if __name__ == "__main__":
    serve(load, measure)
