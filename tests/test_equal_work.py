"""Budgets given as work: found by bisection on plans, and refused where nothing is near."""

from __future__ import annotations

import csv
import io
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

import moesaic
from moesaic.cli.main import main
from moesaic.comparison.csv_file import csv_text
from moesaic.comparison.entries import EQUAL_WORK, METHOD, REFERENCE
from moesaic.comparison.equal_work import Steps, neighbours, over_dense
from moesaic.comparison.missing import CONVERSION, Missing, lines_of
from moesaic.comparison.options import FFN_BYTES, FFN_MACS, NEAR, SPARSITY, Goal
from moesaic.comparison.page import making, markdown, ranking
from moesaic.comparison.plot import curves, edges, panels_of, plot, upper_edge
from moesaic.comparison.rows import Row
from moesaic.errors import MoesaicError
from moesaic.plot_style import spread_out
from tests.families import tiny_model
from tests.mixtures import tiny_mixture
from tests.test_work import TINY

SMALL: dict[str, Any] = {
    "calibration": "demo", "seeds": 1, "samples": 2, "sequence_length": 64, "max_tokens": 256,
    "dtype": "float32",
}  # fmt: skip
LINEAR = str(Path(__file__).parent / "method_files" / "magnitude.py")
WIDE = LlamaConfig(**TINY | {"hidden_size": 64, "intermediate_size": 192}, dtype="bfloat16")


# --- the search --------------------------------------------------------------------------------


def tenths(step: int) -> float:
    """Step 1 costs 0.9, step 9 costs 0.1."""
    return (10 - step) / 10


def test_the_neighbours_of_a_work_by_hand() -> None:
    assert neighbours(tenths, 9, 0.55) == {4: 0.6, 5: 0.5}
    assert neighbours(tenths, 9, 0.5) == {4: 0.6, 5: 0.5}
    assert neighbours(tenths, 9, 0.95) == {1: 0.9}
    assert neighbours(tenths, 9, 0.05) == {9: 0.1}


def test_steps_out_of_reach_are_passed_over() -> None:
    def in_the_middle(step: int) -> float | None:
        return tenths(step) if 3 <= step <= 6 else None

    assert neighbours(in_the_middle, 9, 0.55) == {4: 0.6, 5: 0.5}
    assert neighbours(in_the_middle, 9, 0.95) == {3: 0.7}
    assert neighbours(in_the_middle, 9, 0.05) == {6: 0.4}
    assert neighbours(lambda step: None, 9, 0.5) == {}


@given(
    works=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    before=st.integers(0, 20),
    behind=st.integers(0, 20),
    wanted=st.integers(0, 31),
)
@settings(deadline=None)
def test_the_search_finds_what_a_look_at_all_steps_finds(
    works: list[int], before: int, behind: int, wanted: int
) -> None:
    falling = [None] * before + sorted(works, reverse=True) + [None] * behind
    asked = []

    def work_at(step: int) -> float | None:
        asked.append(step)
        return falling[step - 1]

    found = neighbours(work_at, len(falling), wanted)
    if not found:  # fewer in reach than lie between two of the places looked at
        assert len(works) <= len(falling) / 64
        return
    distance = min(abs(work - wanted) for work in found.values())
    assert distance == min(abs(work - wanted) for work in works)
    assert set(asked) <= set(range(1, len(falling) + 1))


@pytest.mark.parametrize("equal", [FFN_BYTES, FFN_MACS])
@pytest.mark.parametrize("method", ["moesaic", "moesaic-neurons", "static", LINEAR])
def test_a_work_is_met_within_half_an_expert_or_neuron(method: str, equal: str) -> None:
    settings = {"choose_by": "sketch"} if method == "moesaic-neurons" else {}
    chosen = moesaic.load_method(method, settings)
    steps = Steps(WIDE, "a model", chosen, "medium", 192)
    of_neurons = method in ("moesaic-neurons", LINEAR)
    apart = 1 / 192 if of_neurons else 6 / 192  # 32 experts of 6
    for wanted in (0.8, 0.7, 0.61):
        sparsity, plan = steps.nearest(Goal(equal, wanted))
        work = over_dense(plan)
        spent = work.ffn_bytes if equal == FFN_BYTES else work.ffn_macs
        assert abs(spent - wanted) <= apart / 2 + 1e-9
        assert 0 < sparsity < 1
    found = {id(found) for found in steps.known.values() if found is not None}
    assert len(found) <= len(steps.known) <= 40


