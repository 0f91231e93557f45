"""Conversion and recovery in one command: files, numbers, kills, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

import moesaic
from moesaic.cli import main as cli
from moesaic.errors import MoesaicError
from moesaic.families.load import load_model
from moesaic.finetune import estimate
from moesaic.finetune import recover as recover_module
from moesaic.finetune import tune_dense as tune_dense_module
from moesaic.finetune.convert import dry_run
from moesaic.finetune.train import RecoveryTrainer
from moesaic.output import draft as drafts
from moesaic.output.atomic import write_file
from moesaic.progress import duration
from tests.families import tiny_model
from tests.gguf_models import tiny_llama, write_gguf
from tests.stock_models import dense_model, tokenizer

TEXT = "the cat sat in a hat and the rat in a bin. a dog ran on the mat, the sun is hot. " * 150
LENGTH = 64
MAGNITUDE = Path(__file__).parent / "method_files" / "magnitude.py"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "dense"
    dense_model("llama").save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def recovered(dense: Path, output: Path | None, **changes: Any) -> tuple[Any, Any]:
    values = {
        "recipe": "moesaic",
        "layout": "S2A3E8",
        "calibration": [TEXT],
        "samples": 16,
        "recover": 20 * LENGTH + 5,
        "device": "cpu",
        "output": output,
    }
    return moesaic.convert(dense, **values | changes)


def test_both_halves_are_in_the_folder(dense: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    model, report = recovered(dense, output)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    recovery = report.recovery
    assert recovery["settings"]["samples"] == 20
    assert recovery["settings"]["sequence_length"] == LENGTH
    assert recovery["perplexity_before"] == report.perplexity
    assert recovery["perplexity"] < report.perplexity
    assert recovery["distill"] == str(dense)
    moe = load_model(output).config.moesaic
    assert moe.calibration["tokens"] == 16 * LENGTH
    assert moe.finetune["settings"]["samples"] == 20
    assert moe.finetune["distill"] == "dense"
    ids = torch.tensor(tokenizer()(TEXT)["input_ids"])
    held = ids[-(len(ids) // 10) :]
    value, _ = moesaic.perplexity(model, held, LENGTH)
    written = recovery["folded_perplexity"] if recovery["folded"] else recovery["perplexity"]
    assert value == pytest.approx(written, rel=1e-5)
    reports = ("moesaic_report.json", "moesaic_finetune.json", "config.json", "README.md")
    for name in reports:
        assert ".partial" not in (output / name).read_text("utf-8"), name
    card = (output / "README.md").read_text("utf-8")
    for words in ("S2A3E8", "Calibration", "Recovered on", "LoRA", "Perplexity, recovered"):
        assert words in card, words
    kept = json.loads((output / "moesaic_report.json").read_text("utf-8"))
    assert len(kept["layers"]) == 3
    exported = moesaic.export(str(output), "glm4_moe", tmp_path / "stock")
    assert exported.architecture == "glm4_moe"


def test_it_is_the_two_commands_one_after_the_other(dense: Path, tmp_path: Path) -> None:
    model, _ = recovered(dense, tmp_path / "one")
    _, report = recovered(dense, tmp_path / "first", recover=None)
    assert report.recovery is None
    assert "recovery" not in (tmp_path / "first" / "moesaic_report.json").read_text("utf-8")
    moesaic.finetune(
        tmp_path / "first", tmp_path / "second", [TEXT], samples=20, distill=dense, device="cpu"
    )
    expected = load_model(tmp_path / "second").state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("method", ["static-repaired", "moesaic-neurons", "cmoe"])
def test_methods_that_recover(method: str, dense: Path, tmp_path: Path) -> None:
    layout = None if method == "moesaic-neurons" else "S2A3E8"
    _, report = recovered(dense, tmp_path / "out", recipe=method, layout=layout)
    assert report.recovery["perplexity"] < report.perplexity


class Killed(Exception):
    pass


@pytest.mark.parametrize("when", ["layer", "training", "between", "naming"])
def test_a_killed_run_goes_on_where_it_was(
    when: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = recovered(dense, tmp_path / "whole", command="x")
    calls = {"layer": 0, "training": 0}

    def die(*arguments: Any, **others: Any) -> Any:
        raise Killed

    def die_in_layer(*arguments: Any) -> Any:
        calls["layer"] += 1
        if calls["layer"] == 3:
            raise Killed
        return save_layer(*arguments)

    def die_in_step(self: Any, *arguments: Any) -> Any:
        if self.state.global_step == 5:
            raise Killed
        return step(self, *arguments)

    save_layer = drafts.save_layer
    step = RecoveryTrainer.training_step
    if when == "layer":
        monkeypatch.setattr(drafts, "save_layer", die_in_layer)
    elif when == "training":
        monkeypatch.setattr(RecoveryTrainer, "training_step", die_in_step)
    elif when == "between":
        monkeypatch.setattr(recover_module, "run", die)
    else:
        monkeypatch.setattr(recover_module, "_write_both", die)
    with pytest.raises(Killed):
        recovered(dense, tmp_path / "out", command="x")
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
    with pytest.raises(MoesaicError, match="left from an unfinished run; pass --resume"):
        recovered(dense, tmp_path / "out", command="x")
    with pytest.raises(MoesaicError, match=r"was started with recover = 1285, this run has 640"):
        recovered(dense, tmp_path / "out", command="x", resume=True, recover=640)
    if when != "layer":  # the first half is done, and not done again
        monkeypatch.setattr(recover_module, "convert_prepared", die)
    if when == "naming":
        monkeypatch.setattr(recover_module, "run", die)
    again, report = recovered(dense, tmp_path / "out", command="x", resume=True)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert report.recovery["perplexity"] < report.perplexity
    for name in ("README.md", "moesaic_report.json", "learning_curve.csv", "config.json"):
        one = (tmp_path / "whole" / name).read_text("utf-8")
        assert (tmp_path / "out" / name).read_text("utf-8") == one, name
    kept = json.loads((tmp_path / "out" / "moesaic_finetune.json").read_text("utf-8"))
    assert kept["model"] == f"{dense}, S2A3E8"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_the_dense_model_can_be_trained_first(dense: Path, tmp_path: Path) -> None:
    """What is converted and imitated is the trained one, and the folder says so."""
    output = tmp_path / "out"
    plain_model, plain = recovered(dense, tmp_path / "plain")
    model, report = recovered(dense, output, tune_dense=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plain"]
    recovery = report.recovery
    assert recovery["teacher_tuned"]
    assert recovery["teacher_perplexity_before"] == pytest.approx(plain.dense_perplexity)
    assert recovery["teacher_perplexity"] < recovery["teacher_perplexity_before"]
    assert report.dense_perplexity == pytest.approx(recovery["teacher_perplexity"], rel=1e-4)
    assert report.perplexity < plain.perplexity
    assert recovery["distill"] == report.model == str(dense)
    assert model.config.moesaic.base_model == plain_model.config.moesaic.base_model
    assert model.config.moesaic.finetune["teacher_tuned"]
    card = (output / "README.md").read_text("utf-8")
    for words in ("Dense model, as it came", "Dense model, tuned likewise", "tune_dense=True"):
        assert words in card, words
    for name in ("moesaic_report.json", "moesaic_finetune.json", "config.json", "README.md"):
        assert ".partial" not in (output / name).read_text("utf-8"), name
    page = (output / "report.html").read_text("utf-8")
    came = recovery["teacher_perplexity_before"]
    assert f"was trained on the same tokens before: it came with {came:.3f}." in page
    with pytest.raises(MoesaicError, match="imitates 'dense' as it was after a training"):
        moesaic.finetune(output, tmp_path / "again", [TEXT], samples=4, device="cpu")


def test_a_trained_gguf_file_is_still_named(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), GGMLQuantizationType.Q8_0)
    model, _ = recovered(file, tmp_path / "out", tune_dense=True)
    assert model.config.moesaic.source == "dequantised from tiny.gguf (Q8_0)"


@pytest.mark.parametrize("part", ["dense", "record", "layer", "between", "student"])
def test_a_run_that_trains_the_dense_model_goes_on_where_it_was_killed(
    part: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = recovered(dense, tmp_path / "whole", command="x", tune_dense=True)
    step = RecoveryTrainer.training_step

    def die(*arguments: Any, **others: Any) -> Any:
        raise Killed

    if part == "record":
        monkeypatch.setattr(tune_dense_module, "write_file", die_at(tune_dense_module.RECORD))
    elif part == "layer":
        monkeypatch.setattr(drafts, "save_layer", die)
    elif part == "between":
        monkeypatch.setattr(recover_module, "run", die)
    else:
        monkeypatch.setattr(RecoveryTrainer, "training_step", killed_in_training(part))
    with pytest.raises(Killed):
        recovered(dense, tmp_path / "out", command="x", tune_dense=True)
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
    with pytest.raises(MoesaicError, match="was started with tune_dense = True"):
        recovered(dense, tmp_path / "out", command="x", resume=True)
    steps: dict[str, list[int]] = {"dense": [], "student": []}

    def note_step(self: Any, *arguments: Any) -> Any:
        steps["dense" if self.teacher is None else "student"].append(self.state.global_step)
        return step(self, *arguments)

    monkeypatch.setattr(RecoveryTrainer, "training_step", note_step)
    again, _ = recovered(dense, tmp_path / "out", command="x", resume=True, tune_dense=True)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    # What was done is not done again: checkpoints are written every two steps of twenty.
    first_steps = {name: min(found, default=None) for name, found in steps.items()}
    expected = {
        "dense": {"dense": 4, "student": 0},
        "record": {"dense": None, "student": 0},
        "layer": {"dense": None, "student": 0},
        "between": {"dense": None, "student": 0},
        "student": {"dense": None, "student": 4},
    }
    assert first_steps == expected[part]


def killed_in_training(part: str) -> Callable[..., Any]:
    """A training step that is killed after five of the student, or of the dense model."""
    step = RecoveryTrainer.training_step

    def die_in_step(self: Any, *arguments: Any) -> Any:
        is_student = self.teacher is not None
        if self.state.global_step == 5 and is_student == (part == "student"):
            raise Killed
        return step(self, *arguments)

    return die_in_step


def die_at(name: str) -> Callable[[Path, str], None]:
    """Writes files, but that of this name."""

    def write(path: Path, text: str) -> None:
        if path.name == name:
            raise Killed
        write_file(path, text)

    return write


@pytest.mark.parametrize(("part", "tune"), [("dense", True), ("student", True), ("student", False)])
def test_a_run_with_a_dense_model_of_other_weights_is_refused(
    part: str, tune: bool, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(dense, model)
    monkeypatch.setattr(RecoveryTrainer, "training_step", killed_in_training(part))
    with pytest.raises(Killed):
        recovered(model, tmp_path / "out", command="x", tune_dense=tune)
    monkeypatch.undo()
    other = load_model(str(model))
    other.model.layers[0].mlp.up_proj.weight.data += 0.01
    other.save_pretrained(model)
    with pytest.raises(MoesaicError, match="was started with other weights of"):
        recovered(model, tmp_path / "out", command="x", resume=True, tune_dense=tune)
    assert (tmp_path / "out.partial").is_dir()  # nothing is lost


def test_a_failed_conversion_keeps_the_trained_dense_model(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the draft is moved before the run goes on."""

    def fail(*arguments: Any) -> Any:
        raise MoesaicError("no luck")

    monkeypatch.setattr(recover_module, "convert_prepared", fail)
    with pytest.raises(MoesaicError, match="no luck"):
        recovered(dense, tmp_path / "out", tune_dense=True, command="x")
    monkeypatch.undo()
    draft = tmp_path / "out.partial"
    assert (draft / "dense" / "config.json").is_file()
    assert not list(draft.glob("dense-trainer/checkpoint-*"))
    draft.rename(tmp_path / "moved.partial")
    monkeypatch.setattr(tune_dense_module, "train", fail)
    _, report = recovered(dense, tmp_path / "moved", tune_dense=True, command="x", resume=True)
    assert report.recovery["teacher_tuned"]


