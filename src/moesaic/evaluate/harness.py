"""EleutherAI's lm-evaluation-harness, as far as it is used here.

The one module that imports it: it is an extra, and takes seconds to import.
Source: https://github.com/EleutherAI/lm-evaluation-harness, version 0.4.13.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import datasets
import lm_eval.api.task
import lm_eval.tasks
import numpy as np
import torch
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.filters import build_filter_ensemble
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from moesaic.errors import MoesaicError, first_line
from moesaic.evaluate.code_execution import passes
from moesaic.evaluate.perplexity import skips_nothing
from moesaic.evaluate.self_consistency import (
    TEMPERATURE,
    Voting,
    draw,
    majority,
    probabilities,
)
from moesaic.evaluate.task_data import (
    MMLU_PREFIX,
    check_subjects,
    overrides,
)
from moesaic.evaluate.work import is_converted
from moesaic.modeling import MoesaicPromptNeurons, chosen_for_each_token
from moesaic.progress import Ticker, progress

logging.getLogger("lm_eval").setLevel(logging.ERROR)

# Where the harness defines our tasks. To read all of its 14,000 takes half a minute.
_FOLDERS = (
    "piqa",
    "winogrande",
    "arc",
    "hellaswag",
    "mmlu/default",
    "gsm8k",
    "humaneval",
)
_SEED = 1234  # of the examples shown; the harness's own
_USUAL_ANSWER = 256  # tokens that the harness lets a model write
_CPU_BATCH = 16  # answers at once on a CPU
_CPU_TOKENS = 2048  # in all of them; the logits of each take as many bytes as 6 vocabularies
_MANY_PROMPTS = (
    1000  # from here on, writing them takes long enough to tell of it
)


class Model(HFLM):  # type: ignore[misc]
    """A loaded model as the harness asks it, with our progress instead of its bars.

    Log probabilities are taken in float32, whatever the model's number format: in
    bfloat16 their sums would be rounded to steps of a half and more.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        context: int,
        batch_size: int | str,
    ) -> None:
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            max_length=context,
            batch_size=batch_size,
            softmax_dtype="float32",
        )
        self.on_cpu = model.device.type == "cpu"
        self.shown_name = name
        self.task = ""  # what it is asked now, for the progress

    def skips_nothing(self, tokens: int) -> bool:
        """Whether so many tokens, read at once, run all neurons as a prompt."""
        config = self.model.config
        return is_converted(config) and skips_nothing(config.moesaic, tokens)

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = True
    ) -> Any:
        with self._told(len(requests)):
            return super().loglikelihood(requests, disable_tqdm=True)

    def generate_until(
        self, requests: list[Any], disable_tqdm: bool = True
    ) -> Any:
        batch: int = self.batch_size_per_gpu  # type: ignore[has-type]
        modules = self.model.modules()
        if any(isinstance(module, MoesaicPromptNeurons) for module in modules):
            # The padding before a short prompt would be taken for its beginning.
            self.batch_size_per_gpu = 1
        try:
            with self._told(len(requests)):
                return super().generate_until(requests, disable_tqdm=True)
        finally:
            self.batch_size_per_gpu = batch

    # The two by which the harness finds the batch `auto`. It takes as many answers as do
    # not run out of memory, which on a CPU would take other programs down.

    def _batch_scheduler(self, pos: int, requests: Any) -> int:
        if not self.on_cpu:
            return int(super()._batch_scheduler(pos, requests))
        _, prompt, answer = requests[pos]  # longest first
        fit = _CPU_TOKENS // len(prompt + answer)
        return max(1, min(_CPU_BATCH, fit))

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        if not self.on_cpu:
            return int(super()._detect_batch_size(requests, pos))
        return _CPU_BATCH

    @contextmanager
    def _told(self, answers: int) -> Iterator[None]:
        with progress(f"{self.task}, {self.shown_name}", answers) as advance:
            self.set_cache_hook(_Counter(advance))
            # Answers are scored as the model would write them.
            with chosen_for_each_token(self.model):
                yield


