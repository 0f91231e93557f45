"""What a conversion costs: time against a dense forward pass, memory against its bound.

    make bench
    python benchmarks/bench_convert.py --rows smollm2,7b

Every time is a ratio to a dense pass over the same tokens, of the layers alone and of the whole
model with its head, all measured in turn in one process; medians, the sum with its range. A third
column says how many passes of the layers' products the machine could have done in that time at
its ceiling, which is what one large product reaches in the model's number format.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import platform
import statistics
import threading
import time
from importlib.metadata import version
from typing import Any

import lap
import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table
from smollm2_model import find_texts, needed_folder
from transformers import AutoModelForCausalLM, LlamaConfig

import moesaic
from moesaic.calibration.calibration_set import CalibrationSet
from moesaic.calibration.hidden_states import BLOCK_TOKENS, Stream
from moesaic.calibration.statistics import SAMPLE_TOKENS
from moesaic.calibration.text import to_ids
from moesaic.families import find_ffns
from moesaic.families.load import load_model, load_tokenizer
from moesaic.parts.assignment import balanced_assignment
from moesaic.parts.products import widened_products

CPU = torch.device("cpu")
console = Console(width=110)


def dense_pass(model: Any, windows_NL: torch.Tensor) -> float:
    stream = Stream(find_ffns(model), windows_NL, CPU)
    begun = time.perf_counter()
    with widened_products(model.dtype, CPU):
        for layer in range(len(stream.ffns.layers)):
            stream.advance(layer)
    return time.perf_counter() - begun


@torch.no_grad()
def ceiling(dtype: torch.dtype) -> float:
    """FLOPs a second of one large product, the best of five."""
    size = 4096
    factor = torch.randn(size, size, dtype=dtype)
    seconds = []
    with widened_products(dtype, CPU):
        for _ in range(5):
            begun = time.perf_counter()
            factor @ factor
            seconds.append(time.perf_counter() - begun)
    return 2 * size**3 / min(seconds)


def copied_bytes() -> float:
    """Bytes a second of copying 1 GiB, read and written, the best of five."""
    source = torch.ones(2**28)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - begun)
    return 2 * source.nbytes / min(seconds)


def seconds_at_ceiling(model: Any, windows_NL: torch.Tensor) -> float:
    """Of the layers' products with weights; those of attention are left out."""
    weights = 0
    for layer in find_ffns(model).layers:
        matrices = [one for one in layer.parameters() if one.ndim == 2]
        weights += sum(matrix.numel() for matrix in matrices)
    return 2 * weights * windows_NL.numel() / ceiling(model.dtype)


