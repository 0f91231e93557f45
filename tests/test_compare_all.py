"""`compare` of everything: what cannot is said, what fails stops nothing, rows are fine-tuned."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import torch

import moesaic
from moesaic.cli.tables import comparison_table
from moesaic.comparison import compare as compare_module
from moesaic.comparison import speed, trials
from moesaic.comparison.compare import REFERENCES, _named
from moesaic.comparison.entries import METHOD, REFERENCE, make_entries
from moesaic.comparison.missing import CONVERSION, PLANNING, TUNING, Missing, lines_of
from moesaic.comparison.options import SPARSITY, CompareOptions
from moesaic.errors import MoesaicError
from moesaic.methods.contents import METHODS
from tests.families import tiny_model
from tests.stock_models import dense_model, tokenizer

TEXT = "the cat sat in a hat and the rat in a bin. a dog ran on the mat, the sun is hot. " * 150
WINDOWS = 8
TIMING = "dense: timing a pass over the calibration tokens"
FRAGILE = """
from dataclasses import dataclass
from pathlib import Path

from moesaic.methods.contents import Description
from moesaic.methods.static import Static


@dataclass(frozen=True)
class Fragile(Static):
    description = Description("fragile", "", "Breaks while a file is there.", "nothing")
    needs = frozenset({NEEDS})

    def convert_ffn(self, weights, inputs, sizes, generator):
        if Path(BROKEN).exists():
            raise RuntimeError("a fuse blew\\nin the cellar")
        return super().convert_ffn(weights, inputs, sizes, generator)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny dense model, and its text beside it."""
    path = tmp_path_factory.mktemp("models")
    dense_model("llama").save_pretrained(path / "dense")
    tokenizer().save_pretrained(path / "dense")
    (path / "text.txt").write_text(TEXT)
    return path


def compared(folder: Path, methods: Any, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "references": (), "sparsity": (0.5,), "seeds": 1, "samples": 8, "sequence_length": 64,
        "calibration": str(folder / "text.txt"), "device": "cpu",
    }  # fmt: skip
    return moesaic.compare(str(folder / "dense"), methods, **values | changes)


def fragile(folder: Path, broken: Path, needs: str = "") -> Path:
    path = folder / "fragile.py"
    path.write_text(FRAGILE.replace("BROKEN", repr(str(broken))).replace("NEEDS", needs))
    return path


# --- which methods -----------------------------------------------------------------------------


def test_all_are_every_method_once_and_references_stay_references() -> None:
    everything = _named("all", REFERENCES)
    assert set(everything) == set(METHODS) - set(REFERENCES)
    assert _named(["all"], ()) == list(METHODS)
    with_files = _named(["cmoe", "all", "mine.py"], REFERENCES)
    assert sorted(map(str, with_files)) == sorted([*everything, "mine.py"])
    assert _named("cmoe", ()) == ["cmoe"]


def test_who_cannot_is_named_with_the_reason_and_the_others_go_on(tmp_path: Path) -> None:
    """An FFN without a gate, and a wish that nobody grants."""
    names = ["static", "moesaic-neurons", fragile(tmp_path, tmp_path, needs="'telepathy'")]
    options = CompareOptions(
        model="a model", methods=tuple(map(moesaic.load_method, names)), references=(),
        sparsities=(0.5, 1.5), layout=None, grain="medium", calibration=("demo",), texts=("demo",),
    )  # fmt: skip
    found = make_entries(options, tiny_model("opt").config)
    assert [(entry.label, entry.goal.at) for entry in found.entries] == [("static", 0.5)]
    reasons = {(lack.method, lack.at): lack.reason for lack in found.missing}
    assert "without a gate" in reasons["moesaic-neurons", 0.5]
    assert "needs telepathy" in reasons["fragile", 0.5]
    assert "outside" in reasons["static", 1.5]
    assert {lack.step for lack in found.missing} == {PLANNING}


def test_several_calibration_texts_are_a_domain_each(folder: Path, tmp_path: Path) -> None:
    """As many windows of each, and what is held out of each is measured on."""
    second = tmp_path / "second.txt"
    words = (folder / "text.txt").read_text().split()
    second.write_text(" ".join(reversed(words)))
    sources = [str(folder / "text.txt"), str(second)]
    result = compared(folder, ["read-me", "static"], calibration=sources)
    assert {row["method"] for row in result["rows"]} == {"read-me", "static"}
    assert set(result["dense"]) == set(sources)
    assert result["settings"]["calibration"]["samples"] == 8
    alone = compared(folder, ["read-me", "static"])
    (lack,) = alone["missing"]
    assert "at least two domains" in lack["reason"]
    with pytest.raises(MoesaicError, match="each once"):
        compared(folder, "static", calibration=[sources[0], sources[0]])


def test_griffin_is_not_measured_on_windows_that_are_all_prompt(folder: Path) -> None:
    """It would come first, at the dense model's perplexity and a part of its work."""
    griffin = moesaic.load_method("griffin", {"prompt": 16})
    result = compared(folder, ["static", griffin], sequence_length=16, max_tokens=256)
    assert {row["method"] for row in result["rows"]} == {"static"}
    (lack,) = result["missing"]
    assert lack["method"] == "griffin prompt=16"
    assert "perplexity would be the dense model's" in lack["reason"]
    result = compared(folder, griffin, sequence_length=32, max_tokens=256)
    (row,) = result["rows"]
    assert row["notes"] == [
        "the first 16 of 32 tokens of every window run whole; work is that of a token after them"
    ]


