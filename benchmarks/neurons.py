"""Time of one FFN whose neurons are experts, over the dense FFN it came from: few tokens, on a CPU.

    python benchmarks/neurons.py [--hidden 2048] [--neurons 5632] [--threads 1] [--choose-by copies]

A random FFN of that size, converted by `moesaic-neurons` without budgets and repair, called with 1
to 8 tokens: pair by pair, and all neurons under a mask. Random weights choose no neurons worth
choosing, but as many: the threshold is set on the inputs that are timed. Prints ratios (median of
30 calls in turn with the dense FFN) and the floor, the share of multiply-accumulates that is left.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import moesaic
from moesaic.modeling import MoesaicNeurons
from moesaic.parts.thresholds import set_neuron_thresholds

CALLS = 30


def timed(call: Any, x_TD: torch.Tensor) -> float:
    started = time.perf_counter()
    call(x_TD)
    return time.perf_counter() - started


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--neurons", type=int, default=5632)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--choose-by", choices=("copies", "sketch"), default="copies"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=arguments.hidden, intermediate_size=arguments.neurons,
        num_hidden_layers=1, num_attention_heads=16, max_position_embeddings=512,
    )  # fmt: skip
    settings = {
        "layer_budgets": "uniform", "repair_by": "none", "up_steps": 0, "intercept": False,
        "choose_by": arguments.choose_by,
    }  # fmt: skip
    print("| skipped | tokens | MACs | pairs | masked |\n|---|---|---|---|---|")
    for sparsity in (0.25, 0.5, 0.75):
        model: Any = LlamaForCausalLM(config).eval()
        dense = model.model.layers[0].mlp
        windows = torch.randint(64, (8, 256))
        moesaic.convert(
            model,
            "moesaic-neurons",
            sparsity=sparsity,
            calibration=windows,
            settings=settings,
        )
        block = next(
            m for m in model.modules() if isinstance(m, MoesaicNeurons)
        )
        inputs_TD = torch.randn(8, arguments.hidden)
        set_neuron_thresholds(block.router, block.scores(inputs_TD))
        runs = block.chosen(inputs_TD).float().mean().item()
        assert abs(runs - (1 - sparsity)) < 0.01, runs
        work = block.active_weights() + block.router_weights()
        all_work = 3 * arguments.hidden * arguments.neurons
        for count in (1, 2, 4, 8):
            x_TD = inputs_TD[:count]
            found: dict[str, list[float]] = {
                "dense": [],
                "pairs": [],
                "masked": [],
            }
            for _ in range(CALLS):
                found["dense"].append(timed(dense, x_TD))
                for name, pays in (("pairs", True), ("masked", False)):
                    block._pairs_pay = lambda _, pays=pays: pays
                    found[name].append(timed(block, x_TD))
            base = statistics.median(found["dense"])
            ratios = [
                statistics.median(found[name]) / base
                for name in ("pairs", "masked")
            ]
            share = work / all_work
            cells = [f"{value:.2f}" for value in (share, *ratios)]
            print(
                f"| {sparsity:.0%} | {count} | {' | '.join(cells)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
