"""`moesaic demo`: the main job on the embedded model, with its references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.calibration.text import to_ids
from moesaic.evaluate.perplexity import perplexity
from moesaic.evaluate.work import count_macs
from moesaic.families.load import load_model, load_tokenizer
from moesaic.finetune.convert import convert
from moesaic.layout import layouts_for
from moesaic.methods.load import load_method
from moesaic.output.draft import check_output, is_begun

SPARSITY = 0.25
METHODS_SHOWN = ("moesaic", "cmoe", "static-repaired", "static", "random")
SAMPLES = 64  # of 512 tokens
HELDOUT_TOKENS = 65_536


@dataclass
class DemoRow:
    name: str
    perplexity: float
    active_ffn_fraction: float
    macs: float  # per token
    seconds: float | None  # of the conversion, without loading and evaluating


def run_demo(
    output: Path, say: Callable[[str], Any], overwrite: bool = False
) -> list[DemoRow]:
    """Converts the demo model by our method, saves and reloads it, and evaluates it.

    Beside it stand the dense model and, at the same budget and on the same calibration tokens,
    the paper's method, static pruning with and without repair, and a random conversion.
    Calibration and held-out text are disjoint modules of the standard library.
    """
    resume = is_begun(output) and not overwrite
    check_output(output, overwrite, resume)
    tokenizer = load_tokenizer("demo")
    ids = to_ids("demo", tokenizer, heldout=True)
    dense = load_model("demo", "float32")
    length = dense.config.max_position_embeddings

    def row(name: str, model: Any, seconds: float | None) -> DemoRow:
        value, _ = perplexity(model, ids, length, HELDOUT_TOKENS)
        macs = count_macs(model, 1)
        return DemoRow(
            name, value, macs.active_ffn_fraction, macs.total, seconds
        )

    say("dense model: evaluating")
    rows = [row("dense", dense, None)]
    neurons = dense.config.intermediate_size
    for method in METHODS_SHOWN:
        count = getattr(load_method(method), "experts", None)
        layout = layouts_for(SPARSITY, neurons, experts=count)[0]
        say(f"{method}: converting to {layout} and evaluating")
        target = output if method == METHODS_SHOWN[0] else None
        model, report = convert(
            "demo",
            method,
            layout,
            "demo",
            samples=SAMPLES,
            output=target,
            overwrite=overwrite,
            resume=resume and target is not None,
            dtype="float32",
            command=f"moesaic convert demo --layout {layout} --samples {SAMPLES} "
            f"--output {output} --dtype float32",
        )
        if target is not None:
            model = load_model(target)
        rows.append(row(method, model, sum(report.step_seconds.values())))
    return rows
