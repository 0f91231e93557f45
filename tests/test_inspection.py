"""What `inspect` says of a converted model, and the page that shows it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

import moesaic
from moesaic.cli.main import main
from moesaic.demo import demo_path
from moesaic.families import find_ffns
from moesaic.families.load import load_model, load_tokenizer
from moesaic.inspection import charts
from moesaic.inspection.answers import answer, worst_layers
from moesaic.inspection.charts import Series
from moesaic.inspection.figures import layer_figures
from moesaic.inspection.inspect import Inspection, pass_through
from moesaic.inspection.measure import Pass, measure
from moesaic.inspection.record import read_record
from tests.families import CONTEXT, tiny_model, tokens
from tests.mixtures import tiny_mixture

TEXT = "def main(argument):\n    return [argument for _ in range(10)]\n" * 400
WINDOWS = tokens(16, CONTEXT, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, converted: its page lies beside it."""
    output = tmp_path_factory.mktemp("converted") / "out"
    moesaic.convert("demo", "cmoe", "S3A3E8", [TEXT], output=output, samples=4, sequence_length=64)
    return output


@pytest.fixture(scope="module")
def inspection(folder: Path) -> Inspection:
    return moesaic.inspect(folder)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command line in this process: exit code, what it printed, and its errors."""
    monkeypatch.setenv("COLUMNS", "200")

    def type_in(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moesaic", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return type_in


class Elements(HTMLParser):
    """Tags with their attributes, ids and links of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in {"src", "href"}:
                self.links.append(str(value))


# --- the pass through the model ----------------------------------------------------------------


def watched(model: Any, ids_T: Tensor, words: list[str]) -> Pass:
    passed = measure(model, ids_T, words, "noise")
    assert passed is not None
    return passed


def added_one_by_one(block: Any, call: Any, units: int) -> Tensor:
    """Norm of what each unit adds (T, U): the output with it alone, less that with none."""

    def only(unit: int | None) -> Tensor:
        def view(router: Any, values: Any, gate_TR: Tensor) -> Tensor:
            mask_TR = torch.zeros_like(gate_TR)
            if unit is not None:
                mask_TR[:, unit] = 1.0
            return mask_TR

        block.view = view
        try:
            return call()
        finally:
            block.view = None

    none_TD = only(None)
    norms = [(only(unit) - none_TD).norm(dim=1) for unit in range(units)]
    return torch.stack(norms, dim=1)


