"""`moesaic reproduce`: the cheap tables on the demo model, resuming, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from moesaic.cli.main import main
from moesaic.demo import demo_path
from moesaic.errors import MoesaicError
from moesaic.evaluate.task_data import FILES
from moesaic.evaluate.tasks import load_questions
from moesaic.experiments import load_balance
from moesaic.experiments import study as study_module
from moesaic.experiments.contents import EXPERIMENTS, chosen
from moesaic.experiments.digests import digest_of
from moesaic.experiments.figure import draw
from moesaic.experiments.flops import CONFIGS
from moesaic.experiments.page import markdown
from moesaic.experiments.questions import puzzles, write_questions
from moesaic.experiments.reproduce import reproduce
from moesaic.experiments.rows import attempt
from moesaic.experiments.scales import SCALES, with_prompts_within
from moesaic.experiments.study import Study
from moesaic.experiments.table import Column, Line, Panel, Row, Table
from moesaic.experiments.texts import Text, prepare_texts, smoke_text
from moesaic.output.draft import open_draft

CHEAP = "hidden_states,activation_rates,domain_overlap,load_balance"
CONFIG_FOLDER = Path(import_module("moesaic.experiments").__path__[0]) / "configs"
PAPER_TEX = Path(__file__).parents[2] / "shared" / "paper.tex"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cheap tables, made once for all workers; each has a copy."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # the workers of one run share it
    made = base / "reproduced"
    with FileLock(base / "reproduced.lock"):
        if not made.exists():
            done = reproduce("demo", made, tables=CHEAP)
            assert (done.made, done.kept, done.failed) == (4, 0, {})
    own = tmp_path_factory.mktemp("reproduced") / "out"
    shutil.copytree(made, own)
    return own


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        words = [str(argument) for argument in arguments]
        monkeypatch.setattr("sys.argv", ["moesaic", "reproduce", *words])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        code = end.value.code or 0
        assert isinstance(code, int)
        return code, printed.out, printed.err

    return call


def numbers_of(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text())
    return values


# --- the tables -----------------------------------------------------------------------------------


def test_a_table_is_a_page_numbers_and_a_plot(folder: Path) -> None:
    for name in CHEAP.split(","):
        page = (folder / f"{name}.md").read_text()
        assert EXPERIMENTS[name].label in page
        assert "says nothing about the paper's models" in page
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    overlap = numbers_of(folder / "domain_overlap.json")
    row = next(row for row in overlap["rows"] if row["name"] == "code / maths")
    assert row["paper"] == {"overlap": 86}
    assert 37.5 < row["values"]["overlap"] < 100  # more than by chance
    assert f"{row['values']['overlap']:.1f} (86.0)" in (folder / "domain_overlap.md").read_text()
    listed = (folder / "README.md").read_text()
    assert "[load_balance](load_balance.md)" in listed
    assert "zero_shot" not in listed  # not asked for


def test_the_list_names_tables_of_earlier_runs(folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    (again / "load_balance.json").unlink()
    done = reproduce("demo", again, tables="domain_overlap")
    assert (done.made, done.kept) == (0, 1)
    listed = (again / "README.md").read_text()
    assert "[domain_overlap](domain_overlap.md)" in listed
    for name in set(CHEAP.split(",")) - {"load_balance"}:
        assert f"[{name}]({name}.md)" in listed
    assert "load_balance" not in listed  # gone, and not asked for


def test_rates_are_the_k_a_largest(folder: Path) -> None:
    rows = numbers_of(folder / "activation_rates.json")["rows"]
    for row in rows:
        top_k = int(row["name"].removeprefix("K_a = "))
        assert row["values"]["mean"] == pytest.approx(top_k / 768)


def test_how_long_a_model_took_is_kept(folder: Path) -> None:
    """Beside the model, whose own report is the same in two runs."""
    study = Study("demo", SCALES["smoke"], folder, {})
    models = list((folder / "models").iterdir())
    assert any("tuned" in model.name for model in models)
    for model in models:
        seconds = study.seconds_of(str(model))
        assert seconds is not None
        assert seconds > 0
    assert study.seconds_of("elsewhere") is None


def test_what_was_measured_counts_where_the_folder_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def once(model: str, sources: list[str], **options: Any) -> dict[str, Any]:
        measured.extend(sources)
        return {"perplexity": {sources[0]: 3.5}}

    monkeypatch.setattr(study_module, "evaluate", once)
    for name in ("before", "after"):
        folder = tmp_path / name
        text = Text(str(folder / "fit.txt"), str(folder / "test.txt"))
        study = Study("demo", SCALES["smoke"], folder, {"wiki": text})
        assert study.perplexity("demo", "wiki") == 3.5
        if name == "before":
            shutil.copytree(folder, tmp_path / "after")
    assert measured == [str(tmp_path / "before" / "test.txt")]


def test_a_second_run_keeps_what_is_whole(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.png")}
    kept = (folder / "hidden_states.json").read_bytes()
    (folder / "hidden_states.json").write_bytes(kept[:100])  # as a killed copy leaves it
    (folder / "load_balance.md").unlink()
    done = reproduce("demo", folder, tables=CHEAP)
    assert (done.made, done.kept) == (2, 2)
    after = {path: path.stat().st_mtime_ns for path in folder.glob("*.png")}
    changed = {path.stem for path, time in after.items() if time != before[path]}
    assert changed == {"hidden_states", "load_balance"}
    again = numbers_of(folder / "hidden_states.json")
    assert again["rows"] == json.loads(kept)["rows"]
    done = reproduce("demo", folder, tables=CHEAP)
    assert (done.made, done.kept) == (0, 4)


def test_options_that_a_table_does_not_ask_for_do_not_make_it_again(
    folder: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    done = reproduce("demo", again, tables=CHEAP, allow_code_execution=True)
    assert (done.made, done.kept) == (0, 4)
    assert "[hidden_states](hidden_states.md)" in (again / "README.md").read_text()


def test_numbers_are_the_same_in_another_folder(folder: Path, tmp_path: Path) -> None:
    names = "domain_overlap,load_balance"
    reproduce("demo", tmp_path / "other", tables=names)
    for name in names.split(","):
        one = numbers_of(folder / f"{name}.json")
        other = numbers_of(tmp_path / "other" / f"{name}.json")
        assert one.pop("times") != other.pop("times")
        assert json.dumps(one) == json.dumps(other)
        pages = [place / f"{name}.md" for place in (folder, tmp_path / "other")]
        assert pages[0].read_bytes() == pages[1].read_bytes()


@pytest.mark.parametrize("kind", [MoesaicError, RuntimeError, ConnectionResetError])
def test_one_that_fails_stops_no_other(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail(study: object) -> Table:
        raise kind("made to fail")

    monkeypatch.setattr(load_balance, "run", fail)
    code, printed, error = run(
        "demo", "--output", tmp_path / "out", "--tables", "load_balance,hidden_states"
    )
    assert code == 2
    assert "error: load_balance: " in error
    assert "made to fail" in error
    assert "1 made" in printed
    assert "made to fail" in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "hidden_states.json").is_file()


@pytest.mark.parametrize(("kind", "tried_again"), [(MoesaicError, False), (MemoryError, True)])
def test_rows_that_may_come_another_time_are_tried_again(
    kind: type[Exception], tried_again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> float:
        raise kind("no room")

    def table(make: Callable[[], float]) -> Callable[[Study], Table]:
        def run(study: Study) -> Table:
            notes: list[str] = []
            value = attempt("cmoe", notes, study, make)
            rows = [] if value is None else [Row("cmoe", {"error": value})]
            return Table([Column("error", "error")], rows, notes)

        return run

    monkeypatch.setattr(load_balance, "run", table(fail))
    first = reproduce("demo", tmp_path / "out", tables="load_balance")
    assert first.made == 1
    assert ("load_balance" in first.in_part) == tried_again
    assert ("in part: cmoe: " in (tmp_path / "out" / "README.md").read_text()) == tried_again
    monkeypatch.setattr(load_balance, "run", table(lambda: 1.0))
    again = reproduce("demo", tmp_path / "out", tables="load_balance")
    assert (again.made, again.kept) == ((1, 0) if tried_again else (0, 1))
    assert not again.failed | again.in_part


@pytest.mark.parametrize(("number", "stops"), [(errno.ENOSPC, True), (errno.ECONNRESET, False)])
def test_a_full_disk_ends_the_run(
    number: int, stops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(study: Study) -> Table:
        raise OSError(number, "made to fail")

    monkeypatch.setattr(load_balance, "run", fail)
    if stops:
        with pytest.raises(OSError, match="made to fail"):
            reproduce("demo", tmp_path / "out", tables="load_balance")
    else:
        done = reproduce("demo", tmp_path / "out", tables="load_balance")
        assert list(done.failed) == ["load_balance"]


def test_what_was_raised_from_a_full_disk_is_one(tmp_path: Path) -> None:
    study = Study("demo", SCALES["smoke"], tmp_path, {})

    def fail(number: int) -> Callable[[], None]:
        def make() -> None:
            with open_draft(tmp_path / "out", {}, resume=False):
                raise OSError(number, "made to fail")

        return make

    with pytest.raises(MoesaicError, match="no space left on the disk"):
        attempt("cmoe", [], study, fail(errno.ENOSPC))
    shutil.rmtree(tmp_path / "out.partial", ignore_errors=True)
    assert attempt("cmoe", [], study, fail(errno.ETIMEDOUT)) is None
    assert len(study.broken) == 1


def test_the_paper_s_numbers_go_by_the_model_and_not_by_its_folders(tmp_path: Path) -> None:
    folder = "/data/qwen2.5-7b-distilled/smollm2-135m"
    study = Study(folder, SCALES["smoke"], tmp_path, {})
    assert "Qwen" not in study.paper_model


def test_every_experiment_has_its_module() -> None:
    labels = [row.label for row in EXPERIMENTS.values()]
    assert [label for label in labels if label.startswith("Table ")] == [
        f"Table {number}" for number in range(1, 12)
    ]
    for row in EXPERIMENTS.values():
        module = import_module(row.where)
        assert module.__doc__
        assert row.label.split()[0].rstrip("s") in module.__doc__ or "Section" in module.__doc__
        assert callable(module.run)
    assert [row.name for row in chosen("all")] == list(EXPERIMENTS)
    assert [row.name for row in chosen("wina, flops")] == ["flops", "wina"]


def paper_numbers() -> Iterator[tuple[str, float]]:
    """Every number that a module holds of the paper's tables."""
    for row in EXPERIMENTS.values():
        paper = getattr(import_module(row.where), "PAPER", {})
        yield from ((row.name, number) for number in floats(paper))


