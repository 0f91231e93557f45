"""Time of one FFN cut into experts, over the dense FFN it came from, and over its floor, on a GPU.

    python benchmarks/blocks_gpu.py [--shapes 576x1536,4096x11008] [--tokens 1,16,64,512,2048]

Random weights in bfloat16 behind a linear router. As many FFNs as fill 256 MB run one after the
other, so that weights come from memory and not from a cache, in one CUDA graph: what a server
replays. Dense, ours and transformers' grouped product are replayed in turn (medians). From 65
tokens on, 33 of large blocks, ours gathers tokens where it expects that to pay, else it
computes every expert: two columns say what each takes everywhere. The floor is what dense
would take for the weights that are read for fewer than 256 tokens, for the
multiply-accumulates from there on; routers count.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from blocks import LAYOUTS, by, floor_of, new_block
from torch import Tensor
from torch.nn.functional import linear, silu

import moesaic  # noqa: F401 - registers the kernel
from moesaic.kernels.gpu import are_few
from moesaic.layout import Layout
from moesaic.modeling import Sizes

FILLED = 256e6
MANY = 256  # tokens, from which an H100 waits for products and not for weights
ROUNDS = 15


def new_blocks(sizes: Sizes, hidden: int, count: int) -> list[Any]:
    with torch.device("cuda"):
        return [new_block(sizes, hidden, torch.bfloat16) for _ in range(count)]


def graph_of(
    calls: Sequence[Callable[[Tensor], Tensor]], x_TD: Tensor
) -> torch.cuda.CUDAGraph:
    """All of them one after the other."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # each lays its weights out the first time
            call(x_TD)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call(x_TD)
    return graph


def medians(graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
    """Milliseconds of each, replayed in turn."""
    found: list[list[float]] = [[] for _ in graphs]
    for number in range(ROUNDS + 2):
        for graph, of_graph in zip(graphs, found, strict=True):
            start, end = (
                torch.cuda.Event(enable_timing=True) for _ in range(2)
            )
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number > 1:  # the first warm up
                of_graph.append(start.elapsed_time(end))
    return [statistics.median(of_graph) for of_graph in found]


def grouped(block: Any) -> Callable[[Tensor], Tensor]:
    """transformers' product, which a block itself takes only where few experts run."""

    def call(x_TD: Tensor) -> Tensor:
        block.experts.config = SimpleNamespace(
            _experts_implementation="grouped_mm"
        )
        output: Tensor = block.experts(x_TD, *block.router(x_TD))
        if block.shared_expert is not None:
            output = output + block.shared_expert(x_TD)
        return output

    return call


def under_mask(block: Any) -> Callable[[Tensor], Tensor]:
    """Every expert computed, what was not chosen multiplied by 0."""

    def call(x_TD: Tensor) -> Tensor:
        output: Tensor = block.experts(
            x_TD, None, block.router.gates_of_all(x_TD)
        )
        if block.shared_expert is not None:
            output = output + block.shared_expert(x_TD)
        return output

    return call


def both_ways(
    blocks: Sequence[Any], x_TD: Tensor
) -> list[torch.cuda.CUDAGraph]:
    """Ours, gathering tokens and not, whatever pays; nothing where it never gathers."""
    if are_few(x_TD, blocks[0].experts.down_proj):
        return []
    from moesaic.kernels import prompts_triton  # needs Triton

    usual = prompts_triton.gathering_pays
    graphs = []
    try:
        for forced in (True, False):
            prompts_triton.gathering_pays = lambda *call, _pays=forced: _pays
            calls = [by("moesaic", block) for block in blocks]
            graphs.append(graph_of(calls, x_TD))
    finally:
        prompts_triton.gathering_pays = usual
    return graphs


def dense_ffn(hidden: int, neurons: int) -> Callable[[Tensor], Tensor]:
    new = {"device": "cuda", "dtype": torch.bfloat16}
    gate, up = (torch.randn(neurons, hidden, **new) for _ in range(2))
    down = torch.randn(hidden, neurons, **new)

    def call(x_TD: Tensor) -> Tensor:
        return linear(silu(linear(x_TD, gate)) * linear(x_TD, up), down)

    return call


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    add = parser.add_argument
    add("--shapes", default="576x1536,896x4864,2048x5632,4096x11008")
    add("--layouts", default=LAYOUTS)
    add("--tokens", default="1,16,64,512,2048")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU of NVIDIA's, and torch built for it")
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    for shape in options.shapes.split(","):
        hidden, neurons = map(int, shape.split("x"))
        count = max(2, round(FILLED / (6 * hidden * neurons)))
        dense = [dense_ffn(hidden, neurons) for _ in range(count)]
        print(f"\n{hidden} / {neurons}, {count} FFNs in a graph\n")
        print(
            "| layout | tokens | dense, us | over dense | floor | over floor | grouped_mm over "
            "dense | torch's mask | ours gathered | ours all |\n"
            "|---|---|---|---|---|---|---|---|---|---|"
        )
        for name in options.layouts.split(","):
            sizes = Layout.parse(name).sizes(neurons)
            made = new_blocks(sizes, hidden, count)
            for tokens in map(int, options.tokens.split(",")):
                x_TD = torch.randn(tokens, hidden, device="cuda").bfloat16()
                ways = [
                    dense,
                    [by("moesaic", block) for block in made],
                    [grouped(block) for block in made],
                    [under_mask(block) for block in made],
                ]
                graphs = [graph_of(calls, x_TD) for calls in ways]
                graphs += both_ways(made, x_TD)
                times = medians(graphs)
                of_dense, of_ours, by_groups, masked = times[:4]
                forced = [f"{time / of_dense:.2f}" for time in times[4:]]
                forced = forced or ["-", "-"]
                floor = floor_of(sizes, tokens, MANY)
                ratio = of_ours / of_dense
                print(
                    f"| {name} | {tokens} | {1e3 * of_dense / count:.1f} | {ratio:.2f} | "
                    f"{floor:.2f} | {ratio / floor:.2f} | {by_groups / of_dense:.2f} | "
                    f"{masked / of_dense:.2f} | {' | '.join(forced)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
