"""Time of one FFN cut into experts, over the dense FFN it came from, and over its floor, on a CPU.

    python benchmarks/blocks.py [--hidden 576 --neurons 1536] [--tokens 1,16,64,512] [--threads 2]

Random weights of that size behind a linear router, called in turn with the dense FFN and with the
same block by transformers' grouped product (10 rounds or more, medians). The floor is the share of
weights that are read for fewer than 64 tokens, the share of multiply-accumulates from there on;
routers count. Say it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

import moesaic  # noqa: F401 - registers the kernel
from moesaic.layout import Layout
from moesaic.modeling import BlockConfig, MoesaicBlock, RouterConfig, Sizes

LAYOUTS = "S1A5E8,S3A3E8,S1A11E16,S2A2E8,S1A23E32,S2A46E64,S2A30E64"
MANY = 64  # tokens, from which multiply-accumulates are what takes time
SECONDS = 0.05  # a round at least


def new_block(sizes: Sizes, hidden: int, dtype: torch.dtype) -> Any:
    """Experts with random weights, the neurons that fill them up zero."""
    router = RouterConfig("linear", "topk")
    config = BlockConfig(
        "experts", hidden, True, False, "silu", False, router, sizes.total
    )
    block: Any = MoesaicBlock(config, sizes).to(dtype).eval()
    block.requires_grad_(False)
    block.router.expert_scale.data = block.router.expert_scale.float()
    block.router.selection_bias = block.router.selection_bias.float()
    experts = block.experts
    experts.first_matrix.unflatten(1, (2, -1))[:, :, sizes.expert :] = 0
    experts.down_proj[:, :, sizes.expert :] = 0
    return block


def by(kind: str, block: Any) -> Callable[[Tensor], Tensor]:
    def call(x_TD: Tensor) -> Tensor:
        block.experts.config = SimpleNamespace(_experts_implementation=kind)
        output: Tensor = block(x_TD)
        return output

    return call


def floor_of(sizes: Sizes, tokens: int, many: int = MANY) -> float:
    """Weights read, or multiplied with, over the dense FFN's."""
    running = sizes.num_active / sizes.num_routed
    if tokens < many:
        running = 1 - (1 - running) ** tokens
    neurons = sizes.shared + running * sizes.num_routed * sizes.expert
    router = sizes.num_routed / 3  # a row of it is one of a neuron's three
    return (neurons + router) / sizes.total


def medians(
    calls: Sequence[Callable[[Tensor], Tensor]], x_TD: Tensor, rounds: int
) -> list[float]:
    """Seconds of each, called in turn."""
    started = time.perf_counter()
    for call in calls:
        call(x_TD)
    once = (time.perf_counter() - started) / len(calls)
    repeats = max(1, int(SECONDS / once))
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 1):
        for call, of_call in zip(calls, seconds, strict=True):
            started = time.perf_counter()
            for _ in range(repeats):
                call(x_TD)
            if number > 0:  # the first warms up
                of_call.append((time.perf_counter() - started) / repeats)
    return [statistics.median(of_call) for of_call in seconds]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    add = parser.add_argument
    add("--hidden", type=int, default=576)
    add("--neurons", type=int, default=1536)
    add("--layouts", default=LAYOUTS)
    add("--tokens", default="1,16,64,512")
    add("--threads", type=int, default=2)
    add("--dtypes", default="float32,bfloat16")
    add("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    hidden = options.hidden
    shape = f"{hidden} / {options.neurons}, {options.threads} threads"
    print(f"{shape}\n")
    print(
        "| layout | dtype | tokens | over dense | floor | over floor | grouped_mm over dense |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in options.layouts.split(","):
        sizes = Layout.parse(name).sizes(options.neurons)
        for dtype_name in options.dtypes.split(","):
            dtype = getattr(torch, dtype_name)
            block = new_block(sizes, hidden, dtype)
            gate, up = (
                torch.randn(options.neurons, hidden).to(dtype) for _ in range(2)
            )
            down = torch.randn(hidden, options.neurons).to(dtype)

            def dense(
                x_TD: Tensor,
                gate: Tensor = gate,
                up: Tensor = up,
                down: Tensor = down,
            ) -> Tensor:
                h_TF = silu(linear(x_TD, gate)) * linear(x_TD, up)
                return linear(h_TF, down)

            for tokens in map(int, options.tokens.split(",")):
                x_TD = torch.randn(tokens, hidden).to(dtype)
                calls = [dense, by("moesaic", block), by("grouped_mm", block)]
                of_dense, ours, grouped = medians(calls, x_TD, options.rounds)
                floor = floor_of(sizes, tokens)
                ratio = ours / of_dense
                print(
                    f"| {name} | {dtype_name} | {tokens} | {ratio:.2f} | {floor:.2f} | "
                    f"{ratio / floor:.2f} | {grouped / of_dense:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
