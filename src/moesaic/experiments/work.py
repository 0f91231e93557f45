"""Multiply-accumulates of a text by the paper's convention (docs/method.md)."""

from __future__ import annotations

from typing import Any

from moesaic.conversion.options import make_budget
from moesaic.conversion.plan import make_plan
from moesaic.evaluate.work import count_macs, meta_model
from moesaic.experiments.study import LAYOUT, Study
from moesaic.families.load import load_config
from moesaic.methods.load import load_method

TOKENS = 128  # of the text that the paper's Table 7 counts


def macs_of(study: Study, model: str) -> float:
    """Billions, of a model that is there."""
    config = load_config(model, study.trust_remote_code)
    return counted(config)


def counted(config: Any) -> float:
    """Billions, from a configuration alone."""
    return count_macs(meta_model(config), TOKENS).total / 1e9


def planned_macs(config: Any, name: str) -> float:
    """Billions after a conversion by cmoe, from the dense configuration alone."""
    method = load_method("cmoe")
    plan = make_plan(config, name, method, make_budget(LAYOUT))
    return counted(plan.config)


def decoding_speeds(study: Study, model: str) -> tuple[float, float]:
    """Tokens a second of a model and of the dense one, timed in turn, one sequence."""
    context = study.scale.contexts[0]
    for row in study.speeds(model, context):
        if row["kind"] == "decode" and row["batch"] == study.scale.batches[0]:
            ours, dense = row["tokens_per_second"]
            return ours, dense
    raise AssertionError("bench times decoding of every batch")
