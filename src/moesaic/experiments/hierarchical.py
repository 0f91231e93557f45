"""Section 4.4: every expert of a mixture cut into shared and routed sub-experts."""

from __future__ import annotations

from functools import partial

from moesaic.evaluate.work import meta_model
from moesaic.experiments import zero_shot
from moesaic.experiments.contents import FIVE
from moesaic.experiments.rows import accuracy_row, attempt, task_columns
from moesaic.experiments.study import LAYOUT, Study
from moesaic.experiments.table import Column, Row, Table
from moesaic.experiments.work import macs_of
from moesaic.families import Mixtures, find_ffns
from moesaic.families.load import load_config

METHODS = ("cmoe", "moesaic", "static")
QWEN = "Qwen-3-30B-A3B"
COLUMNS = (
    Column("macs", "MACs (G)", 3),
    Column("wiki", "perplexity, wiki", 3),
    *task_columns(FIVE),
)
# GMACs of Table 7; accuracies are those of Table 1.
PAPER_MACS = {"mixture": 389.3, "cmoe, fine-tuned": 331.3}
_TABLE_1 = {"mixture": "dense", "cmoe, fine-tuned": "cmoe"}


def run(study: Study) -> Table:
    notes = [f"every expert at {LAYOUT}; the paper's numbers are of {QWEN}"]
    mixture = study.model
    if not _is_mixture(study):
        made = study.converted("moesaic", "S0A6E8")
        mixture = study.exported(made)
        notes.append(
            "this model is dense: the mixture is its export by moesaic at S0A6E8, so both "
            "levels are conversions"
        )
    models = {"mixture": mixture}
    for method in METHODS:
        convert = partial(study.converted, method, LAYOUT, model=mixture)
        converted = attempt(method, notes, study, convert)
        if converted is not None:
            models[method] = converted
    if "cmoe" in models:
        tune = partial(study.tuned, models["cmoe"])
        tuned = attempt("cmoe", notes, study, tune)
        if tuned is not None:
            models["cmoe, fine-tuned"] = tuned
    rows = [_row(study, name, model, notes) for name, model in models.items()]
    return Table(COLUMNS, rows, notes)


def _is_mixture(study: Study) -> bool:
    config = load_config(study.model, study.trust_remote_code)
    return isinstance(find_ffns(meta_model(config)), Mixtures)


def _row(study: Study, name: str, model: str, notes: list[str]) -> Row:
    numbers = zero_shot.PAPER[QWEN].get(_TABLE_1.get(name, ""), ())
    paper = dict(zip(FIVE, numbers, strict=False))
    if name in PAPER_MACS:
        paper["macs"] = PAPER_MACS[name]
    asked = accuracy_row(study, name, model, FIVE, notes)
    values = dict(asked.values)
    values["macs"] = macs_of(study, model)
    values["wiki"] = study.perplexity(model, "wiki")
    is_reference = name == "mixture"
    return Row(name, values, paper, asked.errors, is_reference)
