"""Made-up questions for every task, in the files and fields of the real ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

SUBJECTS = {"virology": 3, "anatomy": 7, "astronomy": 1}  # questions of each
LETTERS = ["A", "B", "C", "D"]


def piqa(number: int) -> dict[str, Any]:
    return {
        "goal": f"open jar {number}", "sol1": "turn the lid", "sol2": "look at the lid",
        "label": number % 2,
    }  # fmt: skip


def winogrande(number: int) -> dict[str, Any]:
    return {
        "sentence": f"Ann paid Eve {number} coins because _ owed her.",
        "option1": "Ann", "option2": "Eve", "answer": str(1 + number % 2),
    }  # fmt: skip


def arc(number: int) -> dict[str, Any]:
    labels = LETTERS if number % 3 else ["1", "2", "3", "4"]  # the real ones have both
    texts = [f"{number} apples", "a pear", "three red plums", "no fruit at all"]
    return {
        "id": f"made-{number}", "question": f"What is in basket {number}?",
        "choices": {"text": texts, "label": labels}, "answerKey": labels[number % 4],
    }  # fmt: skip


def hellaswag(number: int) -> dict[str, Any]:
    return {
        "ind": number, "activity_label": "Cooking", "ctx_a": f"A man boils egg {number}.",
        "ctx_b": "he", "ctx": f"A man boils egg {number}. he",
        "endings": ["eats it.", "flies [title] off.", "sings to it.", "paints it blue."],
        "label": str(number % 4),
    }  # fmt: skip


def mmlu(subject: str, number: int) -> dict[str, Any]:
    return {
        "question": f"Which one is {subject} {number}?", "subject": subject,
        "choices": ["this", "that", "the other", "none"], "answer": number % 4,
    }  # fmt: skip


def gsm8k(number: int) -> dict[str, Any]:
    return {
        "question": f"Ann has {number} eggs and buys 1,000 more. How many has she?",
        "answer": f"She has {number} + 1,000 = <<{number}+1000={number + 1000}>>eggs.\n"
        f"#### {number + 1000}",
    }


def humaneval(number: int) -> dict[str, Any]:
    name = f"add_{number}"
    return {
        "task_id": f"Made/{number}",
        "prompt": f'def {name}(value: int) -> int:\n    """ The value and {number}.\n    """\n',
        "entry_point": name, "canonical_solution": f"    return value + {number}\n",
        "test": f"\n\ndef check(candidate):\n    assert candidate(1) == {1 + number}\n",
    }  # fmt: skip


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        path.write_text(text)


def write_task_files(folder: Path, questions: int = 6) -> Path:
    """Every file that any task may want, shots included."""
    folder.mkdir(exist_ok=True)
    makers = {
        "piqa": piqa, "winogrande": winogrande, "arc_easy": arc, "arc_challenge": arc,
        "hellaswag": hellaswag,
    }  # fmt: skip
    for task, make in makers.items():
        asked = [make(number) for number in range(questions)]
        shown = [make(number) for number in range(100, 110)]
        write_rows(folder / f"{task}.validation.jsonl", asked)
        write_rows(folder / f"{task}.train.jsonl", shown)
    tested = [mmlu(subject, n) for subject, count in SUBJECTS.items() for n in range(count)]
    shown = [mmlu(subject, 100 + n) for subject in SUBJECTS for n in range(5)]
    write_rows(folder / "mmlu.test.jsonl.gz", tested)
    write_rows(folder / "mmlu.dev.jsonl", shown)
    write_rows(folder / "gsm8k.test.jsonl", [gsm8k(n) for n in range(questions)])
    write_rows(folder / "gsm8k.train.jsonl", [gsm8k(n) for n in range(100, 120)])
    write_rows(folder / "humaneval.test.jsonl", [humaneval(n) for n in range(questions)])
    return folder


def right_choice(task: str, doc: dict[str, Any]) -> int:
    """The number of the right answer to a question."""
    if task == "winogrande":
        return int(doc["answer"]) - 1
    if task.startswith("arc"):
        return int(doc["choices"]["label"].index(doc["answerKey"]))
    if task.startswith("mmlu"):
        return int(doc["answer"])
    return int(doc["label"])
