"""What a user chooses from in one engine: perplexity over dense against measured time.

    python benchmarks/engine_frontier.py llama.cpp --output DIR --models moesaic-25=FOLDER,...
        --engine-python VENV/bin/python --convert-hf llama.cpp/convert_hf_to_gguf.py
    python benchmarks/engine_frontier.py transformers --output DIR --models moesaic-25=FOLDER,...
    python benchmarks/engine_frontier.py vllm --output DIR --models moesaic-25=FOLDER,...
        --engine-python .engines/vllm/bin/python

FOLDERs are converted by moesaic from the model of `make smollm2`. In llama.cpp each model, the
dense one too, is a GGUF file in 16, 8 and 4 bits (--kinds), and perplexity is llama.cpp's own; in
transformers it is in its own dtype, and perplexity that of transformers. vLLM is given experts as
`moesaic export --format glm4_moe` writes them, pruned models by `--format dense`, in their own
dtype, 8 and 4 bits (benchmarks/vllm_files.py), single neurons as they are (plug-in), and perplexity
is vLLM's own. Time is over the dense model's in 16 bits, by `moesaic bench`, so say it on a machine
that does nothing else; --perplexity-only leaves time out, for one that does. --perplexities
dense=1,NAME=1.03,NAME w8a8=1.04 takes what was measured elsewhere, so that models that were
converted on few tokens may be timed. In vLLM each model is loaded alone, the dense one first and
once more at the end (`again`).
Writes DIR/ENGINE.json as it goes, and goes on with it; DIR/ENGINE.md and .png at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from smollm2_model import find_texts, needed_folder

import moesaic
from moesaic.bench.engine import end_with_this_process
from moesaic.calibration.text import to_ids
from moesaic.cli.quiet import quieten
from moesaic.families.load import load_config, load_model, load_tokenizer
from moesaic.modeling.moe_config_moesaic import NEURON_KINDS

HERE = Path(__file__).parent
DENSE = "dense"
LENGTH = 512
# What others are divided by, and the number formats that are tried. The model's weights lie on
# q4_1's grid already: that flatters the dense model and attention in q4_1.
BASE = {"llama.cpp": "f16", "transformers": "own", "vllm": "own"}
KINDS = {
    "llama.cpp": "f16,q8_0,q4_1",
    "transformers": "own",
    "vllm": "own,w8a8,w4a16",
}
# What quantises and measures in the engine's own Python.
FILES = {"llama.cpp": "llama_cpp_files.py", "vllm": "vllm_files.py"}
AGAIN = "again"
BATCHES = (1, 16)
# By the key of a row: that of one sequence has the name of its kind.
REGIMES = {
    "prefill": "a prompt",
    "decode": "a token",
    "decode-16": "a token of 16 answers",
}


class Frontier:
    """The models of one engine, and what is known of them."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.dense = needed_folder()
        self.models = {DENSE: self.dense} | options.models
        if options.engine == "vllm":
            self.models[AGAIN] = self.dense
        tokenizer = load_tokenizer(str(self.dense))
        ids = to_ids(find_texts().heldout, tokenizer)
        self.ids = ids[: options.tokens]
        self.path = options.output / f"{options.engine}.json"
        self.rows: dict[str, dict[str, Any]] = {}
        if self.path.is_file():
            self.rows = json.loads(self.path.read_text())

    def fill(self) -> None:
        """Measures what is missing."""
        for name, kind in self.names():
            row = self.rows.setdefault(f"{name} {kind}", {})
            model = self.file_of(name, kind)
            perplexities = self.options.perplexities
            known = perplexities.get(f"{name} {kind}")
            if known is None and kind == BASE[self.options.engine]:
                known = perplexities.get(name)
            if known is not None:
                row["perplexity"] = known
            elif "perplexity" not in row:
                row["perplexity"] = self.perplexity(model)
            self.save()
            if not self.options.perplexity_only and "decode-16" not in row:
                for regime in REGIMES:  # all over the same dense times
                    row.pop(regime, None)
                row |= self.times(model)
                self.save()
            print(name, kind, row, flush=True)

    def names(self) -> list[tuple[str, str]]:
        kinds = self.options.kinds
        pairs = [(name, kind) for name in self.models for kind in kinds]
        return [pair for pair in pairs if self.is_to_be_had(*pair)]

    def is_to_be_had(self, name: str, kind: str) -> bool:
        """vLLM takes single neurons as they are, and needs the dense model once again."""
        if self.options.engine != "vllm" or kind == BASE["vllm"]:
            return True
        return name != AGAIN and not is_of_neurons(self.models[name])

    def file_of(self, name: str, kind: str) -> Path:
        """What the engine loads."""
        if self.options.engine == "transformers":
            return Path(self.models[name])
        if self.options.engine == "vllm":
            return self.served_in(name, kind)
        own = self.options.output / f"{name}.f16.gguf"
        if not own.is_file():
            self.write_gguf(self.models[name], own)
        if kind == "f16":
            return own
        file = self.options.output / f"{name}.{kind}.gguf"
        if not file.is_file():
            self.in_engine("quantise", str(own), str(file), kind)
        return file

    def served_in(self, name: str, kind: str) -> Path:
        """As vLLM takes it, in this number format."""
        folder = self.served(name)
        if kind == BASE["vllm"]:
            return folder
        output = self.options.output / f"{name}.{kind}"
        if not output.is_dir():
            self.in_engine("quantise", str(folder), str(output), kind)
        return output

    def served(self, name: str) -> Path:
        """As vLLM takes it, in its own dtype."""
        folder = Path(self.models[name])
        config = load_config(str(folder))
        if config.model_type != "moesaic" or is_of_neurons(folder):
            return folder
        output = self.options.output / f"{name}.vllm"
        if not output.is_dir():
            is_pruned = config.moesaic.router is None
            format_name = "dense" if is_pruned else "glm4_moe"
            export = [sys.executable, "-m", "moesaic", "export", folder]
            run([*export, "--format", format_name, "--output", output])
        return output

    def write_gguf(self, folder: Path, file: Path) -> None:
        """In 16 bits: ours by moesaic, ordinary models by llama.cpp's script."""
        config = load_config(str(folder))
        if config.model_type != "moesaic":
            words = [self.options.convert_hf, folder, "--outfile", file]
            run([sys.executable, *words, "--outtype", "f16"])
            return
        export = [sys.executable, "-m", "moesaic", "export", folder]
        if config.moesaic.router is None:
            narrow = file.with_name(f"{file.name}.dense")
            if not narrow.is_dir():
                run([*export, "--format", "dense", "--output", narrow])
            self.write_gguf(narrow, file)
            return
        run(
            [
                *export,
                "--format",
                "gguf",
                "--dtype",
                "float16",
                "--output",
                file,
            ]
        )

    def perplexity(self, model: Path) -> float:
        """Of answers: neurons that are chosen are chosen for each token."""
        if self.options.engine == "transformers":
            loaded = load_model(str(model), "auto")
            value, _ = moesaic.perplexity(loaded, self.ids, LENGTH)
            return value
        ids_file = self.options.output / "ids.json"
        ids_file.write_text(json.dumps(self.ids.tolist()))
        answer = self.in_engine(
            "perplexity", str(model), str(ids_file), str(LENGTH)
        )
        return float(answer)

    def in_engine(self, *words: str) -> str:
        script = HERE / FILES[self.options.engine]
        return run([self.options.engine_python, script, *words])

    def times(self, model: Path) -> dict[str, Any]:
        """Median, least and most over the dense model in 16 bits."""
        if self.options.engine == "vllm":
            return self.times_alone(model)
        dense = self.file_of(DENSE, BASE[self.options.engine])
        result = moesaic.bench(
            str(model),
            against=str(dense),
            prefill=512,
            decode=64,
            batches=BATCHES,
            engine=self.options.engine,
            engine_python=self.options.engine_python,
            rounds=self.options.rounds,
            threads=2,
        )
        times = {}
        for row in result["rows"]:
            times[regime_of(row)] = {
                "median": row["ratio"],
                "least": row["least"],
                "most": row["most"],
            }
        return times

    def times_alone(self, model: Path) -> dict[str, Any]:
        """The same of a model that ran by itself, after the dense one did."""
        result = moesaic.bench(
            str(model),
            prefill=512,
            decode=64,
            batches=BATCHES,
            engine=self.options.engine,
            engine_python=self.options.engine_python,
            rounds=self.options.rounds,
        )
        times = {}
        known = self.rows[f"{DENSE} {BASE['vllm']}"]
        for row in result["rows"]:
            (seconds,) = row["seconds"]
            median = statistics.median(seconds)
            base = known.get(regime_of(row), {"seconds": median})["seconds"]
            times[regime_of(row)] = {
                "median": median / base,
                "least": min(seconds) / base,
                "most": max(seconds) / base,
                "seconds": median,
            }
        return times

    def save(self) -> None:
        self.path.write_text(json.dumps(self.rows, indent=1) + "\n")

    def write(self) -> None:
        """The table and the plot."""
        base = BASE[self.options.engine]
        dense = self.rows[f"{DENSE} {base}"]["perplexity"]
        lines = [
            "| model | perplexity over dense | a prompt of 512 | a token | a token of 16 answers |",
            "|---|---|---|---|---|",
        ]
        for name, row in self.rows.items():
            ratio = row["perplexity"] / dense
            cells = [name, f"{ratio:.3f}"]
            for regime in REGIMES:
                time = row.get(regime)
                cell = "-" if time is None else worded(time)
                cells.append(cell)
            lines.append("| " + " | ".join(cells) + " |")
        table = "\n".join(lines) + "\n"
        self.path.with_suffix(".md").write_text(table)
        self.plot(dense)

    def plot(self, dense: float) -> None:
        figure = Figure(figsize=(16, 4.6), layout="constrained")
        panels = figure.subplots(1, len(REGIMES))
        for panel, (regime, words) in zip(panels, REGIMES.items(), strict=True):
            for name, row in self.rows.items():
                if regime not in row or name.startswith(AGAIN):
                    continue
                median = row[regime]["median"]
                ratio = row["perplexity"] / dense
                panel.plot(median, ratio, "o", color=colour_of(name))
                panel.annotate(
                    name.removesuffix(" own"),
                    (median, ratio),
                    xytext=(4, 3),
                    textcoords="offset points",
                    fontsize=7,
                )
            panel.axvline(1, linestyle=":", color="grey")
            panel.axhline(1, linestyle=":", color="grey")
            panel.set_xlabel(f"time of {words}, over dense in 16 bits")
            panel.set_ylabel("perplexity over dense")
            panel.margins(x=0.25, y=0.08)  # room for the names
            times = [
                row[regime]["median"]
                for row in self.rows.values()
                if regime in row
            ]
            slowest = max(times, default=1)
            if slowest > 2:  # else what is near the dense model falls together
                panel.set_xscale("log")
                panel.xaxis.set_major_formatter("{x:g}")
                panel.xaxis.set_minor_formatter("{x:g}")
        figure.suptitle(f"SmolLM2-135M in {self.options.engine}, 2 threads")
        figure.savefig(self.path.with_suffix(".png"), dpi=130)


