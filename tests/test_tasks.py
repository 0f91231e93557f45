"""`moesaic eval --tasks`: made-up models on made-up questions, and what is refused."""

from __future__ import annotations

import gzip
import json
import math
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.api.group import Group
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

import moesaic
from moesaic.cli.main import main
from moesaic.demo import demo_path
from moesaic.errors import MoesaicError
from moesaic.evaluate import harness
from moesaic.evaluate.tasks import (
    CHOICE_TASKS,
    TASKS,
    Asked,
    ask_all,
    difference_rows,
    evaluate_tasks,
    load_questions,
    mean_of,
    mean_of_five,
    spread,
)
from moesaic.families.load import load_model, load_tokenizer
from tests import reference
from tests.task_files import (
    SUBJECTS,
    arc,
    gsm8k,
    humaneval,
    mmlu,
    piqa,
    right_choice,
    write_rows,
    write_task_files,
)

ALL = ",".join(TASKS)
FIVE = ",".join(CHOICE_TASKS)
PAPER = {task: setup.shots for task, setup in TASKS.items()}


class MadeUp(LM):
    """A model that answers rightly where `knows` says so."""

    def __init__(self, knows: Any) -> None:
        super().__init__()
        self.knows = knows
        self.asked: list[Instance] = []
        self.max_length = 10**9
        self.tokenizer = SimpleNamespace(encode=list)
        self.skips_nothing = lambda tokens: False

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        self.asked += requests
        found = []
        for request in requests:
            is_right = request.idx == right_choice(request.task_name, request.doc)
            found.append((0.0 if is_right == self.knows(request) else -1000.0, False))
        return found

    def generate_until(self, requests: list[Instance]) -> list[str]:
        self.asked += requests
        return [self._write(request) for request in requests]

    def _write(self, request: Instance) -> str:
        doc = request.doc
        if request.task_name == "humaneval":
            return doc["canonical_solution"] if self.knows(request) else "    return -1\n"
        answer = str(doc["answer"])
        if self.knows(request):
            return f" {answer}"
        return " She has none.\n#### 0"

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise NotImplementedError


def clever(request: Instance) -> bool:
    return True


def wrong(request: Instance) -> bool:
    return False


def uneven(request: Instance) -> bool:
    """Knows some questions, and of MMLU's subjects anatomy best."""
    if request.task_name.startswith("mmlu"):
        return "anatomy" in request.task_name
    return any(digit in str(request.doc) for digit in "35")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task_files(tmp_path_factory.mktemp("data") / "made-up")


@pytest.fixture(scope="module")
def asked(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Asked]:
    """Every task with the paper's shots, and all questions."""
    return load_questions(PAPER, None, data, tmp_path_factory.mktemp("scratch"))


# --- Scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("knows", "score"), [(clever, 1.0), (wrong, 0.0)])
def test_who_knows_all_scores_all_and_who_errs_nothing(
    asked: dict[str, Asked], knows: Any, score: float
) -> None:
    rows, scores = ask_all(MadeUp(knows), asked)
    assert list(rows) == list(TASKS)
    sizes = dict.fromkeys(TASKS, 6) | {"mmlu": sum(SUBJECTS.values())}
    for task, row in rows.items():
        assert row["score"] == score, task
        assert row["standard_error"] == 0
        assert row["questions"] == row["of"] == len(scores[task]) == sizes[task]
        assert row["metric"] == TASKS[task].metric
        assert row["cut"] == 0
        assert row["version"] is not None
        for values in row["harness"].values():
            for key, value in values.items():
                # gsm8k's other way to read an answer takes the last number, also a wrong one.
                if "stderr" not in key:
                    assert value == score, (task, key)


def test_both_accuracies_are_kept(asked: dict[str, Asked]) -> None:
    rows, _ = ask_all(MadeUp(clever), asked)
    for task in ("piqa", "arc_easy", "arc_challenge", "hellaswag"):
        values = rows[task]["harness"][task]
        assert {"acc,none", "acc_norm,none", "acc_stderr,none"} <= values.keys()
    assert "exact_match,flexible-extract" in rows["gsm8k"]["harness"]["gsm8k"]