@torch.no_grad()
def whole_pass(model: Any, windows_NL: torch.Tensor) -> float:
    """The model's own forward, logits and all, on as many tokens at once as the stream takes."""
    begun = time.perf_counter()
    with widened_products(model.dtype, CPU):
        for ids_BL in windows_NL.split(
            max(1, BLOCK_TOKENS // windows_NL.shape[1])
        ):
            model(input_ids=ids_BL, use_cache=False)
    return time.perf_counter() - begun


def bench_time(
    name: str,
    model: Any,
    method: str,
    layout: str,
    windows_NL: torch.Tensor,
    rounds: int,
    depth: int | None = None,
    **settings: Any,
) -> None:
    """`depth`: layers that the whole model has, where this one has fewer of them."""
    times = 1.0 if depth is None else depth / len(find_ffns(model).layers)
    layers, whole, steps, seconds = [], [], [], []
    best = seconds_at_ceiling(model, windows_NL)
    dense_pass(model, windows_NL[:1])  # what torch itself takes, once
    for number in range(rounds + (rounds > 1)):
        victim = copy.deepcopy(model)
        dense, with_head = (
            dense_pass(model, windows_NL),
            whole_pass(model, windows_NL),
        )
        _, report = moesaic.convert(
            victim, method, layout, windows_NL, settings=settings
        )
        if number or rounds == 1:  # the first of several rounds warms up
            spent = sum(report.step_seconds.values())
            layers.append(spent / dense)
            whole.append(spent * times / (dense * (times - 1) + with_head))
            steps.append({k: v / dense for k, v in report.step_seconds.items()})
            seconds.append(dense)
    table = Table(
        "step",
        "passes of the layers",
        "of the whole model",
        "at the ceiling",
        title=f"{method} {settings or ''} {layout}, {name}, {windows_NL.numel()} tokens",
    )
    at_ceiling = statistics.median(seconds) / best
    table.add_row("a dense pass", "1", "", f"{at_ceiling:.1f}")
    for step in steps[0]:
        passes = statistics.median(s[step] for s in steps)
        table.add_row(step, f"{passes:.2f}", "", f"{passes * at_ceiling:.1f}")
    spans = [
        f"{statistics.median(found):.2f} ({min(found):.2f}..{max(found):.2f})"
        for found in (layers, whole)
    ]
    all_passes = statistics.median(layers) * at_ceiling
    table.add_row("all", *spans, f"{all_passes:.1f}")
    console.print(table)


class PeakMemory:
    """Highest resident memory of this process while inside the block, sampled every 5 ms."""

    def __enter__(self) -> PeakMemory:
        self.process, self.done = psutil.Process(), threading.Event()
        self.peak = self.process.memory_info().rss
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.done.wait(0.005):
            self.peak = max(self.peak, self.process.memory_info().rss)

    def __exit__(self, *unused: object) -> None:
        self.done.set()
        self.thread.join()


def bench_memory(layers: int, method: str, samples: int, length: int) -> None:
    """Peak above the dense weights, for a deep and for a shallow model of the same layers."""
    windows_NL = torch.randint(0, 1000, (samples, length))
    dense_pass(llama_layers(1), windows_NL)  # what torch itself takes, once
    empty = psutil.Process().memory_info().rss
    model = llama_layers(layers)
    config = model.config
    hidden, neurons = config.hidden_size, config.intermediate_size
    # The converted FFN and its masked view beside the dense one they replace.
    layer = 2 * 3 * hidden * neurons * 4
    inputs = 2 * windows_NL.numel() * hidden * 4  # of the layer and of its FFN
    marks = (
        windows_NL.numel() * 10 * (4 + 4 + 8)
    )  # column index, one, and their int64 copy
    # Working set of a block: hidden states of the FFN and of attention, and the grouped product's
    # copies of each token for each of its 3 routed experts.
    block = BLOCK_TOKENS * (4 * neurons + (8 + 5 * 3) * hidden) * 4
    # Sample of hidden states and its contributions; Gram matrices of the routed and of the static
    # neurons (cmoe: the static reference alone), and copies in float64 while one is factorised.
    fits = method != "cmoe"
    sample = (
        2
        * min(windows_NL.numel(), SAMPLE_TOKENS)
        * (neurons + hidden)
        * 4
        * fits
    )
    grammed = neurons if fits else neurons * 3 // 4
    grams = ((1 + fits) * 4 + 3 * 8) * grammed**2
    with PeakMemory() as memory:
        moesaic.convert(model, method, "S3A3E8", windows_NL)
    title = f"{method}, memory, {layers} layers of {hidden}/{neurons}, fp32"
    table = Table("MB", "", title=title)
    weights = sum(p.nbytes for p in model.parameters())
    for name, value in (
        ("dense weights", weights),
        ("bound above them", layer + inputs + marks + block + sample + grams),
        ("  one converted FFN, twice", layer),
        ("  inputs of one layer and its FFN, all tokens", inputs),
        ("  activation marks", marks),
        ("  one token block", block),
        ("  sample of hidden states", sample),
        ("  Gram matrices", grams),
        ("measured above them", memory.peak - empty - weights),
    ):
        table.add_row(name, f"{value / 1e6:.0f}")
    console.print(table)


def llama_layers(
    layers: int, hidden: int = 2048, neurons: int = 5632, key_values: int = 4
) -> Any:
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=neurons, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=key_values, vocab_size=1000,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def bench_assignment(
    neurons: int, experts: int, rounds: int, against_lap: bool = True
) -> None:
    """The transportation problem against Jonker-Volgenant on the expanded matrix."""
    cost_NR = (
        np.random.default_rng(0)
        .integers(0, 4096, (neurons, experts))
        .astype(np.float64)
    )
    fast = []
    for _ in range(rounds):
        begun = time.perf_counter()
        ours_N = balanced_assignment(cost_NR)
        fast.append(time.perf_counter() - begun)
    if not against_lap:
        console.print(
            f"{neurons} neurons to {experts} experts: {fast[0]:.1f} s"
        )
        return
    begun = time.perf_counter()
    expanded = np.repeat(cost_NR, neurons // experts, axis=1)
    value, _, _ = lap.lapjv(expanded)
    slow = time.perf_counter() - begun
    ours = cost_NR[np.arange(neurons), ours_N].sum()
    table = Table(
        "",
        "",
        title=f"balanced assignment, {neurons} neurons to {experts} experts",
    )
    table.add_row("objective, transportation problem", f"{ours:.0f}")
    table.add_row("objective, lap.lapjv on the expanded matrix", f"{value:.0f}")
    table.add_row("times faster", f"{slow / statistics.median(fast):.0f}")
    console.print(table)


def demo_rows() -> None:
    ids = to_ids("demo", load_tokenizer("demo"))
    demo = load_model("demo", "float32")
    few, many = (
        CalibrationSet.sample(ids, n, 512, 0).windows_NL for n in (8, 64)
    )
    bench_time("demo model", demo, "cmoe", "S3A3E8", few, rounds=9)
    bench_time("demo model", demo, "cmoe", "S3A3E8", many, rounds=5)
    for layout in ("S3A3E8", "S1A11E16", "S1A23E32"):
        bench_time("demo model", demo, "moesaic", layout, many, rounds=3)
    for method, settings in (
        ("moesaic-dynamic", {"layer_budgets": "uniform"}),
        ("moesaic-dynamic", {}),
        ("moesaic", {"up_steps": 4}),
    ):
        bench_time(
            "demo model", demo, method, "S1A23E32", many, rounds=3, **settings
        )


def wide_rows() -> None:
    wide, windows_NL = llama_layers(1), torch.randint(0, 1000, (8, 2048))
    bench_time(
        "layer of 2048/5632", wide, "cmoe", "S3A3E8", windows_NL, rounds=3
    )
    bench_time(
        "layer of 2048/5632", wide, "moesaic", "S1A11E16", windows_NL, rounds=2
    )


def smollm2_rows() -> None:
    """Six layers from the middle of the real model, at the tokens that are usual."""
    model = load_model(str(needed_folder()), "auto")
    layers = model.model.layers[12:18]
    model.model.layers = layers
    model.config.num_hidden_layers = len(layers)
    model.config.layer_types = None
    for place, layer in enumerate(layers):
        layer.self_attn.layer_idx = place
    ids = to_ids(find_texts().calibration, load_tokenizer(str(needed_folder())))
    few, many = (
        CalibrationSet.sample(ids, n, 1024, 0).windows_NL for n in (16, 64)
    )
    name = "SmolLM2, six of 30 layers"
    depth = 30
    bench_time(name, model, "cmoe", "S3A3E8", few, rounds=2, depth=depth)
    bench_time(name, model, "cmoe", "S3A3E8", many, rounds=1, depth=depth)
    for layout in ("S1A23E32", "S1A15E32", "S2A94E128"):
        bench_time(name, model, "moesaic", layout, many, rounds=1, depth=depth)
    bench_time(
        name, model, "static-repaired", "S3A3E8", many, rounds=1, depth=depth
    )
    for method, layout in (
        ("moesaic-dynamic", "S1A23E32"),
        ("moesaic-neurons", "S0A768E1536"),
    ):
        for settings in ({"layer_budgets": "uniform"}, {}):
            bench_time(
                name,
                model,
                method,
                layout,
                many,
                rounds=1,
                depth=depth,
                **settings,
            )


def llama_7b_rows() -> None:
    """Two layers of Llama-2-7B's shape, random, in bfloat16: some minutes a row."""
    model = llama_layers(2, 4096, 11008, 32).bfloat16()
    name = "two layers of 4,096 / 11,008"
    few, enough = (torch.randint(0, 1000, (n, 2048)) for n in (8, 12))
    bench_time(name, model, "cmoe", "S3A3E8", few, rounds=1)
    bench_time(name, model, "moesaic", "S1A23E32", enough, rounds=1)


def memory_rows() -> None:
    for layers, method in (
        (2, "cmoe"),
        (8, "cmoe"),
        (2, "moesaic"),
        (8, "moesaic"),
    ):
        # In a process of its own: freed memory is not always given back.
        fresh = multiprocessing.get_context("spawn").Process(
            target=bench_memory, args=(layers, method, 4, 2048)
        )
        fresh.start()
        fresh.join()


def assignment_rows() -> None:
    bench_assignment(6880, 5, rounds=5)
    bench_assignment(28_672, 224, rounds=1, against_lap=False)


ROWS = {
    "demo": demo_rows,
    "wide": wide_rows,
    "smollm2": smollm2_rows,
    "7b": llama_7b_rows,
    "memory": memory_rows,
    "assignment": assignment_rows,
}
USUAL = "demo,wide,memory,assignment"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default=USUAL, help=", ".join(ROWS))
    asked = parser.parse_args().rows.split(",")
    names = ("moesaic", "torch", "transformers", "POT", "lap")
    console.print(
        f"{platform.processor() or platform.machine()}, {psutil.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads, Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in names)
    )
    speeds = [
        f"{str(dtype).removeprefix('torch.')} {ceiling(dtype) / 1e9:.0f}"
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    ]
    console.print(
        f"one product of 4,096 by 4,096, GFLOPS: {', '.join(speeds)}; "
        f"memory copied, GB/s: {copied_bytes() / 1e9:.0f}"
    )
    for rows in asked:
        ROWS[rows]()


if __name__ == "__main__":
    main()
