"""Times a model in transformers: python run_transformers.py, then lines of JSON."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from worker import peak, repeated, serve


def load(settings: dict[str, Any]) -> tuple[Any, str]:
    """The model, its tokenizer's ids of the text, and the device."""
    from moesaic.families.load import load_model, load_tokenizer

    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    name = settings["model"]
    trust = settings["trust_remote_code"]
    device = torch.device(settings["device"])
    model = load_model(name, settings["dtype"], trust, device).eval()
    ids = load_tokenizer(name, trust)(settings["text"])["input_ids"]
    return (model, ids, device), transformers.__version__


@torch.inference_mode()
def measure(
    loaded: Any, batch: int, prompt: int, new: int
) -> tuple[float, float]:
    """The tokens are given, so that all models do the same passes."""
    model, ids, device = loaded
    rows = []
    for row in range(batch):
        start = row * prompt % len(ids)
        rotated = ids[start:] + ids[:start]
        rows.append(repeated(rotated, prompt + new))
    ids_BL = torch.tensor(rows, device=device)
    started = time.perf_counter()
    outputs = model(
        input_ids=ids_BL[:, :prompt], use_cache=True, logits_to_keep=1
    )
    wait_for(outputs)
    prefill = time.perf_counter() - started

    started = time.perf_counter()
    for place in range(prompt, prompt + new):
        outputs = model(
            input_ids=ids_BL[:, place : place + 1],
            past_key_values=outputs.past_key_values,
            use_cache=True,
        )
    wait_for(outputs)
    return prefill, time.perf_counter() - started


def wait_for(outputs: Any) -> None:
    """A GPU runs behind; a number from it has to be waited for."""
    outputs.logits[0, -1, 0].item()


def memory() -> int:
    """Of this process, and of the accelerator where there is one."""
    held: int = peak()
    if torch.cuda.is_available():
        held += torch.cuda.max_memory_allocated()
    return held


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    serve(load, measure, memory)