def test_scores_are_the_harness_s(asked: dict[str, Asked]) -> None:
    """Values and standard errors of single tasks, and its mean over MMLU by size."""
    rows, _ = ask_all(MadeUp(uneven), asked)
    for task, row in rows.items():
        setup = TASKS[task]
        assert 0 < row["score"] < 1, task
        if task == "mmlu":
            continue
        values = row["harness"][task]
        assert row["score"] == pytest.approx(values[f"{setup.metric},{setup.way}"])
        error = values[f"{setup.metric}_stderr,{setup.way}"]
        assert row["standard_error"] == pytest.approx(error)

    group = Group.from_config(harness._manager().task_index["mmlu_stem"].cfg)
    measured = {}
    for name, part in asked["mmlu"].parts.items():
        group.add(part)
        size = len(part.eval_docs)
        measured[name] = rows["mmlu"]["harness"][name] | {"sample_len": size}
    total = group.aggregate(measured)["acc,none"]
    assert rows["mmlu"]["score"] == pytest.approx(total)
    subjects = [values["acc,none"] for values in measured.values()]
    assert abs(total - sum(subjects) / len(subjects)) > 0.01  # not the mean of subjects


def test_means_and_errors_by_hand() -> None:
    assert mean_of([1, 0, 0, 1]) == {"score": 0.5, "standard_error": pytest.approx((1 / 12) ** 0.5)}
    assert mean_of([1]) == {"score": 1, "standard_error": None}
    ours = {"piqa": [1, 1, 0, 1]}
    other = {"piqa": [1, 0, 0, 0]}
    row = difference_rows(ours, other)["piqa"]
    assert row == {"score": 0.5, "standard_error": pytest.approx((1 / 12) ** 0.5)}
    assert difference_rows(ours, ours)["piqa"] == {"score": 0, "standard_error": 0}
    rows = {
        task: {"score": score, "standard_error": 0.01}
        for task, score in zip(CHOICE_TASKS, [0.5, 0.6, 0.7, 0.8, 0.9], strict=True)
    }
    mean = mean_of_five(rows)
    assert mean["score"] == pytest.approx(0.7)
    assert mean["standard_error"] == pytest.approx(0.01 / 5**0.5)
    rows["piqa"]["standard_error"] = None
    assert mean_of_five(rows)["standard_error"] is None


# --- What is asked -------------------------------------------------------------------------------


def test_the_shots_are_the_paper_s(asked: dict[str, Asked]) -> None:
    expected = dict.fromkeys(CHOICE_TASKS, 0) | {"mmlu": 5, "gsm8k": 8, "humaneval": 0}
    assert expected == PAPER
    model = MadeUp(clever)
    rows, _ = ask_all(model, asked)
    assert {task: row["shots"] for task, row in rows.items()} == PAPER
    prompts = {request.task_name: request.args[0] for request in model.asked}
    for task in CHOICE_TASKS:
        assert "\n\n" not in prompts[task]
    assert prompts["mmlu_anatomy"].count("Answer:") == 6
    assert prompts["mmlu_anatomy"].count("Which one is anatomy 10") == 5  # of this subject only
    assert prompts["gsm8k"].count("Question:") == 9
    assert prompts["gsm8k"].count("Ann has 1") >= 8  # the examples are those of train
    assert prompts["humaneval"].startswith("def add_")


