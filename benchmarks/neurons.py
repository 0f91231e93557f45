"""Time of one FFN whose neurons are chosen one by one, over the dense FFN's, on a CPU.

    python benchmarks/neurons.py [--hidden 2048] [--neurons 5632] [--threads 1] [--dtype bfloat16]

A random FFN of that size as `moesaic-neurons` makes it, at half of its bytes and at two thirds:
copies in 4 bits of all neurons, exact rows of a quarter of those that run. Random weights choose
no neurons worth choosing, but as many: thresholds are set on the inputs that are timed. As many
FFNs as fill 200 MB are called one after the other, so that weights come from memory. Prints, over
the dense FFNs' time (median of calls in turn with them), the kernel's and the same without it, and
the floor: bytes that these tokens read together.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from moesaic.kernels.neurons import neurons_forward
from moesaic.modeling import (
    BlockConfig,
    MoesaicCopy,
    MoesaicNeurons,
    RouterConfig,
    Sizes,
    packed,
)

CALLS = 25
FILLED = 200e6
TOKENS = (1, 2, 4)
EXACT = 0.25
RUNNING = (0.65, 0.98)  # at half of the bytes and at two thirds


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--neurons", type=int, default=5632)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    print(
        "| run | tokens | floor | kernel | over floor | without |\n|---|---|---|---|---|---|"
    )
    for share in RUNNING:
        first = random_neurons(options.hidden, options.neurons, share, dtype)
        dense_bytes = 3 * first.up_proj.weight.nbytes
        count = max(1, round(FILLED / dense_bytes))
        ffns = [copy.deepcopy(first) for _ in range(count)]
        turned = [ffn.down_proj.weight.T.contiguous() for ffn in ffns]
        for tokens in TOKENS:
            x_TD = torch.randn(tokens, options.hidden).to(dtype)
            set_thresholds(ffns, x_TD, share)
            floor = bytes_read(ffns[0], x_TD) / dense_bytes

            base, ours = timed_in_turn(
                [
                    partial(run_dense, ffns, turned, x_TD),
                    partial(run_kernel, ffns, x_TD),
                ],
                CALLS,
            )
            few = ffns[:2]
            (slow,) = timed_in_turn([partial(run_parts, few, x_TD)], 3)
            ratio = ours / base
            slow_ratio = slow / len(few) * count / base
            print(
                f"| {share:.0%} | {tokens} | {floor:.2f} | {ratio:.2f} | {ratio / floor:.2f} "
                f"| {slow_ratio:.1f} |",
                flush=True,
            )


def run_dense(ffns: list[Any], turned: list[Tensor], x_TD: Tensor) -> None:
    for ffn, down_DF in zip(ffns, turned, strict=True):
        gate_TF = silu(linear(x_TD, ffn.gate_proj.weight))
        linear(gate_TF * linear(x_TD, ffn.up_proj.weight), down_DF)


def run_kernel(ffns: list[Any], x_TD: Tensor) -> None:
    for ffn in ffns:
        assert neurons_forward(ffn, x_TD) is not None


def run_parts(ffns: list[Any], x_TD: Tensor) -> None:
    for ffn in ffns:
        ffn._part_by_part(x_TD)


def random_neurons(
    hidden: int, count: int, share: float, dtype: torch.dtype
) -> Any:
    """An FFN with copies that are not of its rows: who runs is a matter of thresholds."""
    router = RouterConfig("copies", "threshold", bits=4, exact=EXACT)
    block = BlockConfig("neurons", hidden, True, False, "silu", True, router)
    sizes = Sizes(
        shared=0, expert=1, num_routed=count, num_active=int(share * count)
    )
    neurons = MoesaicNeurons(block, sizes).to(dtype).eval()
    for parameter in neurons.parameters():
        parameter.normal_(std=hidden**-0.5)
    chooser = neurons.router
    chooser.selection_bias = chooser.selection_bias.float()
    chooser.exact_margin = chooser.exact_margin.float()
    for part in chooser.modules():
        if isinstance(part, MoesaicCopy):
            code_RI = torch.randint(-8, 8, (count, hidden), dtype=torch.int8)
            part.planes = packed(code_RI, 4)
            part.scales = torch.full_like(part.scales, hidden**-0.5 / 4).to(
                dtype
            )
    return neurons


def set_thresholds(ffns: list[Any], x_TD: Tensor, share: float) -> None:
    """So many neurons run for these inputs, and EXACT of them exactly."""
    router = ffns[0].router
    router.selection_bias.zero_()
    score = ffns[0].scores(x_TD).flatten()
    threshold = score.quantile(1 - share)
    margin = score.quantile(1 - EXACT * share) - threshold
    for ffn in ffns:
        ffn.router.selection_bias.fill_(-threshold)
        ffn.router.exact_margin.fill_(margin)


def bytes_read(neurons: Any, x_TD: Tensor) -> float:
    """Copies, and rows that any of the tokens asks for."""
    score_TF = neurons.scores(x_TD)
    down_rows = (score_TF > 0).any(0).sum()
    exact_rows = (score_TF > neurons.router.exact_margin).any(0).sum()
    row_bytes = x_TD.shape[1] * x_TD.element_size()
    rows = int(down_rows + 2 * exact_rows)
    return float(neurons.router.weight_bytes() + rows * row_bytes)


def timed_in_turn(calls: list[Callable[[], None]], rounds: int) -> list[float]:
    """The median time of each."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, found in zip(calls, seconds, strict=True):
            started = time.perf_counter()
            call()
            found.append(time.perf_counter() - started)
    return [statistics.median(found) for found in seconds]


if __name__ == "__main__":
    main()