@pytest.mark.parametrize(
    "method", ["cmoe", "moesaic", "moesaic-dynamic", "moesaic-neurons", "cats", "llama-moe"]
)
@torch.no_grad()
def test_units_are_what_runs_and_what_each_adds(method: str) -> None:
    settings = {"layer_budgets": "uniform"} if method.startswith("moesaic-") else {}
    model, _ = moesaic.convert(tiny_model("qwen3"), method, "S2A2E8", WINDOWS, settings=settings)
    ffns = find_ffns(model)
    block: Any = ffns.replaced(1)
    x_BLD = torch.randn(2, 9, block.block.hidden_size)
    x_TD = x_BLD.flatten(0, 1)
    runs_TU, added_TU = block.units(x_BLD)
    assert torch.equal(runs_TU, block.chosen(x_TD))
    expected_TU = added_one_by_one(block, lambda: block(x_TD), runs_TU.shape[1])
    if block.unit == "neuron" and not block.router.reads_gates:
        # A neuron that runs on its copy adds what the copy says.
        close = (added_TU - expected_TU).abs() <= 0.5 * added_TU + 1e-3
        assert close.float().mean() > 0.8
        return
    torch.testing.assert_close(added_TU, expected_TU, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_units_of_a_mixture_are_sub_experts() -> None:
    model, _ = moesaic.convert(tiny_mixture("olmoe"), "cmoe", "S3A3E8", WINDOWS)
    hierarchy: Any = find_ffns(model).replaced(0)
    x_TD = torch.randn(7, hierarchy.block.hidden_size)
    index_TO = torch.tensor([[0, 3]] * 4 + [[2, 1]] * 3)
    weight_TO = torch.rand(7, 2)
    runs_TU, added_TU = hierarchy.units(x_TD, index_TO, weight_TO)
    routed, outer = hierarchy.num_routed, hierarchy.num_outer
    assert runs_TU.shape == (7, routed * outer)
    assert (runs_TU.sum(1) == 2 * 3).all()
    unused_TU = torch.ones_like(runs_TU)
    for token, row in enumerate(index_TO.tolist()):
        for expert in row:
            unused_TU[token, expert * routed : (expert + 1) * routed] = False
    assert (added_TU[unused_TU] == 0).all()
    # One sub-expert alone: its output is what the layer puts out without shared experts.
    hierarchy.shared_experts = None
    unit = int(runs_TU[0].nonzero()[0])
    down = hierarchy.experts.down_proj
    kept = down[unit].clone()
    down.zero_()
    down[unit] = kept
    alone_TD = hierarchy(x_TD, index_TO, weight_TO)
    expected_T = alone_TD.norm(dim=1)
    found_T = added_TU[:, unit] * runs_TU[:, unit]
    torch.testing.assert_close(found_T, expected_T, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_units_of_a_linear_layer_are_the_inputs_it_reads() -> None:
    model, _ = moesaic.convert(tiny_model("qwen3"), "teal", calibration=WINDOWS, sparsity=0.5)
    linear: Any = model.model.layers[1].mlp.up_proj
    x_TI = torch.randn(5, linear.in_features)
    reads_TI, added_TI = linear.units(x_TI)
    expected_TN = (x_TI * reads_TI) @ linear.weight.T
    torch.testing.assert_close(linear(x_TI), expected_TN)
    alone_I = (x_TI[0, 3] * linear.weight[:, 3]).norm()
    torch.testing.assert_close(added_TI[0, 3], alone_I)


@torch.no_grad()
def test_hidden_states_are_the_dense_ffns() -> None:
    """The same neurons in another order, before any of them is skipped."""
    dense = tiny_model("qwen3")
    model, _ = moesaic.convert(tiny_model("qwen3"), "cmoe", "S2A2E8", WINDOWS)
    block: Any = find_ffns(model).replaced(0)
    x_TD = torch.randn(6, block.block.hidden_size)
    dense_TF = find_ffns(dense).read(0).hidden(x_TD)
    torch.testing.assert_close(block.hidden(x_TD).sort(dim=1).values, dense_TF.sort(dim=1).values)


def test_a_pass_counts_what_runs() -> None:
    model, _ = moesaic.convert(tiny_model("qwen3"), "moesaic", "S2A2E8", WINDOWS)
    ids_T = tokens(1, 3 * CONTEXT, seed=5)[0]
    words = [str(token) for token in ids_T[:20].tolist()]
    passed = watched(model, ids_T, words)
    assert [layer.layer for layer in passed.layers] == list(range(len(passed.layers)))
    for layer in passed.layers:
        assert layer.unit == "expert"
        assert sum(layer.rates) == pytest.approx(2.0, abs=1e-3)  # top-2 of 6
        assert layer.cells.ran == [2] * 20
        assert all(0 < kept <= 1 for kept in layer.cells.kept)
        assert len(layer.cells.added) == len(layer.cells.units) == 20
        for row in layer.cells.units:
            numbers = [number if number >= 0 else -1 - number for number in row[::2]]
            assert sorted(numbers) == list(range(6))
            assert sum(number >= 0 for number in row[::2]) == 2
            assert row[1::2] == sorted(row[1::2], reverse=True)
        assert sum(layer.neuron_rates) == model.config.intermediate_size
    hooks = [module for module in model.modules() if module._forward_hooks]
    assert not hooks


def test_watching_lays_no_weight_out_anew(folder: Path) -> None:
    """The fast path would, and what lies in a file would then be in memory as well."""
    model = load_model(folder)
    assert pass_through(model, tokens(1, 64, seed=3)[0], None, "text") is not None
    for layer in model.model.layers:
        assert layer.mlp.experts.down_proj.is_contiguous()
        assert layer.mlp.view is None


def test_loads_and_energy_are_those_of_the_report() -> None:
    """Watched on the tokens that the conversion held out, both say the same."""
    model, report = moesaic.convert(tiny_model("qwen3"), "cmoe", "S2A2E8", WINDOWS)
    passed = watched(model, WINDOWS.flatten(), ["?"] * CONTEXT)
    for layer, row in zip(passed.layers, report.layers, strict=True):
        assert sum(layer.rates) == pytest.approx(sum(row.expert_load), abs=1e-3)
    kept = sum(passed.layers[0].cells.kept) / CONTEXT
    assert kept == pytest.approx(report.layers[0].mass_kept, abs=0.1)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "gemma2", "opt"])