def test_prompts_are_the_stock_ones(asked: dict[str, Asked]) -> None:
    """Word for word as in the harness's definitions, version 0.4.13."""
    first = {}
    model = MadeUp(clever)
    ask_all(model, asked)
    for request in model.asked:
        first.setdefault(request.task_name, []).append(request.args)
    assert first["piqa"][0] == ("Question: open jar 0\nAnswer:", " turn the lid")
    assert first["arc_easy"][3] == ("Question: What is in basket 0?\nAnswer:", " no fruit at all")
    # The answer goes into the sentence, and what follows is predicted.
    assert first["winogrande"][:2] == [
        ("Ann paid Eve 0 coins because Ann", " owed her."),
        ("Ann paid Eve 0 coins because Eve", " owed her."),
    ]
    context = "Cooking: A man boils egg 0. He"
    assert first["hellaswag"][:2] == [(context, " eats it."), (context, " flies. off.")]
    assert first["mmlu_virology"][1][1] == " B"
    assert first["mmlu_virology"][0][0].startswith(
        "The following are multiple choice questions (with answers) about virology.\n\n"
        "Which one is virology 100?\nA. this\nB. that\nC. the other\nD. none\nAnswer: A\n\n"
    )
    _, options = first["gsm8k"][0]
    assert options["do_sample"] is False
    _, options = first["humaneval"][0]
    assert options["do_sample"] is False
    assert "\ndef" in options["until"]


def test_the_same_questions_come_with_the_same_examples_every_time(data: Path) -> None:
    """For both models of a run, and for two runs."""
    prompts = []
    scratch = data.parent / "again"
    for run in range(2):
        (scratch / str(run)).mkdir(parents=True)
        asked = load_questions({"gsm8k": 3, "piqa": 2}, 4, data, scratch / str(run))
        for _ in range(2):
            model = MadeUp(clever)
            random.seed()  # what else draws random numbers changes nothing
            ask_all(model, asked)
            prompts.append([request.args[0] for request in model.asked])
    assert prompts[0] == prompts[1] == prompts[2] == prompts[3]
    assert len(set(prompts[0])) == 8


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ({"piqa": 4}, None, {"piqa": [0, 1, 2, 3]}),
        ({"piqa": 4}, 9, {"piqa": [0, 1, 2, 3]}),
        ({"piqa": 10}, 4, {"piqa": [0, 2, 5, 7]}),
        ({"piqa": 10}, 1, {"piqa": [0]}),
        ({"a": 2, "b": 6, "c": 2}, 5, {"a": [0], "b": [0, 2, 4], "c": [0]}),
        ({"a": 2, "b": 1, "c": 9}, 3, {"a": [0], "c": [1, 5]}),  # b gives none
    ],
)
def test_a_limit_takes_questions_evenly(
    sizes: dict[str, int], limit: int | None, expected: dict[str, list[int]]
) -> None:
    assert spread(sizes, limit) == expected


def test_a_limit_on_mmlu_is_spread_over_subjects_by_size() -> None:
    sizes = {f"subject {number}": 100 + 37 * number for number in range(57)}
    chosen = spread(sizes, 570)
    assert sum(len(numbers) for numbers in chosen.values()) == 570
    total = sum(sizes.values())
    for name, size in sizes.items():
        share = 570 * size / total
        assert math.floor(share) <= len(chosen[name]) <= math.ceil(share)


def test_a_limit_asks_those_questions_and_no_other(data: Path, tmp_path: Path) -> None:
    asked = load_questions({"piqa": 0, "mmlu": 1}, 4, data, tmp_path)
    model = MadeUp(uneven)
    rows, _ = ask_all(model, asked)
    goals = [r.doc["goal"] for r in model.asked if r.task_name == "piqa" and r.idx == 0]
    assert goals == [f"open jar {number}" for number in (0, 1, 3, 4)]
    assert rows["piqa"]["questions"] == 4
    assert rows["piqa"]["of"] == 6
    questions = [r.doc["question"] for r in model.asked if r.task_name != "piqa" and r.idx == 0]
    # 11 questions in a row, subjects by the alphabet; of them 0, 2, 5 and 8.
    assert questions == [
        "Which one is anatomy 0?", "Which one is anatomy 2?", "Which one is anatomy 5?",
        "Which one is virology 0?",
    ]  # fmt: skip
    assert rows["mmlu"]["questions"] == 4
    assert rows["mmlu"]["of"] == 11
    assert rows["mmlu"]["harness"].keys() == {"mmlu_anatomy", "mmlu_virology"}


