"""Results on the real model, resumable: the same command goes on with what is there.

    python benchmarks/smollm2.py WHAT --output DIR [--methods ...] [--sparsity ...] [--seeds N]

WHAT is one of these:

- frontier: perplexity over dense against work, by `moesaic.compare`: methods and references.
- tasks: answers to multiple choice and other questions, by `moesaic eval --tasks`.
- recovery: what fine-tuning regains, over the equally tuned dense model, by `moesaic finetune`.
- time: of one prompt and of the tokens after it, over the dense model's, by `moesaic bench`.

All but frontier convert into DIR/METHOD-PERCENT first. Options that are not listed by --help go to
the command as they are, such as --limit 200, --samples 96 or --batch 1. Take another
DIR for other settings.
The model is that of `make smollm2`, the text WikiText-2 (benchmarks/smollm2_model.py finds it).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from smollm2_model import find_texts, needed_folder

import moesaic
from moesaic.cli.quiet import quieten
from moesaic.cli.tables import comparison_table, out
from moesaic.comparison.compare import REFERENCES
from moesaic.errors import MoesaicError
from moesaic.progress import status

METHODS = ("moesaic", "moesaic-dynamic", "moesaic-neurons", "cmoe")
SPARSITIES = (0.125, 0.25, 0.375, 0.5, 0.625)
TASKS = "piqa,winogrande,arc_easy,arc_challenge,hellaswag"


def frontier(options: argparse.Namespace) -> None:
    """compare.json, compare.md and compare.png in the output."""
    with status("comparing") as tell:
        result = moesaic.compare(
            options.model,
            options.methods,
            sparsity=options.sparsity,
            grain=options.grain,
            calibration=options.calibration,
            text=[options.text],
            references=options.references,
            seeds=options.seeds,
            samples=options.windows,
            sequence_length=options.length,
            max_tokens=options.tokens,
            output=options.output,
            resume=True,
            dtype=options.dtype,
            progress=tell,
        )
    comparison_table(result)


def tasks(options: argparse.Namespace) -> None:
    """dense.tasks.json, and METHOD-PERCENT.tasks.json beside each converted model."""
    asked = ["--tasks", options.tasks, "--against", "none"]
    dense = options.output / "dense"
    run(dense, "tasks", ["eval", options.model, *asked], options)
    for folder in converted(options):
        run(folder, "tasks", ["eval", str(folder), *asked], options)


def recovery(options: argparse.Namespace) -> None:
    """METHOD-PERCENT.recovery.json: perplexities before, after, and of the tuned dense model."""
    for folder in converted(options):
        tuned = folder.with_name(f"{folder.name}-tuned")
        command = ["finetune", str(folder), "--output", str(tuned), "--resume"]
        teacher = ["--distill", options.model, "--tune-teacher"]
        text = ["--data", options.calibration]
        length = ["--sequence-length", str(options.length)]
        run(folder, "recovery", [*command, *teacher, *text, *length], options)


def run(
    folder: Path, what: str, command: list[str], options: argparse.Namespace
) -> None:
    """One command of moesaic, unless its numbers are there already."""
    path = folder.with_name(f"{folder.name}.{what}.json")
    if path.is_file():
        out.print(f"{path} is there already")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    moesaic_command = [sys.executable, "-m", "moesaic", *command]
    written = ["--dtype", options.dtype, "--json", str(path)]
    process = subprocess.run(
        [*moesaic_command, *written, *options.others], check=False
    )
    if process.returncode != 0:
        sys.exit(process.returncode)


def timing(options: argparse.Namespace) -> None:
    """METHOD-PERCENT.time.json: a prompt and the tokens after it, by `moesaic bench`."""
    for folder in converted(options):
        command = ["bench", str(folder), "--against", options.model]
        run(folder, "time", command, options)


def converted(options: argparse.Namespace) -> list[Path]:
    """A folder for each method at each sparsity; those that are there are kept."""
    folders = []
    for sparsity in options.sparsity:
        for method in options.methods:
            name = f"{Path(method).stem}-{100 * sparsity:g}"
            folder = options.output / name
            folders.append(folder)
            if folder.is_dir():
                continue
            out.print(f"converting {name}")
            moesaic.convert(
                options.model,
                method,
                sparsity=sparsity,
                grain=options.grain,
                calibration=options.calibration,
                samples=options.windows,
                sequence_length=options.length,
                output=folder,
                resume=True,
                dtype=options.dtype,
                progress=True,
            )
    return folders


WHAT = {
    "frontier": frontier,
    "tasks": tasks,
    "recovery": recovery,
    "time": timing,
}


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def shares(text: str) -> list[float]:
    return [float(share) for share in text.split(",")]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Results on the real model.", allow_abbrev=False
    )
    add = parser.add_argument
    add("what", choices=WHAT)
    add("--output", type=Path, required=True, help="folder of the results")
    add("--methods", type=names, default=METHODS, help="names or files")
    add("--references", type=names, default=REFERENCES, help="of the frontier")
    add("--sparsity", type=shares, default=SPARSITIES, help="shares skipped")
    add("--grain", default="medium", help="coarse, medium or fine")
    add("--seeds", type=int, default=1, help="of the frontier")
    add("--tokens", type=int, default=65_536, help="measured on")
    add("--windows", type=int, help="to calibrate on [default: usual]")
    add("--length", type=int, default=1024, help="tokens of a window")
    add("--tasks", default=TASKS, help="names of tasks")
    add("--dtype", default="auto", help="auto is bfloat16 here")
    add("--model", help="another model [default: that of make smollm2]")
    add("--calibration", help="another text to calibrate and train on")
    add("--text", help="another text to measure on")
    options, options.others = parser.parse_known_args()
    if options.others and options.what == "frontier":
        parser.error(f"unknown options: {' '.join(options.others)}")
    return options


def main() -> None:
    options = read_options()
    quieten()
    try:
        options.model = options.model or str(needed_folder())
        if options.calibration is None or options.text is None:
            texts = find_texts()
            out.print(f"text: {texts.origin}")
            options.calibration = options.calibration or texts.calibration
            options.text = options.text or texts.heldout
        WHAT[options.what](options)
    except (MoesaicError, OSError) as error:
        line = " ".join(str(error).split())
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