class _Counter:
    """What the harness tells of every answer; it is meant for a cache."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self.advance = advance

    def add_partial(self, *unused: object) -> None:
        self.advance(1)


@dataclass(frozen=True)
class Answers:
    """One model's answers to one part of a task."""

    scores: list[float]  # of the metric shown, a question each
    cut: int  # questions whose prompt did not fit the context
    whole: int  # questions in which nothing was skipped
    values: dict[str, Any]  # every metric, as the harness names it


def load_task(
    task: str, shots: int, task_data: Path | None, scratch: Path
) -> dict[str, Task]:
    """The parts of a task with their questions: one, or a part per subject of MMLU.

    Raises MoesaicError where questions cannot be read, or are too few for the shots.
    """
    datasets.disable_progress_bars()
    manager = _manager()
    changes: dict[str, dict[str, Any]]
    if task_data is not None:
        changes = overrides(task_data, task, shots, scratch)
    elif task == "mmlu":
        changes = {name: {} for name in _subjects(manager)}
    else:
        changes = {task: {}}
    if task == "mmlu":
        check_subjects(list(changes), _subjects(manager))

    parts = {}
    for name, change in changes.items():
        definition = _definition(manager, name, change, scratch)
        parts[name] = _load_part(manager, name, definition, task_data)
        _set_shots(task, parts[name], shots)
    return parts


def task_version(task: str, parts: dict[str, Task]) -> Any:
    """The version of a task; of MMLU that of the group of its subjects."""
    if task == "mmlu":
        return _manager().task_index[task].cfg["metadata"]["version"]
    return parts[task].VERSION


@cache
def _manager() -> TaskManager:
    root = Path(lm_eval.tasks.__file__).parent
    folders = [root / folder for folder in _FOLDERS]
    return TaskManager(include_defaults=False, include_path=folders)


def _subjects(manager: TaskManager) -> list[str]:
    return [
        name for name in manager.all_subtasks if name.startswith(MMLU_PREFIX)
    ]


def _definition(
    manager: TaskManager, name: str, change: dict[str, Any], scratch: Path
) -> str | dict[str, Any]:
    """What the harness loads a task by: its name, a file that includes it, a dictionary."""
    stock = manager.task_index[name]
    if name == "humaneval":
        # Its own scorer is fetched from the hub, and runs what the model wrote in a
        # process that forks from this one. The prompt and where answers end stay.
        return {
            **deepcopy(stock.cfg),
            **change,
            "process_results": _score_program,
            "metric_list": [
                {
                    "metric": "pass@1",
                    "aggregation": "mean",
                    "higher_is_better": True,
                }
            ],
            "filter_list": None,
        }
    if not change:
        return name
    path = scratch / f"{name}.yaml"
    including = {"include": str(stock.yaml_path), "task": name, **change}
    path.write_text(yaml.safe_dump(including))
    return str(path)


def _load_part(
    manager: TaskManager,
    name: str,
    definition: str | dict[str, Any],
    task_data: Path | None,
) -> Task:
    try:
        return manager.load([definition])["tasks"][name]
    except Exception as error:  # datasets raises many kinds for one cause
        reason = first_line(error)
        if task_data is None:
            raise MoesaicError(
                f"the questions of {name} cannot be fetched from the hub ({reason}); "
                "name a folder that holds them by --task-data"
            ) from error
        raise MoesaicError(
            f"the questions of {name} in {task_data} are not as in the data set on "
            f"the hub ({reason})"
        ) from error


def _set_shots(task: str, part: Task, shots: int) -> None:
    part.set_config("num_fewshot", shots)
    if shots == 0:
        return
    examples = len(part.sampler.df)
    if shots > examples:
        raise MoesaicError(
            f"--fewshot {shots}: {task} has {examples} examples to show"
        )


def _score_program(doc: dict[str, Any], answers: list[str]) -> dict[str, float]:
    """Whether the function that a model went on writing passes HumanEval's tests."""
    check = f"check({doc['entry_point']})"
    function = doc["prompt"] + answers[0]
    program = "\n".join([function, doc["test"], check])
    return {"pass@1": float(passes(program))}


def first_requests(part: Task) -> list[Instance]:
    """What the model is asked for the first question of a part."""
    part.set_fewshot_seed(seed=_SEED)
    doc = part.eval_docs[0]
    prompt = part.fewshot_context(
        doc,
        num_fewshot=part.config.num_fewshot,
        gen_prefix=part.doc_to_prefix(doc),
    )
    metadata = (part.task_name, 0, 1)
    requests = part.construct_requests(doc=doc, ctx=prompt, metadata=metadata)
    return requests if isinstance(requests, list) else [requests]


