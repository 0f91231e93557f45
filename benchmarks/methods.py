"""Tables behind the method `moesaic`: what each ingredient, token and expert is worth.

    python benchmarks/methods.py WHAT [--model demo] [--calibration demo] [--text demo]

WHAT is ablation, size, source, grain or load. Writes Markdown to standard output. Everything but
the row's own difference is equal: calibration windows, seeds, evaluation text, active neurons.
`source` takes several --calibration, all evaluated on the same --text.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

import moesaic
from moesaic.calibration.statistics import StatisticsKind
from moesaic.comparison.labels import label_of
from moesaic.families.load import load_config
from moesaic.methods.base import Method
from moesaic.methods.cmoe import copied_neurons
from moesaic.methods.expert_method import fit_repair, split_shared
from moesaic.methods.load import load_method
from moesaic.methods.moesaic import Moesaic
from moesaic.methods.static import StaticRepaired
from moesaic.modeling import RouterConfig
from moesaic.parts.clustering import balanced_kmeans
from moesaic.parts.importance import activation_rate, observability
from moesaic.parts.partition import NO_EXPERTS, Partition
from moesaic.parts.representatives import representative

SPARSITIES = (0.25, 0.5)
SIZES = (1024, 4096, 8192, 32_768, 131_072)
EXPERTS = (8, 16, 32, 64, 128, 256)


class PapersExperts(Moesaic):
    """moesaic with the paper's balanced k-means on activation marks."""

    @property
    def statistics_kind(self) -> StatisticsKind:
        return replace(super().statistics_kind, activation_top_k=10)

    def _groups(self, fit: Any, candidates_N: Any) -> Any:
        routed = fit.sizes.num_routed
        return balanced_kmeans(fit.statistics, candidates_N, routed, 20)


class PapersRouter(PapersExperts):
    """moesaic with the paper's representative neurons as its router."""

    _groups = Moesaic._groups

    def router_config(self, ffn: Any) -> RouterConfig:
        return RouterConfig("neuron-copies", "topk")

    def make_router(self, fit: Any) -> Any:
        neurons_R = representative(fit.statistics, fit.partition.experts_RM)
        return copied_neurons(fit, neurons_R)


class SharedByRate(PapersExperts):
    """moesaic that shares the neurons that are active most often."""

    _groups = Moesaic._groups

    def _importance(self, fit: Any) -> Any:
        return activation_rate(fit.statistics)


class Observed(StaticRepaired):
    """Static pruning that keeps the neurons of largest observability."""

    statistics_kind = StatisticsKind(gram=True)

    def partition(self, fit: Any) -> Partition:
        importance_F = observability(fit.statistics, fit.ffn)
        return Partition(
            split_shared(importance_F, fit.sizes.shared)[0], NO_EXPERTS
        )


class Refitted(StaticRepaired):
    """Static pruning with the rows of W_up refitted too."""

    def repair(self, fit: Any) -> Any:
        return fit_repair(
            fit,
            "least-squares",
            intercept=False,
            up_steps=4,
            undo_drift=self.undo_drift,
        )


def varied(
    base: Method, what: str, kind: type[Method] | None = None, **settings: Any
) -> Method:
    """The same with other settings, or of another class, under a name that says so."""
    description = replace(base.description, name=f"{base.name}: {what}")
    parent = kind or type(base)
    named = type(parent.__name__, (parent,), {"description": description})
    return named(**base.settings | settings)


def ablations() -> list[Method]:
    """The two methods, then each with one ingredient taken out or put in."""
    ours, static = load_method("moesaic"), load_method("static-repaired")
    dynamic = dynamic_alone()
    return [
        ours,
        dynamic,
        varied(ours, "no repair", repair_by="none"),
        varied(ours, "mean compensation only", repair_by="mean"),
        varied(ours, "W_up refitted", up_steps=4),
        varied(dynamic, "W_up refitted", up_steps=4),
        varied(ours, "no re-assignment", reassign_rounds=0),
        varied(ours, "random experts", groups="random", reassign_rounds=0),
        varied(ours, "paper's k-means", PapersExperts, reassign_rounds=0),
        varied(ours, "paper's router", PapersRouter),
        varied(ours, "shared by rate", SharedByRate),
        varied(ours, "shared by variance", importance="variance"),
        varied(ours, "shared by observability", importance="observability"),
        varied(dynamic, "no intercept", intercept=False),
        varied(dynamic, "linear router", directions=0),
        varied(dynamic, "4 directions", directions=4),
        varied(dynamic, "24 directions", directions=24),
        varied(dynamic, "layers share a budget", layer_budgets="gradient"),
        static,
        varied(static, "by observability", Observed),
        varied(static, "W_up refitted", Refitted),
    ]