def regime_of(row: dict[str, Any]) -> str:
    """The key of REGIMES that a row of `moesaic bench` has; others are of prompts."""
    kind: str = row["kind"]
    return kind if row["batch"] == 1 else f"{kind}-{row['batch']}"


def is_of_neurons(folder: Path) -> bool:
    """Whether single neurons are chosen, which no stock architecture does."""
    config = load_config(str(folder))
    if config.model_type != "moesaic":
        return False
    router = config.moesaic.router
    return router is not None and router.kind in NEURON_KINDS


def colour_of(name: str) -> str:
    method = name.partition("-")[0].partition(" ")[0]
    colours = {DENSE: "black", "static": "tab:orange", "moesaic": "tab:blue"}
    return colours.get(method, "tab:green")


def worded(time: dict[str, float]) -> str:
    return f"{time['median']:.2f} ({time['least']:.2f} to {time['most']:.2f})"


def run(words: list[Any]) -> str:
    """Standard output of a command. Stops where it fails."""
    told = [str(word) for word in words]
    done = subprocess.run(told, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(told)}: {done.stderr[-2000:]}")
    return done.stdout


def named(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    return {name: value for name, _, value in pairs}


def folders(text: str) -> dict[str, Path]:
    return {name: Path(folder) for name, folder in named(text).items()}


def measured(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in named(text).items()}


def check_settings(options: argparse.Namespace) -> None:
    """What is kept under a name is of this many tokens, and of this folder."""
    file = options.output / f"{options.engine}.settings.json"
    known: dict[str, Any] = {"tokens": options.tokens, "models": {}}
    if file.is_file():
        known = json.loads(file.read_text())
    others = [
        name
        for name, folder in options.models.items()
        if known["models"].get(name, str(folder)) != str(folder)
    ]
    if others or known["tokens"] != options.tokens:
        sys.exit(f"{file} has other settings; take another --output")
    known["models"] |= {
        name: str(folder) for name, folder in options.models.items()
    }
    file.write_text(json.dumps(known, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("engine", choices=tuple(BASE))
    add("--output", type=Path, required=True)
    add("--models", type=folders, required=True)
    add("--kinds", help="with the first of KINDS among them")
    add("--engine-python")
    add("--convert-hf", type=Path)
    add("--tokens", type=int, default=8192)
    add("--rounds", type=int, default=5)
    add("--perplexity-only", action="store_true")
    add("--perplexities", type=measured, default={})
    options = parser.parse_args()
    kinds = options.kinds or KINDS[options.engine]
    options.kinds = kinds.split(",")
    options.output.mkdir(parents=True, exist_ok=True)
    quieten()
    end_with_this_process()
    check_settings(options)
    frontier = Frontier(options)
    frontier.fill()
    frontier.write()


if __name__ == "__main__":
    main()