def tokens_needed(request: Instance, tokenizer: Any) -> int:
    """Positions of a context that a prompt and its answer take."""
    if request.request_type == "generate_until":
        prompt, options = request.args
        answer = options.get("max_gen_toks", _USUAL_ANSWER)
        return len(tokenizer.encode(prompt)) + int(answer)
    prompt, choice = request.args
    # Nothing is predicted from the last token.
    return len(tokenizer.encode(prompt + choice)) - 1


def split_of(part: Task) -> str:
    """The split whose questions are asked."""
    return str(part.config.test_split or part.config.validation_split)


def ask(
    lm: Any,
    parts: dict[str, Task],
    chosen: dict[str, list[int]],
    metric: str,
    way: str,
) -> dict[str, Answers]:
    """Asks a model those questions of a task's parts whose numbers are `chosen`.

    `metric` is the one whose scores are kept question by question, and `way` the
    harness's name for how an answer is read. The same questions come with the same
    examples every time. A part of which none is chosen is left out.
    """
    asked = {}
    numbers = {}
    for name, part in parts.items():
        if name not in chosen:
            continue
        part.set_fewshot_seed(seed=_SEED)
        asked[name] = part
        # To look every number up in a list takes long where all are chosen.
        if len(chosen[name]) < len(part.eval_docs):
            numbers[name] = chosen[name]
    count = sum(len(chosen[name]) for name in asked)
    with (
        _prompts_told(f"{lm.task}: prompts", count),
        redirect_stdout(StringIO()),  # the harness prints what batch it found
    ):
        found = evaluate(
            lm=lm,
            task_dict={"tasks": asked},
            samples=numbers,
            confirm_run_unsafe_code=True,  # asked for before a model is loaded
        )
    answers = {}
    for name, part in asked.items():
        _check_finite(part, lm)
        scores = [
            float(sample[metric])
            for sample in found["samples"][name]
            if sample["filter"] == way
        ]
        values = {
            key: value
            for key, value in found["results"][name].items()
            if "," in key
        }
        cut, whole = count_lengths(part, lm)
        answers[name] = Answers(scores, cut, whole, values)
    return answers


def _check_finite(part: Task, lm: Any) -> None:
    """Raises MoesaicError where a model that broke has answered.

    Its answers would count: the first of equals is the highest.
    """
    for request in part.instances:
        if request.request_type != "loglikelihood":
            continue
        log_probability, _ = request.resps[0]
        if math.isnan(log_probability):
            raise MoesaicError(
                f"{lm.shown_name} gives an answer of {part.task_name} the log "
                "probability nan: its weights or activations broke"
            )


@contextmanager
def _prompts_told(description: str, total: int) -> Iterator[None]:
    """Our progress in the place of the bars that the harness shows while it writes prompts.

    One for all parts of a task: MMLU has 57. It ends with the last prompt, for a terminal
    shows one bar at a time.
    """
    ticker = Ticker(description, total, enabled=total >= _MANY_PROMPTS)

    def tell(docs: Iterable[Any], **unused: Any) -> Iterator[Any]:
        for doc in docs:
            yield doc
            ticker.advance()
            if ticker.done == total:
                ticker.stop()

    theirs = lm_eval.api.task.tqdm
    lm_eval.api.task.tqdm = tell
    try:
        yield
    finally:
        lm_eval.api.task.tqdm = theirs
        if (
            ticker.done < total
        ):  # to stop twice would tell the time of the answers too
            ticker.stop()


def count_lengths(part: Task, lm: Any) -> tuple[int, int]:
    """Questions that did not fit the context, and those that were nothing but a prompt.

    Of the first the harness cuts the start of their prompt. Of the others no choice is
    longer than the prompt over which a model (GRIFFIN) runs all neurons.
    Costs tokenising a prompt for each question that was asked last.
    """
    longest: dict[int, Instance] = {}
    for request in part.instances:
        other = longest.get(request.doc_id)
        if other is None or _characters(request) > _characters(other):
            longest[request.doc_id] = request
    cut = 0
    whole = 0
    for request in longest.values():
        needed = tokens_needed(request, lm.tokenizer)
        cut += needed > lm.max_length
        if request.request_type == "loglikelihood":
            whole += lm.skips_nothing(needed)
    return cut, whole