def test_questions_from_the_hub_are_the_stock_tasks(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a folder the harness asks the hub for the data set of its own definition."""
    wanted: list[tuple[str, str | None]] = []

    def fetch(path: str, name: str | None = None, **unused: Any) -> None:
        wanted.append((path, name))
        raise ConnectionError("no route to the hub\nand a long story")

    monkeypatch.setattr("datasets.load_dataset", fetch)
    for task in TASKS:
        message = r"cannot be fetched from the hub \(no route to the hub\).* --task-data"
        with pytest.raises(MoesaicError, match=message):
            load_questions({task: 0}, None, None, tmp_path)
    assert wanted == [
        ("baber/piqa", None), ("allenai/winogrande", "winogrande_xl"),
        ("allenai/ai2_arc", "ARC-Easy"), ("allenai/ai2_arc", "ARC-Challenge"),
        ("Rowan/hellaswag", None), ("cais/mmlu", "abstract_algebra"), ("openai/gsm8k", "main"),
        ("openai/openai_humaneval", None),
    ]  # fmt: skip


# --- How a real model is asked -------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Any:
    return load_model("demo", "float32")


@pytest.mark.parametrize("batch_size", ["1", "auto", "auto as on a GPU"])
def test_choices_are_scored_as_the_loop_does(
    demo: Any,
    data: Path,
    tmp_path: Path,
    batch_size: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The sum of log softmax over the answer's tokens, whatever is padded beside it."""
    tokenizer = load_tokenizer("demo")
    shots = {"piqa": 0, "winogrande": 0, "arc_easy": 0, "mmlu": 1}
    asked = load_questions(shots, 2, data, tmp_path)
    lm = harness.Model("demo", demo, tokenizer, 512, batch_size[:4])
    lm.on_cpu = batch_size != "auto as on a GPU"
    ask_all(lm, asked)
    compared = 0
    for questions in asked.values():
        for name in questions.chosen:
            for request in questions.parts[name].instances:
                prompt, answer = request.args
                expected = reference.answer_log_probability(demo, tokenizer, prompt, answer)
                assert request.resps[0][0] == pytest.approx(expected, abs=2e-4)
                compared += 1
    assert compared == 2 * (2 + 2 + 4 + 4)
    assert capsys.readouterr().out == ""  # the harness says there what batch it found


def test_long_prompts_go_through_a_cpu_in_small_batches(
    demo: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[torch.Size] = []
    call = harness.Model._model_call

    def watched(self: Any, ids_BL: torch.Tensor, **unused: Any) -> torch.Tensor:
        shapes.append(ids_BL.shape)
        return call(self, ids_BL)

    monkeypatch.setattr(harness.Model, "_model_call", watched)
    monkeypatch.setattr(harness, "_CPU_TOKENS", 100)
    asked = load_questions({"mmlu": 1, "hellaswag": 0}, None, data, tmp_path)
    lm = harness.Model("demo", demo, load_tokenizer("demo"), 512, "auto")
    ask_all(lm, asked)
    lengths = [length for _, length in shapes]
    assert max(lengths) > 100  # one at a time, though it is over
    assert min(lengths) < 50
    for batch, length in shapes:
        assert batch == 1 or batch * length <= 120
    assert max(batch for batch, _ in shapes) > 1
    lm.on_cpu = False
    assert lm.batch_size == "auto"


@pytest.mark.parametrize("method", [None, "griffin"])
def test_written_answers_are_greedy(method: str | None, demo: Any, tmp_path: Path) -> None:
    """Whatever else is asked: the neurons of a prompt are chosen by it alone."""
    tokenizer = load_tokenizer("demo")
    if method is not None:
        demo, _ = moesaic.convert(
            "demo",
            method,
            calibration="demo",
            sparsity=0.75,
            samples=4,
            settings={"prompt": 8},
            dtype="float32",
        )
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [humaneval(number) for number in range(3)]
    for number, row in enumerate(rows):  # of different lengths
        row["prompt"] = "import math\n" * 5 * number + row["prompt"]
    write_rows(folder / "humaneval.test.jsonl", rows)
    asked = load_questions({"humaneval": 0}, 3, folder, tmp_path)
    part = asked["humaneval"].parts["humaneval"]
    part.config.generation_kwargs["max_gen_toks"] = 24
    lm = harness.Model("demo", demo, tokenizer, 512, 2)
    ask_all(lm, asked)
    for request in part.instances:
        prompt, options = request.args
        expected = reference.write_on(demo, tokenizer, prompt, 24)
        for stop in options["until"]:
            expected = expected.split(stop)[0]
        assert request.resps[0] == expected


def test_half_precision_models_are_summed_in_single(data: Path, tmp_path: Path) -> None:
    """In bfloat16 a log probability of -40 would be rounded to a multiple of 0.25."""
    half = load_model("demo", "bfloat16")
    asked = load_questions({"hellaswag": 0}, 2, data, tmp_path)
    ask_all(harness.Model("demo", half, load_tokenizer("demo"), 512, 4), asked)
    values = [r.resps[0][0] for r in asked["hellaswag"].parts["hellaswag"].instances]
    assert any(value * 64 != round(value * 64) for value in values)


def test_a_broken_model_is_refused(data: Path, tmp_path: Path) -> None:
    broken_model = load_model("demo", "float32")
    broken_model.model.norm.weight.data[3] = torch.nan
    asked = load_questions({"piqa": 0}, 2, data, tmp_path)
    lm = harness.Model("mine", broken_model, load_tokenizer("demo"), 512, 4)
    with pytest.raises(MoesaicError, match="mine gives an answer of piqa the log probability nan"):
        ask_all(lm, asked)


def test_prompts_that_do_not_fit_are_counted(demo: Any, data: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer("demo")
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [piqa(number) for number in range(4)]
    rows[2]["goal"] = "open " * 600
    write_rows(folder / "piqa.validation.jsonl", rows)
    asked = load_questions({"piqa": 0}, None, folder, tmp_path)
    found, _ = ask_all(harness.Model("demo", demo, tokenizer, 512, 1), asked)
    assert found["piqa"]["cut"] == 1


@pytest.mark.parametrize(("prompt", "whole"), [(0, 4), (64, 3)])
def test_questions_over_which_nothing_is_skipped_are_counted(
    prompt: int, whole: int, data: Path, tmp_path: Path
) -> None:
    """All but the long one are no longer than the prompt that chooses."""
    model, _ = moesaic.convert(
        "demo", "griffin", calibration="demo", sparsity=0.75, samples=4,
        settings={"prompt": prompt}, dtype="float32",
    )  # fmt: skip
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [piqa(number) for number in range(4)]
    rows[2]["goal"] = "open " * 60
    write_rows(folder / "piqa.validation.jsonl", rows)
    asked = load_questions({"piqa": 0}, None, folder, tmp_path)
    found, _ = ask_all(harness.Model("it", model, load_tokenizer("demo"), 512, 1), asked)
    assert found["piqa"]["whole"] == whole
    assert found["piqa"]["cut"] == 0


def test_a_longest_answer_is_the_harness_s(demo: Any) -> None:
    lm = harness.Model("demo", demo, load_tokenizer("demo"), 512, 1)
    assert lm.max_gen_toks == harness._USUAL_ANSWER


# --- The command ---------------------------------------------------------------------------------


class Run:
    """Runs the command line in this process and keeps what it printed."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]):
        self.patch, self.capture = patch, capture

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self.patch.setattr(sys, "argv", ["moesaic", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = self.capture.readouterr()
        return code, printed.out, printed.err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "200")
    return Run(monkeypatch, capsys)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("converted") / "out"
    text = "def main(argument):\n    return [argument for _ in range(10)]\n" * 400
    moesaic.convert("demo", "cmoe", "S3A3E8", [text], output=folder, samples=4, sequence_length=64)
    yield folder
    shutil.rmtree(folder)


def test_a_converted_model_beside_its_dense_one(
    run: Run, converted: Path, data: Path, tmp_path: Path
) -> None:
    numbers = tmp_path / "numbers.json"
    code, printed, error = run(
        "eval", converted, "--tasks", FIVE, "--task-data", data, "--json", numbers,
        "--dtype", "float32",
    )  # fmt: skip
    assert code == 0, error
    result = json.loads(numbers.read_text())
    dense = result["against"]
    assert result["model"] == str(converted)
    assert dense["model"] == "demo"
    assert result["active_ffn_fraction"] == 0.75
    assert dense["active_ffn_fraction"] == 1
    alone = evaluate_tasks("demo", CHOICE_TASKS, task_data=data, dtype="float32")
    assert dense["tasks"] == alone["tasks"]
    assert dense["mean"] == alone["mean"]
    assert "against" not in alone
    for task in CHOICE_TASKS:
        ours, other = result["tasks"][task]["score"], dense["tasks"][task]["score"]
        difference = result["difference"]["tasks"][task]["score"]
        assert difference == pytest.approx(ours - other)
        assert f" {task} " in printed
    means = [part["mean"]["score"] for part in (result, dense, result["difference"])]
    assert means[2] == pytest.approx(means[0] - means[1])
    assert f"{100 * means[0]:.1f} ± " in printed
    assert f"{100 * means[2]:+.1f} ± " in printed
    assert "mean of five" in printed
    assert "against: demo" in printed
    assert "acc_norm: " in printed
    assert "pass@1" not in printed  # only what is in the table is explained
    assert result["versions"].keys() == {
        "lm-eval", "datasets", "torch", "transformers", "moesaic", "python",
    }  # fmt: skip
    assert result["versions"]["torch"] == torch.__version__
    assert result["settings"]["task_data"] == str(data)


def test_tasks_that_write(
    run: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.Model, "max_gen_toks", 8)
    numbers = tmp_path / "numbers.json"
    code, printed, error = run(
        "eval", "demo", "--tasks", "gsm8k", "--fewshot", 0, "--limit", 1, "--task-data", data,
        "--json", numbers,
    )  # fmt: skip
    assert code == 0, error
    row = json.loads(numbers.read_text())["tasks"]["gsm8k"]
    assert (row["shots"], row["questions"], row["standard_error"]) == (0, 1, None)
    assert "mean of five" not in printed
    assert "difference" not in printed
    # A line where answers begin, and none of the harness's.
    assert error.splitlines() == ["gsm8k, demo: 0 of 1"]


def test_many_prompts_take_long_enough_to_tell(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One count for all subjects of MMLU."""
    stopped: list[int] = []

    class Watched(harness.Ticker):
        def stop(self) -> None:
            stopped.append(self.done)
            super().stop()

    class Slow(MadeUp):
        def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
            # A terminal shows one bar at a time: that of the prompts has gone by now.
            assert stopped == ([6] if self.task == "piqa" else [6, 11])
            return super().loglikelihood(requests)

    monkeypatch.setattr(harness, "Ticker", Watched)
    monkeypatch.setattr(harness, "_MANY_PROMPTS", 11)
    asked = load_questions({"piqa": 0, "mmlu": 1}, None, data, tmp_path)
    ask_all(Slow(clever), asked)
    assert stopped == [6, 11]
    assert capsys.readouterr().err.splitlines() == ["mmlu: prompts: 0 of 11"]


def test_nothing_is_left_behind(
    run: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = sorted(data.iterdir())
    code, _, error = run("eval", "demo", "--tasks", "piqa,mmlu", "--limit", 3, "--fewshot", 1,
                         "--task-data", data)  # fmt: skip
    assert code == 0, error
    assert list(tmp_path.iterdir()) == []
    assert sorted(data.iterdir()) == before


# --- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "pica"], "unknown task 'pica': did you mean piqa"),
        (["--tasks", "piqa,arc_hard"], "did you mean arc_easy"),
        (["--tasks", ","], "--tasks names none; known are piqa"),
        (["--tasks", "humaneval"], "runs code that the model writes"),
        (["--tasks", ALL], "allow it by --allow-code-execution"),
        (
            ["--tasks", "gsm8k,humaneval", "--fewshot", "2", "--allow-code-execution"],
            "--fewshot 2: humaneval has no examples",
        ),
        (["--tasks", "piqa", "--fewshot", "-1"], "--fewshot -1"),
        (["--tasks", "piqa", "--fewshot", "11"], "--fewshot 11: piqa has 10 examples to show"),
        (["--tasks", "mmlu", "--fewshot", "6"], "--fewshot 6: mmlu has 5 examples to show"),
        (["--tasks", "piqa", "--limit", "0"], "--limit 0 asks nothing"),
        (["--tasks", "piqa", "--limit", "some"], "'--limit'"),
        (["--tasks", "piqa", "--batch-size", "0"], "--batch-size 0: give auto or a number"),
        (["--tasks", "piqa", "--batch-size", "large"], "--batch-size large: give auto"),
        (["--tasks", "piqa", "--text", "demo"], "--text does not go with a run that asks"),
        (["--tasks", "piqa", "--max-tokens", "9"], "--max-tokens does not go with"),
        (["--tasks", "piqa", "--seed", "5"], "--seed does not go with a run that draws no"),
        (["--limit", "5"], "--limit does not go with a run that measures perplexity"),
        (["--allow-code-execution"], "--allow-code-execution does not go with"),
        (["--tasks", "gsm8k", "--fewshot", "8"], "lower --fewshot, which is 8"),
        (["--tasks", "humaneval", "--allow-code-execution"], "humaneval: the first prompt"),
        (["--tasks", "piqa", "--task-data", "no-folder"], "--task-data no-folder is no folder"),
        (["--tasks", "piqa", "--against", "no-model"], "no-model"),
    ],
)
def test_bad_options(
    run: Run, data: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    if "--tasks" in options and "--task-data" not in options:
        options = [*options, "--task-data", str(data)]
    code, _, error = run("eval", "demo", "--json", tmp_path / "numbers.json", *options)
    check_error(code, error, message)
    assert list(tmp_path.iterdir()) == []


def check_error(code: int, error: str, message: str) -> None:
    assert code == 2
    assert "Traceback" not in error
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, error
    assert message in lines[0]


def test_a_context_too_short_says_how_long_the_prompt_is(run: Run, data: Path) -> None:
    code, _, error = run("eval", "demo", "--tasks", "gsm8k", "--task-data", data)
    check_error(code, error, "gsm8k: the first prompt and its answer take ")
    assert " tokens, and the context of demo holds 512" in error
    needed = int(error.split("take ")[1].split(" tokens")[0].replace(",", ""))
    assert 512 < needed < 2048


def test_without_the_harness(
    run: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.evaluate.tasks.find_spec", lambda name: None)
    code, _, error = run("eval", "demo", "--tasks", "piqa", "--task-data", data)
    check_error(code, error, "pip install 'lm-eval>=0.4.13'")


def test_only_one_module_imports_the_harness_and_none_imports_that_at_once() -> None:
    """So help comes fast, and text can be measured without the extra."""
    source = Path(harness.__file__).parents[1]
    for path in source.rglob("*.py"):
        lines = path.read_text().splitlines()
        if path.name != "harness.py":
            assert not any(line.startswith(("import lm_eval", "from lm_eval")) for line in lines)
        assert not any(line.startswith("from moesaic.evaluate.harness") for line in lines), path


@pytest.mark.parametrize(
    "missing", ["piqa.validation.jsonl", "mmlu.dev.jsonl", "gsm8k.train.jsonl"]
)
def test_a_missing_file(run: Run, tmp_path: Path, missing: str) -> None:
    folder = write_task_files(tmp_path / "data")
    (folder / missing).unlink()
    code, _, error = run("eval", "demo", "--tasks", "piqa,mmlu,gsm8k", "--task-data", folder)
    check_error(code, error, f"{missing} (or {missing}.gz) is not in --task-data {folder}")
    assert "of " in error
    sources = ("baber/piqa", "cais/mmlu", "openai/gsm8k")
    assert sum(source in error for source in sources) == 1


def test_examples_are_not_missed_where_none_are_shown(tmp_path: Path) -> None:
    folder = write_task_files(tmp_path / "data")
    for path in folder.glob("*.train.jsonl"):
        path.unlink()
    (folder / "mmlu.dev.jsonl").unlink()
    asked = load_questions(dict.fromkeys(TASKS, 0), 2, folder, tmp_path)
    rows, _ = ask_all(MadeUp(clever), asked)
    assert all(row["score"] == 1 for row in rows.values())


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_text_keeps_its_odd_signs(tmp_path: Path, ending: str) -> None:
    """U+2028 ends a line in Unicode, not in JSON; real questions hold it."""
    folder = tmp_path / "data"
    folder.mkdir()
    row = piqa(0) | {"goal": "fold\u2028paper \x85 into a ☂"}
    text = json.dumps(row, ensure_ascii=False) + "\n"
    packed = gzip.compress(text.encode()) if ending.endswith(".gz") else text.encode()
    (folder / f"piqa.validation{ending}").write_bytes(packed)
    asked = load_questions({"piqa": 0}, None, folder, tmp_path)
    doc = asked["piqa"].parts["piqa"].eval_docs[0]
    assert doc["goal"] == row["goal"]


def broken(row: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (row | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("piqa.validation.jsonl", b"", "piqa.validation.jsonl is empty"),
        ("piqa.validation.jsonl", b"\xff\xfe", "cannot be read"),
        ("piqa.validation.jsonl", b"[1]\n", "line 1 of"),
        ("piqa.validation.jsonl", b"{\n", "is no JSON object"),
        (
            "piqa.validation.jsonl",
            json.dumps(broken(piqa(0), sol2=None)).encode(),
            "lacks sol2; it needs goal, sol1, sol2, label",
        ),
        (
            "arc_easy.validation.jsonl",
            json.dumps(broken(arc(0), answerKey="E")).encode(),
            "arc_easy",
        ),
        ("gsm8k.test.jsonl", json.dumps(broken(gsm8k(0), answer=None)).encode(), "lacks answer"),
        (
            "mmlu.test.jsonl.gz",
            json.dumps(mmlu("anatomy", 0)).encode(),  # not packed
            "mmlu.test.jsonl.gz cannot be read",
        ),
        (
            "mmlu.test.jsonl",
            json.dumps(mmlu("anatomie", 0)).encode(),
            "no examples of anatomie",
        ),
    ],
)
def test_a_damaged_file(run: Run, tmp_path: Path, name: str, content: bytes, message: str) -> None:
    folder = write_task_files(tmp_path / "data")
    (folder / "mmlu.test.jsonl.gz").unlink()
    (folder / name).write_bytes(content)
    task = name.split(".")[0]
    code, _, error = run("eval", "demo", "--tasks", task, "--task-data", folder)
    check_error(code, error, message)


def test_a_subject_that_mmlu_does_not_have(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_rows(folder / "mmlu.test.jsonl", [mmlu("anatomie", 0)])
    code, _, error = run("eval", "demo", "--tasks", "mmlu", "--fewshot", 0, "--task-data", folder)
    check_error(code, error, "unknown subject of mmlu 'anatomie': did you mean anatomy")


def test_a_context_of_the_other_model_counts_too(data: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(demo_path(), short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    message = f"hellaswag: .* take [0-9]+ tokens, and the context of {short} holds 16; leave it out"
    with pytest.raises(MoesaicError, match=message):
        evaluate_tasks("demo", ["hellaswag"], against=str(short), task_data=data)
