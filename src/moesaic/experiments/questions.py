"""Made-up questions of every task, from lines of code: so that smoke needs no download.

Which line comes next? The right answer is the line that stands there, the others stand
elsewhere in the same text. They say whether the tables run, not what a model knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.output.atomic import write_file

MADE_UP = (
    "questions are made up: which line of Python comes next, and sums for gsm8k"
)
SUBJECTS = ("college_computer_science", "machine_learning")
QUESTIONS = 64  # of each task
_SHOWN = 8  # examples
_LETTERS = ("A", "B", "C", "D")
_WORD = re.compile(r"[a-z]{4,}")


@dataclass(frozen=True)
class Puzzle:
    """Two lines, four that may come next, and which one does."""

    before: str
    lines: tuple[str, ...]
    right: int


def puzzles(text: str, count: int, shift: int = 0) -> list[Puzzle]:
    """So many, evenly spaced over the text from line `shift` on; always the same ones."""
    rows = [line.strip() for line in text.splitlines()]
    usable = [
        line for line in rows if 20 <= len(line) <= 60 and "_" not in line
    ]
    stride = len(usable) // count
    generator = np.random.default_rng(0)
    found = []
    for number in range(count):
        place = number * stride + shift + 2
        before = f"{usable[place - 2]}\n{usable[place - 1]}"
        others = [
            usable[(place + step * stride + 7) % len(usable)]
            for step in (1, 2, 3)
        ]
        right = int(generator.integers(4))
        lines = [*others[:right], usable[place], *others[right:]]
        found.append(Puzzle(before, tuple(lines), right))
    return found


def piqa(puzzle: Puzzle) -> dict[str, Any]:
    right = puzzle.lines[puzzle.right]
    wrong = puzzle.lines[(puzzle.right + 1) % 4]
    label = puzzle.right % 2
    pair = (right, wrong) if label == 0 else (wrong, right)
    return {
        "goal": puzzle.before,
        "sol1": pair[0],
        "sol2": pair[1],
        "label": label,
    }


def winogrande(puzzle: Puzzle) -> dict[str, Any]:
    """A word of the line is left out; the other one is of another line."""
    line = puzzle.lines[puzzle.right]
    right = _word(line, "self")
    wrong = _word(puzzle.lines[(puzzle.right + 1) % 4], "value")
    if wrong == right:
        wrong = "nothing"
    pair = (right, wrong) if puzzle.right % 2 == 0 else (wrong, right)
    return {
        "sentence": f"{puzzle.before} {line.replace(right, '_', 1)}",
        "option1": pair[0],
        "option2": pair[1],
        "answer": str(1 + puzzle.right % 2),
    }


def _word(line: str, otherwise: str) -> str:
    """The longest word of a line."""
    words = _WORD.findall(line)
    return max(words, key=len) if words else otherwise


def arc(puzzle: Puzzle) -> dict[str, Any]:
    return {
        "id": "made-up",
        "question": puzzle.before,
        "choices": {"text": list(puzzle.lines), "label": list(_LETTERS)},
        "answerKey": _LETTERS[puzzle.right],
    }


def hellaswag(puzzle: Puzzle) -> dict[str, Any]:
    first, second = puzzle.before.split("\n")
    return {
        "ind": 0,
        "activity_label": "Python",
        "ctx_a": first,
        "ctx_b": second,
        "ctx": puzzle.before,
        "endings": list(puzzle.lines),
        "label": str(puzzle.right),
    }


def mmlu(puzzle: Puzzle, subject: str) -> dict[str, Any]:
    return {
        "question": puzzle.before,
        "subject": subject,
        "choices": list(puzzle.lines),
        "answer": puzzle.right,
    }


def gsm8k(number: int) -> dict[str, Any]:
    total = number + 10
    return {
        "question": f"Ann has {number} eggs and buys 10 more. How many has she?",
        "answer": f"She has {number} + 10 = <<{number}+10={total}>>{total} eggs.\n#### {total}",
    }


def humaneval(number: int) -> dict[str, Any]:
    name = f"add{number}"
    return {
        "task_id": f"MadeUp/{number}",
        "prompt": f'def {name}(value):\n    """ The value and {number}. """\n',
        "entry_point": name,
        "canonical_solution": f"    return value + {number}\n",
        "test": f"\n\ndef check(candidate):\n    assert candidate(1) == {1 + number}\n",
    }


_MAKERS: dict[str, Callable[[Puzzle], dict[str, Any]]] = {
    "piqa": piqa,
    "winogrande": winogrande,
    "arc_easy": arc,
    "arc_challenge": arc,
    "hellaswag": hellaswag,
}


def write_questions(text: str, folder: Path) -> Path:
    """Every task's file, as `--task-data` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    for shift, (task, make) in enumerate(_MAKERS.items()):
        rows = [make(puzzle) for puzzle in puzzles(text, QUESTIONS, shift)]
        _write(folder / f"{task}.validation.jsonl", rows)
    asked = puzzles(text, QUESTIONS + _SHOWN)
    tested = []
    shown = []
    for number, puzzle in enumerate(asked[:QUESTIONS]):
        tested.append(mmlu(puzzle, SUBJECTS[number % len(SUBJECTS)]))
    for subject in SUBJECTS:
        shown += [mmlu(puzzle, subject) for puzzle in asked[QUESTIONS:]]
    _write(folder / "mmlu.test.jsonl", tested)
    _write(folder / "mmlu.dev.jsonl", shown)
    numbers = range(2, 2 + QUESTIONS)
    _write(folder / "gsm8k.test.jsonl", [gsm8k(number) for number in numbers])
    _write(
        folder / "gsm8k.train.jsonl", [gsm8k(100 + n) for n in range(_SHOWN)]
    )
    _write(folder / "humaneval.test.jsonl", [humaneval(n) for n in numbers])
    return folder


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = [json.dumps(row) + "\n" for row in rows]
    write_file(path, "".join(lines))
