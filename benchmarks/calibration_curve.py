"""What more calibration tokens gain, and what of the loss is left to the router.

    python benchmarks/calibration_curve.py --output DIR [--windows 16,64,256] [--sparsity 0.25]
        [--method moesaic] [--references static-repaired,oracle]

Perplexity over dense on WikiText-2's test text, training-free, one seed, by the number of
calibration windows of 1,024 tokens. `static-repaired` prunes; `oracle` has the method's experts and
knows the best of them for each token: what lies between it and the method is the router's share,
what lies between it and 1 is that of grouping. Writes DIR/curve.md and DIR/curve.png; DIR/WINDOWS
holds each comparison, and the same command goes on with what is there. The model is that of
`make smollm2`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from smollm2_model import find_texts, needed_folder

import moesaic
from moesaic.cli.quiet import quieten
from moesaic.progress import status

LENGTH = 1024
TEST_TOKENS = 65_536
COLOURS = {"oracle": "tab:grey", "static-repaired": "tab:orange"}


def ratios_of(windows: int, options: argparse.Namespace) -> dict[str, float]:
    """Perplexity over dense of the method and of the references, by name."""
    texts = find_texts()
    with status(f"{windows} windows") as tell:
        result = moesaic.compare(
            str(needed_folder()),
            [options.method],
            sparsity=(options.sparsity,),
            calibration=texts.calibration,
            text=[texts.heldout],
            references=options.references,
            seeds=1,
            samples=windows,
            sequence_length=LENGTH,
            max_tokens=TEST_TOKENS,
            output=options.output / str(windows),
            resume=True,
            progress=tell,
        )
    ratios = {}
    for row in result["rows"]:
        (ratio,) = row["ratio"].values()
        ratios[row["method"]] = ratio
    return {
        name: ratios[name] for name in (options.method, *options.references)
    }


def write_table(curve: dict[int, dict[str, float]], path: Path) -> None:
    columns = list(next(iter(curve.values())))
    lines = ["| calibration tokens | " + " | ".join(columns) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for windows, ratios in curve.items():
        cells = [f"{windows * LENGTH:,}"]
        cells += [f"{ratios[name]:.3f}" for name in columns]
        lines.append("| " + " | ".join(cells) + " |")
    path.write_text("\n".join(lines) + "\n")


def draw(
    curve: dict[int, dict[str, float]], sparsity: float, path: Path
) -> None:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    panel = figure.subplots()
    tokens = [windows * LENGTH for windows in curve]
    for name in next(iter(curve.values())):
        values = [ratios[name] for ratios in curve.values()]
        colour = COLOURS.get(name, "tab:blue")
        panel.plot(tokens, values, "o-", color=colour, label=name)
    panel.set_xscale("log", base=2)
    panel.set_xticks(tokens, [f"{count:,}" for count in tokens])
    panel.set_xlabel("calibration tokens")
    panel.set_ylabel("perplexity over dense")
    panel.set_ylim(bottom=1)
    panel.set_title(
        f"SmolLM2-135M, {sparsity:.0%} of the FFNs' neurons skipped"
    )
    panel.legend()
    figure.savefig(path, dpi=130)


def counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--output", type=Path, required=True)
    add("--windows", type=counts, default=[16, 64, 256])
    add("--sparsity", type=float, default=0.25)
    add("--method", default="moesaic")
    add("--references", type=names, default=["static-repaired", "oracle"])
    options = parser.parse_args()
    quieten()
    curve: dict[int, dict[str, Any]] = {}
    for windows in options.windows:
        curve[windows] = ratios_of(windows, options)
        write_table(curve, options.output / "curve.md")
    draw(curve, options.sparsity, options.output / "curve.png")


if __name__ == "__main__":
    main()