def test_other_families_can_be_watched(family: str) -> None:
    model, _ = moesaic.convert(tiny_model(family), "cmoe", "S2A2E8", WINDOWS)
    passed = watched(model, tokens(1, 40)[0], ["?"] * 10)
    assert all(len(layer.cells.added) == 10 for layer in passed.layers)


def test_linear_layers_are_units_where_a_layer_has_several() -> None:
    model, _ = moesaic.convert(tiny_model("qwen3"), "teal", calibration=WINDOWS, sparsity=0.5)
    passed = watched(model, tokens(1, 40)[0], ["?"] * 10)
    layer = passed.layers[0]
    assert "mlp.down_proj" in layer.names
    assert len(layer.names) == len(layer.rates) == len(layer.cells.units[0]) // 2
    assert layer.cells.added == []


# --- the answers -------------------------------------------------------------------------------


def with_errors(inspection: Inspection, errors: list[float], ratio: float) -> Any:
    """The record with other layer errors and another perplexity."""
    record = inspection.model.record
    report = record.report
    assert report is not None
    assert report.dense_perplexity is not None
    layers = [
        replace(report.layers[0], layer=number, relative_error=error)
        for number, error in enumerate(errors)
    ]
    return replace(
        record,
        report=replace(report, layers=layers, perplexity=ratio * report.dense_perplexity),
    )


def test_the_worst_layers_are_named_with_what_leaving_them_gives_back(
    inspection: Inspection,
) -> None:
    record = with_errors(inspection, [0.1, 0.5, 0.1, 0.1, 0.1, 0.3, 0.1, 0.1, 0.1, 0.1], 1.2)
    assert [layer.layer for layer in worst_layers(record.report)] == [1, 5]
    answers = answer(record, None)
    assert "Perplexity rose by 20.0 %" in answers.lost[0]
    assert answers.where[0].startswith("Layers 1 (50 %), 5 (30 %) lose most")
    step = next(line for line in answers.next if "--dense-layers" in line)
    assert "--dense-layers 1,5 takes 50 %" in step
    assert "gives 20 % of the saving back" in step


def test_where_little_was_lost_more_can_be_skipped(inspection: Inspection) -> None:
    answers = answer(with_errors(inspection, [0.1, 0.1, 0.1], 1.01), None)
    assert "No layer stands out" in answers.where[0]
    assert "skip more" in answers.next[0]
    assert not any("--dense-layers" in line for line in answers.next)


def test_speed_is_measured_or_said_to_be_counted(inspection: Inspection) -> None:
    record = inspection.model.record
    assert answer(record, None).faster[0] == "The time was not measured."
    row = {"kind": "decode", "batch": 1, "tokens_per_second": [9.0, 7.0]}
    times = {
        "model": record.model, "engine": "transformers", "device": "cpu", "rows": [row],
    }  # fmt: skip
    assert "not timed beside it" in answer(record, times).faster[0]
    row |= {"ratio": 0.78, "least": 0.7, "most": 0.9}
    assert (
        "0.78 of the dense model's time (0.70 to 0.90), faster" in answer(record, times).faster[0]
    )


