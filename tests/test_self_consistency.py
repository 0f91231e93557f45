"""`moesaic eval --self-consistency`: how answers are drawn, and how they vote."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.api.instance import Instance

from moesaic.cli.main import main
from moesaic.evaluate import harness
from moesaic.evaluate.self_consistency import Voting, draw, majority, probabilities
from moesaic.evaluate.tasks import CHOICE_TASKS, Asked, ask_all, evaluate_tasks, load_questions
from tests.task_files import gsm8k, write_task_files
from tests.test_tasks import MadeUp, clever, wrong

VOTING = Voting((1, 3, 5), seed=0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task_files(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def asked(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Asked]:
    shots = {**dict.fromkeys(CHOICE_TASKS, 0), "mmlu": 0, "gsm8k": 0}
    return load_questions(shots, None, data, tmp_path_factory.mktemp("scratch"))


def test_probabilities_by_hand() -> None:
    assert probabilities([np.log(0.1), np.log(0.3)]) == pytest.approx([0.25, 0.75])
    # -6 over 12 characters is more a character than -4 over 4; mean length 8.
    shares = probabilities([-6.0, -4.0], [12, 4])
    assert shares[0] / shares[1] == pytest.approx(np.exp(-0.5 * 8 + 1.0 * 8))
    assert probabilities([-1e4, -2e4]) == [1.0, 0.0]
    assert sum(probabilities([-2.0, 0.0], [3, 0])) == pytest.approx(1)  # an empty answer


def test_of_equal_votes_the_first_drawn_wins() -> None:
    assert majority([2, 0, 0, 2]) == 2
    assert majority([1, 0, 0]) == 0


def test_choices_are_drawn_as_often_as_they_are_likely() -> None:
    drawn = draw([0.2, 0.8], 5000, np.random.default_rng(0))
    assert Counter(drawn)[1] / 5000 == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize("knows", [clever, wrong])
def test_who_is_sure_votes_as_it_answers(asked: dict[str, Asked], knows: Any) -> None:
    lm: Any = MadeUp(knows)
    rows, _ = ask_all(lm, asked, VOTING)
    assert rows.keys() == asked.keys()
    for row in rows.values():
        assert row["self_consistency"].keys() == {"1", "3", "5"}
        for votes in row["self_consistency"].values():
            # A choice that is not right is one of several wrong ones: still wrong.
            assert votes["score"] == row["score"]


class Torn(MadeUp):
    """Holds all choices alike."""

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        return [(-1.0, False) for _ in requests]


def test_votes_are_those_of_a_plain_loop(asked: dict[str, Asked]) -> None:
    lm: Any = Torn(clever)
    rows, _ = ask_all(lm, {"winogrande": asked["winogrande"]}, VOTING)
    generator = np.random.default_rng(0)
    right = []
    for doc in asked["winogrande"].parts["winogrande"].eval_docs:
        votes = list(generator.choice(2, size=5, p=[0.5, 0.5]))
        winner = 0 if votes.count(0) >= 3 else 1
        right.append(float(winner == int(doc["answer"]) - 1))
    assert rows["winogrande"]["self_consistency"]["5"]["score"] == np.mean(right)


def test_seeds_are_repeated(asked: dict[str, Asked]) -> None:
    lm: Any = Torn(clever)
    found = []
    for seed in (0, 0, 1, 2, 3):
        rows, _ = ask_all(lm, asked, Voting((1,), seed))
        found.append(json.dumps(rows, default=str))
    assert found[0] == found[1]
    assert len(set(found)) > 1


class Wavering(MadeUp):
    """Writes a wrong solution first, and then right ones."""

    def generate_until(self, requests: list[Instance]) -> list[str]:
        self.asked += requests
        written: Counter[int] = Counter()
        answers = []
        for request in requests:
            number = written[request.doc_id]
            written[request.doc_id] += 1
            right = gsm8k(request.doc_id)["answer"]
            answers.append(" 7 #### 7" if number == 0 else right)
        return answers


def test_written_answers_vote_by_the_number_read(asked: dict[str, Asked]) -> None:
    lm: Any = Wavering(clever)
    rows, _ = ask_all(lm, {"gsm8k": asked["gsm8k"]}, VOTING)
    row = rows["gsm8k"]
    assert row["score"] == 0.0  # one answer each, the first
    scores = {count: votes["score"] for count, votes in row["self_consistency"].items()}
    assert scores == {"1": 0.0, "3": 1.0, "5": 1.0}
    greedy, drawn = lm.asked[0].args[1], lm.asked[-1].args[1]
    assert (greedy["do_sample"], drawn["do_sample"]) == (False, True)
    assert drawn["temperature"] == 0.7
    # The next model is asked as the first one was.
    rows, _ = ask_all(lm, {"gsm8k": asked["gsm8k"]})
    assert lm.asked[-1].args[1]["do_sample"] is False


def test_the_command(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness.Model, "max_gen_toks", 8)
    numbers = tmp_path / "numbers.json"
    command = ["eval", "demo", "--tasks", "piqa,gsm8k", "--fewshot", "0", "--limit", "2"]
    command += ["--task-data", str(data), "--self-consistency", "1,3", "--json", str(numbers)]
    monkeypatch.setattr("sys.argv", ["moesaic", *command])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    printed = capsys.readouterr().out
    assert "3 vote" in printed
    result = json.loads(numbers.read_text())
    assert result["settings"]["self_consistency"] == [1, 3]
    again = evaluate_tasks(
        "demo", ["piqa", "gsm8k"], fewshot=0, limit=2, task_data=data, self_consistency=[3, 1]
    )
    assert again["tasks"] == result["tasks"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "piqa", "--self-consistency", "0"], "numbers of answers from 1 to 1,000"),
        (["--tasks", "piqa", "--self-consistency", "many"], "--self-consistency 'many'"),
        (["--self-consistency", "3"], "--self-consistency does not go with"),
        (["--tasks", "piqa", "--self-consistency", "3", "--seed", "-1"], "--seed -1"),
        (
            ["--tasks", "humaneval", "--self-consistency", "3", "--allow-code-execution"],
            "programs cannot vote",
        ),
    ],
)
def test_bad_options(
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["moesaic", "eval", "demo", *options])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
