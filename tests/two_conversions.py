"""What test_distributed_conversion.py compares: the same here, on one process, and under torchrun.

    torchrun --nproc-per-node 2 -m tests.two_conversions FOLDER

Every process writes what it found to FOLDER/RANK.pt.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moesaic
from moesaic.calibration.calibration_set import CalibrationSet
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.share import Share, share_of_launch
from moesaic.calibration.statistics import StatisticsKind
from moesaic.cli.main import main as command
from moesaic.conversion.run import Run
from moesaic.errors import LostError, MoesaicError
from moesaic.families import DenseFFN
from tests.families import CONTEXT, VOCABULARY, tiny_model, tokens
from tests.stock_models import tokenizer

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
WINDOWS = tokens(33, CONTEXT, seed=1)  # shares differ by one
# A method to what it is given besides.
CASES: dict[str, dict[str, Any]] = {
    "moesaic": {"layout": "S2A3E8", "settings": {"up_steps": 2, "importance": "observability"}},
    # Thresholds lie at a token's score, so that rounding decides about one token. What the next
    # layers would take back of its drift shows that.
    "moesaic-dynamic": {
        "layout": "S2A3E8",
        "settings": {"layer_budgets": "gradient", "undo_drift": 0.0},
    },
    "moesaic-neurons": {"sparsity": 0.5, "settings": {"layer_budgets": "uniform"}},
    "cmoe": {"layout": "S2A3E8"},
    "flap": {"sparsity": 0.25},
    "expertweaver": {"layout": "S2A18E26", "settings": {"threshold": 0.2}},
    "read-me": {"layout": "S0A1E2"},
    "llama-moe-v2": {"sparsity": 0.5},
    "moefication": {"sparsity": 0.5},
    "g-moefication": {"sparsity": 0.5},
    "searched": {"recipe": "moesaic", "sparsity": 0.25},
    "shown": {"layout": "S2A3E8"},  # docs/add_a_method.md: it knows of no processes
}


class StoppedError(Exception):
    """As if the processes had been killed."""


def converted(case: str, shown: Path, **more: Any) -> dict[str, Any]:
    """State and report of a tiny model that was converted in memory, or into an output."""
    options = CASES[case] | more
    recipe: Any = options.pop("recipe", case)
    if case == "shown":
        recipe = shown
    calibration: Any = WINDOWS
    if case == "read-me":
        calibration = {"even": WINDOWS[::2], "odd": WINDOWS[1::2]}
    model, report = moesaic.convert(tiny_model("qwen3"), recipe, calibration=calibration, **options)
    return {"state": dict(model.state_dict()), "report": report.to_dict(timing=False)}


def exchanged(share: Share, hold_out: bool, samples: int) -> dict[str, Any]:
    """All that a method can ask of its inputs, of tokens that are their own numbers."""
    length = 8
    calibration = CalibrationSet(torch.zeros(samples, length, dtype=torch.long))
    part = calibration.part(share, hold_out)
    x_TD = torch.arange(samples * length * 3.0).view(-1, 3)
    own_NLD = x_TD.view(samples, length, 3)[part.window_N]
    blocks = own_NLD.flatten(0, 1).split(length * 2)
    inputs = FFNInputs(blocks, calibration.split, hold_out, CPU, CPU, part=part)
    ffn = DenseFFN(up_FD=torch.eye(3), down_DF=torch.eye(3), activation="linear")
    kind = StatisticsKind(activation_top_k=1, sample=True, gram=True)
    statistics = inputs.statistics(ffn, kind)
    assert statistics.active is not None
    thirds = inputs.apart(len(x_TD) // 3)
    return {
        "windows": part.window_N,
        "own": torch.cat(list(inputs.own())),
        "fit": torch.cat(list(inputs.fit())),
        "heldout": torch.cat(list(inputs.heldout())),
        "sample": inputs.sample(),
        "heldout sample": inputs.heldout_sample(3),
        "apart": torch.cat(list(thirds.fit())),
        "apart, tokens": thirds.tokens,
        "apart, heldout": thirds.heldout_sample(3),
        "map": inputs.map(row_sums).whole(),
        "tokens": statistics.tokens,
        "energy": torch.from_numpy(statistics.energy_F),
        "active": torch.from_numpy(statistics.active.toarray()),
        "gram": statistics.gram_FF,
        "sampled h": statistics.sample_h_SF,
    }


def row_sums(x_TD: Tensor) -> Tensor:
    return x_TD.sum(1, keepdim=True)


def stopped_and_resumed(folder: Path, shown: Path) -> dict[str, Any]:
    """A conversion into a folder, stopped after its second layer, and resumed."""
    save = Run._save

    def save_and_stop(run: Run, layer: int, *rest: Any) -> None:
        save(run, layer, *rest)
        if layer == 1:
            raise StoppedError

    options: dict[str, Any] = {"output": folder / "resumed", "tokenizer": tokenizer()}
    Run._save = save_and_stop  # type: ignore[method-assign]
    try:
        converted("moesaic", shown, **options)
    except StoppedError:
        pass
    finally:
        Run._save = save  # type: ignore[method-assign]
    model, report = moesaic.convert(
        tiny_model("qwen3"), "moesaic", calibration=WINDOWS, resume=True, **CASES["moesaic"],
        **options,
    )  # fmt: skip
    return {
        "state": dict(model.state_dict()),
        "report": report.to_dict(timing=False),
        "before": [layer.seconds is None for layer in report.layers],
    }


def refused(windows_NL: Tensor, model: Any, method: str = "static") -> str:
    try:
        moesaic.convert(model, method, calibration=windows_NL)
    except MoesaicError as error:
        return str(error)
    return "nothing was wrong"


def broken() -> tuple[Any, Tensor]:
    """A model that one token breaks, and windows of which only the last one has it."""
    model = tiny_model("qwen3")
    word = VOCABULARY - 1
    with torch.no_grad():
        model.get_input_embeddings().weight[word] = 3e38
    windows_NL = WINDOWS.clamp(max=word - 1)
    windows_NL[-1, -1] = word
    return model, windows_NL


def command_words(folder: Path, output: str) -> list[str]:
    """`convert` of the model and the text that lie in the folder."""
    words = ["convert", folder / "dense", "--calibration", folder / "text.txt", "--samples", 17]
    words += ["--layout", "S2A3E8", "--device", "cpu", "--output", folder / output]
    return [str(word) for word in words]


def commanded(folder: Path, output: str) -> None:
    sys.argv = ["moesaic", *command_words(folder, output)]
    with suppress(SystemExit):
        command()


def main() -> None:
    folder, shown = map(Path, sys.argv[1:])
    place = int(os.environ["RANK"])
    share = share_of_launch(CPU)
    found: dict[str, Any] = {}
    for hold_out in (True, False):
        for samples in (5, 17):
            found[f"{hold_out} {samples}"] = exchanged(share, hold_out, samples)
    for case in CASES:
        found[case] = converted(case, shown)
    commanded(folder, "commanded")
    found["resumed"] = stopped_and_resumed(folder, shown)
    model, windows_NL = broken()
    found["broken"] = refused(windows_NL, model)
    found["others"] = refused(tokens(9, CONTEXT, seed=place), tiny_model("qwen3"))
    found["linears"] = refused(WINDOWS, tiny_model("qwen3"), "teal")
    if place == 0:
        try:  # the other process is on its way out
            share.total(1.0)
        except LostError as error:
            found["lost"] = str(error)
    torch.save(found, folder / f"{place}.pt")


if __name__ == "__main__":
    main()