def test_a_neuron_s_work_by_hand() -> None:
    """With a of the neurons running: 1/3 + 2a/3, and a sketch of rank 24."""
    method = moesaic.load_method("moesaic-neurons", {"choose_by": "sketch"})
    steps = Steps(WIDE, "a model", method, "medium", 192)
    _, plan = steps.nearest(Goal(FFN_BYTES, 0.7))
    sketch = 24 * (64 + 192) / (3 * 64 * 192)
    active = plan.sizes.active
    assert over_dense(plan).ffn_bytes == pytest.approx(1 / 3 + 2 / 3 * active / 192 + sketch)
    assert active == round((0.7 - sketch - 1 / 3) * 1.5 * 192)


def test_a_copied_neuron_s_work_by_hand() -> None:
    """Codes of 4 bits and a scale for 64 inputs, in bfloat16; a quarter of what runs is exact."""
    method = moesaic.load_method("moesaic-neurons", {"exact": 0.25})
    steps = Steps(WIDE, "a model", method, "medium", 192)
    _, plan = steps.nearest(Goal(FFN_BYTES, 0.4))
    copies = 2 / 3 * (4 / 16 + 1 / 64)
    active = plan.sizes.active
    exact = round(active / 4)
    rows = (active + 2 * exact) / (3 * 192)
    assert over_dense(plan).ffn_bytes == pytest.approx(copies + rows)
    assert abs(copies + rows - 0.4) < 1 / 192


def test_what_cannot_be_spent_is_said_with_what_can() -> None:
    """8 experts of 24 neurons: steps of an eighth. The router has 2 rows for each of 5."""
    steps = Steps(WIDE, "a model", moesaic.load_method("cmoe"), "medium", 192)
    with pytest.raises(MoesaicError) as refused:
        steps.nearest(Goal(FFN_BYTES, 0.7))
    works = [(6 * 24 + 2 / 3 * 5) / 192, (5 * 24 + 2 / 3 * 5) / 192]
    assert f"{works[0]:.3f} or {works[1]:.3f}" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_method_that_takes_no_such_model_says_why() -> None:
    config = tiny_model("gpt2").config
    steps = Steps(config, "a model", moesaic.load_method("moesaic-neurons"), "medium", 52)
    with pytest.raises(MoesaicError, match="FFNs without a gate"):
        steps.nearest(Goal(FFN_BYTES, 0.7))


def test_the_works_of_a_mixture_count_its_outer_router_on_both_sides() -> None:
    config = tiny_mixture("mixtral").config
    plan = Steps(config, "a model", moesaic.load_method("static"), "medium", 20).nearest(
        Goal(FFN_BYTES, 0.7)
    )[1]
    neuron = 2 * 3 * 32  # of each of the 2 experts of a token
    router = 4 * 32
    expected = (neuron * plan.sizes.active + router) / (neuron * 20 + router)
    assert over_dense(plan).ffn_bytes == pytest.approx(expected)
    assert over_dense(plan).ffn_macs == pytest.approx(expected)


# --- comparisons -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, list[str]]:
    folder = tmp_path_factory.mktemp("compare")
    made: list[str] = []
    found = moesaic.compare(
        "demo", ["cmoe", "moesaic"], references=("static", "static-repaired", "oracle"),
        ffn_bytes=(0.7, 0.625), ffn_macs=(0.625,), sparsity=(0.375,), output=folder,
        progress=made.append, **SMALL,
    )  # fmt: skip
    return found, folder, made


def rows_of(result: tuple[dict[str, Any], Path, list[str]]) -> list[Row]:
    return [Row(**row) for row in result[0]["rows"]]