def floats(values: Any) -> Iterator[float]:
    if isinstance(values, dict):
        values = values.values()
    if isinstance(values, float):
        yield values
    elif not isinstance(values, str | int):
        for value in values:
            yield from floats(value)


def test_the_paper_s_numbers_stand_in_the_paper() -> None:
    if not PAPER_TEX.is_file():
        pytest.skip(f"needs the paper's source, {PAPER_TEX}, which is absent")
    found = {float(number) for number in re.findall(r"\d+\.\d+", PAPER_TEX.read_text())}
    numbers = list(paper_numbers())
    assert len(numbers) > 200
    wrong = [(name, number) for name, number in numbers if number not in found]
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "printed_numbers"),
    [
        # The paper's Table 7, but for the routers inside Qwen3's experts (331.3 without).
        ("Llama-2 7B", ["845.7", "707.4"]),
        ("Qwen-3-30B-A3B", ["389.3", "332.4"]),
        ("Llama-2 70B", []),
        ("Qwen-2.5-7B", []),
    ],
)
def test_work_of_the_paper_s_models(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    printed_numbers: list[str],
) -> None:
    path = CONFIG_FOLDER / f"{CONFIGS[name]}.json"
    asked = ["--method", "cmoe", "--layout", "S3A3E8"]
    monkeypatch.setattr("sys.argv", ["moesaic", "flops", str(path), *asked])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr().out
    assert not end.value.code
    dense = f"{dense_macs(numbers_of(path)) / 1e9:.1f}"
    for number in [dense, *printed_numbers]:
        assert number in printed


