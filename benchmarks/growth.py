"""How the time of a conversion grows: with tokens, hidden size, FFN size and number of experts.

    python benchmarks/growth.py [--methods cmoe,moesaic] [--output growth.png] [--rounds 3]

One random Llama layer is converted (float32, a quarter skipped, one shared expert), and one of the
four sizes is doubled at a time. Printed: seconds of the layer's conversion over those of a dense
pass of the same layer and tokens, and the exponent of the seconds themselves, the slope between
the last two points. The first round warms up, medians of the others.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import moesaic
from moesaic.calibration.hidden_states import Stream
from moesaic.families import find_ffns
from moesaic.plot_style import looks_of, new_figure, plain, png

LENGTH = 512
VOCABULARY = 1000
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """The four sizes of one conversion."""

    tokens: int = 8192
    hidden: int = 512
    neurons: int = 2048
    experts: int = 16


SWEEPS = {
    "tokens": (4096, 8192, 16_384, 32_768),
    "hidden": (256, 512, 1024, 2048),
    "neurons": (1024, 2048, 4096, 8192),
    "experts": (8, 16, 32, 64, 128, 256),
}


@dataclass(frozen=True)
class Cost:
    """Seconds of a conversion and of a dense pass of the layer over the same tokens."""

    converting: float
    dense: float


def cost_of(method: str, case: Case, rounds: int) -> Cost:
    torch.manual_seed(0)
    windows_NL = torch.randint(0, VOCABULARY, (case.tokens // LENGTH, LENGTH))
    skipped = case.experts // 4
    layout = f"S1A{case.experts - 1 - skipped}E{case.experts}"
    converting = []
    dense = []
    for _ in range(rounds + 1):
        model = _one_layer(case)
        dense.append(_dense_seconds(model, windows_NL))
        _, report = moesaic.convert(model, method, layout, windows_NL)
        converting.append(sum(report.step_seconds.values()))
    return Cost(statistics.median(converting[1:]), statistics.median(dense[1:]))


def _one_layer(case: Case) -> Any:
    config = LlamaConfig(
        hidden_size=case.hidden,
        intermediate_size=case.neurons,
        num_hidden_layers=1,
        num_attention_heads=case.hidden // 64,
        num_key_value_heads=case.hidden // 64,
        vocab_size=VOCABULARY,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def _dense_seconds(model: Any, windows_NL: torch.Tensor) -> float:
    stream = Stream(find_ffns(model), windows_NL, CPU)
    started = time.perf_counter()
    stream.advance(0)
    return time.perf_counter() - started


def exponent(x: tuple[int, ...], y: list[float]) -> float:
    """The slope between the last two points, both axes logarithmic."""
    rise = math.log(y[-1] / y[-2])
    return rise / math.log(x[-1] / x[-2])


def draw(
    costs: dict[str, dict[str, list[Cost]]],
    exponents: dict[tuple[str, str], float],
) -> bytes:
    """A panel for each size; what a dense pass takes is dotted."""
    figure = new_figure(4 * len(SWEEPS), 3.6)
    panels = figure.subplots(1, len(SWEEPS), sharey=True)
    looks = looks_of(dict.fromkeys(costs, False))
    for panel, (size, values) in zip(panels, SWEEPS.items(), strict=True):
        for method, by_size in costs.items():
            look = looks[method]
            found = by_size[size]
            panel.plot(
                values,
                [cost.converting for cost in found],
                color=look.colour,
                marker=look.marker,
            )
            panel.annotate(
                f"{method}, exponent {exponents[method, size]:.1f}",
                (values[-1], found[-1].converting),
                (-4, 6),
                textcoords="offset points",
                horizontalalignment="right",
                color=look.colour,
                fontsize=9,
            )
        dense = [cost.dense for cost in found]
        panel.plot(values, dense, color="0.5", linestyle=":")
        panel.set(xscale="log", yscale="log", xlabel=size)
        panel.set_xticks(values, [f"{value:,}" for value in values])
        panel.minorticks_off()
        plain(panel)
    panels[0].set_ylabel("seconds of one layer (dotted: a dense pass)")
    base = Case()
    figure.suptitle(
        f"Time of a conversion: {base.tokens:,} tokens, {base.hidden} / {base.neurons:,}, "
        f"{base.experts} experts, one of them doubled at a time",
        fontsize=11,
    )
    return png(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--methods", default="cmoe,moesaic")
    parser.add_argument("--output", type=Path, default=Path("growth.png"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, float32, windows of {LENGTH}\n")
    print("| method | size | at | passes of the layer | exponent of the time |")
    print("|---|---|---|---|---|")
    costs: dict[str, dict[str, list[Cost]]] = {}
    exponents = {}
    for method in options.methods.split(","):
        costs[method] = {}
        for size, values in SWEEPS.items():
            cases = [replace(Case(), **{size: value}) for value in values]
            found = [cost_of(method, case, options.rounds) for case in cases]
            costs[method][size] = found
            seconds = [cost.converting for cost in found]
            exponents[method, size] = exponent(values, seconds)
            passes = [f"{cost.converting / cost.dense:.1f}" for cost in found]
            at = ", ".join(f"{value:,}" for value in values)
            print(
                f"| {method} | {size} | {at} | {', '.join(passes)} | "
                f"{exponents[method, size]:.2f} |",
                flush=True,
            )
    options.output.write_bytes(draw(costs, exponents))


if __name__ == "__main__":
    main()