def test_a_failed_training_keeps_the_conversion(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise MoesaicError("no luck")

    monkeypatch.setattr(recover_module, "run", fail)
    with pytest.raises(MoesaicError, match="no luck"):
        recovered(dense, tmp_path / "out")
    assert (tmp_path / "out.partial" / "converted" / "config.json").is_file()


BAD = [
    ({"recover": None, "tune_dense": True}, "tune_dense trains on the tokens of recover"),
    ({"recover": 0}, "recover 0: a whole number of tokens is needed"),
    ({"recover": -5}, "recover -5: a whole number of tokens is needed"),
    ({"recover": 63}, "recover 63: one window is 64 tokens"),
    ({"recover": 10**6}, "recover 1000000: the text has 8910 tokens besides"),
    ({"recipe": MAGNITUDE, "layout": None}, "'magnitude' replaces linear layers, which are not"),
    ({"dtype": "float16"}, "would be trained in float16, whose range"),
    ({"device": "cpu:0"}, "device cpu:0: training takes the first GPU"),
    (
        {"recipe": "griffin", "layout": None, "sparsity": 0.5},
        "runs the first 128 tokens of a window",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_what_cannot_be_recovered_is_refused_before_the_conversion(
    changes: dict[str, Any],
    message: str,
    dense: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recover_module, "convert_prepared", None)
    with pytest.raises(MoesaicError, match=message) as caught:
        recovered(dense, tmp_path / "out", **changes)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_output_is_needed(dense: Path) -> None:
    with pytest.raises(MoesaicError, match="recover writes what it trains; give an output"):
        recovered(dense, None)


def test_a_model_in_memory_is_refused(tmp_path: Path) -> None:
    windows = torch.randint(3, 90, (8, LENGTH))
    with pytest.raises(MoesaicError, match="one in memory is changed in place; pass its folder"):
        moesaic.convert(
            tiny_model("llama"), "cmoe", "S2A3E8", windows, recover=64, output=tmp_path / "out"
        )
    assert not list(tmp_path.iterdir())


def test_windows_of_ids_are_trained_on_as_they_are(dense: Path, tmp_path: Path) -> None:
    windows = torch.randint(3, 50, (24, 32), generator=torch.Generator().manual_seed(0))
    _, report = recovered(dense, tmp_path / "out", calibration=windows, recover=320)
    assert report.recovery["settings"]["samples"] == 10
    assert report.recovery["settings"]["sequence_length"] == 32
    assert report.recovery["perplexity"] is None


def test_several_texts_are_trained_on_alike(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many windows of each, as they are calibrated on."""
    given = []

    def look(options: Any, text: Any, tuned: Any) -> Any:
        given.append(text.ids)
        raise MoesaicError("far enough")

    monkeypatch.setattr(recover_module, "run", look)
    ones = torch.full((2000,), 11)
    others = torch.full((200,), 22)
    texts = {"long": ones, "short": others}
    with pytest.raises(MoesaicError, match="far enough"):
        recovered(dense, tmp_path / "rows", calibration=texts)
    texts = {"many": ones[:1024].view(-1, LENGTH), "few": others[:192].view(-1, LENGTH)}
    with pytest.raises(MoesaicError, match="far enough"):
        recovered(dense, tmp_path / "windows", calibration=texts, recover=10 * LENGTH)
    of_rows, of_windows = given
    assert of_rows.shape == (20, LENGTH)
    assert (of_rows == 22).all(1).sum() == (of_rows == 11).all(1).sum() == 10
    assert of_windows.shape == (10, LENGTH)
    assert (of_windows == 22).all(1).sum() == 3  # all there are
    first = of_rows[:10, 0]
    assert 0 < (first == 22).sum() < 10  # mixed


def test_the_command_prints_what_each_half_changed(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["moesaic", "convert", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "200")
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    common = (dense, "--output", tmp_path / "out", "--calibration", text, "--layout", "S2A3E8",
              "--samples", 16, "--device", "cpu", "--recover")  # fmt: skip
    code, out, _ = run(*common, 640, "--dry-run")
    assert code == 0
    assert "train on about 640 tokens of it, and write" in out
    assert "conversion: under a minute; training: under a minute" in out
    for words in ((0,), (0, "--dry-run"), (640, "--dry-run", "--device", "cpu:0")):
        code, _, err = run(*common, *words)
        assert code == 2
        assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
    code, out, err = run(*common, 640, "--resume")
    assert code == 0
    assert err.count("nothing to resume") == 1
    assert f"nothing to resume in {tmp_path / 'out'}.partial;" in err
    assert "training on 640 tokens in 10 steps: under a minute by a forward pass" in err
    assert "training, windows: 0 of 10" in err
    assert err.index("conversion: under a minute") < err.index("training on 640 tokens")
    assert "recovered on 640 tokens in" in out
    assert "perplexity: dense " in out
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "--recover 640" in card


def test_the_outlook_by_hand(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By counted work, at a made-up speed of one multiply-accumulate a microsecond."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    prepared = dry_run(
        dense, "moesaic", "S2A3E8", str(text), output=tmp_path / "out", samples=16, device="cpu"
    )
    monkeypatch.setattr(estimate, "product_rate", lambda *unused: 1e6)
    of_a_pass = 2 * prepared.plans[0].dense_macs.total / 1e6
    calibration = prepared.windows_NL.numel()
    convert = [duration(passes * calibration * of_a_pass) for passes in (2, 8)]
    for dense_first, passes in ((False, 4), (True, 7)):
        train = duration(passes * 6400 * of_a_pass)
        words = estimate.outlook(prepared, 6400, dense_first)
        assert f"conversion: {convert[0]} to {convert[1]} by method; training: {train}" in words
        assert train != "under a minute"
