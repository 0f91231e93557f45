"""Accuracy on sets of questions, a dense model's beside a converted one's.

EleutherAI's lm-evaluation-harness asks: its prompts, its metrics, its way to read an
answer. The shots are those of the paper (arXiv 2502.04416, Section 5). Chat templates are
not applied.

Standard errors are the sample standard deviation over the root of the number of
questions, as the harness's. That of a difference is taken over the differences question
by question, for both models answer the same ones.
"""

from __future__ import annotations

import math
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.errors import MoesaicError, unknown
from moesaic.evaluate.code_execution import check_can_run
from moesaic.evaluate.self_consistency import Voting
from moesaic.evaluate.task_data import check_files
from moesaic.evaluate.work import active_ffn_fraction_of
from moesaic.families.load import (
    context_of,
    load_config,
    load_model,
    load_tokenizer,
)
from moesaic.parts.products import widened_products

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TaskSetup:
    """How a task is shown and asked unless told otherwise."""

    metric: str
    shots: int
    way: str = "none"  # of the harness, to read an answer from what was written


TASKS = {
    "piqa": TaskSetup("acc_norm", 0),
    "winogrande": TaskSetup("acc", 0),
    "arc_easy": TaskSetup("acc_norm", 0),
    "arc_challenge": TaskSetup("acc_norm", 0),
    "hellaswag": TaskSetup("acc_norm", 0),
    "mmlu": TaskSetup("acc", 5),
    "gsm8k": TaskSetup("exact_match", 8, way="strict-match"),
    "humaneval": TaskSetup("pass@1", 0),
}
CHOICE_TASKS = ("piqa", "winogrande", "arc_easy", "arc_challenge", "hellaswag")

_PACKAGES = ("lm-eval", "datasets", "torch", "transformers", "moesaic")


@dataclass(frozen=True)
class Asked:
    """One task: its parts in the harness, and which of their questions are asked."""

    parts: dict[str, Any]
    shots: int
    chosen: dict[str, list[int]]
    version: Any