def test_a_table_for_each_budget_in_the_order_asked(result: Any) -> None:
    rows = rows_of(result)
    goals = list(dict.fromkeys(row.goal for row in rows))
    assert goals == [
        Goal(SPARSITY, 0.375), Goal(FFN_BYTES, 0.7), Goal(FFN_BYTES, 0.625), Goal(FFN_MACS, 0.625),
    ]  # fmt: skip
    for goal in goals:
        group = [row for row in rows if row.goal == goal]
        ratios = [row.ratio["demo"] for row in group]
        assert ratios == sorted(ratios)
        if goal.is_work:
            assert not any(row.role == EQUAL_WORK for row in group)
            assert all(abs(row.ffn_bytes - goal.at) <= NEAR for row in group)


def test_a_method_out_of_reach_is_left_out_and_harms_no_other(result: Any) -> None:
    """8 experts cannot spend 0.7 of the FFN."""
    at_70 = {row.method for row in rows_of(result) if row.goal == Goal(FFN_BYTES, 0.7)}
    assert at_70 == {"moesaic", "static", "static-repaired", "oracle"}
    lines = [line for line in result[0]["remarks"] if line.startswith("without cmoe")]
    assert len(lines) == 1
    assert "at FFN bytes 0.7" in lines[0]


def test_the_same_plan_for_two_budgets_is_converted_once(result: Any) -> None:
    found, _, made = result
    conversions = {(row["method"], row["layout"]) for row in found["rows"]}
    assert len(made) == 3 + len(conversions)  # planning, and dense twice
    twins = [row for row in found["rows"] if row["method"] == "static" and row["at"] == 0.625]
    assert len(twins) == 2
    assert twins[0]["ratio"] == twins[1]["ratio"]
    assert [row["equal"] for row in twins] == [FFN_BYTES, FFN_MACS]


def test_it_resumes_and_refuses_what_an_older_version_wrote(result: Any, tmp_path: Path) -> None:
    _, folder, _ = result
    again: list[str] = []
    options: dict[str, Any] = {"references": ("static",), "ffn_bytes": (0.625,), "resume": True}
    values = json.loads((folder / "compare.json").read_text())
    (tmp_path / "compare.json").write_text(json.dumps(values))
    moesaic.compare("demo", ["cmoe"], output=tmp_path, progress=again.append, **options, **SMALL)
    assert again == ["planning"]
    for cell in values["cells"].values():
        del cell["bytes"]
    (tmp_path / "compare.json").write_text(json.dumps(values))
    with pytest.raises(MoesaicError, match=r"cannot be resumed \(KeyError: 'bytes'\)"):
        moesaic.compare("demo", ["cmoe"], output=tmp_path, **options, **SMALL)


def test_where_no_method_is_left_it_is_an_error() -> None:
    with pytest.raises(MoesaicError, match=r"without cmoe at FFN bytes 0\.7"):
        moesaic.compare("demo", ["cmoe"], ffn_bytes=(0.7,), **SMALL)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ffn_bytes": (0.0,)}, "outside"),
        ({"ffn_macs": (1.5,)}, "outside"),
        ({"ffn_macs": (float("nan"),)}, "outside"),
        ({"ffn_bytes": (0.5,), "layout": "S1A1E2"}, "leave out"),
        ({"ffn_bytes": (0.5,), "grain": "huge"}, "grain"),
    ],
)
def test_bad_works_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(MoesaicError, match=reason):
        moesaic.compare("demo", ["static"], **SMALL | changes)


def test_the_command_passes_budgets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def compare(model: str, names: list[str], **options: Any) -> None:
        asked.append(options)
        raise MoesaicError("enough")

    monkeypatch.setattr("moesaic.comparison.compare.compare", compare)
    for words in (["--ffn-bytes", "0.75,0.5", "--ffn-macs", "0.6"], ["--sparsity", "0.3"], []):
        monkeypatch.setattr(sys, "argv", ["moesaic", "compare", "demo", *words])
        with pytest.raises(SystemExit):
            main()
    budgets = [
        (options["sparsity"], options["ffn_bytes"], options["ffn_macs"]) for options in asked
    ]
    assert budgets == [(None, [0.75, 0.5], [0.6]), ([0.3], [], []), (None, [], [])]


