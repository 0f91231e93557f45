"""What `moesaic finetune MODEL` does with nothing else: teacher, rate and batch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moesaic
from moesaic.cli import main as cli
from moesaic.errors import MoesaicError
from moesaic.finetune.defaults import usual_batch_size, usual_rate
from moesaic.finetune.options import Machine, Settings
from moesaic.finetune.train import computes_again, windows_at_once
from tests.families import tokens
from tests.stock_models import dense_model, tokenizer

TEXT = "the cat sat in a hat and the rat in a bin. a dog ran on the mat. " * 200


def rate(steps: int = 128, hidden: int = 4096, teacher: bool = False) -> float:
    return usual_rate(steps, hidden, teacher)


@pytest.mark.parametrize(
    ("length", "use_cpu", "windows", "again"),
    [(256, True, 2, False), (512, True, 1, False), (2048, True, 1, True),
     (256, False, 16, False), (2048, False, 2, False)],
)  # fmt: skip
def test_windows_at_once_follow_from_their_length(
    length: int, use_cpu: bool, windows: int, again: bool
) -> None:
    settings = Settings(sequence_length=length)
    machine = Machine(use_cpu=use_cpu)
    assert windows_at_once(16, settings, machine) == windows
    assert computes_again(settings, machine) is again
    given = Machine(use_cpu=use_cpu, micro_batch=7, gradient_checkpointing=not again)
    assert windows_at_once(16, settings, given) == 4  # divides the 16 of a process
    assert computes_again(settings, given) is not again


def test_the_papers_run_gets_the_papers_rate() -> None:
    assert rate() == pytest.approx(5.95e-5)


def test_the_rate_fits_the_run() -> None:
    """Hand-worked: cube root of the steps, one over the width."""
    assert rate(steps=16) == pytest.approx(2 * 5.95e-5)
    assert rate(hidden=512) == pytest.approx(8 * 5.95e-5)
    assert rate(teacher=True) == pytest.approx(1.5 * 5.95e-5)


def test_the_rate_stays_within_bounds() -> None:
    assert rate(steps=10**9) == 1e-5
    assert rate(steps=1, hidden=8, teacher=True) == 1e-3


def test_measured_models_get_rates_that_helped_them() -> None:
    """Of babyllama-105, the demo model and SmolLM2 about 1e-3 was best (docs/log.md)."""
    for hidden in (128, 192, 576):
        assert 8e-4 < rate(steps=48, hidden=hidden, teacher=True) < 2e-3


@pytest.mark.parametrize(
    ("windows", "processes", "expected"),
    [
        (2048, 1, 16),
        (768, 1, 16),
        (256, 1, 5),
        (96, 1, 2),
        (32, 1, 1),
        (256, 2, 4),
        (48, 2, 2),
        (5, 2, 2),
        (2048, 3, 15),
    ],
)
def test_a_batch_leaves_48_steps(windows: int, processes: int, expected: int) -> None:
    assert usual_batch_size(windows, processes) == expected


@pytest.mark.parametrize(
    ("windows", "epochs", "expected"),
    [(31, 25, 15), (64, 12, 16), (100, 4, 5), (17, 48, 16), (10, 2, 1)],
)
def test_several_epochs_leave_out_few_windows(windows: int, epochs: int, expected: int) -> None:
    size = usual_batch_size(windows, epochs=epochs)
    assert size == expected


@given(windows=st.integers(1, 400), epochs=st.integers(1, 40), processes=st.integers(1, 4))
def test_no_batch_is_too_large_for_48_steps(windows: int, epochs: int, processes: int) -> None:
    size = usual_batch_size(windows, processes, epochs)
    assert size % processes == 0
    assert size == processes or windows // size * epochs >= 48
    larger = size + processes
    if epochs == 1 and larger <= 16:
        assert windows // larger < 48


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model and what was made from it, side by side, with a text."""
    folder = tmp_path_factory.mktemp("models")
    dense = folder / "dense"
    dense_model("llama").save_pretrained(dense)
    tokenizer().save_pretrained(dense)
    for recipe in ("cmoe", "moesaic"):
        moesaic.convert(
            str(dense),
            recipe,
            "S2A3E8",
            tokens(8, 64, seed=1),
            output=folder / recipe,
        )
    (folder / "text.txt").write_text(TEXT, "utf-8")
    return folder


@pytest.mark.parametrize("recipe", ["cmoe", "moesaic"])
def test_a_default_run_recovers(recipe: str, models: Path, tmp_path: Path) -> None:
    report = moesaic.finetune(
        models / recipe,
        tmp_path / "tuned",
        models / "text.txt",
        samples=64,
        device="cpu",
    )
    assert report.distill == str(models / "dense")
    assert report.settings["mix"] == {"lm": 0.5, "logits": 0.5, "ffn": 3.0}
    assert report.settings["batch_size"] == 1
    assert report.perplexity_before is not None
    assert report.perplexity is not None
    assert report.perplexity < 0.9 * report.perplexity_before


def moved_away(models: Path, tmp_path: Path) -> Path:
    """A converted model whose dense one is nowhere near."""
    return Path(shutil.copytree(models / "cmoe", tmp_path / "elsewhere" / "cmoe"))


def test_a_teacher_that_is_gone_is_one_line_and_nothing_is_written(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    model = moved_away(models, tmp_path)
    output = tmp_path / "tuned"
    words = ["finetune", model, "--output", output, "--data", models / "text.txt"]
    monkeypatch.setattr("sys.argv", ["moesaic", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert len(message.splitlines()) == 1
    assert "'dense'" in message
    assert "--distill PATH" in message
    assert "--distill none" in message
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_a_teacher_on_a_hub_out_of_reach_is_said_with_the_way_out(
    models: Path, tmp_path: Path
) -> None:
    model = moved_away(models, tmp_path)
    config = model / "config.json"
    text = config.read_text("utf-8")
    text = text.replace('"base_model": "dense"', '"base_model": "nobody/nothing"')
    config.write_text(text, "utf-8")
    with pytest.raises(MoesaicError, match=r"'nobody/nothing'.* cannot be loaded .*none$"):
        moesaic.finetune(model, tmp_path / "tuned", models / "text.txt")


def test_no_teacher_trains_on_the_text_alone(models: Path, tmp_path: Path) -> None:
    model = moved_away(models, tmp_path)
    report = moesaic.finetune(
        model,
        tmp_path / "tuned",
        models / "text.txt",
        samples=8,
        distill="none",
        device="cpu",
    )
    assert report.distill is None
    assert report.settings["mix"] == {"lm": 1.0, "logits": 0.0, "ffn": 0.0}


def test_no_teacher_cannot_be_tuned(models: Path, tmp_path: Path) -> None:
    with pytest.raises(MoesaicError, match="--distill none says there is none"):
        moesaic.finetune(models / "cmoe", tmp_path / "tuned", distill="none", tune_teacher=True)
    assert not list(tmp_path.iterdir())
