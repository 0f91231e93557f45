"""A model of the Llama-2-7B shape on a GPU: its conversion, and one token, a few, and a prompt.

    python benchmarks/llama7b_gpu.py make --folder DIR
    python benchmarks/llama7b_gpu.py convert --folder DIR [--method cmoe] [--layout S3A3E8]
    python benchmarks/llama7b_gpu.py time --folder DIR [--method cmoe]

Random weights in bfloat16, 32 layers, 13.5 GB: a folder in memory (/dev/shm) keeps the disk out of
it. `convert` takes 8 windows of 2,048 random tokens, the paper's numbers, and prints what each step
took; start it with `time` for the whole command. `time` reads tokens without a past, with and
without a CUDA graph, dense and converted in turn, twice; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import moesaic
from moesaic.families.load import load_model

GPU = torch.device("cuda")
VOCABULARY = 32_000
SHAPES = ((1, 1), (4, 1), (16, 1), (1, 512), (4, 2048))
ROUNDS = 10


@torch.no_grad()
def make(options: argparse.Namespace) -> None:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with GPU:
        model = LlamaForCausalLM(config)
    model.save_pretrained(options.folder / "dense", max_shard_size="2GB")
    windows_NL = random_windows().to(GPU)

    def one_pass() -> None:
        for ids_1L in windows_NL.split(1):
            model.model(input_ids=ids_1L, use_cache=False)

    print(f"a dense pass of the layers: {milliseconds(one_pass):.0f} ms")


def convert(options: argparse.Namespace) -> None:
    _, report = moesaic.convert(
        str(options.folder / "dense"),
        options.method,
        options.layout,
        random_windows(),
        device="cuda",
        output=options.folder / options.method,
        overwrite=True,
    )
    for step, seconds in report.step_seconds.items():
        print(f"{step}: {seconds:.2f} s")
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"all: {report.seconds:.1f} s, at most {peak:.1f} GiB on the GPU")


@torch.no_grad()
def time_tokens(options: argparse.Namespace) -> None:
    models = {}
    for name in ("dense", options.method):
        model = load_model(str(options.folder / name), "auto")
        models[name] = model.to(GPU).eval()
    for shape in SHAPES:
        calls: dict[str, Callable[[], Any]] = {}
        for name, model in models.items():
            ids_BL = torch.randint(0, VOCABULARY, shape, device=GPU)
            call = caller(model, ids_BL)
            calls[name] = call
            if shape[1] == 1:
                calls[f"{name}, graph"] = graph_of(call).replay
        for _ in range(2):
            found = {name: milliseconds(call) for name, call in calls.items()}
            line = ", ".join(f"{name} {ms:.2f}" for name, ms in found.items())
            print(f"{shape[0]} x {shape[1]} tokens, ms: {line}", flush=True)


def random_windows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (8, 2048), generator=generator)


def caller(model: Any, ids_BL: torch.Tensor) -> Callable[[], Any]:
    def call() -> Any:
        return model(input_ids=ids_BL, use_cache=False, logits_to_keep=1)

    return call


def graph_of(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def milliseconds(call: Callable[[], Any]) -> float:
    """The median of some calls, after two that warm up."""
    seconds = []
    for number in range(ROUNDS + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if number > 1:
            seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds)


def main() -> None:
    steps = {"make": make, "convert": convert, "time": time_tokens}
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("step", choices=steps)
    add("--folder", type=Path, required=True)
    add("--method", default="cmoe")
    add("--layout", default="S3A3E8")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU of NVIDIA's, and torch built for it")
    steps[options.step](options)


if __name__ == "__main__":
    main()
