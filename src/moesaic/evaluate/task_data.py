"""Questions from files of a folder, in place of data sets from the hub.

The files are called TASK.SPLIT.jsonl or TASK.SPLIT.jsonl.gz: one JSON object a line, with
the fields of the Hugging Face data set. The harness asks them as its stock task does; only
where they come from is overridden.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.errors import MoesaicError, unknown

Row = dict[str, Any]

MMLU_PREFIX = "mmlu_"  # the harness's names of MMLU's subjects begin so


@dataclass(frozen=True)
class TaskFiles:
    """Which splits a task reads, and the fields that its prompt and metric need."""

    source: str  # the data set on the hub
    split: str
    fields: tuple[str, ...]
    examples: str | None = "train"  # the split that shots are drawn from


FILES = {
    "piqa": TaskFiles(
        "baber/piqa", "validation", ("goal", "sol1", "sol2", "label")
    ),
    "winogrande": TaskFiles(
        "allenai/winogrande (winogrande_xl)",
        "validation",
        ("sentence", "option1", "option2", "answer"),
    ),
    "arc_easy": TaskFiles(
        "allenai/ai2_arc (ARC-Easy)",
        "validation",
        ("question", "choices", "answerKey"),
    ),
    "arc_challenge": TaskFiles(
        "allenai/ai2_arc (ARC-Challenge)",
        "validation",
        ("question", "choices", "answerKey"),
    ),
    "hellaswag": TaskFiles(
        "Rowan/hellaswag",
        "validation",
        ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    ),
    "mmlu": TaskFiles(
        "cais/mmlu (all)",
        "test",
        ("question", "subject", "choices", "answer"),
        examples="dev",
    ),
    "gsm8k": TaskFiles("openai/gsm8k (main)", "test", ("question", "answer")),
    "humaneval": TaskFiles(
        "openai/openai_humaneval",
        "test",
        ("prompt", "test", "entry_point"),
        examples=None,
    ),
}


def check_files(folder: Path, shots: dict[str, int]) -> None:
    """Raises MoesaicError unless every file of these tasks is in the folder."""
    if not folder.is_dir():
        raise MoesaicError(f"--task-data {folder} is no folder")
    for task, count in shots.items():
        for split in _splits(task, count):
            _find(folder, task, split)


def overrides(
    folder: Path, task: str, shots: int, scratch: Path
) -> dict[str, dict[str, Any]]:
    """What to change in the configuration of each of a task's parts in the harness.

    Most tasks have one part. MMLU has one for each subject in the file. Reads and checks
    the files. Writes below `scratch`: MMLU's subjects, and what `datasets` keeps.
    Raises MoesaicError.
    """
    files = FILES[task]
    paths = {}
    rows = {}
    for split in _splits(task, shots):
        paths[split] = _find(folder, task, split)
        rows[split] = _read(paths[split], files.fields)
    if task != "mmlu":
        data_files = {split: str(path) for split, path in paths.items()}
        return {task: _config(files, shots, data_files, scratch)}

    parts = {}
    by_subject = _split_subjects(rows, paths, scratch)
    for subject, data_files in by_subject.items():
        parts[MMLU_PREFIX + subject] = _config(
            files, shots, data_files, scratch
        )
    return parts


def _splits(task: str, shots: int) -> list[str]:
    files = FILES[task]
    if shots > 0 and files.examples is not None:
        return [files.split, files.examples]
    return [files.split]


def _find(folder: Path, task: str, split: str) -> Path:
    name = f"{task}.{split}.jsonl"
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    source = FILES[task].source
    raise MoesaicError(
        f"{name} (or {name}.gz) is not in --task-data {folder}: it holds the split "
        f"{split} of {source}, one JSON object a line; put it there, or leave "
        "--task-data out to fetch it from the hub"
    )


def _read(path: Path, fields: tuple[str, ...]) -> list[Row]:
    """The rows of a file, which must have these fields."""
    open_text = gzip.open if path.suffix == ".gz" else open
    try:
        with open_text(path, "rt", encoding="utf-8") as file:
            # Not splitlines: text may hold other signs that end a line for it.
            lines = list(file)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise MoesaicError(f"{path} cannot be read ({error})") from error
    if not lines:
        raise MoesaicError(f"{path} is empty")
    rows = []
    for number, line in enumerate(lines, start=1):
        rows.append(_row(line, fields, f"line {number} of {path}"))
    return rows


def _row(line: str, fields: tuple[str, ...], where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise MoesaicError(f"{where} is no JSON object ({error})") from error
    if not isinstance(row, dict):
        raise MoesaicError(f"{where} is no JSON object")
    missing = [name for name in fields if name not in row]
    if missing:
        lacking = ", ".join(missing)
        needed = ", ".join(fields)
        raise MoesaicError(f"{where} lacks {lacking}; it needs {needed}")
    return row


def _config(
    files: TaskFiles, shots: int, data_files: dict[str, str], scratch: Path
) -> dict[str, Any]:
    """The keys of a stock task that say where its questions come from."""
    split_key = f"{files.split}_split"
    examples = files.examples if shots > 0 else None
    splits = dict.fromkeys(
        ("training_split", "validation_split", "test_split", "fewshot_split")
    )
    return {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": data_files,
            "cache_dir": str(scratch / "datasets"),
        },
        **splits,
        split_key: files.split,
        "fewshot_split": examples,
    }


def _split_subjects(
    rows: dict[str, list[Row]], paths: dict[str, Path], scratch: Path
) -> dict[str, dict[str, str]]:
    """Files of each subject by split, subjects in the order of the alphabet."""
    test = FILES["mmlu"].split
    by_subject: dict[str, dict[str, list[Row]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for split, split_rows in rows.items():
        for row in split_rows:
            by_subject[str(row["subject"])][split].append(row)

    files: dict[str, dict[str, str]] = {}
    for subject in sorted({str(row["subject"]) for row in rows[test]}):
        files[subject] = {}
        for split in rows:
            found = by_subject[subject][split]
            if not found:
                raise MoesaicError(
                    f"{paths[split]} has no examples of {subject}, which "
                    f"{paths[test]} asks; add them or take --fewshot 0"
                )
            part = scratch / f"mmlu.{len(files)}.{split}.jsonl"
            lines = [json.dumps(row) + "\n" for row in found]
            part.write_text("".join(lines), encoding="utf-8")
            files[subject][split] = str(part)
    return files


def check_subjects(parts: list[str], known: list[str]) -> None:
    """Raises MoesaicError for a subject of MMLU that the harness does not have."""
    for part in parts:
        if part not in known:
            subjects = [name.removeprefix(MMLU_PREFIX) for name in known]
            subject = part.removeprefix(MMLU_PREFIX)
            raise unknown("subject of mmlu", subject, subjects)