# --- charts ------------------------------------------------------------------------------------


def titles(svg: Any) -> list[str]:
    return [
        str(element.text)
        for element in ElementTree.fromstring(svg).iter()
        if element.tag == "title"
    ]


def test_every_mark_of_a_line_has_its_number() -> None:
    series = [Series("a <b>", [0.1, None, 0.003], 0), Series("c", [0.0, 2.0, 3.0], 1)]
    svg = charts.lines("error", [0, 1, 7], series, log=True)
    assert titles(svg) == [
        "layer 0, a <b>: 0.1", "layer 7, a <b>: 0.003", "layer 1, c: 2", "layer 7, c: 3",
    ]  # fmt: skip
    assert len(titles(charts.lines("error", [0, 1, 7], series))) == 5


def test_higher_values_stand_higher() -> None:
    svg = charts.lines("error", [0, 1], [Series("a", [0.5, 0.1], 0)])
    points = ElementTree.fromstring(svg).find("polyline")
    assert points is not None
    heights = [float(point.split(",")[1]) for point in points.attrib["points"].split()]
    assert heights[0] < heights[1]  # SVG counts downwards


def test_a_heat_map_is_darker_where_more_runs() -> None:
    svg = charts.heat("loads", [(3, [("expert 1", 0.9), ("expert 0", 0.1)])], 0.1, 0.9)
    assert titles(svg) == ["layer 3, expert 1: 90.0 %", "layer 3, expert 0: 10.0 %"]
    cells = list(ElementTree.fromstring(svg).iter("rect"))
    depth = [float(cell.attrib["fill-opacity"]) for cell in cells]
    assert depth == [1.0, 0.04]


def test_a_histogram_leaves_out_empty_bins() -> None:
    svg = charts.bars("rates", [5, 0, 1], ["0 % to 1 %", "1 %", "2 %"], "neurons", "rate")
    assert titles(svg) == ["0 % to 1 %: 5 neurons", "2 %: 1 neurons"]


@pytest.mark.parametrize("values", [[], [None], [0.0]])
def test_without_values_there_is_no_chart(values: list[float | None]) -> None:
    assert charts.lines("x", list(range(len(values))), [Series("a", values, 0)], log=True) == ""
    assert charts.bars("x", [0], ["a"], "b", "c") == ""
    assert charts.heat("x", [], 0.0, 1.0) == ""


def test_equal_values_have_an_axis() -> None:
    assert titles(charts.lines("x", [0, 1], [Series("a", [1.0, 1.0], 0)]))


# --- the page ----------------------------------------------------------------------------------


