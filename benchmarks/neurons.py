"""Time of one FFN whose neurons are chosen one by one, over the dense FFN's, on a CPU.

    python benchmarks/neurons.py [--hidden 2048] [--neurons 5632] [--threads 1] [--dtype bfloat16]
        [--int8]

A random FFN of that size as `moesaic-neurons` makes it, at half of its bytes and at two thirds:
copies in 4 bits of all neurons, exact rows of a quarter of those that run. Random weights choose
no neurons worth choosing, but as many: thresholds are set on the inputs that are timed. As many
FFNs as fill 200 MB are called one after the other, so that weights come from memory. Prints, over
the dense FFNs' time (median of calls in turn with them), the kernel's and the same without it, and
the floor: bytes that these tokens read together. With `--int8` the neurons' weights have 8 bits,
the dense FFNs' stay in that dtype.
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
    MoesaicInt8Neurons,
    MoesaicNeurons,
    MoesaicRest,
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
    parser.add_argument("--int8", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    print(
        "| run | tokens | floor | kernel | over floor | without |\n|---|---|---|---|---|---|"
    )
    for share in RUNNING:
        first = random_neurons(
            options.hidden, options.neurons, share, dtype, options.int8
        )
        shape = (options.neurons, options.hidden)
        dense = [
            torch.randn(shape).to(dtype) / options.hidden**0.5 for _ in range(3)
        ]
        dense_bytes = sum(weight.nbytes for weight in dense)
        count = max(1, round(FILLED / dense_bytes))
        ffns = [copy.deepcopy(first) for _ in range(count)]
        base_ffns = [copy.deepcopy(dense) for _ in range(count)]
        for weights in base_ffns:
            weights[2] = weights[2].T.contiguous()
        for tokens in TOKENS:
            x_TD = torch.randn(tokens, options.hidden).to(dtype)
            set_thresholds(ffns, x_TD, share)
            floor = bytes_read(ffns[0], x_TD) / dense_bytes

            base, ours = timed_in_turn(
                [
                    partial(run_dense, base_ffns, x_TD),
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


def run_dense(base_ffns: list[list[Tensor]], x_TD: Tensor) -> None:
    for gate_FD, up_FD, down_DF in base_ffns:
        gate_TF = silu(linear(x_TD, gate_FD))
        linear(gate_TF * linear(x_TD, up_FD), down_DF)


def run_kernel(ffns: list[Any], x_TD: Tensor) -> None:
    for ffn in ffns:
        assert neurons_forward(ffn, x_TD) is not None


def run_parts(ffns: list[Any], x_TD: Tensor) -> None:
    for ffn in ffns:
        ffn._part_by_part(x_TD)


def random_neurons(
    hidden: int, count: int, share: float, dtype: torch.dtype, int8: bool
) -> Any:
    """An FFN with copies that are not of its rows: who runs is a matter of thresholds."""
    router = RouterConfig("copies", "threshold", bits=4, exact=EXACT)
    block = BlockConfig("neurons", hidden, True, False, "silu", True, router)
    sizes = Sizes(
        shared=0, expert=1, num_routed=count, num_active=int(share * count)
    )
    made_of = MoesaicInt8Neurons if int8 else MoesaicNeurons
    neurons: Any = made_of(block, sizes).to(dtype).eval()
    for parameter in neurons.parameters():
        parameter.normal_(std=hidden**-0.5)
    chooser = neurons.router
    chooser.selection_bias = chooser.selection_bias.float()
    chooser.exact_margin = chooser.exact_margin.float()
    for part in neurons.modules():
        if isinstance(part, MoesaicCopy):
            code_RI = torch.randint(-8, 8, (count, hidden), dtype=torch.int8)
            planes_BRP = packed(code_RI, 4)
            is_rest = isinstance(part, MoesaicRest)
            part.planes = (
                planes_BRP.transpose(0, 1).contiguous()
                if is_rest
                else planes_BRP
            )
            step = hidden**-0.5 / (64 if is_rest else 4)
            part.scales = torch.full_like(part.scales, step)
    if int8:
        neurons.down_proj.codes.random_(-127, 128)
        neurons.down_proj.scales.fill_(hidden**-0.5 / 64)
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
    if isinstance(neurons, MoesaicInt8Neurons):
        down_bytes = neurons.down_proj.row_bytes()
        rests = (
            neurons.gate_proj.weight_bytes() + neurons.up_proj.weight_bytes()
        )
        exact_bytes = rests / neurons.sizes.num_routed
    else:
        down_bytes = x_TD.shape[1] * x_TD.element_size()
        exact_bytes = 2 * down_bytes
    of_rows = int(down_rows) * down_bytes + int(exact_rows) * exact_bytes
    return float(neurons.router.weight_bytes() + of_rows)


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