def test_what_is_missing_in_lines() -> None:
    """One reason for several budgets is said once; what failed is said for each."""
    never = [Missing("a", METHOD, SPARSITY, at, PLANNING, "no gate") for at in (0.25, 0.5)]
    failed = [Missing("b", METHOD, SPARSITY, 0.5, CONVERSION, "NaN", seed) for seed in (0, 1)]
    untuned = Missing("c", REFERENCE, SPARSITY, 0.5, TUNING, "too large", 0)
    assert lines_of([*never, *failed, untuned]) == [
        "without a: no gate",
        "without b at sparsity 0.5, seed 0: NaN",
        "without b at sparsity 0.5, seed 1: NaN",
    ]


# --- failures ----------------------------------------------------------------------------------


def test_a_row_that_fails_is_reported_stops_nothing_and_is_tried_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    passed = []

    def two_seconds(model: Any, windows_NL: torch.Tensor) -> float:
        passed.append(windows_NL.numel())
        return 2.0

    monkeypatch.setattr(compare_module, "pass_seconds", two_seconds)
    monkeypatch.setenv("COLUMNS", "200")
    broken = tmp_path / "broken"
    broken.touch()
    methods = [fragile(tmp_path, broken), "static"]
    output = tmp_path / "out"
    found = compared(folder, methods, output=output)
    assert [row["method"] for row in found["rows"]] == ["static"]
    [lack] = found["missing"]
    assert (lack["method"], lack["step"], lack["seed"]) == ("fragile", CONVERSION, 0)
    assert lack["reason"] == "RuntimeError: a fuse blew"
    line = "without fragile at sparsity 0.5, seed 0: RuntimeError: a fuse blew"
    assert line in found["remarks"]
    page = (output / "compare.md").read_text()
    assert "| fragile | failed |" in page
    assert f"- {line}" in page
    last = list(csv.DictReader(io.StringIO((output / "compare.csv").read_text())))[-1]
    assert (last["method"], last["step"], last["reason"]) == (
        "fragile", CONVERSION, "RuntimeError: a fuse blew",
    )  # fmt: skip
    comparison_table(found)
    printed = capsys.readouterr().out
    assert "failed" in printed
    assert line in printed
    # Seconds over those of a dense pass of all calibration tokens.
    assert passed == [8 * 64]
    [row] = found["rows"]
    assert row["passes"] == row["seconds"] / 2
    assert found["dense_seconds"] == 2

    broken.unlink()
    told: list[str] = []
    again = compared(folder, methods, output=output, resume=True, progress=told.append)
    assert [line.split(",")[0] for line in told] == ["planning", TIMING, "fragile"]
    assert {row["method"] for row in again["rows"]} == {"fragile", "static"}
    assert again["missing"] == []
    values = {row["method"]: row["ratio"] for row in again["rows"]}
    assert values["fragile"] == values["static"]


# --- fine-tuning and speed ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    output = tmp_path_factory.mktemp("tuned")
    methods = ["cmoe", "teal", "static"]
    found = compared(
        folder, methods, references=("neuron-oracle",), finetune=WINDOWS, speed=True, output=output
    )
    return found, output


def row_of(found: dict[str, Any], method: str) -> dict[str, Any]:
    return next(row for row in found["rows"] if row["method"] == method)


def test_the_tuned_column_is_what_finetune_gives(tuned: Any, folder: Path, tmp_path: Path) -> None:
    found, _ = tuned
    text = str(folder / "text.txt")
    row = row_of(found, "cmoe")
    dense = folder / "dense"
    moesaic.convert(
        str(dense), "cmoe", row["layout"], text, samples=8, sequence_length=64, device="cpu",
        output=tmp_path / "converted",
    )  # fmt: skip
    options: dict[str, Any] = {
        "samples": WINDOWS, "sequence_length": 64, "distill": dense, "device": "cpu",
    }  # fmt: skip
    report = moesaic.finetune(tmp_path / "converted", tmp_path / "one", text, **options)
    dense_value = found["dense"][text]
    assert report.perplexity_before == pytest.approx(row["ratio"][text] * dense_value, rel=1e-4)
    assert report.perplexity == pytest.approx(row["tuned"][text] * dense_value, rel=1e-4)
    assert row["tuned"][text] < row["ratio"][text]
    other = moesaic.finetune(
        tmp_path / "converted", tmp_path / "two", text, tune_teacher=True, **options
    )
    tuned_dense = found["tuned_dense"][text]
    assert tuned_dense == pytest.approx(other.teacher_perplexity, rel=1e-4)
    assert row["over_tuned_dense"][text] == pytest.approx(
        row["tuned"][text] * dense_value / tuned_dense
    )