def _characters(request: Instance) -> int:
    return sum(len(text) for text in request.args if isinstance(text, str))


def vote_on_choices(
    parts: dict[str, Task], metric: str, voting: Voting
) -> dict[int, list[float]]:
    """By number of votes, the score of each question that `ask` asked last.

    Costs nothing of the model: the log probabilities of all choices are known.
    """
    generator = np.random.default_rng(voting.seed)
    scores: dict[int, list[float]] = {count: [] for count in voting.counts}
    for part in parts.values():
        for requests in _requests_by_question(part).values():
            drawn = _drawn_choices(requests, metric, voting, generator)
            for count in voting.counts:
                winner = majority(drawn[:count])
                score = _score_of(part, requests, winner, metric)
                scores[count].append(score)
    return scores


def _requests_by_question(part: Task) -> dict[int, list[Instance]]:
    """What was asked for each question, a request for each choice, in their order."""
    questions: dict[int, list[Instance]] = {}
    for request in part.instances or []:
        questions.setdefault(request.doc_id, []).append(request)
    for requests in questions.values():
        requests.sort(key=lambda request: int(request.idx))
    return questions


def _drawn_choices(
    requests: list[Instance],
    metric: str,
    voting: Voting,
    generator: np.random.Generator,
) -> list[int]:
    known = [request.resps[0][0] for request in requests]
    lengths = None
    if metric == "acc_norm":
        # The harness divides by the choice without the space before it.
        lengths = [
            len(str(request.args[1]).removeprefix(" ")) for request in requests
        ]
    chances = probabilities(known, lengths)
    return draw(chances, voting.samples, generator)


def _score_of(
    part: Task, requests: list[Instance], choice: int, metric: str
) -> float:
    """The metric, had the model been sure of this choice."""
    sure = [
        (0.0 if number == choice else -1e9, False)
        for number in range(len(requests))
    ]
    return float(part.process_results(requests[0].doc, sure)[metric])


def vote_on_texts(
    lm: Any,
    parts: dict[str, Task],
    chosen: dict[str, list[int]],
    metric: str,
    way: str,
    voting: Voting,
) -> dict[int, list[float]]:
    """By number of votes, the score of each question, answers to which are written.

    Writes `voting.samples` answers to each question, by the harness's own repeats.
    What cannot be read in an answer is a vote as well, for a wrong one.
    """
    scores: dict[int, list[float]] = {count: [] for count in voting.counts}
    for name in parts.keys() & chosen.keys():
        part = _sampling(parts[name], way, voting)
        part.set_fewshot_seed(seed=_SEED)
        torch.manual_seed(voting.seed)
        with redirect_stdout(StringIO()):
            found = evaluate(
                lm=lm,
                task_dict={"tasks": {name: part}},
                samples={name: chosen[name]},
            )
        for sample in found["samples"][name]:
            count = int(sample["filter"])
            scores[count].append(float(sample[metric]))
    return scores


def _sampling(part: Task, way: str, voting: Voting) -> Task:
    """The same task with answers drawn, and a filter for each number of votes."""
    sampling = copy.copy(part)
    sampling._config = deepcopy(part.config)
    written = {
        **part.config.generation_kwargs,
        "do_sample": True,
        "temperature": TEMPERATURE,
        # Else those of the model's generation config, and without one a top_k of 50.
        "top_k": 0,
        "top_p": 1.0,
    }
    sampling.set_config("generation_kwargs", written)
    sampling.set_config("repeats", voting.samples)
    [usual] = [one for one in part.config.filter_list if one["name"] == way]
    read = []
    for function in usual["filter"]:
        if function["function"] != "take_first":
            settings = dict(function)
            read.append([settings.pop("function"), settings])
    sampling._filters = [
        build_filter_ensemble(
            str(count),
            [
                ["take_first_k", {"k": count}],
                *read,
                ["majority_vote", None],
                ["take_first", None],
            ],
        )
        for count in voting.counts
    ]
    return sampling
