"""What recovery regains by the number of tokens, over the dense model trained on the same.

    python benchmarks/recovery_curve.py --output DIR [--windows 48,96,192] [--sparsity 0.5]
        [--methods moesaic,static-repaired] [--device cuda]
    python benchmarks/recovery_curve.py --output DIR --windows 976 --batch-size 4 --rate 1e-3 \
        --sparsity 0.25,0.5 --methods moesaic --layouts S4A84E128,S4A53E128 --dense-layers 6,3 \
        --samples 1024 --rank 8 --alpha 32 --test-tokens 65536 --device cuda [--convert-tuned]

For each number of windows the dense model is trained on them by next tokens, and each converted
model against that one as its teacher. --convert-tuned converts that trained model, too, and not
the one as it came. Ranks differ (RANKS): the dense model trains 39 million weights, `moesaic` 45
(32 experts), static pruning by half 30 and by a quarter 35. Perplexity is of the end of the
training text, which nobody trained on, and with --test-tokens also of the test text. A row is
written to DIR/rows.jsonl as it ends, and the same command goes on with what is there. --layouts and
--dense-layers (first so many) name one for each sparsity, --rank and --alpha are in place of those
for all methods but dense. The model is that of `make smollm2`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from smollm2_model import find_texts, needed_folder

import moesaic
from moesaic import load_method
from moesaic.calibration.text import to_ids
from moesaic.cli.quiet import quieten
from moesaic.conversion.layout_search import HELDOUT_TOKENS
from moesaic.conversion.prepare import hold_out
from moesaic.evaluate import perplexity
from moesaic.families.load import load_model, load_tokenizer
from moesaic.finetune.defaults import usual_batch_size, usual_rate
from moesaic.finetune.lora import merge
from moesaic.finetune.options import Machine, Settings
from moesaic.finetune.prepare import draw_windows, whole_steps
from moesaic.finetune.train import train
from moesaic.parts.products import widened_products

# Rank and alpha: LoRA has its rank on every expert, so 32 experts of rank 32 train more
# weights than a dense FFN of rank 128. alpha / sqrt(rank) is the same, but for rounding.
RANKS = {
    "dense": (128, 128),
    "static-repaired": (128, 128),
    "flap": (128, 128),
    "moesaic": (32, 64),
    "moesaic-dynamic": (32, 64),
}
LENGTH = 512
TEST_LENGTH = 1024


@dataclass(frozen=True)
class Row:
    """One trained model. `over_dense` divides by the dense model of as many windows."""

    method: str
    sparsity: float
    windows: int
    steps: int
    rate: float
    seed: int
    trained_weights: int
    before: float
    test_before: float | None
    after: float
    over_dense: float
    test: float | None
    test_over_dense: float | None
    cpu_minutes: float


class Curve:
    """The texts, and the rows that are there."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.dense = needed_folder()
        texts = find_texts()
        tokenizer = load_tokenizer(str(self.dense))
        all_ids = to_ids(texts.calibration, tokenizer)
        self.text = texts.calibration
        self.ids, validation = hold_out(
            all_ids, texts.calibration, tokenizer, LENGTH
        )
        assert validation is not None
        self.end_of_text = validation.ids
        self.test_text = to_ids(texts.heldout, tokenizer)
        self.path = options.output / "rows.jsonl"
        self.rows: list[dict[str, Any]] = []
        if self.path.is_file():
            lines = self.path.read_text().splitlines()
            self.rows = [json.loads(line) for line in lines]

    def find(self, method: str, sparsity: float, windows: int) -> Any:
        for row in self.rows:
            asked = (method, sparsity, windows, self.options.seed)
            if (
                row["method"],
                row["sparsity"],
                row["windows"],
                row["seed"],
            ) == asked:
                return row
        return None

    def add(self, row: Row) -> None:
        fields = vars(row)
        self.rows.append(fields)
        line = json.dumps(fields)
        with self.path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def at_the_end(self, model: Any) -> float:
        """Perplexity of the end of the training text."""
        end, _ = perplexity(model, self.end_of_text, LENGTH, HELDOUT_TOKENS)
        return end

    def measured(self, model: Any) -> tuple[float, float | None]:
        """Perplexity of the end of the training text, and of the test text if asked."""
        end = self.at_the_end(model)
        tokens = self.options.test_tokens
        if not tokens:
            return end, None
        test, _ = perplexity(model, self.test_text, TEST_LENGTH, tokens)
        return end, test

    def tuned_dense(self, windows: int) -> Path:
        """The dense model after next-token training, as a folder."""
        seed = self.options.seed
        folder: Path = self.options.output / f"dense-{windows}-seed{seed}"
        if self.find("dense", 0.0, windows):
            return folder
        batch_size = self.options.batch_size or usual_batch_size(windows)
        drawn_NL = draw_windows(self.ids, windows, LENGTH, seed)
        drawn_NL = whole_steps(drawn_NL, batch_size)
        steps = len(drawn_NL) // batch_size
        rank, alpha = RANKS["dense"]
        model = load_model(str(self.dense), "auto").to(self.options.device)
        rate = self.options.rate or usual_rate(
            steps, model.config.hidden_size, has_teacher=False
        )
        settings = Settings(
            samples=len(drawn_NL),
            sequence_length=LENGTH,
            batch_size=batch_size,
            rank=rank,
            alpha=alpha,
            lora_lr=rate,
            seed=seed,
        )
        before, test_before = self.measured(model)
        started = time.process_time()
        with widened_products(model.dtype, model.device):
            machine = Machine(use_cpu=self.options.device == "cpu")
            trained = train(model, drawn_NL, settings, machine)
        merged = merge(trained.model)
        minutes = (time.process_time() - started) / 60
        after, test = self.measured(merged)
        merged.cpu().save_pretrained(folder)
        load_tokenizer(str(self.dense)).save_pretrained(folder)
        row = Row(
            method="dense",
            sparsity=0.0,
            windows=windows,
            steps=steps,
            rate=rate,
            seed=seed,
            trained_weights=trained.weights,
            before=before,
            test_before=test_before,
            after=after,
            over_dense=1.0,
            test=test,
            test_over_dense=1.0,
            cpu_minutes=minutes,
        )
        self.add(row)
        return folder

    def converted(self, method: str, sparsity: float, windows: int) -> Path:
        """The model before it is trained, as a folder."""
        seed = self.options.seed
        name = f"{Path(method).stem}-{100 * sparsity:g}-seed{seed}"
        dense = self.dense
        if self.options.convert_tuned:
            name = f"{name}-of-dense-{windows}"
            dense = self.tuned_dense(windows)
        folder: Path = self.options.output / name
        if not folder.is_dir():
            options = self.options
            budget: dict[str, Any] = {"sparsity": sparsity}
            if options.layouts:
                number = options.sparsity.index(sparsity)
                dense_layers = range(options.dense_layers[number])
                budget = {
                    "layout": options.layouts[number],
                    "dense_layers": tuple(dense_layers),
                }
            moesaic.convert(
                str(dense),
                method,
                calibration=self.text,
                samples=options.samples,
                sequence_length=TEST_LENGTH,
                seed=seed,
                device=options.device,
                output=folder,
                resume=True,
                **budget,
            )
        return folder

    def student(self, method: str, sparsity: float, windows: int) -> None:
        if self.find(method, sparsity, windows):
            return
        teacher = self.tuned_dense(windows)
        dense = self.find("dense", 0.0, windows)
        seed = self.options.seed
        folder = self.converted(method, sparsity, windows)
        output = folder.with_name(f"{folder.name}-tuned-{windows}")
        untrained = load_model(str(folder), "auto").to(self.options.device)
        _, test_before = self.measured(untrained)
        del untrained
        usual_rank, usual_alpha = RANKS[load_method(method).name]
        started = time.process_time()
        report = moesaic.finetune(
            folder,
            output,
            self.text,
            samples=windows,
            sequence_length=LENGTH,
            batch_size=self.options.batch_size,
            lora_lr=self.options.rate,
            rank=self.options.rank or usual_rank,
            alpha=self.options.alpha or usual_alpha,
            distill=teacher,
            seed=seed,
            device=self.options.device,
            resume=True,
        )
        minutes = (time.process_time() - started) / 60  # with what is measured
        settings = report.settings
        model = load_model(str(output), "auto").to(self.options.device)
        after, test = self.measured(model)
        row = Row(
            method=method,
            sparsity=sparsity,
            windows=windows,
            steps=settings["samples"] // settings["batch_size"],
            rate=settings["lora_lr"],
            seed=seed,
            trained_weights=report.trained_weights,
            before=report.perplexity_before,
            test_before=test_before,
            after=after,
            over_dense=after / dense["after"],
            test=test,
            test_over_dense=_over(test, dense["test"]),
            cpu_minutes=minutes,
        )
        self.add(row)


