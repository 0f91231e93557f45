"""`moesaic demo`: the main job on the embedded model, with its references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.checkpoint import check_output
from moesaic.convert import convert
from moesaic.data import to_ids
from moesaic.evaluate.perplexity import perplexity
from moesaic.flops import count_macs
from moesaic.load import load_model, load_tokenizer

LAYOUT = "S3A3E8"
HELDOUT_TOKENS = 65_536


@dataclass
class DemoRow:
    name: str
    perplexity: float
    active_ffn_fraction: float
    macs: float  # per token
    seconds: float | None  # of the conversion, without loading and evaluating


def run_demo(output: Path, say: Callable[[str], Any]) -> list[DemoRow]:
    """Converts the demo model by the paper's method, saves and reloads it, and evaluates it.

    Beside it stand the dense model, static pruning at the same budget and a random conversion.
    Calibration and held-out text are disjoint modules of the standard library.
    """
    check_output(output, overwrite=True, resume=False)
    tokenizer = load_tokenizer("demo")
    ids = to_ids("demo", tokenizer, heldout=True)
    dense = load_model("demo", "float32")
    length = dense.config.max_position_embeddings

    def row(name: str, model: Any, seconds: float | None) -> DemoRow:
        value, _ = perplexity(model, ids, length, HELDOUT_TOKENS)
        macs = count_macs(model, 1)
        return DemoRow(name, value, macs.active_ffn_fraction, macs.total, seconds)

    say("dense model: evaluating")
    rows = [row("dense", dense, None)]
    for recipe in ("cmoe", "static", "random"):
        say(f"{recipe}: converting to {LAYOUT} and evaluating")
        target = output if recipe == "cmoe" else None
        model, report = convert(
            "demo", recipe, LAYOUT, "demo", output=target, overwrite=True, dtype="float32",
            command=f"moesaic convert demo --output {output} --dtype float32",
        )  # fmt: skip
        if target is not None:
            model = load_model(target)
        rows.append(row(recipe, model, sum(report.step_seconds.values())))
    return rows