def test_a_word_for_a_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["moesaic", "compare", "demo", "--ffn-bytes", "half"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "--ffn-bytes 'half'" in capsys.readouterr().err


# --- what is written ---------------------------------------------------------------------------


def test_the_csv_says_what_the_rows_say(result: Any) -> None:
    rows = rows_of(result)
    text = (result[1] / "compare.csv").read_text()
    missing = [Missing.from_dict(lack) for lack in result[0]["missing"]]
    assert text == csv_text(rows, missing)
    lines = list(csv.DictReader(io.StringIO(text)))
    assert len(lines) == len(rows) + len(missing)
    lacking = [(line["method"], line["step"], line["reason"]) for line in lines[len(rows) :]]
    assert lacking == [(lack.method, lack.step, lack.reason) for lack in missing]
    assert "cmoe" in {method for method, _, _ in lacking}
    for line, row in zip(lines[: len(rows)], rows, strict=True):
        for name in ("macs", "bytes", "ffn_macs", "ffn_bytes", "sparsity", "at", "seconds"):
            assert float(line[name]) == getattr(row, name)
        for name in ("passes", "layer_error"):
            assert float(line[name]) == getattr(row, name)
        recall = "" if row.router_recall is None else str(row.router_recall)
        assert line["router_recall"] == recall
        assert (line["method"], line["layout"], line["equal"]) == (
            row.method, row.layout, row.equal,
        )  # fmt: skip
        assert float(line["ratio demo"]) == row.ratio["demo"]
        assert line["spread demo"] == ""  # of one seed
    assert csv_text([], []).count("\n") == 1


def test_the_page_has_every_row_with_both_works(result: Any) -> None:
    rows = rows_of(result)
    page = (result[1] / "compare.md").read_text()
    tables = [line for line in page.splitlines() if line.startswith("|")]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in tables
        if "---" not in line and "method" not in line
    ]  # fmt: skip
    expected = []
    for goal in dict.fromkeys(row.goal for row in rows):
        for columns in (ranking(rows), making(rows)):
            expected += [
                [column.cell(row) for column in columns] for row in rows if row.goal == goal
            ]
    assert cells == expected
    heads = [column.head for column in ranking(rows)]
    macs, ffn_bytes = heads.index("MACs"), heads.index("FFN bytes")
    at_70 = [row for row in rows if row.goal == Goal(FFN_BYTES, 0.7)]
    for found in at_70:
        line = next(
            line for line in cells
            if line[0] == found.method and line[ffn_bytes] == f"{found.ffn_bytes:.3f}"
        )  # fmt: skip
        assert float(line[macs]) == pytest.approx(found.macs, abs=5e-4)
    assert "## FFNs read 70% of the dense FFNs' bytes" in page
    assert "- FFN bytes: bytes of weights that the FFNs read for one token" in page


def row(method: str, work: float, ratio: float, role: str = METHOD, **changes: Any) -> Row:
    values: dict[str, Any] = {
        "method": method, "role": role, "saves": True, "routes": True, "repairs": True,
        "equal": SPARSITY, "at": 1 - work, "sparsity": 1 - work, "layout": "S1A1E2",
        "active_ffn_fraction": work, "macs": work, "bytes": work / 2, "ffn_macs": work,
        "ffn_bytes": work / 2, "ratio": {"t": ratio}, "spread": {"t": 0.01}, "seeds": 2,
        "load_max_over_mean": None, "dead_experts": 0, "notes": [], "better_static": [],
        "seconds": 1.0, "passes": 2.0, "layer_error": 0.1, "router_recall": None, "tuned": None,
        "tuned_spread": None, "over_tuned_dense": None, "untuned": None, "speed": None,
    }  # fmt: skip
    return Row(**values | changes)


