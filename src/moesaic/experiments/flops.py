"""Table 7: FLOPs and MACs of a text of 128 tokens, and tokens a second."""

from __future__ import annotations

from importlib.resources import as_file, files

from moesaic.experiments.study import LAYOUT, Study
from moesaic.experiments.table import Column, Row, Table, Value
from moesaic.experiments.work import (
    counted,
    decoding_speeds,
    macs_of,
    planned_macs,
)
from moesaic.families.load import load_config

COLUMNS = (
    Column("flops", "FLOPs (G)", 2),
    Column("macs", "MACs (G)", 2),
    Column("saved", "MACs saved (%)", 1),
    Column("speed", "tokens/s", 1, timed=True),
)
# Configurations of the paper's models: their work is counted without weights.
CONFIGS = {
    "Llama-2 7B": "llama-2-7b",
    "Llama-2 70B": "llama-2-70b",
    "Qwen-2.5-7B": "qwen2.5-7b",
    "Qwen-3-30B-A3B": "qwen3-30b-a3b",
}

PAPER: dict[str, dict[str, Value]] = {
    "Llama-2 7B, dense": {"flops": 1690, "macs": 845.7, "speed": 45.9},
    "Llama-2 7B, cmoe": {
        "flops": 1410,
        "macs": 707.4,
        "saved": 16.3,
        "speed": 52.7,
    },
    "Qwen-3-30B-A3B, dense": {"flops": 778.7, "macs": 389.3, "speed": 1.19},
    "Qwen-3-30B-A3B, cmoe": {
        "flops": 634.9,
        "macs": 331.3,
        "saved": 14.9,
        "speed": 1.36,
    },
}


def run(study: Study) -> Table:
    made = study.converted("cmoe", LAYOUT)
    ours, dense = decoding_speeds(study, made)
    before = macs_of(study, study.model)
    after = macs_of(study, made)
    rows = [
        Row(
            "this model, dense",
            _values(before, before, dense),
            is_reference=True,
        ),
        Row("this model, cmoe", _values(after, before, ours)),
    ]
    for model, name in CONFIGS.items():
        rows += _rows_of_config(model, name)
    notes = [
        f"cmoe at {LAYOUT}; FLOPs are twice the MACs; scores of attention are left out, "
        "as in the paper",
        "the paper's models are counted from their configurations: no weights, no times",
        "the paper's 331.3 leaves out the routers inside the experts",
        "tokens/s: decoding, one sequence, both models in turn",
    ]
    return Table(COLUMNS, rows, notes)


def _rows_of_config(model: str, name: str) -> list[Row]:
    path = files("moesaic.experiments").joinpath("configs", f"{name}.json")
    with as_file(path) as file:
        config = load_config(str(file))
    before = counted(config)
    after = planned_macs(config, model)
    names = (f"{model}, dense", f"{model}, cmoe")
    return [
        Row(names[0], _values(before, before), PAPER.get(names[0], {})),
        Row(names[1], _values(after, before), PAPER.get(names[1], {})),
    ]


def _values(
    macs: float, dense: float, speed: float | None = None
) -> dict[str, Value]:
    saved = None if macs == dense else 100 * (1 - macs / dense)
    return {"flops": 2 * macs, "macs": macs, "saved": saved, "speed": speed}
