"""How far a long step is: a bar in a terminal, plain lines in a log file.

A line is written when a step begins, then at most once a minute, and at the end of a
step that took over a minute. All of it goes to stderr.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

Item = TypeVar("Item")
Clock = Callable[[], float]

_MINUTE = 60.0
_HOUR = 3600.0


class Ticker:
    """Tells how far a count is. Call `advance` or `reach`, and `stop` at the end."""

    def __init__(
        self,
        description: str,
        total: int | None,
        *,
        done: int = 0,
        enabled: bool = True,
        now: Clock = time.monotonic,
    ) -> None:
        self.done = done
        self._display: _Bar | _Lines | None = None
        if not enabled:
            return
        if _in_terminal():
            self._display = _Bar(description, total, done)
        else:
            self._display = _Lines(description, total, done, now)

    def advance(self, count: int = 1) -> None:
        """Counts `count` more."""
        self.reach(self.done + count)

    def reach(self, done: int) -> None:
        """Sets the count to `done`."""
        self.done = done
        if self._display is not None:
            self._display.reach(done)

    def describe(self, description: str) -> None:
        """Changes the words in front of the count."""
        if self._display is not None:
            self._display.describe(description)

    def stop(self) -> None:
        """Takes the bar away, or writes the last line."""
        if self._display is not None:
            self._display.stop()


@contextmanager
def progress(
    description: str,
    total: int | None,
    *,
    enabled: bool = True,
    now: Clock = time.monotonic,
) -> Iterator[Callable[[int], None]]:
    """Counts to `total`: the block calls what it gets with each part that is done."""
    ticker = Ticker(description, total, enabled=enabled, now=now)
    try:
        yield ticker.advance
    finally:
        ticker.stop()


def track(
    items: Iterable[Item],
    description: str,
    total: int | None = None,
    enabled: bool = True,
    now: Clock = time.monotonic,
) -> Iterator[Item]:
    """Yields the items and tells how many of them are done."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with progress(description, total, enabled=enabled, now=now) as advance:
        for item in items:
            yield item
            advance(1)


def step_log(enabled: bool) -> Callable[[str], None]:
    """Writes a line to stderr as it is, names with brackets too."""
    console = Console(stderr=True, quiet=not enabled, markup=False, emoji=False)
    return console.print


@contextmanager
def status(description: str) -> Iterator[Callable[[str], None]]:
    """Names the current step: beside a spinner in a terminal, else a line for each."""
    if not _in_terminal():
        yield _say
        return
    with Console(stderr=True).status(Text(description)) as spinner:
        yield lambda words: spinner.update(Text(words))


class _Bar:
    """A bar with the time left, which goes away at the end."""

    def __init__(self, description: str, total: int | None, done: int) -> None:
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self.task = self.progress.add_task(
            description, total=total, completed=done
        )
        self.progress.start()

    def reach(self, done: int) -> None:
        self.progress.update(self.task, completed=done)

    def describe(self, description: str) -> None:
        self.progress.update(self.task, description=description)

    def stop(self) -> None:
        self.progress.stop()


class _Lines:
    """A line at the start, then at most one a minute."""

    def __init__(
        self, description: str, total: int | None, done: int, now: Clock
    ) -> None:
        self.description = description
        self.total = total
        self.first = done  # a resumed run does not start at 0
        self.done = done
        self.now = now
        self.started = now()
        self.last_line = self.started
        _say(f"{description}: {self._count()}")

    def reach(self, done: int) -> None:
        self.done = done
        now = self.now()
        is_due = now - self.last_line >= _MINUTE
        if is_due and not self._finished():
            self.last_line = now
            outlook = self._outlook(now)
            _say(f"{self.description}: {self._count()}{outlook}")

    def describe(self, description: str) -> None:
        self.description = description

    def stop(self) -> None:
        seconds = self.now() - self.started
        if self._finished() and seconds > _MINUTE:
            taken = duration(seconds)
            _say(f"{self.description}: {self._count()}, took {taken}")

    def _finished(self) -> bool:
        return self.total is not None and self.done >= self.total

    def _count(self) -> str:
        if self.total is None:
            return f"{self.done:,}"
        return f"{self.done:,} of {self.total:,}"

    def _outlook(self, now: float) -> str:
        """The percentage and the time left, where both are known."""
        newly_done = self.done - self.first
        if not self.total or newly_done <= 0:
            return ""
        seconds_each = (now - self.started) / newly_done
        seconds_left = seconds_each * (self.total - self.done)
        percent = 100 * self.done / self.total
        return f", {percent:.0f} %, {duration(seconds_left)} left"


def duration(seconds: float) -> str:
    """A time in words, to the minute."""
    if seconds < _MINUTE:
        return "under a minute"
    minutes = round(seconds / _MINUTE)
    if seconds < 2 * _HOUR:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def _in_terminal() -> bool:
    return sys.stderr.isatty()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