def test_the_dense_model_is_unharmed_by_teaching(tuned: Any, folder: Path) -> None:
    """A row after others were fine-tuned is what it is alone."""
    text = str(folder / "text.txt")
    alone = compared(folder, "static")
    before = row_of(tuned[0], "static")
    assert before["ratio"][text] == pytest.approx(alone["rows"][0]["ratio"][text], rel=1e-6)
    assert alone["rows"][0]["tuned"] is None


def test_who_is_not_fine_tuned_has_a_dash_and_the_reason(tuned: Any, folder: Path) -> None:
    found, output = tuned
    text = str(folder / "text.txt")
    lines = {
        line["method"]: line
        for line in csv.DictReader(io.StringIO((output / "compare.csv").read_text()))
    }
    for method, reason in (("teal", "linear layers"), ("neuron-oracle", "no model can hold it")):
        row = row_of(found, method)
        assert row["tuned"] is row["over_tuned_dense"] is None
        assert reason in row["untuned"]
        assert reason in lines[method]["reason"]
        assert lines[method][f"tuned {text}"] == ""
    static = row_of(found, "static")
    assert float(lines["static"][f"tuned {text}"]) == static["tuned"][text]
    assert float(lines["static"][f"over tuned dense {text}"]) == static["over_tuned_dense"][text]
    for name in ("passes", "layer_error", "speed"):
        assert float(lines["static"][name]) == static[name]
    assert float(lines["cmoe"]["router_recall"]) == row_of(found, "cmoe")["router_recall"]
    assert lines["neuron-oracle"]["speed"] == ""
    page = (output / "compare.md").read_text()
    assert "| over tuned dense |" in page
    assert "| tokens/s |" in page
    assert f"Fine-tuned on {WINDOWS} windows of 64" in page
    assert "not fine-tuned: teal (linear layers" in page


def test_a_failed_fine_tuning_keeps_the_row_and_is_tried_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*unused: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(trials, "tuned", too_large)
        found = compared(folder, "static", finetune=2, distill="none", output=tmp_path)
    [row] = found["rows"]
    assert row["tuned"] is None
    assert row["untuned"] == "OutOfMemoryError: out of memory"
    assert [lack["step"] for lack in found["missing"]] == [TUNING]
    assert found["remarks"] == ["not fine-tuned: static (OutOfMemoryError: out of memory)"]
    assert found["settings"]["finetune"]["teacher"] is False
    told: list[str] = []
    again = compared(
        folder, "static", finetune=2, distill="none", output=tmp_path, resume=True,
        progress=told.append,
    )  # fmt: skip
    assert [line.split(",")[0] for line in told] == ["planning", TIMING, "static"]
    assert again["rows"][0]["tuned"] is not None
    assert again["tuned_dense"] == found["tuned_dense"]
    with pytest.raises(MoesaicError, match="finetune"):
        compared(folder, "static", finetune=3, distill="none", output=tmp_path, resume=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"finetune": 0}, "finetune 0: windows to train on"),
        ({"finetune": 2, "distill": "somebody"}, "teacher"),
        ({"distill": "none"}, "give finetune too"),
    ],
)
def test_bad_fine_tunings_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(MoesaicError, match=reason):
        compared(folder, "static", output=tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_speed_is_a_ratio_of_medians_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round warms up: 100 counts for nobody."""
    seconds = {"dense": [100.0, 6.0, 9.0, 3.0], "converted": [100.0, 4.0, 1.0, 3.0]}
    asked: list[str] = []

    def decode_seconds(model: str, ids_L: torch.Tensor, prompt: int) -> float:
        asked.append(model)
        assert (len(ids_L), prompt) == (64, 32)
        return seconds[model].pop(0)

    monkeypatch.setattr(speed, "decode_seconds", decode_seconds)
    ids = torch.arange(90)
    assert speed.speed_over_dense("dense", "converted", ids, rounds=3) == 2.0
    assert asked == ["dense", "converted"] * 4


def test_decoding_runs_once_for_the_prompt_and_once_for_each_token() -> None:
    model = tiny_model("llama")
    lengths = []
    model.register_forward_pre_hook(
        lambda module, args, options: lengths.append(options["input_ids"].shape[1]),
        with_kwargs=True,
    )
    assert speed.decode_seconds(model, torch.arange(3, 20), 12) > 0
    assert lengths == [12, 1, 1, 1, 1, 1]
