"""Recovery by light fine-tuning, at equal tokens: what each loss, sample and method is worth.

    python benchmarks/recovery.py WHAT [--model demo] [--data demo] [--samples 512] [--seeds 3]

WHAT is table (methods, training-free, plain and distilled), mixes (losses of a distilled run),
rates (learning rates) or samples (data efficiency). Converts and trains in memory and writes
Markdown to standard output, one row per run as it ends. Every run of a seed sees the same
calibration windows, training windows and evaluation text; none of the last is trained on. The
row "dense" is fine-tuned by next-token loss on the same windows at the same rates, and ratios are
over that row of the same seed. "distilled" is against the dense model as it came, "tuned teacher"
against that row's model. Minutes are of CPU time, training and merging alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers.utils import logging

import moesaic
from moesaic.calibration.calibration_set import CalibrationSet
from moesaic.calibration.text import to_ids
from moesaic.conversion.prepare import hold_out
from moesaic.evaluate import perplexity
from moesaic.families.load import load_model, load_tokenizer
from moesaic.finetune.balance import measure_loads, refit_thresholds
from moesaic.finetune.defaults import PAPER_RATE
from moesaic.finetune.lora import merge
from moesaic.finetune.options import Machine, Mix, Settings
from moesaic.finetune.prepare import DISTILLED, draw_windows
from moesaic.finetune.train import train

PLAIN = Mix()
MIXES = {
    "next token": Mix(),
    "logits": Mix(0, 1, 0),
    "FFNs": Mix(0, 0, 1),
    "next token + logits": Mix(0.5, 0.5, 0),
    "next token + FFNs": Mix(1, 0, 1),
    "logits + FFNs": Mix(0, 1, 1),
    "all three": DISTILLED,
}
RATES = (5.95e-5, 3e-4, 1e-3, 3e-3)
SAMPLES = (0, 64, 256, 1024, 2048)


class Bench:
    """One model and its texts."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        tokenizer = load_tokenizer(arguments.model)
        self.dense = load_model(arguments.model, "float32")
        self.length = min(
            arguments.length, self.dense.config.max_position_embeddings
        )
        ids = to_ids(arguments.data, tokenizer)
        self.ids, validation = hold_out(
            ids, arguments.data, tokenizer, self.length
        )
        assert validation is not None
        self.heldout = validation.ids
        self.kept: tuple[Any, Any] = (
            None,
            None,
        )  # the last conversion, by what it was
        self.kept_dense: tuple[Any, Any] = (None, None)

    def perplexity(self, model: Any) -> float:
        return perplexity(
            model, self.heldout, self.length, self.arguments.max_tokens
        )[0]

    def converted(self, method: str, sparsity: float, seed: int) -> Any:
        """By NAME or NAME:GRAIN; a copy of the last one where it is asked for again."""
        if self.kept[0] != (method, sparsity, seed):
            calibration = CalibrationSet.sample(
                self.ids, 32_768 // self.length, self.length, seed
            ).windows_NL
            name, _, grain = method.partition(":")
            model, _ = moesaic.convert(
                load_model(self.arguments.model, "float32"), name, sparsity=sparsity,
                grain=grain or "medium", calibration=calibration, seed=seed,
            )  # fmt: skip
            self.kept = (method, sparsity, seed), model
        return copy.deepcopy(self.kept[1])

    def settings(self, seed: int, **changes: Any) -> Settings:
        base = Settings(
            samples=self.arguments.samples, sequence_length=self.length,
            batch_size=self.arguments.batch_size, epochs=self.arguments.epochs, seed=seed,
            balance_rate=self.arguments.balance_rate,
        )  # fmt: skip
        return replace(base, **changes)

    def tuned(self, settings: Settings) -> Any:
        """The dense model after next-token fine-tuning with these settings; kept, the last one."""
        settings = replace(settings, mix=PLAIN)
        if self.kept_dense[0] != settings:
            windows = draw_windows(
                self.ids, settings.samples, self.length, settings.seed
            )
            dense = load_model(self.arguments.model, "float32")
            done = train(dense, windows, settings, Machine(use_cpu=True))
            self.kept_dense = settings, merge(done.model)
        return self.kept_dense[1]

    def trained(
        self, model: Any, settings: Settings, tuned_teacher: bool = False
    ) -> tuple[float, dict[str, Any]]:
        """Perplexity after training, and what else was seen."""
        windows = draw_windows(
            self.ids, settings.samples, self.length, settings.seed
        )
        teacher = None
        if settings.mix != PLAIN:
            teacher = self.tuned(settings) if tuned_teacher else self.dense
        started = time.process_time()
        done = train(model, windows, settings, Machine(use_cpu=True), teacher)
        with torch.no_grad():
            refit_thresholds(done.model, windows[: max(1, 8192 // self.length)])
        merged = merge(done.model)
        minutes = (time.process_time() - started) / 60
        after = measure_loads(merged, windows[: max(1, 8192 // self.length)])

        def worst(loads: Any) -> list[float]:
            return (
                [round(row["max_over_mean"], 3) for row in loads.to_dict()]
                if loads
                else []
            )

        return self.perplexity(merged), {
            "minutes": minutes,
            "load before": worst(done.loads_before),
            "load after": worst(after),
        }


def say(row: dict[str, Any]) -> None:
    """A row as JSON to the log and nothing else: tables are made at the end."""
    print(json.dumps(row), flush=True)


def spread(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}"
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def table(bench: Bench) -> list[dict[str, Any]]:
    arguments, rows = bench.arguments, []
    base = bench.perplexity(bench.dense)
    rate = arguments.lora_lr
    losses = {
        "plain": (PLAIN, rate, False),
        "distilled": (DISTILLED, rate, False),
        "tuned teacher": (DISTILLED, rate, True),
    }
    losses = {
        name: losses[name]
        for name in dict.fromkeys(["plain", *arguments.losses])
    }
    if arguments.paper:
        losses = {"paper's rate": (PLAIN, PAPER_RATE, False)} | losses
    for seed in range(arguments.seeds):
        row = {"method": "dense", "sparsity": 0, "seed": seed, "free": base}
        for name, (mix, rate, _) in losses.items():
            if mix == PLAIN:  # the reference of the others as well
                row[name] = bench.perplexity(
                    bench.tuned(bench.settings(seed, lora_lr=rate))
                )
        say(row)
        rows.append(row)
        for sparsity in arguments.sparsity:
            for method in arguments.methods.split(","):
                row = {"method": method, "sparsity": sparsity, "seed": seed}
                for name, (mix, rate, tuned) in losses.items():
                    model = bench.converted(method, sparsity, seed)
                    row["layout"] = model.config.moesaic.layout
                    row.setdefault("free", bench.perplexity(model))
                    settings = bench.settings(seed, lora_lr=rate, mix=mix)
                    row[name], found = bench.trained(model, settings, tuned)
                    row |= {
                        f"{name}: {key}": value for key, value in found.items()
                    }
                say(row)
                rows.append(row)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """Means over seeds; in brackets over the dense model of the same seed.

    That as it came for what is not trained, else fine-tuned by next-token loss; minutes last.
    """
    names = ["free", "paper's rate", "plain", "distilled", "tuned teacher"]
    names = [name for name in names if any(name in row for row in rows)]
    keys = dict.fromkeys((row["sparsity"], row["method"]) for row in rows)
    dense = {row["seed"]: row for row in rows if row["method"] == "dense"}
    print("| skipped | method | layout | " + " | ".join(names) + " | minutes |")
    print("|---" * (4 + len(names)) + "|")
    for sparsity, method in keys:
        here = [
            r
            for r in rows
            if (r["sparsity"], r["method"]) == (sparsity, method)
        ]
        cells, minutes = [], []
        for name in names:
            values = [row[name] for row in here if name in row]
            own = {"free": "free", "paper's rate": "paper's rate"}.get(
                name, "plain"
            )
            over = [
                row[name] / dense[row["seed"]][own]
                for row in here
                if name in row
            ]
            brackets = (
                f" ({spread(over)})" if over and method != "dense" else ""
            )
            cells.append(
                f"{statistics.mean(values):.3f}{brackets}" if values else ""
            )
            spent = [
                row[f"{name}: minutes"]
                for row in here
                if f"{name}: minutes" in row
            ]
            minutes += [f"{statistics.mean(spent):.1f}"] if spent else []
        layouts = " ".join(dict.fromkeys(row.get("layout", "") for row in here))
        cells = [
            f"{sparsity:.0%}",
            method,
            layouts,
            *cells,
            " / ".join(minutes),
        ]
        print(f"| {' | '.join(cells)} |")


def variants(bench: Bench, what: str) -> list[dict[str, Any]]:
    """Mixes, rates or samples: one method and sparsity, one row each."""
    arguments, rows = bench.arguments, []
    method, sparsity = arguments.methods.split(",")[0], arguments.sparsity[0]
    for seed in range(arguments.seeds):
        if what == "mixes":
            cases = {
                f"{name}, {rate:g}": {"mix": mix, "lora_lr": rate}
                for rate in arguments.rates
                for name, mix in MIXES.items()
                if not arguments.only or name in arguments.only.split(",")
            }
        elif what == "rates":
            cases = {
                f"{name}, {rate:g}": {"mix": mix, "lora_lr": rate}
                for rate in arguments.rates or RATES
                for name, mix in (("plain", PLAIN), ("distilled", DISTILLED))
            }
        else:
            cases = {
                f"{name}, {count}": {
                    "mix": mix,
                    "lora_lr": rate,
                    "samples": count,
                }
                for count in SAMPLES
                for name, mix, rate in (
                    ("plain", PLAIN, arguments.lora_lr),
                    ("tuned teacher", DISTILLED, arguments.lora_lr),
                )
                if count <= arguments.samples
            }
        for name, changes in cases.items():
            model = bench.converted(method, sparsity, seed)
            found: dict[str, Any] = {}
            if changes.get("samples") == 0:
                value, dense = (
                    bench.perplexity(model),
                    bench.perplexity(bench.dense),
                )
            else:
                settings = bench.settings(seed, **changes)
                value, found = bench.trained(model, settings, "tuned" in name)
                dense = (
                    bench.perplexity(bench.tuned(settings))
                    if what == "samples"
                    else None
                )
            over = {"over dense": value / dense} if dense else {}
            row = {"case": name, "method": method, "sparsity": sparsity, "seed": seed,
                   "perplexity": value, **over, **found}  # fmt: skip
            say(row)
            rows.append(row)
    return rows


def plot_samples(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Data efficiency: perplexity over the dense model's, tuned on as many windows (a PNG)."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for loss, label in (
        ("plain", "next token"),
        ("tuned teacher", "distilled, tuned teacher"),
    ):
        found: dict[int, list[float]] = {}
        for row in rows:
            name, count = row["case"].rsplit(", ", 1)
            if name == loss:
                found.setdefault(int(count), []).append(row["over dense"])
        axes.plot(
            range(len(found)), [statistics.mean(values) for values in found.values()],
            marker="o", label=label,
        )  # fmt: skip
        axes.set_xticks(range(len(found)), [f"{count:,}" for count in found])
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(
        xlabel="training windows",
        ylabel="perplexity over dense, tuned as long",
        title=title,
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("what", choices=["table", "mixes", "rates", "samples"])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument(
        "--lora-lr", type=float, default=3e-4, help="of both losses"
    )
    parser.add_argument("--rates", type=float, nargs="*", default=[1e-3])
    names = ["plain", "distilled", "tuned teacher"]
    parser.add_argument(
        "--losses", nargs="+", choices=names, default=names, help="of the table"
    )
    parser.add_argument(
        "--paper", action="store_true", help="plain at the paper's rate as well"
    )
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--balance-rate", type=float, default=1e-3)
    parser.add_argument(
        "--methods",
        default="moesaic-dynamic:fine,moesaic,cmoe,static",
        help="NAME[:GRAIN]",
    )
    parser.add_argument(
        "--sparsity", type=float, nargs="+", default=[0.25, 0.5]
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=32_768)
    parser.add_argument("--only", default="", help="mixes: only these")
    parser.add_argument(
        "--plot", type=Path, help="samples: a PNG of data efficiency"
    )
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(f"# {Path(arguments.model).name}: {vars(arguments)}", flush=True)
    bench = Bench(arguments)
    if arguments.what == "table":
        print_table(table(bench))
    else:
        rows = variants(bench, arguments.what)
        if arguments.plot:
            skipped = f"{arguments.sparsity[0]:.0%} skipped"
            title = (
                f"{Path(arguments.model).name}, {arguments.methods}, {skipped}"
            )
            plot_samples(rows, arguments.plot, title)


if __name__ == "__main__":
    main()