def test_curves_by_hand() -> None:
    """A method through its budgets, the least work last; static of equal work joins static."""
    rows = [
        row("a", 0.5, 1.2), row("a", 0.75, 1.05), row("static", 0.5, 1.5, REFERENCE),
        row("static, MACs of a", 0.6, 1.4, EQUAL_WORK), row("oracle", 0.5, 0.99, saves=False),
    ]  # fmt: skip
    found = {curve.method: curve for curve in curves(rows, "t", lambda row: row.bytes)}
    assert set(found) == {"a", "static", "oracle"}
    assert [point.work for point in found["a"].points] == [0.375, 0.25]
    assert [point.loss for point in found["a"].points] == pytest.approx([0.05, 0.2])
    assert found["a"].last.spread == 0.01
    assert [point.work for point in found["static"].points] == [0.3, 0.25]
    assert [curve.is_reference for curve in found.values()] == [False, True, True]
    assert found["oracle"].last.loss == 1e-3  # better than dense: on the lower edge


def test_the_edge_shows_half_of_the_curves_whole() -> None:
    rows = [row("a", 0.5, 1.1), row("b", 0.5, 1.2), row("c", 0.5, 1.4), row("d", 0.5, 99.0)]
    found = curves(rows, "t", lambda row: row.macs)
    assert upper_edge(found) == pytest.approx(0.4 * 1.6)
    assert upper_edge(found[:2]) == pytest.approx(0.2 * 1.6)
    assert upper_edge(found[:1]) == pytest.approx(0.1 * 1.6)


def test_panels_share_the_edges_of_the_one_that_shows_most() -> None:
    rows = [row("a", 0.5, 1.1, speed=1.2), row("b", 0.5, 1.2), row("c", 0.5, 1.4)]
    panels = panels_of(rows, "t")
    assert upper_edge(panels["time of one token"]) == pytest.approx(0.1 * 1.6)
    bottom, top = edges(panels.values())
    assert top == pytest.approx(0.2 * 1.6)
    assert bottom == pytest.approx(0.1 / 1.6)


def test_who_was_timed_has_a_panel_of_its_own() -> None:
    untimed = row("oracle", 0.5, 1.1, saves=False)
    rows = [row("a", 0.5, 1.2, speed=1.25), row("a", 0.75, 1.1, speed=0.5), untimed]
    panels = panels_of(rows, "t")
    assert [len(found) for found in panels.values()] == [2, 2, 1]
    [timed] = panels["time of one token"]
    assert [(point.work, round(point.loss, 6)) for point in timed.points] == [(2, 0.1), (0.8, 0.2)]
    assert len(panels_of([untimed], "t")) == 2
    assert plot("m", {"t": 20.0}, rows).startswith(b"\x89PNG")


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_labels_keep_their_order_and_do_not_touch(heights: list[float]) -> None:
    placed = spread_out(heights, 0.05)
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    gaps = [placed[b] - placed[a] for a, b in itertools.pairwise(order)]
    assert all(gap >= 0.05 - 1e-9 for gap in gaps)
    assert max(placed) <= 1 + 1e-9
    if len(heights) == 1:
        assert placed == heights


def test_a_plot_of_one_row_and_one_of_dreadful_rows_are_drawn() -> None:
    for rows in ([row("a", 0.5, 1.2)], [row("a", 0.5, 0.9), row("b", 0.6, 1e6, REFERENCE)]):
        assert plot("m", {"t": 4.0}, rows).startswith(b"\x89PNG")


def test_a_page_of_no_rows_names_what_failed() -> None:
    settings = {
        "model": "m", "calibration": {"sources": ["demo"], "samples": 1, "sequence_length": 8},
        "max_tokens": 8, "versions": {}, "dtype": "float32", "device": "cpu", "finetune": None,
    }  # fmt: skip
    lack = Missing("a", METHOD, SPARSITY, 0.5, CONVERSION, "it diverged", 0)
    result = {"settings": settings, "dense": {"t": 4.0}, "remarks": lines_of([lack])}
    page = markdown(result, [], [lack])
    assert "| a | failed |" in page
    assert "- without a at sparsity 0.5, seed 0: it diverged" in page
