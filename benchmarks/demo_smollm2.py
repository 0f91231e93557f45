"""The whole way on a real model: convert, save, reload, write, compare.

    make demo-smollm2

Converts SmolLM2-135M-Instruct by `moesaic` at 25 %, lets the dense and the converted model answer
the same question, and compares methods at 25 % and 50 %, one seed. Few tokens, so that it takes
less than 20 minutes on 2 cores: the numbers to quote come from benchmarks/smollm2.py.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from smollm2_model import Texts, find_texts, needed_folder

import moesaic
from moesaic.cli.quiet import quieten
from moesaic.cli.tables import comparison_table, out
from moesaic.errors import MoesaicError
from moesaic.families.load import load_model, load_tokenizer
from moesaic.methods.load import load_method
from moesaic.progress import duration, status

OUTPUT = Path("moesaic-demo-smollm2")
QUESTION = "Explain in one paragraph why the sea is salty."
ANSWER_TOKENS = 120
SPARSITIES = (0.25, 0.5)
LENGTH = 1024  # tokens of a window
SAMPLES = 8  # calibration windows: 5 tokens a neuron
# Of the model that is written: a quarter is skipped. A search of layouts takes a minute.
LAYOUT = "S1A23E32"
HELDOUT_TOKENS = 8192


def main() -> None:
    started = time.perf_counter()
    quieten()
    try:
        folder = needed_folder()
        texts = find_texts()
        out.print(f"text: {texts.origin}")
        convert(folder, texts)
        write(folder)
        compare(folder, texts)
    except (MoesaicError, OSError) as error:
        line = " ".join(str(error).split())
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
    taken = duration(time.perf_counter() - started)
    out.print(f"the converted model lies in {OUTPUT}; all of it took {taken}")


def convert(folder: Path, texts: Texts) -> None:
    """Writes the converted model to OUTPUT."""
    out.print(f"1 of 3: converting by moesaic, {LAYOUT}")
    _, report = moesaic.convert(
        folder,
        layout=LAYOUT,
        calibration=texts.calibration,
        samples=SAMPLES,
        sequence_length=LENGTH,
        output=OUTPUT,
        overwrite=True,
        progress=True,
    )
    out.print(
        f"{report.layout}, perplexity {report.perplexity:.2f}, dense "
        f"{report.dense_perplexity:.2f} ({report.heldout})"
    )


def write(folder: Path) -> None:
    """Prints what the dense and the reloaded model answer, side by side."""
    out.print(f"2 of 3: {QUESTION}")
    tokenizer = load_tokenizer(folder)
    answers = []
    for name in (folder, OUTPUT):
        with status(f"{name} writes"):
            model = load_model(name)
            answers.append(answer(model, tokenizer))
    table = Table("dense", "converted", show_lines=True)
    table.add_row(*answers)
    out.print(table)


@torch.inference_mode()
def answer(model: Any, tokenizer: Any) -> str:
    """A greedy answer to QUESTION."""
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids_1L = model.generate(
        **prompt, max_new_tokens=ANSWER_TOKENS, do_sample=False
    )
    asked = prompt["input_ids"].shape[1]
    return tokenizer.decode(ids_1L[0, asked:], skip_special_tokens=True)


def compare(folder: Path, texts: Texts) -> None:
    """Prints the frontier. `moesaic-neurons` as it is by default takes longer."""
    settings = {"up_steps": 0}
    neurons = load_method("moesaic-neurons", settings)
    changed = ", ".join(f"{name}={value}" for name, value in settings.items())
    out.print(
        f"3 of 3: methods at equal budgets; moesaic-neurons with {changed}"
    )
    with status("comparing") as tell:
        result = moesaic.compare(
            str(folder),
            ["moesaic", neurons],
            sparsity=SPARSITIES,
            calibration=texts.calibration,
            text=[texts.heldout],
            references=["static-repaired"],
            seeds=1,
            samples=SAMPLES,
            sequence_length=LENGTH,
            max_tokens=HELDOUT_TOKENS,
            progress=tell,
        )
    comparison_table(result)


if __name__ == "__main__":
    main()
