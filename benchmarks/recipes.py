"""Tables behind the recipe `moesaic`: what each ingredient, token and expert is worth.

    python benchmarks/recipes.py WHAT [--model demo] [--calibration demo] [--text demo]

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
from moesaic.families.load import load_config
from moesaic.methods.recipe import RECIPES, Recipe

SPARSITIES = (0.25, 0.5)
SIZES = (1024, 4096, 8192, 32_768, 131_072)
EXPERTS = (8, 16, 32, 64, 128, 256)


def ablations() -> list[Recipe]:
    """The two recipes, then each with one ingredient taken out or put in."""
    ours, dynamic = RECIPES["moesaic"], RECIPES["moesaic-dynamic"]
    changes: list[tuple[Recipe, str, dict[str, Any]]] = [
        (ours, "no repair", {"repair": "none"}),
        (ours, "mean compensation only", {"repair": "mean"}),
        (ours, "W_up refitted", {"up_steps": 4}),
        (dynamic, "W_up refitted", {"up_steps": 4}),
        (ours, "no re-assignment", {"reassign_rounds": 0}),
        (ours, "random experts", {"grouping": "random", "reassign_rounds": 0}),
        (
            ours,
            "paper's k-means",
            {"grouping": "balanced-kmeans", "reassign_rounds": 0},
        ),
        (ours, "paper's router", {"router": "representative"}),
        (ours, "shared by rate", {"importance": "rate"}),
        (ours, "shared by variance", {"importance": "variance"}),
        (ours, "shared by observability", {"importance": "observability"}),
        (dynamic, "no intercept", {"intercept": False}),
        (dynamic, "linear router", {"router": "linear"}),
        (dynamic, "4 directions", {"features": 4}),
        (dynamic, "24 directions", {"features": 24}),
    ]
    rows = [
        replace(base, name=f"{base.name}: {what}", **new)
        for base, what, new in changes
    ]
    static = RECIPES["static-repaired"]
    observed = replace(
        static,
        name="static-repaired: by observability",
        importance="observability",
    )
    fitted = replace(static, name="static-repaired: W_up refitted", up_steps=4)
    return [ours, dynamic, *rows, static, observed, fitted]


def run(
    arguments: argparse.Namespace, recipes: list[Recipe], **changes: Any
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
    return moesaic.compare(arguments.model, recipes, **(settings | changes))


def ratio_of(result: Any, recipe: str, sparsity: float | None) -> str:
    for row in result["rows"]:
        if row["recipe"] == recipe and row["sparsity"] == sparsity:
            text = next(iter(row["ratio"]))
            spread = row["spread"][text]
            return f"{row['ratio'][text]:.3f}" + (
                "" if spread is None else f" ± {spread:.3f}"
            )
    return ""


def rows_of(first: str, result: Any, recipes: list[Recipe]) -> list[list[str]]:
    return [
        [
            first,
            recipe.name,
            *(ratio_of(result, recipe.name, s) for s in SPARSITIES),
        ]
        for recipe in recipes
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
        RECIPES["moesaic"],
        RECIPES["moesaic-dynamic"],
        RECIPES["static-repaired"],
    ]
    if arguments.what == "ablation":
        recipes = [
            recipe for recipe in ablations() if arguments.only in recipe.name
        ]
        result = run(arguments, recipes)
        names = list(dict.fromkeys(recipe.name for recipe in recipes))
        rows = [
            [name, *(ratio_of(result, name, s) for s in SPARSITIES)]
            for name in names
        ]
        table(by_sparsity("recipe"), rows)
    elif arguments.what == "size":
        rows = []
        for tokens in SIZES:
            result = run(
                arguments, ours, samples=max(1, tokens // arguments.length)
            )
            rows += [
                [
                    f"{tokens:,}",
                    recipe.name,
                    *(ratio_of(result, recipe.name, s) for s in SPARSITIES),
                ]
                for recipe in ours
            ]
        table(["calibration tokens", *by_sparsity("recipe")], rows)
    elif arguments.what == "source":
        rows = []
        for source in arguments.calibration:
            result = run(arguments, ours, calibration=source)
            rows += rows_of(Path(source).name, result, ours)
        table(["calibration text", *by_sparsity("recipe")], rows)
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
                result = run(arguments, ours[:2], layout=layout)
                macs = next(
                    r["macs"]
                    for r in result["rows"]
                    if r["recipe"] == "moesaic"
                )
                cells += [
                    ratio_of(result, recipe.name, None) for recipe in ours[:2]
                ]
                cells.append(f"{macs:.3f}")
            rows.append([f"{total} of {size}", *cells])
            if size == 1:
                break
        head = ["experts"]
        for sparsity in SPARSITIES:
            head += [f"{recipe.name} {sparsity:.0%}" for recipe in ours[:2]] + [
                "MACs of moesaic"
            ]
        table(head, rows)
    else:
        result = run(arguments, [*ours[:2], RECIPES["cmoe"]])
        rows = [
            [
                row["recipe"], f"{row['sparsity']:.0%}", f"{row['load_max_over_mean']:.2f}",
                str(row["dead_experts"]),
            ]
            for row in result["rows"]
        ]  # fmt: skip
        table(
            [
                "recipe",
                "skipped",
                "worst layer: max / mean load",
                "dead experts",
            ],
            rows,
        )


if __name__ == "__main__":
    main()
