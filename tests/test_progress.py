"""Progress where there is no terminal: a line at the start, one a minute, one at the end."""

from __future__ import annotations

import sys

import pytest

from moesaic.progress import Ticker, duration, progress, status, track


class Clock:
    """A time that passes only when told to."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def lines(capture: pytest.CaptureFixture[str]) -> list[str]:
    printed = capture.readouterr()
    assert printed.out == ""
    return printed.err.splitlines()


def test_a_line_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    for _ in track(range(30), "converting layers", now=clock):
        clock.time += 20
    found = lines(capsys)
    assert found[0] == "converting layers: 0 of 30"
    assert found[1] == "converting layers: 3 of 30, 10 %, 9 min left"
    assert found[4] == "converting layers: 12 of 30, 40 %, 6 min left"
    assert found[-1] == "converting layers: 30 of 30, took 10 min"
    assert len(found) == 11


def test_a_short_step_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    assert list(track(["a", "b"], "reading", now=clock)) == ["a", "b"]
    assert lines(capsys) == ["reading: 0 of 2"]


def test_not_enabled_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track([1, 2], "reading", enabled=False)) == [1, 2]
    with progress("evaluating", 10, enabled=False) as advance:
        advance(10)
    assert lines(capsys) == []


def test_counts_that_are_no_loop(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with progress("evaluating demo", 65_536, now=clock) as advance:
        clock.time += 90
        advance(16_384)
    assert lines(capsys) == [
        "evaluating demo: 0 of 65,536",
        "evaluating demo: 16,384 of 65,536, 25 %, 4 min left",
    ]


def test_a_total_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    for _ in track(iter("abc"), "reading", now=clock):
        clock.time += 60
    assert lines(capsys) == ["reading: 0", "reading: 1", "reading: 2", "reading: 3"]


def test_an_error_ends_without_a_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()

    def break_off() -> None:
        with progress("x", 2, now=clock):
            clock.time += 100
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        break_off()
    assert lines(capsys) == ["x: 0 of 2"]


def test_a_resumed_run_estimates_by_what_it_did_itself(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    ticker = Ticker("training", 100, done=50, now=clock)
    ticker.describe("training, loss 2.0")
    clock.time += 60
    ticker.reach(60)
    assert lines(capsys) == [
        "training: 50 of 100",
        "training, loss 2.0: 60 of 100, 60 %, 4 min left",
    ]


def test_steps_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    with status("exporting") as tell:
        tell("reading")
        tell("writing")
    assert lines(capsys) == ["reading", "writing"]


def test_in_a_terminal_it_is_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(track("ab", "converting layers")) == ["a", "b"]
    with status("exporting") as tell:
        tell("reading")
    printed = capsys.readouterr().err
    assert "converting layers" in printed
    assert "0 of 2" not in printed


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "under a minute"),
        (59, "under a minute"),
        (60, "1 min"),
        (5400, "90 min"),
        (7800, "2 h 10 min"),
    ],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words
