"""Times a model in transformers: python run_transformers.py, then lines of JSON."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
import transformers
from worker import peak, rows_of, serve


class Warnings(logging.Handler):
    """What moesaic warns of: that torch computes where a kernel of ours should."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def load(settings: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    """The model, its tokenizer's ids of the text, and the device."""
    from moesaic.families.load import load_model, load_tokenizer

    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    name = settings["model"]
    trust = settings["trust_remote_code"]
    device = torch.device(settings["device"])
    model = load_model(name, settings["dtype"], trust, device).eval()
    ids = load_tokenizer(name, trust)(settings["text"])["input_ids"]
    about = {"version": transformers.__version__, "device": str(device)}
    return (model, ids, device), about


@torch.inference_mode()
def measure(
    loaded: Any, batch: int, prompt: int, new: int
) -> tuple[float, float]:
    """The tokens are given, so that all models do the same passes."""
    model, ids, device = loaded
    ids_BL = torch.tensor(rows_of(ids, batch, prompt + new), device=device)
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
    """Of the GPU where one was used, else of this process."""
    on_gpu = 0
    if torch.cuda.is_available():
        gpus = range(torch.cuda.device_count())
        on_gpu = max(map(torch.cuda.max_memory_allocated, gpus))
    held: int = on_gpu or peak()
    return held


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings = Warnings()
    logging.getLogger("moesaic").addHandler(warnings)
    serve(load, measure, memory, lambda: warnings.lines)