def test_the_page_beside_a_conversion_answers_a_strangers_questions(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    for words in (
        "What did I lose?", "Where?", "Is it faster?", "What should I try next?",
        "over dense", "What each layer loses", "How well the router chooses",
        "How often each expert runs", "How often neurons are active", "Token by token",
    ):  # fmt: skip
        assert words in page, words
    report = json.loads((folder / "moesaic_report.json").read_text())
    assert f"{report['perplexity']:.3f}" in page
    assert f"{report['perplexity'] / report['dense_perplexity']:.3f}" in page
    for layer in report["layers"]:
        assert f"layer {layer['layer']}, this model: {layer['relative_error']:.3g}" in page


def test_the_page_needs_nothing_but_itself(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    found = Elements(page)
    inside = [link for link in found.links if link.startswith("#")]
    assert {link[1:] for link in inside} <= set(found.ids)
    outside = [link for link in found.links if not link.startswith(("#", "data:"))]
    assert outside == ["https://arxiv.org/abs/2502.04416"]  # the method's paper, to click
    assert "@import" not in page
    assert "url(" not in page
    assert len(found.ids) == len(set(found.ids))
    assert len(page) < 500_000


def test_the_same_model_gives_the_same_page(folder: Path, tmp_path: Path) -> None:
    pages = []
    for name in ("a", "b"):
        moesaic.inspect(folder, html=tmp_path / name)
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]
    assert str(folder).encode() not in pages[0]


def test_a_deep_model_with_many_experts_has_a_page_under_three_megabytes(
    inspection: Inspection,
) -> None:
    """60 layers of 128 experts, 96 tokens."""
    model = inspection.model
    assert model.passed is not None
    layer = model.passed.layers[0]
    row = [number for unit in range(32) for number in (-100 - unit, 1234)]
    cells = replace(layer.cells, units=[row] * 96)
    layers = [
        replace(layer, layer=number, rates=[0.123] * 128, cells=cells) for number in range(60)
    ]
    passed = replace(model.passed, layers=layers)
    page = Inspection(replace(model, passed=passed)).page()
    assert len(page.encode()) < 3_000_000


def test_names_and_tokens_are_text_and_never_markup(inspection: Inspection) -> None:
    evil = '</script><img src=x onerror="alert(1)">'
    model = inspection.model
    assert model.passed is not None
    provenance = model.record.provenance | {
        "base_model": f"m{evil}",
        "method": {"name": evil, "about": evil, "settings": {evil: evil}},
    }
    record = replace(model.record, provenance=provenance, model=evil)
    passed = replace(model.passed, tokens=[evil] * len(model.passed.tokens), text=evil)
    changed = replace(model, record=record, passed=passed)
    times = {
        "model": evil, "engine": evil, "device": evil,
        "rows": [{"kind": evil, "batch": 1, "tokens_per_second": [1.0]}],
    }  # fmt: skip
    result = Inspection(changed, changed, times)
    found = Elements(result.page())
    assert "img" not in found.tags
    assert found.tags.count("script") == 2


@pytest.mark.parametrize(
    ("method", "present", "absent"),
    [
        ("teal", "How much each linear layer reads", "How well the router chooses"),
        ("static", "Nothing is routed in the layers", "How often each"),
        ("moesaic-neurons", "How often each neuron runs", "How often each expert"),
        ("griffin", "How often neurons are active", "How often each"),
        ("sleb", "there is nothing to show token by token", "How often"),
    ],
)
def test_what_a_kind_does_not_have_is_left_out(
    method: str, present: str, absent: str, tmp_path: Path
) -> None:
    moesaic.convert(
        tiny_model("qwen3"), method, calibration=WINDOWS, sparsity=0.5, output=tmp_path / "out"
    )
    page = (tmp_path / "out/report.html").read_text()
    assert present in page
    assert absent not in page


def test_without_a_tokenizer_tokens_are_numbers(tmp_path: Path) -> None:
    moesaic.convert(tiny_model("qwen3"), "static", "S2A2E8", WINDOWS, output=tmp_path / "out")
    assert re.search(r'"#\d+"', (tmp_path / "out/report.html").read_text())


def test_a_page_that_cannot_be_drawn_spoils_no_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> str:
        raise RuntimeError("no\nink")

    monkeypatch.setattr("moesaic.inspection.inspect.draw", fail)
    output = tmp_path / "out"
    moesaic.convert(tiny_model("qwen3"), "cmoe", "S2A2E8", WINDOWS, output=output)
    line = capsys.readouterr().err
    assert "was not drawn (no ink); the model is whole" in line
    assert line.count("\n") == 1
    assert not (output / "report.html").exists()
    load_model(output)


def test_a_recovered_model_shows_both_halves(folder: Path, tmp_path: Path) -> None:
    """Also one whose conversion is not reported in its folder."""
    recovered = tmp_path / "recovered"
    shutil.copytree(folder, recovered)
    report = json.loads((folder / "moesaic_report.json").read_text())
    training = {
        "perplexity_before": report["perplexity"], "perplexity": 18.0, "folded_perplexity": 17.5,
        "folded": True,
        "settings": {"samples": 4, "sequence_length": 64}, "data": "text", "distill": "demo",
    }  # fmt: skip
    (recovered / "moesaic_finetune.json").write_text(json.dumps(training))
    page = moesaic.inspect(recovered).page()
    assert "Before it was trained, perplexity rose by" in page
    assert "17.500" in page
    assert "256 tokens of text, with the dense model as teacher" in page
    training["perplexity_before"] = 20.0
    (recovered / "moesaic_finetune.json").write_text(json.dumps(training))
    page = moesaic.inspect(recovered).page()
    assert "on another text or in other windows" in page
    (recovered / "moesaic_report.json").unlink()
    result = moesaic.inspect(recovered)
    assert result.model.record.perplexities == {"converted": 20.0, "recovered": 17.5}
    assert "errors by layer are not known here" in result.page()


def test_two_models_stand_side_by_side(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    moesaic.convert("demo", "static", "S3A3E8", [TEXT], output=other, samples=4, sequence_length=64)
    result = moesaic.inspect(folder, against=other)
    page = result.page()
    assert "Side by side" in page
    assert "layer 2, the other model:" in page
    assert page.count('"name":"the other model"') == 1
    # Static pruning routes nothing, so there are no loads of it to be shown.
    assert "How often each expert runs: this model" in page
    assert "How often each expert runs: the other model" not in page
    for whose in ("this model", "the other model"):
        assert f"How often neurons are active: {whose}" in page
    assert result.to_dict()["against"]["record"]["report"]["method"]["name"] == "static"


def test_two_routed_models_have_loads_and_recall_of_their_own(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    moesaic.convert(
        "demo", "moesaic", "S1A5E8", [TEXT], output=other, samples=4, sequence_length=64
    )
    page = moesaic.inspect(folder, against=other).page()
    for title in ("How often each expert runs", "How well the router chooses"):
        assert page.index(f"{title}: this model") < page.index(f"{title}: the other model")
    alone = moesaic.inspect(folder).page()
    assert "How often each expert runs:" not in alone


def test_layers_of_the_other_model_are_drawn_where_this_one_has_none(
    folder: Path, tmp_path: Path
) -> None:
    """A conversion that was not measured has no errors by layer."""
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "moesaic_report.json").unlink()
    alone = moesaic.inspect(bare)
    assert layer_figures(alone.model.record, None) == []
    beside = moesaic.inspect(bare, against=folder)
    errors, router = layer_figures(beside.model.record, beside.against)
    assert errors.legend[0].name == "the other model"
    assert errors.table.heads[:2] == ["layer", "the other model"]
    assert router.title == "How well the router chooses: the other model"


def test_a_text_of_the_users_is_shown(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("import zebra\n" * 60)
    result = moesaic.inspect(folder, text)
    assert result.model.passed is not None
    assert "".join(result.model.passed.tokens).startswith("import zebra")
    assert "own.txt" in result.page()


def test_the_record_of_a_folder_that_was_moved(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    record = read_record(str(moved))
    assert record.title == "demo, cmoe S3A3E8"
    tokenizer = load_tokenizer(moved)
    ids_T = torch.tensor(tokenizer(TEXT)["input_ids"])
    passed = pass_through(load_model(moved), ids_T, tokenizer, "text")
    assert passed is not None
    assert passed.measured == 1024


@pytest.mark.parametrize(
    ("name", "value"),
    [("perplexity", "x"), ("tokens", None), ("method", "cmoe"), ("layout", 7), ("search", [])],
)
def test_a_report_of_other_kinds_is_damaged(
    folder: Path, tmp_path: Path, name: str, value: Any
) -> None:
    edited = tmp_path / "edited"
    shutil.copytree(folder, edited)
    report = edited / "moesaic_report.json"
    report.write_text(json.dumps(json.loads(report.read_text()) | {name: value}))
    expected = rf"moesaic_report.json is damaged \(TypeError: {name} "
    with pytest.raises(moesaic.MoesaicError, match=expected):
        read_record(str(edited))


def test_weights_that_are_no_numbers_are_not_inspected(folder: Path) -> None:
    model = load_model(folder)
    model.get_input_embeddings().weight.data.fill_(torch.nan)
    tokenizer = load_tokenizer(folder)
    ids_T = torch.tensor(tokenizer(TEXT)["input_ids"])
    with pytest.raises(moesaic.MoesaicError, match="are not finite numbers"):
        pass_through(model, ids_T, tokenizer, "text")


# --- the command -------------------------------------------------------------------------------


def test_inspect_prints_the_same_in_brief(run: Any, folder: Path, tmp_path: Path) -> None:
    html, numbers = tmp_path / "page.html", tmp_path / "page.json"
    code, printed, _ = run("inspect", folder, "--html", html, "--json", numbers)
    assert code == 0
    for words in ("What did I lose?", "Where?", "Is it faster?", "layers that lose most"):
        assert words in printed
    assert f"moesaic bench {folder}" in printed
    assert f"page: {html}" in printed
    values = json.loads(numbers.read_text())
    assert values["against"] is None
    assert values["model"]["answers"]["lost"][0] in html.read_text().replace("&#39;", "'")
    assert len(values["model"]["passed"]["layers"]) == 4


def test_convert_says_where_the_page_is(run: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    output = tmp_path / "out"
    code, printed, _ = run(
        "convert", "demo", "--output", output, "--method", "cmoe", "--layout", "S3A3E8",
        "--calibration", text, "--samples", 2, "--sequence-length", 64,
    )  # fmt: skip
    assert code == 0
    assert f"report: {output / 'report.html'}" in printed


def test_measured_times_come_from_bench(run: Any, folder: Path, tmp_path: Path) -> None:
    row = {
        "kind": "decode", "batch": 1, "tokens_per_second": [90.0, 70.0], "ratio": 0.777,
        "least": 0.7, "most": 0.9,
    }  # fmt: skip
    bench, html = tmp_path / "bench.json", tmp_path / "page.html"
    values = {"model": "m", "engine": "transformers", "device": "cpu", "rows": [row]}
    bench.write_text(json.dumps(values))
    code, printed, _ = run("inspect", folder, "--bench", bench, "--html", html)
    assert code == 0
    assert "0.78 of the dense model's time" in printed
    assert "0.78 (0.70 to 0.90)" in html.read_text()
    assert "The times are those of m, as the file says." in printed


def test_a_model_timed_against_another_is_not_said_to_be_over_dense(
    run: Any, folder: Path, tmp_path: Path
) -> None:
    row = {
        "kind": "decode", "batch": 1, "tokens_per_second": [90.0, 70.0], "ratio": 0.777,
        "least": 0.7, "most": 0.9,
    }  # fmt: skip
    values = {
        "model": str(folder), "against": "some/static", "engine": "transformers",
        "device": "cpu", "rows": [row],
    }  # fmt: skip
    bench, html = tmp_path / "bench.json", tmp_path / "page.html"
    bench.write_text(json.dumps(values))
    code, printed, _ = run("inspect", folder, "--bench", bench, "--html", html)
    assert code == 0
    assert "0.78 of static's time" in printed
    assert "The times are those of" not in printed
    page = html.read_text()
    assert "over static: decode" in page
    assert "time over static" in page
    assert "time over dense" not in page


@pytest.fixture
def wrong(folder: Path, tmp_path: Path) -> dict[str, list[object]]:
    """Calls that are refused, by what the error says."""
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "rows.json").write_text('{"rows": [{"kind": "decode"}]}')
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    (damaged / "moesaic_report.json").write_text('{"layers": 3}')
    exported = tmp_path / "exported"
    shutil.copytree(demo_path(), exported)
    (exported / "moesaic_export.json").write_text("{}")
    page = tmp_path / "page.html"
    return {
        "was not converted by moesaic": ["demo"],
        "inspect the model that it was made from": [exported],
        "no such model folder": [tmp_path / "nothing"],
        "holds no text": [folder, "--text", tmp_path / "empty.txt", "--html", page],
        "no such text": [folder, "--text", "nowhere.txt", "--html", page],
        "is a folder; name a file": [folder, "--html", tmp_path],
        "there is no folder": [folder, "--html", tmp_path / "no/such/page.html"],
        "was not converted by": [folder, "--against", demo_path(), "--html", page],
        "not what moesaic bench": [folder, "--bench", tmp_path / "list.json", "--html", page],
        "run moesaic bench": [folder, "--bench", tmp_path / "rows.json", "--html", page],
        "json is damaged": [damaged, "--html", page],
        "known are": [folder, "--dtype", "float3", "--html", page],
    }


def test_bad_input_is_one_line_and_writes_nothing(
    run: Any, wrong: dict[str, list[object]], tmp_path: Path
) -> None:
    for words, arguments in wrong.items():
        code, _, errors = run("inspect", *arguments)
        lines = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert code == 2, words
        assert words in lines[0], lines
        assert len(lines) == 1
        assert "Traceback" not in errors
        assert not (tmp_path / "page.html").exists()


# --- in a browser ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install '.[dev]'"
    )
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of one model, and of two."""
    place = tmp_path_factory.mktemp("pages")
    two = place / "two.html"
    moesaic.inspect(folder, against=folder, html=two)
    return {"one": folder / "report.html", "two": two}


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page_without_complaint(
    browser: Any, pages: dict[str, Path], width: int, scheme: str
) -> None:
    for path in pages.values():
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        view = context.new_page()
        complaints: list[str] = []
        requests: list[str] = []
        view.on("console", lambda message, found=complaints: found.append(message.text))
        view.on("pageerror", lambda error, found=complaints: found.append(str(error)))
        view.on("request", lambda request, found=requests: found.append(request.url))
        view.goto(path.as_uri())
        assert complaints == []
        assert requests == [path.as_uri()]
        wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert view.evaluate(wider) <= 0
        assert view.locator("#passage button").count() == 96
        ground = view.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(map(int, re.findall(r"\d+", ground)[:3])) > 384
        assert light == (scheme == "light")
        context.close()


def test_the_keyboard_goes_through_tokens_and_layers(browser: Any, pages: dict[str, Path]) -> None:
    view = browser.new_page()
    view.goto(pages["two"].as_uri())
    view.locator('#passage button[aria-selected="true"]').focus()
    view.keyboard.press("Home")
    assert view.locator("#chosen").inner_text().startswith("Token 1:")
    view.keyboard.press("ArrowRight")
    assert view.locator("#chosen").inner_text().startswith("Token 2:")
    assert view.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
    view.locator("#by-layer button").nth(2).focus()
    view.keyboard.press("Enter")
    assert view.locator("#chosen-layer").inner_text() == "Layer 2"
    rows = view.locator("#by-unit tr")
    assert rows.count() == 5  # routed experts of S3A3E8
    assert view.locator("#by-unit tr.skipped").count() == 2
    view.locator("#which").select_option(label="the other model")
    view.locator("#layer").select_option(label="3")
    assert view.locator("#chosen-layer").inner_text() == "Layer 3"
    view.close()


def test_the_page_prints(browser: Any, pages: dict[str, Path]) -> None:
    view = browser.new_page()
    view.goto(pages["one"].as_uri())
    pdf = view.pdf(format="A4", print_background=True)
    assert pdf.startswith(b"%PDF")
    view.close()


def test_tokens_of_a_bad_tokenizer_run_no_code(
    browser: Any, inspection: Inspection, tmp_path: Path
) -> None:
    evil = "</script><script>document.title = 'taken'</script><img src=x onerror=alert(1)>"
    passed = inspection.model.passed
    assert passed is not None
    shown: Pass = replace(passed, tokens=[evil] * len(passed.tokens))
    path = tmp_path / "evil.html"
    path.write_text(Inspection(replace(inspection.model, passed=shown)).page())
    view = browser.new_page()
    view.goto(path.as_uri())
    assert "taken" not in view.title()
    assert view.locator("#passage button").first.inner_text() == evil
    assert view.locator("#passage img").count() == 0
    view.close()
