"""Looks at a converted model: its history, a text's way through it, and what to try."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from moesaic.calibration.text import encode, has_heldout_split, to_ids
from moesaic.conversion.masks import under_masks
from moesaic.errors import MoesaicError, reason_of
from moesaic.families.load import (
    choose_device,
    load_model,
    load_tokenizer,
)
from moesaic.inspection.answers import Answers, answer
from moesaic.inspection.measure import (
    MEASURED_TOKENS,
    Pass,
    measure,
    most_shown,
)
from moesaic.inspection.page import draw
from moesaic.inspection.passage import PASSAGE
from moesaic.inspection.record import Record, read_record
from moesaic.output.atomic import check_parent, write_file
from moesaic.progress import progress as count_progress

PAGE_FILE = "report.html"


@dataclass(frozen=True)
class Inspected:
    """One model: its history, what was measured now, and what follows.

    `passed` is None where nothing stands in for a part of the dense model.
    """

    record: Record
    answers: Answers
    passed: Pass | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "record": self.record.to_dict(),
            "answers": asdict(self.answers),
            "passed": None if self.passed is None else self.passed.to_dict(),
        }


@dataclass(frozen=True)
class Inspection:
    """A converted model, another one beside it, and measured times, if given."""

    model: Inspected
    against: Inspected | None = None
    bench: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "model": self.model.to_dict(),
            "against": None if self.against is None else self.against.to_dict(),
            "bench": self.bench,
        }

    def page(self) -> str:
        """The page, as HTML that needs nothing but itself."""
        return draw(self)


def inspect(
    model: str | Path,
    text: str | Path | None = None,
    *,
    against: str | Path | None = None,
    html: str | Path | None = None,
    bench: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    progress: bool = False,
) -> Inspection:
    """What a converted model is, what it lost, where, and what ran for each token.

    `model` and `against` are folders that `convert` or `finetune` wrote. `text` is a
    SOURCE, of which up to 1,024 tokens pass through each model and the first 96 are
    shown; a short passage unless given. `html` is where the page is written. `bench` is
    what `moesaic bench --json` wrote; else work is counted. Raises MoesaicError for bad
    input before anything is written. Costs loading each model and about three forward
    passes over those tokens.
    """
    page_file = None if html is None else Path(html)
    if page_file is not None:
        check_page_file(page_file)
    times = None if bench is None else read_bench(Path(bench))
    settings = _Settings(
        text, choose_device(device), dtype, trust_remote_code, progress
    )
    # Both are read before the first is watched, which takes long.
    names = [model] if against is None else [model, against]
    records = [read_record(str(name), trust_remote_code) for name in names]
    ours = _inspected(records[0], settings, times)
    other = None
    if against is not None:
        other = _inspected(records[1], settings, None)
    result = Inspection(ours, other, times)
    if page_file is not None:
        write_page(page_file, result)
    return result


@dataclass(frozen=True)
class _Settings:
    text: str | Path | None
    device: Any
    dtype: str
    trust_remote_code: bool
    progress: bool


def _inspected(
    record: Record, settings: _Settings, times: dict[str, Any] | None
) -> Inspected:
    """Passes the text through a model, where something in it can be watched."""
    model = record.model
    trust = settings.trust_remote_code
    answers = answer(record, times)
    tokenizer = load_tokenizer(model, trust)
    ids_T, source = _ids(settings.text, record, tokenizer)
    loaded = load_model(model, settings.dtype, trust, settings.device)
    passed = pass_through(loaded, ids_T, tokenizer, source, settings.progress)
    return Inspected(record, answers, passed)


def _ids(
    text: str | Path | None, record: Record, tokenizer: Any
) -> tuple[Tensor, str]:
    """The text's tokens, and what to call it."""
    if text is None and record.base == "demo":
        text = "demo"  # the demo model reads code
    if text is None:
        ids_T, source = (
            encode(tokenizer, [PASSAGE]),
            "a short text of moesaic's own",
        )
    else:
        ids_T = to_ids(text, tokenizer, heldout=True)
        source = Path(text).name
        if has_heldout_split(text):
            source += ", held-out split"
    if not len(ids_T):
        raise MoesaicError(
            f"text {source} has no tokens for the tokenizer of {record.model}; give "
            "another --text"
        )
    return ids_T, source


def pass_through(
    model: Any,
    ids_T: Tensor,
    tokenizer: Any,
    source: str,
    progress: bool = False,
) -> Pass | None:
    """Measures a model on the first of these tokens; without a tokenizer as numbers."""
    shown = ids_T[: most_shown(model)].tolist()
    words = [f"#{token}" for token in shown]
    if tokenizer is not None:
        words = [tokenizer.decode([token]) for token in shown]
    total = min(len(ids_T), MEASURED_TOKENS)
    counted = count_progress("watching tokens", total, enabled=progress)
    with under_masks(model), counted as advance:
        return measure(model, ids_T, words, source, advance)


def check_page_file(path: Path) -> None:
    """Raises MoesaicError where no page can be written, before any work."""
    if path.is_dir():
        raise MoesaicError(
            f"--html {path} is a folder; name a file, such as {path / PAGE_FILE}"
        )
    if not path.absolute().parent.is_dir():
        raise MoesaicError(
            f"--html {path}: there is no folder {path.absolute().parent}; make it first"
        )
    check_parent(path)


def write_page(path: Path, result: Inspection) -> None:
    """Writes the page, whole or not at all. Raises MoesaicError."""
    try:
        write_file(path, result.page())
    except OSError as error:
        raise MoesaicError(f"cannot write {path}: {error}") from error


def read_bench(path: Path) -> dict[str, Any]:
    """What `moesaic bench --json` wrote. Raises MoesaicError for anything else."""
    try:
        values: dict[str, Any] = json.loads(path.read_text("utf-8"))
        for row in values["rows"]:
            _check_row(row)
        for name in ("model", "engine", "device"):
            values[name]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise MoesaicError(
            f"--bench {path} is not what moesaic bench --json writes ({reason_of(error)}); run "
            "moesaic bench DIR --json FILE"
        ) from error
    return values


def _check_row(row: dict[str, Any]) -> None:
    """Raises where a row lacks what is read of it, or holds no numbers."""
    numbers = [row["batch"], row["tokens_per_second"][0]]
    if "ratio" in row:
        numbers += [row["ratio"], row["least"], row["most"]]
    for number in numbers:
        float(number)
    str(row["kind"])
