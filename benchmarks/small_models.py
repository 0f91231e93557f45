"""The README's table: every recipe on small real models, same tokens and budget, three seeds.

    python benchmarks/small_models.py [FOLDER_OF_MODELS TEXT]

Always the demo model on its held-out modules; with a folder of models and a text, each of those on
the last tenth of the text, calibrated on windows of the rest.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers.utils import logging

import moesaic
from moesaic.data import to_ids
from moesaic.load import load_model, load_tokenizer

LAYOUTS = ("S3A3E8", "S2A2E8")
SEEDS = (0, 1, 2)
HELDOUT_TOKENS = 65_536


def rows_of(name: str, calibration: torch.Tensor, heldout: torch.Tensor) -> list[str]:
    dense = load_model(name, "float32")
    length = dense.config.max_position_embeddings
    base, count = moesaic.perplexity(dense, heldout, length, HELDOUT_TOKENS)
    rows = [f"**{Path(name).name}**, {count:,} held-out tokens, dense {base:.3f}"]
    for recipe in moesaic.RECIPES:
        cells = []
        for layout in LAYOUTS:
            ratios = []
            for seed in SEEDS:
                model, report = moesaic.convert(
                    load_model(name, "float32"), recipe, layout, calibration, seed=seed
                )
                value, _ = moesaic.perplexity(model, heldout, length, HELDOUT_TOKENS)
                ratios.append(value / base)
            spread = statistics.stdev(ratios)
            cells.append(f"{statistics.mean(ratios):.3f} ± {spread:.3f}")
            active = report.active_ffn_fraction
            cells[-1] += f" ({active:.1%})" if recipe == "static" else ""
        rows.append(f"| {recipe} | {' | '.join(cells)} |")
    return rows


def main(arguments: list[str]) -> None:
    logging.disable_progress_bar()
    console = Console(soft_wrap=True, highlight=False)
    tokenizer: Any = load_tokenizer("demo")
    work = [("demo", to_ids("demo", tokenizer), to_ids("demo", tokenizer, heldout=True))]
    if arguments:
        folder, text = map(Path, arguments)
        for path in sorted(path for path in folder.iterdir() if path.is_dir()):
            ids = to_ids(text, load_tokenizer(path))
            cut = len(ids) - len(ids) // 10
            work.append((str(path), ids[:cut], ids[cut:]))
    for name, calibration, heldout in work:
        for row in rows_of(name, calibration, heldout):
            console.print(row)


if __name__ == "__main__":
    main(sys.argv[1:])
