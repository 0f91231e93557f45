"""Times a model in vLLM, offline: python run_vllm.py, then lines of JSON."""

from __future__ import annotations

import os
import time
from typing import Any

from worker import repeated, serve

GIB_OF_CACHE = (
    "2"  # for keys and values on a CPU; vLLM would take nearly all memory
)


def load(settings: dict[str, Any]) -> tuple[Any, str]:
    """The model, and its tokenizer's ids of the text."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", GIB_OF_CACHE)
    if settings["threads"]:
        os.environ["OMP_NUM_THREADS"] = str(settings["threads"])
    import vllm

    more = {}
    if settings["own_architecture"]:
        more = {"model_impl": "transformers", "trust_remote_code": True}
    elif settings["trust_remote_code"]:
        more = {"trust_remote_code": True}
    llm = vllm.LLM(
        settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["context"],
        enable_prefix_caching=False,
        **more,
    )
    ids = llm.get_tokenizer()(settings["text"])["input_ids"]
    return (llm, ids), vllm.__version__


def measure(
    loaded: Any, batch: int, prompt: int, new: int
) -> tuple[float, float]:
    """Seconds for one token after the prompts, and for `new` more."""
    llm, ids = loaded
    prompts = []
    for row in range(batch):
        start = row * prompt % len(ids)
        rotated = ids[start:] + ids[:start]
        prompts.append({"prompt_token_ids": repeated(rotated, prompt)})
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
