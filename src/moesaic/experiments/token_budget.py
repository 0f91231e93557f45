"""Table 6: the tokens a method sees, and the minutes that it takes."""

from __future__ import annotations

from functools import partial

from moesaic.experiments.rows import attempt, contender
from moesaic.experiments.study import Study
from moesaic.experiments.table import Column, Row, Table, Value

METHODS = ("cmoe", "llama-moe", "llama-moe-v2", "moesaic")
COLUMNS = (
    Column("tokens", "tokens (M)", 3),
    Column("construct", "construction (min)", 3, timed=True),
    Column("all", "with fine-tuning (min)", 3, timed=True),
)

# Llama-2 7B. The times of LLaMA-MoE (both) are of splitting alone.
PAPER: dict[str, dict[str, Value]] = {
    "cmoe": {"tokens": 4, "construct": 4.5, "all": 46},
    "llama-moe": {"tokens": 200_000, "construct": 6, "all": "weeks"},
    "llama-moe-v2": {"tokens": 7000, "construct": 8, "all": "days"},
}


def run(study: Study) -> Table:
    notes = [
        "here all methods see the same tokens; the paper's 200 and 7 billion are those of "
        "LLaMA-MoE's own papers, and are not run",
        "construction includes the measurement of every layer; tokens are those of "
        "calibration and fine-tuning",
    ]
    rows = []
    for method in METHODS:
        convert = partial(contender, study, method)
        made = attempt(method, notes, study, convert)
        if made is None:
            continue
        report = study.report(made)
        tokens = report.tokens
        values: dict[str, Value] = {}
        construction = study.seconds_of(made)
        if construction is not None:
            values["construct"] = construction / 60
        tuned = attempt(method, notes, study, partial(study.tuned, made))
        if tuned is not None:
            tokens += study.scale.tuning * study.scale.length
            tuning = study.seconds_of(tuned)
            if construction is not None and tuning is not None:
                values["all"] = (construction + tuning) / 60
        values["tokens"] = tokens / 1e6
        rows.append(Row(method, values, PAPER.get(method, {})))
    return Table(COLUMNS, rows, notes)