def dense_macs(config: dict[str, Any]) -> int:
    """By hand: 128 tokens times the weights of all matrices that a token meets."""
    width = config["hidden_size"]
    heads = config["num_attention_heads"]
    head = config.get("head_dim", width // heads)
    attention = 2 * width * head * (heads + config["num_key_value_heads"])
    ffn = 3 * width * config["intermediate_size"]
    if "num_experts" in config:
        experts = config["num_experts_per_tok"] * config["moe_intermediate_size"]
        ffn = 3 * width * experts + width * config["num_experts"]
    layers = config["num_hidden_layers"] * (attention + ffn)
    return 128 * (layers + width * config["vocab_size"])


# --- what tables are made of ----------------------------------------------------------------------

TABLE = Table(
    [Column("score", "score (%)", 1), Column("speed", "tokens/s", 0, timed=True)],
    [
        Row("dense", {"score": 70.0, "speed": 9}, {"score": 78.78}, {"score": 1.5}),
        Row("cut|off", {"score": None, "speed": 10}, {"score": "> 10k"}),
    ],
    ["a note"],
)


def test_a_page_shows_both_numbers() -> None:
    page = markdown(EXPERIMENTS["flops"], TABLE, "demo", SCALES["smoke"], "Llama-2 7B")
    assert "| dense | 70.0 ± 1.5 (78.8) | 9 |" in page
    assert "| cut\\|off | - (> 10k) | 10 |" in page
    assert "- times, which differ from run to run: tokens/s" in page


def test_the_paper_s_model_is_that_of_its_table() -> None:
    """Whatever model runs; but where the paper has rows of several."""
    expected = {"speed": "Qwen-2.5 72B", "hierarchical": "Qwen3-30B-A3B", "wina": "Llama-2 7B"}
    for name, model in expected.items():
        assert EXPERIMENTS[name].paper_model == model
    several = [row.name for row in EXPERIMENTS.values() if row.paper_model is None]
    assert several == ["zero_shot", "self_consistency"]


@pytest.mark.parametrize(
    ("context", "prompts"),
    [(4096, (3967,)), (16_000, (4096, 15_871)), (32_768, (4096, 32_000))],
)
def test_prompts_leave_room_for_the_tokens_after_them(
    context: int, prompts: tuple[int, ...]
) -> None:
    """Llama-2 reads 4,096 tokens, which is the paper's shorter prompt."""
    assert with_prompts_within(SCALES["paper"], context).contexts == prompts


def test_times_stand_apart() -> None:
    assert TABLE.numbers()["rows"][0]["values"] == {"score": 70.0}
    assert TABLE.times() == {"dense": {"speed": 9}, "cut|off": {"speed": 10}}


@pytest.mark.parametrize(
    "panels",
    [
        [],
        [Panel("", "x", "y", [Line("one", [1, 2], [1.0, 0.0], [0.1, 0.1])], log_y=True)],
        [Panel("", "x", "y", [Line("one", [1], [3.0]), Line("two", [1], [3.0], None, True)])],
    ],
)
def test_plots_of_few_numbers(panels: list[Panel]) -> None:
    table = Table(TABLE.columns, TABLE.rows, (), panels)
    assert draw(table, "title").startswith(b"\x89PNG")
    assert draw(table, "title") == draw(table, "title")
    assert draw(Table(TABLE.columns, []), "nothing").startswith(b"\x89PNG")


def test_made_up_questions_have_the_right_answer_and_are_asked(tmp_path: Path) -> None:
    text = smoke_text("code")
    lines = [line.strip() for line in text.splitlines()]
    for puzzle in puzzles(text, 20):
        first, second = puzzle.before.split("\n")
        right = puzzle.lines[puzzle.right]
        assert len(puzzle.lines) == 4
        assert min(lines.index(line) for line in (first, second, right)) >= 0
    data = write_questions(text, tmp_path / "questions")
    shots = dict.fromkeys(FILES, 0) | {"mmlu": 1, "gsm8k": 1}
    asked = load_questions(shots, 4, data, tmp_path)
    assert asked.keys() == FILES.keys()
    piqa = json.loads((data / "piqa.validation.jsonl").read_text().splitlines()[0])
    puzzle = puzzles(text, 64)[0]
    assert piqa[f"sol{1 + piqa['label']}"] == puzzle.lines[puzzle.right]


def test_a_text_is_cut_in_two(tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text("".join(f"{number:04d} " for number in range(1000)))
    texts = prepare_texts({"wiki": str(source), "c4": "demo"}, tmp_path / "texts", smoke=False)
    assert texts.keys() == {"wiki", "c4"}
    fitted = set(Path(texts["wiki"].calibration).read_text().split())
    measured = set(Path(texts["wiki"].evaluation).read_text().split())
    assert len(measured) == 100
    assert not fitted & measured
    assert (texts["c4"].calibration, texts["c4"].evaluation) == ("demo", "demo")


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tables", "zero_shoot"], "unknown table 'zero_shoot': did you mean zero_shot?"),
        (["--tables", ","], "--tables names none; known are zero_shot, breadth"),
        (["--scale", "papre"], "unknown scale 'papre': did you mean paper?"),
        (
            ["--scale", "paper"],
            "--scale paper has windows of 2,048 tokens, and the context of demo",
        ),
        (["--text", "wiki"], "--text 'wiki' is not of the form DOMAIN=SOURCE"),
        (["--text", "wki=demo"], "unknown text 'wki': did you mean wiki?"),
        (["--tables", "hidden_states", "--text", "code=/no/file.txt"], "/no/file.txt"),
        (["--tables", "zero_shot", "--task-data", "none"], "--task-data none is no folder"),
    ],
)
def test_bad_options(run: Run, tmp_path: Path, options: list[str], message: str) -> None:
    code, _, error = run("demo", "--output", tmp_path / "out", *options)
    assert code == 2
    assert message in error
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def long_model(tmp_path: Path) -> Path:
    """The demo model, said to read longer windows: nothing is computed with it here."""
    folder = tmp_path / "long"
    shutil.copytree(demo_path(), folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 8192
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_scale_says_which_text_it_lacks(run: Run, tmp_path: Path) -> None:
    model = long_model(tmp_path)
    options = ["--scale", "small", "--tables", "domain_overlap", "--text", "wiki=demo"]
    code, _, error = run(model, "--output", tmp_path / "out", *options)
    assert code == 2
    assert "domain_overlap needs a text of code: give --text code=SOURCE" in error
    assert "the paper takes OpenCoder" in error
    assert not (tmp_path / "out").exists()


def test_a_scale_says_which_questions_it_lacks(run: Run, tmp_path: Path) -> None:
    model = long_model(tmp_path)
    options = ["--scale", "small", "--tables", "data_efficiency", "--text", "wiki=demo"]
    code, _, error = run(model, "--output", tmp_path / "out", *options)
    assert code == 2
    assert "cannot be fetched from the hub" in error
    assert "name a folder that holds them by --task-data" in error
    (tmp_path / "data").mkdir()
    code, _, error = run(
        model, "--output", tmp_path / "out", *options, "--task-data", tmp_path / "data"
    )
    assert code == 2
    assert "piqa.validation.jsonl (or piqa.validation.jsonl.gz) is not in" in error
    assert not (tmp_path / "out").exists()


def test_a_text_that_has_changed_is_another(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(smoke_text("code"))
    options = ["--output", tmp_path / "out", "--tables", "hidden_states", "--text", f"wiki={text}"]
    assert run("demo", *options)[0] == 0
    assert run("demo", *options)[0] == 0
    text.write_text(smoke_text("maths"))
    code, _, error = run("demo", *options)
    assert code == 2
    assert "was made with contents = {'wiki': " in error


def test_a_model_that_has_changed_is_another(run: Run, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo_path(), model)
    options = ["--output", tmp_path / "out", "--tables", "hidden_states"]
    assert run(model, *options)[0] == 0
    assert run(model, *options)[0] == 0
    [weights] = model.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, _, error = run(model, *options)
    assert code == 2
    assert "was made with weights = " in error


def test_digests_are_of_names_and_contents(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.jsonl").write_text("one")
    first = digest_of(folder)
    shutil.copytree(folder, tmp_path / "copy")
    assert digest_of(tmp_path / "copy") == first
    (folder / "a.jsonl").write_text("two")
    second = digest_of(folder)
    (folder / "a.jsonl").rename(folder / "b.jsonl")
    third = digest_of(folder)
    assert len({first, second, third}) == 3
    (folder / "notes.txt").write_text("mine")
    assert digest_of(folder, (".jsonl",)) == third
    assert digest_of("somebody/model") is None


def test_a_folder_in_the_way(run: Run, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "file").write_text("mine")
    code, _, error = run("demo", "--output", tmp_path / "file")
    assert (code, "is a file; choose another" in error) == (2, True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    code, _, error = run("demo", "--output", tmp_path / "mine")
    assert (code, "is in the way: it is not empty, and no reproduction" in error) == (2, True)
    code, _, error = run("demo", "--output", folder, "--dtype", "float32")
    assert (code, "was made with dtype = auto, this run has float32" in error) == (2, True)
    assert not list((tmp_path / "mine").glob("*.json"))