def dynamic_alone() -> Method:
    """moesaic-dynamic with equal budgets of layers."""
    return load_method("moesaic-dynamic", {"layer_budgets": "uniform"})


def run(
    arguments: argparse.Namespace, methods: list[Method], **changes: Any
) -> Any:
    settings: dict[str, Any] = {
        "calibration": arguments.calibration[0],
        "text": [arguments.text],
        "seeds": arguments.seeds,
        "samples": max(1, 32_768 // arguments.length),
        "sparsity": SPARSITIES,
        "grain": arguments.grain,
        "references": (),
        "progress": lambda line: print(line, file=sys.stderr),
    }
    return moesaic.compare(arguments.model, methods, **(settings | changes))


def ratio_of(result: Any, method: Method, sparsity: float | None) -> str:
    label = label_of(method)
    for row in result["rows"]:
        if row["method"] == label and row["sparsity"] == sparsity:
            text = next(iter(row["ratio"]))
            spread = row["spread"][text]
            return f"{row['ratio'][text]:.3f}" + (
                "" if spread is None else f" ± {spread:.3f}"
            )
    return ""


def rows_of(first: str, result: Any, methods: list[Method]) -> list[list[str]]:
    return [
        [
            first,
            method.name,
            *(ratio_of(result, method, s) for s in SPARSITIES),
        ]
        for method in methods
    ]


def table(head: list[str], rows: list[list[str]]) -> None:
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    print("\n".join("| " + " | ".join(row) + " |" for row in rows), flush=True)


def by_sparsity(head: str) -> list[str]:
    return [head, *(f"{sparsity:.0%} skipped" for sparsity in SPARSITIES)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument(
        "what", choices=["ablation", "size", "source", "grain", "load"]
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calibration", nargs="+", default=["demo"])
    parser.add_argument("--text", default="demo")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--grain", default="medium")
    parser.add_argument(
        "--only", default="", help="ablation: rows whose name holds this"
    )
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    config = load_config(arguments.model)
    arguments.length = min(2048, config.max_position_embeddings)
    print(
        f"{Path(arguments.model).name}, text {Path(arguments.text).name}, {arguments.seeds} seeds, "
        f"torch {torch.__version__}; perplexity over dense\n"
    )
    ours = [
        load_method("moesaic"),
        dynamic_alone(),
        load_method("static-repaired"),
    ]
    if arguments.what == "ablation":
        methods = [
            method for method in ablations() if arguments.only in method.name
        ]
        result = run(arguments, methods)
        rows = [
            [method.name, *(ratio_of(result, method, s) for s in SPARSITIES)]
            for method in methods
        ]
        table(by_sparsity("method"), rows)
    elif arguments.what == "size":
        rows = []
        for tokens in SIZES:
            result = run(
                arguments, ours, samples=max(1, tokens // arguments.length)
            )
            rows += [
                [
                    f"{tokens:,}",
                    method.name,
                    *(ratio_of(result, method, s) for s in SPARSITIES),
                ]
                for method in ours
            ]
        table(["calibration tokens", *by_sparsity("method")], rows)
    elif arguments.what == "source":
        rows = []
        for source in arguments.calibration:
            result = run(arguments, ours, calibration=source)
            rows += rows_of(Path(source).name, result, ours)
        table(["calibration text", *by_sparsity("method")], rows)
    elif arguments.what == "grain":
        neurons, rows = config.intermediate_size, []
        for experts in EXPERTS:
            size = -(-neurons // experts)
            cells = []
            for sparsity in SPARSITIES:
                total = neurons // size
                shared = neurons - (total - 1) * size
                active = max(
                    1, round(((1 - sparsity) * neurons - shared) / size)
                )
                layout = f"S1A{active}E{total}"
                result = run(arguments, ours[:2], layout=layout, sparsity=None)
                macs = next(
                    r["macs"]
                    for r in result["rows"]
                    if r["method"] == "moesaic"
                )
                cells += [ratio_of(result, method, None) for method in ours[:2]]
                cells.append(f"{macs:.3f}")
            rows.append([f"{total} of {size}", *cells])
            if size == 1:
                break
        head = ["experts"]
        for sparsity in SPARSITIES:
            head += [f"{method.name} {sparsity:.0%}" for method in ours[:2]] + [
                "MACs of moesaic"
            ]
        table(head, rows)
    else:
        result = run(arguments, [*ours[:2], load_method("cmoe")])
        rows = [
            [
                row["method"], f"{row['sparsity']:.0%}", f"{row['load_max_over_mean']:.2f}",
                str(row["dead_experts"]),
            ]
            for row in result["rows"]
        ]  # fmt: skip
        table(
            [
                "method",
                "skipped",
                "worst layer: max / mean load",
                "dead experts",
            ],
            rows,
        )


if __name__ == "__main__":
    main()