def _over(test: float | None, dense: float | None) -> float | None:
    if test is None or dense is None:
        return None
    return test / dense


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    return text.split(",")


def check_settings(options: argparse.Namespace) -> None:
    """Stops where the folder holds rows of another rate or batch."""
    names = (
        "rate",
        "batch_size",
        "samples",
        "layouts",
        "dense_layers",
        "rank",
        "alpha",
        "convert_tuned",
    )
    settings = {name: getattr(options, name) for name in names}
    file = options.output / "settings.json"
    if file.is_file() and json.loads(file.read_text()) != settings:
        sys.exit(f"{file} has other settings; take another --output")
    file.write_text(json.dumps(settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, required=True)
    add("--windows", type=counts, default=[48, 96, 192])
    add("--sparsity", type=numbers, default=[0.5])
    add(
        "--methods",
        type=names,
        default=["moesaic", "static-repaired"],
        help="names or recipe files, of methods that RANKS has",
    )
    add("--batch-size", type=int)
    add("--rate", type=float)
    add("--seed", type=int, default=0)
    add("--samples", type=int, help="windows of 1,024 to calibrate on")
    add("--layouts", type=names, default=[])
    add("--dense-layers", type=counts, default=[])
    add("--rank", type=int)
    add("--alpha", type=float)
    add("--convert-tuned", action="store_true")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--test-tokens", type=int, default=0)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("needs a GPU of NVIDIA's, and torch built for it")
    if options.layouts:
        asked = len(options.sparsity)
        if {len(options.layouts), len(options.dense_layers)} != {asked}:
            parser.error(
                "--layouts and --dense-layers: one for each --sparsity"
            )
    options.output.mkdir(parents=True, exist_ok=True)
    check_settings(options)
    quieten()
    torch.set_num_threads(1)
    curve = Curve(options)
    for windows in options.windows:
        curve.tuned_dense(windows)
        for sparsity in options.sparsity:
            for method in options.methods:
                curve.student(method, sparsity, windows)


if __name__ == "__main__":
    main()