def evaluate_tasks(
    model: str,
    tasks: Sequence[str],
    *,
    against: str | None = None,
    fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int | str = "auto",
    task_data: Path | None = None,
    allow_code_execution: bool = False,
    self_consistency: Sequence[int] = (),
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Accuracy of a model on TASKS, and of a dense one beside it.

    Gives model, active_ffn_fraction, dtype, context, tasks (a row each), mean (where all
    five choice tasks are asked), settings and versions. With `against` also that model's,
    under that key, and `difference`. `limit` asks so many questions of each task, evenly
    spaced; of MMLU so many in all, its subjects one after another. `task_data` is a folder
    with the questions, in place of the hub. `self_consistency` are numbers of answers
    that vote, drawn with `seed`: each row then has the scores of the votes too.
    Raises MoesaicError for bad input, before a model is loaded. Costs a forward pass over
    prompt and answer for each choice, or a generation for each question, per model.
    Votes on choices cost nothing more, those on what is written a generation each.
    """
    names = list(dict.fromkeys(tasks))
    shots = _check_options(names, fewshot, limit, batch_size)
    voting = _make_voting(names, self_consistency, seed)
    if "humaneval" in names:
        _check_code(shots["humaneval"], allow_code_execution)
    _check_harness()
    if task_data is not None:
        check_files(task_data, shots)
    models = [model] if against is None else [model, against]
    contexts = {}
    tokenizers = {}
    for name in models:
        contexts[name] = context_of(load_config(name, trust_remote_code))
        tokenizers[name] = load_tokenizer(name, trust_remote_code)

    from moesaic.evaluate.harness import Model

    results = []
    scores = []
    with tempfile.TemporaryDirectory() as scratch:
        asked = load_questions(shots, limit, task_data, Path(scratch))
        for name in models:
            check_context(asked, name, contexts[name], tokenizers[name])
        for name in models:
            loaded = load_model(name, dtype, trust_remote_code, device)
            lm = Model(
                name, loaded, tokenizers[name], contexts[name], batch_size
            )
            with widened_products(loaded.dtype, loaded.device):
                rows, scores_by_task = ask_all(lm, asked, voting)
            scores.append(scores_by_task)
            about = {
                "model": name,
                "active_ffn_fraction": active_ffn_fraction_of(loaded),
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "context": contexts[name],
            }
            results.append(about | _with_mean(rows))
            del lm, loaded

    result = results[0]
    if against is not None:
        result["against"] = results[1]
        result["difference"] = _with_mean(difference_rows(*scores))
    result["settings"] = {
        "limit": limit,
        "batch_size": batch_size,
        "self_consistency": list(self_consistency),
        "seed": seed,
        "task_data": None if task_data is None else str(task_data),
        "device": str(device),
    }
    result["versions"] = _versions()
    return result


def _check_options(
    names: list[str],
    fewshot: int | None,
    limit: int | None,
    batch_size: int | str,
) -> dict[str, int]:
    """The shots of each task. Raises MoesaicError for a name or number that cannot be."""
    if not names:
        raise MoesaicError(f"--tasks names none; known are {', '.join(TASKS)}")
    for name in names:
        if name not in TASKS:
            raise unknown("task", name, TASKS)
    if fewshot is not None and fewshot < 0:
        raise MoesaicError(f"--fewshot {fewshot} is less than no example")
    if limit is not None and limit < 1:
        raise MoesaicError(f"--limit {limit} asks nothing; take 1 or more")
    if isinstance(batch_size, int):
        usable = batch_size >= 1
    else:
        usable = batch_size == "auto"
    if not usable:
        raise MoesaicError(
            f"--batch-size {batch_size}: give auto or a number of 1 or more"
        )
    if fewshot is not None:
        return dict.fromkeys(names, fewshot)
    return {name: TASKS[name].shots for name in names}


def _make_voting(
    names: list[str], self_consistency: Sequence[int], seed: int
) -> Voting | None:
    """How answers vote; None where they do not. Raises MoesaicError."""
    if not self_consistency:
        return None
    if "humaneval" in names:
        raise MoesaicError(
            "--self-consistency: programs cannot vote; leave humaneval out"
        )
    counts = sorted(set(self_consistency))
    return Voting(tuple(counts), seed)


def _check_code(shots: int, allowed: bool) -> None:
    """Raises MoesaicError where HumanEval's programs must not or cannot run."""
    if not allowed:
        raise MoesaicError(
            "humaneval runs code that the model writes, on this machine: allow it by "
            "--allow-code-execution, or leave humaneval out"
        )
    if shots > 0:
        raise MoesaicError(
            f"--fewshot {shots}: humaneval has no examples to show; ask it on its own, "
            "without --fewshot"
        )
    check_can_run()


def _check_harness() -> None:
    """Raises MoesaicError where the harness is not installed."""
    if find_spec("lm_eval") is None:
        raise MoesaicError(
            "--tasks needs EleutherAI's evaluation harness: "
            "pip install 'lm-eval>=0.4.13'"
        )


def load_questions(
    shots: dict[str, int],
    limit: int | None,
    task_data: Path | None,
    scratch: Path,
) -> dict[str, Asked]:
    """The tasks that `shots` names, and which of their questions are asked.

    Writes below `scratch`, which must stay as long as they are used.
    Raises MoesaicError where questions cannot be read.
    """
    from moesaic.evaluate.harness import load_task, task_version

    asked = {}
    for task, count in shots.items():
        parts = load_task(task, count, task_data, scratch)
        sizes = {name: len(part.eval_docs) for name, part in parts.items()}
        asked[task] = Asked(
            parts,
            shots=count,
            chosen=spread(sizes, limit),
            version=task_version(task, parts),
        )
    return asked


def spread(sizes: dict[str, int], limit: int | None) -> dict[str, list[int]]:
    """Which questions of each part are asked, by number: `limit` of all, evenly spaced.

    The parts stand in one row, so that each gives as many as its size tells, give or take
    one. A part that gives none is left out.
    """
    total = sum(sizes.values())
    wanted = total if limit is None else min(limit, total)
    in_row = [number * total // wanted for number in range(wanted)]
    chosen = {}
    start = 0
    for name, size in sizes.items():
        end = start + size
        numbers = [at - start for at in in_row if start <= at < end]
        if numbers:
            chosen[name] = numbers
        start = end
    return chosen


def check_context(
    asked: dict[str, Asked], model: str, context: int, tokenizer: Any
) -> None:
    """Raises MoesaicError where the first question of a task does not fit a model."""
    from moesaic.evaluate.harness import first_requests, tokens_needed

    for task, questions in asked.items():
        first_part = next(iter(questions.parts.values()))
        requests = first_requests(first_part)
        needed = max(tokens_needed(request, tokenizer) for request in requests)
        if needed <= context:
            continue
        advice = "leave it out"
        if questions.shots > 0:
            advice = f"lower --fewshot, which is {questions.shots}"
        raise MoesaicError(
            f"{task}: the first prompt and its answer take {needed:,} tokens, and the "
            f"context of {model} holds {context:,}; {advice}"
        )


def ask_all(
    lm: Any, asked: dict[str, Asked], voting: Voting | None = None
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """A row for each task, and each task's scores question by question.

    `lm` is a model as the harness knows it. With `voting` a row has the scores of votes.
    """
    from moesaic.evaluate.harness import ask, split_of

    rows = {}
    scores_by_task = {}
    for task, questions in asked.items():
        setup = TASKS[task]
        lm.task = task
        answers = ask(
            lm, questions.parts, questions.chosen, setup.metric, setup.way
        )
        scores: list[float] = []
        for answer in answers.values():
            scores += answer.scores
        any_part = next(iter(questions.parts.values()))
        rows[task] = {
            "metric": setup.metric,
            **mean_of(scores),
            "questions": len(scores),
            "of": sum(len(part.eval_docs) for part in questions.parts.values()),
            "split": split_of(any_part),
            "shots": questions.shots,
            "cut": sum(answer.cut for answer in answers.values()),
            "whole": sum(answer.whole for answer in answers.values()),
            "version": questions.version,
            "harness": {name: a.values for name, a in answers.items()},
        }
        if voting is not None:
            rows[task]["self_consistency"] = vote(lm, task, questions, voting)
        scores_by_task[task] = scores
    return rows, scores_by_task


def vote(
    lm: Any, task: str, questions: Asked, voting: Voting
) -> dict[str, dict[str, Any]]:
    """By number of votes, the mean score of a task that was asked just now."""
    from moesaic.evaluate.harness import vote_on_choices, vote_on_texts

    setup = TASKS[task]
    if setup.metric == "exact_match":
        scores = vote_on_texts(
            lm,
            questions.parts,
            questions.chosen,
            setup.metric,
            setup.way,
            voting,
        )
    else:
        asked = {name: questions.parts[name] for name in questions.chosen}
        scores = vote_on_choices(asked, setup.metric, voting)
    return {str(count): mean_of(values) for count, values in scores.items()}


def mean_of(scores: list[float]) -> dict[str, Any]:
    """Mean and its standard error, which one number does not have."""
    count = len(scores)
    mean = sum(scores) / count
    error = None
    if count > 1:
        squares = sum((score - mean) ** 2 for score in scores)
        error = math.sqrt(squares / (count - 1) / count)
    return {"score": mean, "standard_error": error}


def mean_of_five(rows: dict[str, Any]) -> dict[str, Any]:
    """Mean of the five choice tasks, each counted alike, and its standard error.

    The errors of the tasks are independent, for no question is in two of them.
    """
    five = [rows[task] for task in CHOICE_TASKS]
    mean = sum(row["score"] for row in five) / len(five)
    errors = [row["standard_error"] for row in five]
    error = None
    if None not in errors:
        error = math.sqrt(sum(each**2 for each in errors)) / len(five)
    return {"score": mean, "standard_error": error}


def _with_mean(rows: dict[str, Any]) -> dict[str, Any]:
    """Rows, and the mean of the five choice tasks where all are among them."""
    if rows.keys() >= set(CHOICE_TASKS):
        return {"tasks": rows, "mean": mean_of_five(rows)}
    return {"tasks": rows}


def difference_rows(
    ours: dict[str, list[float]], other: dict[str, list[float]]
) -> dict[str, Any]:
    """How much more a model scores than another on the same questions."""
    rows = {}
    for task, scores in ours.items():
        pairs = zip(scores, other[task], strict=True)
        rows[task] = mean_of([first - second for first, second in pairs])
    return rows


def _versions() -> dict[str, str]:
    versions = {package: version(package) for package in _PACKAGES}
    versions["python"] = platform.python_version()
    return versions
