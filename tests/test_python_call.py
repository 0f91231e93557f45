"""The call that a card tells, where no command was typed: it makes the same conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesaic.conversion.options import make_options
from moesaic.conversion.prepare import source_name
from moesaic.conversion.python_call import python_call


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, "moesaic.convert('m', 'moesaic', calibration='demo')"),
        (
            {"layout": "S1A3E8", "samples": 4, "seed": 7, "dense_layers": [0, 2]},
            "moesaic.convert('m', 'moesaic', layout='S1A3E8', calibration='demo', samples=4, "
            "dense_layers=(0, 2), seed=7)",
        ),
        (
            {"recipe": "teal", "sparsity": 0.4, "calibration": ["a text"], "dtype": "float32"},
            "moesaic.convert('m', 'teal', sparsity=0.4, calibration=..., dtype='float32')",
        ),
        (
            {"recipe": "teal", "sparsity": 0.0},
            "moesaic.convert('m', 'teal', sparsity=0.0, calibration='demo')",
        ),
        (
            {"settings": {"layer_budgets": "dense-first"}, "grain": "fine"},
            "moesaic.convert('m', 'moesaic', settings={'layer_budgets': 'dense-first'}, "
            "grain='fine', calibration='demo')",
        ),
    ],
)
def test_what_was_said_and_is_no_default(said: dict[str, Any], expected: str) -> None:
    values: dict[str, Any] = {"recipe": "moesaic", "layout": None, "calibration": "demo"} | said
    options = make_options("some/where/m", **values)
    assert python_call(options, "m") == expected


def test_texts_are_named_without_their_folders(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{}")
    for source, expected in (("x.jsonl", "x.jsonl"), ("x.jsonl:body", "x.jsonl:body")):
        options = make_options("m", "cmoe", "S3A3E8", str(tmp_path / source))
        assert f"calibration='{expected}'" in python_call(options, "m")


def test_recovery_is_said_too() -> None:
    options = make_options("m", "cmoe", "S3A3E8", "demo")
    call = python_call(options, "m", recover=4096, tune_dense=True)
    assert call.endswith("calibration='demo', recover=4096, tune_dense=True)")
    assert "tune_dense" not in python_call(options, "m", recover=4096, tune_dense=None)


def test_reports_name_texts_without_their_folders_too(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{}")
    assert source_name(str(tmp_path / "x.jsonl:body")) == "x.jsonl:body"
    assert source_name({"one": tmp_path / "x.jsonl", "other": "c4"}) == "x.jsonl + c4"
