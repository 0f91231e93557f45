"""`compare`: equal tokens and budgets for all, ranked, resumable."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import moesaic
from moesaic.calibration.calibration_set import CalibrationSet
from moesaic.calibration.text import to_ids
from moesaic.cli.main import main
from moesaic.comparison.compare import REFERENCES, _outlook
from moesaic.comparison.entries import EQUAL_WORK, METHOD, REFERENCE, make_entries
from moesaic.comparison.labels import labels_of
from moesaic.comparison.options import FFN_BYTES, FFN_MACS, SPARSITY, CompareOptions
from moesaic.comparison.rows import Cell, ranked, remarks
from moesaic.conversion.run import Run
from moesaic.errors import MoesaicError
from moesaic.families.load import load_config, load_model, load_tokenizer
from moesaic.methods.load import load_method

SMALL: dict[str, Any] = {
    "calibration": "demo", "seeds": 2, "samples": 2, "sequence_length": 64, "max_tokens": 256,
    "sparsity": (0.5,), "dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("compare")
    return moesaic.compare("demo", ["cmoe"], output=folder, **SMALL), folder


def test_every_row_has_the_same_budget_and_all_seeds(result: tuple[dict[str, Any], Path]) -> None:
    rows = {row["method"]: row for row in result[0]["rows"]}
    assert set(rows) == {"cmoe", *REFERENCES}
    for row in rows.values():
        assert row["active_ffn_fraction"] == pytest.approx(0.5, abs=0.01)
        assert row["seeds"] == 2
    ratios = [row["ratio"]["demo"] for row in result[0]["rows"]]
    assert ratios == sorted(ratios)
    assert rows["neuron-oracle"]["ratio"]["demo"] < rows["random"]["ratio"]["demo"]


def test_a_cell_is_what_convert_and_perplexity_give(result: tuple[dict[str, Any], Path]) -> None:
    row = next(row for row in result[0]["rows"] if row["method"] == "static-repaired")
    cell = next(
        cell for cell in result[0]["cells"].values()
        if cell["method"] == "static-repaired" and cell["seed"] == 1
    )  # fmt: skip
    tokenizer = load_tokenizer("demo")
    windows = CalibrationSet.sample(to_ids("demo", tokenizer), 2, 64, 1).windows_NL
    model, _ = moesaic.convert(
        load_model("demo", "float32"), "static-repaired", row["layout"], windows, seed=1
    )
    value, _ = moesaic.perplexity(model, to_ids("demo", tokenizer, heldout=True), 64, 256)
    assert cell["perplexity"]["demo"] == pytest.approx(value, rel=1e-4)


def test_layers_of_a_cell_share_their_budget() -> None:
    method = moesaic.load_method("moesaic", {"layer_budgets": "gradient"})
    found = moesaic.compare("demo", [method], references=(), **SMALL | {"samples": 16})
    assert len(found["cells"]) == 2
    assert found["missing"] == []
    for cell in found["cells"].values():
        assert "in a layer) of" in cell["shape"]
        assert cell["active_ffn_fraction"] == pytest.approx(0.5, abs=0.01)


def test_it_writes_table_and_plot_and_resumes(
    result: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, folder = result
    page = (folder / "compare.md").read_text()
    assert all(f"| {name} |" in page for name in ("cmoe", *REFERENCES))
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(MoesaicError, match="--resume"):
        moesaic.compare("demo", ["cmoe"], output=folder, **SMALL)
    # A killed run: one cell is missing, and only that one is made again.
    kept = json.loads((folder / "compare.json").read_text())
    missing = next(key for key in kept["cells"] if key.startswith("cmoe"))
    del kept["cells"][missing]
    (folder / "compare.json").write_text(json.dumps(kept))
    made: list[str] = []
    again = moesaic.compare(
        "demo", ["cmoe"], output=folder, resume=True, progress=made.append, **SMALL
    )
    assert len(made) == 3
    assert made[0] == "planning"
    assert made[1].startswith("dense: timing")
    assert made[2].startswith("cmoe")
    for old, new in zip(first["rows"], again["rows"], strict=True):
        assert new["ratio"]["demo"] == pytest.approx(old["ratio"]["demo"], rel=1e-6)
    with pytest.raises(MoesaicError, match="texts"):
        moesaic.compare("demo", ["cmoe"], output=folder, resume=True, **SMALL | {"max_tokens": 128})


def test_a_long_comparison_says_how_far_it_is() -> None:
    """Which conversion of how many, and the time left by the mean of those before."""
    told: list[str] = []
    methods = ["static", "random"]
    small = SMALL | {"seeds": 1}
    moesaic.compare("demo", methods, references=(), progress=told.append, **small)
    assert told[:2] == ["planning", "dense: evaluating"]
    assert told[2].startswith("dense: timing")
    assert told[3].endswith("(1 of 2)")
    assert "(2 of 2, " in told[4]
    assert _outlook(2, 5, seconds=240.0) == "3 of 5, 6 min left"


def test_static_may_spend_the_routers_work_too() -> None:
    small = SMALL | {"seeds": 1}
    rows = moesaic.compare("demo", ["moesaic"], references=("static-repaired",), **small)["rows"]
    found = {row["method"]: row for row in rows}
    routed, static = found["moesaic"], found["static-repaired, MACs of moesaic"]
    assert static["macs"] == pytest.approx(routed["macs"], abs=0.002)
    assert static["macs"] >= routed["macs"]
    assert static["active_ffn_fraction"] > routed["active_ffn_fraction"]


@pytest.mark.parametrize(
    ("methods", "references"),
    [
        (["moesaic", "static-repaired"], ()),
        (["moesaic-neurons", "moesaic"], ("static-repaired",)),
    ],
)
def test_static_of_equal_work_is_there_whoever_asked(
    methods: list[str], references: tuple[str, ...]
) -> None:
    """Also where the first method's router costs more than is skipped."""
    options = CompareOptions(
        model="demo", methods=tuple(map(load_method, methods)),
        references=tuple(map(load_method, references)), sparsities=(0.25,), layout=None,
        grain="medium", calibration=("demo",), texts=("demo",),
    )  # fmt: skip
    entries = make_entries(options, load_config("demo")).entries
    assert [entry.label for entry in entries if entry.role == EQUAL_WORK] == [
        "static-repaired, MACs of moesaic"
    ]


def test_a_text_that_is_calibrated_on_is_known_by_its_field_too(tmp_path: Path) -> None:
    """Else what is evaluated were the text that was calibrated on."""
    file = tmp_path / "a.jsonl"
    lines = [
        json.dumps({"text": f"line {number} of a text, and more of it"}) for number in range(99)
    ]
    file.write_text("\n".join(lines))
    whole = moesaic.compare("demo", ["static"], references=(), **SMALL | {"calibration": str(file)})
    named = SMALL | {"calibration": str(file), "text": [f"{file}:text"]}
    found = moesaic.compare("demo", ["static"], references=(), **named)
    values = [list(cell["perplexity"].values()) for cell in found["cells"].values()]
    assert values == [list(cell["perplexity"].values()) for cell in whole["cells"].values()]


def test_what_thresholds_run_on_a_text_is_told(tmp_path: Path) -> None:
    """Counted again, layer by layer, with the model that `convert` gives."""
    text = tmp_path / "text.txt"
    text.write_text("0123456789 " * 400)
    method = load_method("moesaic-dynamic", {"layer_budgets": "uniform"})
    asked = SMALL | {"seeds": 1, "references": (), "text": [str(text)]}
    result = moesaic.compare("demo", [method, "moesaic"], **asked)
    [told] = [line for line in result["remarks"] if "of what is chosen from runs" in line]
    assert told.startswith("moesaic-dynamic")

    tokenizer = load_tokenizer("demo")
    windows = CalibrationSet.sample(to_ids("demo", tokenizer), 2, 64, 0).windows_NL
    model, _ = moesaic.convert(
        load_model("demo", "float32"), method, calibration=windows, sparsity=0.5
    )
    running = []

    def count(block: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        runs_TR, _ = block.units(inputs[0])
        running.append(runs_TR.float().mean().item())

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(count)
    ids = to_ids(str(text), tokenizer)[:256]
    with torch.no_grad():
        for window in ids[None].split(64, dim=1):
            model(window)
    assert f"{sum(running) / len(running):.1%} of what" in told
    sizes = model.config.moesaic.first_sizes
    assert f"planned, {sizes.num_active / sizes.num_routed:.1%}" in told


def test_ranking_by_hand() -> None:
    def cell(method: str, seed: int, value: float) -> Cell:
        routes = method == "cmoe"
        return Cell(
            method=method, role=METHOD if routes else REFERENCE, saves=True, routes=routes,
            repairs=not routes, equal=SPARSITY, at=0.5, sparsity=0.5, seed=seed, layout="S1A1E2",
            shape="", active_ffn_fraction=0.5, macs=0.6, bytes=0.6, ffn_macs=0.5, ffn_bytes=0.5,
            perplexity={"t": value}, relative_error=[0.1], better_static=[seed],
            load_max_over_mean=1.5 + seed, dead_experts=seed,
            notes=["too few tokens"] if routes else [], seconds=1.0,
        )  # fmt: skip

    cells = [cell("cmoe", 0, 8.0), cell("cmoe", 1, 12.0), cell("static-repaired", 0, 6.0)]
    rows = ranked(cells, {"t": 4.0})
    assert [row.method for row in rows] == ["static-repaired", "cmoe"]
    assert rows[1].ratio["t"] == 2.5
    assert rows[1].spread["t"] == pytest.approx(0.5**0.5)
    assert rows[0].spread["t"] is None
    assert (rows[1].load_max_over_mean, rows[1].dead_experts) == (2.5, 1)
    assert rows[1].better_static == [0, 1]
    assert remarks(rows) == [
        "cmoe S1A1E2: too few tokens",
        "at sparsity 0.5 static-repaired beats cmoe",
    ]


def test_work_that_was_missed_is_told() -> None:
    """Experts of a mixture that see too few tokens stay whole, which no plan knows."""

    def cell(seed: int, bytes: float, equal: str = FFN_BYTES) -> Cell:
        return Cell(
            method="moesaic", role=METHOD, saves=True, routes=True, repairs=True, equal=equal,
            at=0.75, sparsity=0.25, seed=seed, layout="S1A2E4", shape="", active_ffn_fraction=0.75,
            macs=0.8, bytes=0.8, ffn_macs=bytes, ffn_bytes=bytes, perplexity={"t": 4.0},
            relative_error=[0.1], better_static=[], load_max_over_mean=1.0, dead_experts=0,
            notes=[], seconds=1.0,
        )  # fmt: skip

    rows = ranked([cell(0, 0.9), cell(1, 1.0)], {"t": 4.0})
    assert rows[0].ffn_bytes == pytest.approx(0.95)
    line = "at FFN bytes 0.75 moesaic takes 95.0% of the dense FFNs' bytes: it comes no nearer"
    assert remarks(rows) == [line]
    assert remarks(ranked([cell(0, 0.76)], {"t": 4.0})) == []
    [line] = remarks(ranked([cell(0, 0.7, FFN_MACS)], {"t": 4.0}))
    assert "70.0% of the dense FFNs' multiply-accumulates" in line


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seeds": 0}, "seeds 0: at least 1 seed is needed"),
        ({"max_tokens": 1}, "2 tokens"),
        ({"sparsity": ()}, "1 sparsity"),
        ({"sparsity": (1.5,)}, "outside"),
        ({"sparsity": (0.25, 0.25)}, "sparsity 0.25, sparsity 0.25: give each once"),
        ({"calibration": [__file__, f"{__file__}:text"]}, "at least one is needed, each once"),
        ({"grain": "huge"}, "grain"),
        ({"grain": "fine", "sparsity": None, "layout": "S1A3E8"}, "grain fine and layout S1A3E8"),
        ({"output": Path(__file__)}, "is no folder"),
        ({"output": Path(__file__) / "below"}, "is not a folder"),
        ({"resume": True}, "resume needs the output"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(MoesaicError, match=reason):
        moesaic.compare("demo", ["moesaic"], **SMALL | changes)


def test_unknown_and_repeated_methods_are_refused() -> None:
    with pytest.raises(MoesaicError, match="unknown method"):
        moesaic.compare("demo", ["moesaik"], **SMALL)
    with pytest.raises(MoesaicError, match="once"):
        moesaic.compare("demo", ["cmoe", "cmoe"], **SMALL)


def test_two_settings_of_one_method_stand_side_by_side() -> None:
    """Each row is called by what differs from the defaults, and has its own result."""
    few = load_method("cmoe", {"activation_top_k": 1})
    result = moesaic.compare("demo", ["cmoe", few], references=(), **SMALL)
    ratios = {row["method"]: row["ratio"] for row in result["rows"]}
    assert set(ratios) == {"cmoe", "cmoe activation_top_k=1"}
    assert ratios["cmoe"] != ratios["cmoe activation_top_k=1"]


def test_settings_are_in_a_row_that_stands_alone_too() -> None:
    """A recipe file must not pass for the plain method."""
    few = load_method("cmoe", {"activation_top_k": 1})
    assert labels_of([few, load_method("emoe")]) == ["cmoe activation_top_k=1", "emoe"]


def test_the_command_prints_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = [
        "moesaic",
        "compare",
        "demo",
        "--methods",
        "cmoe",
        "--layout",
        "S1A1E2",
        "--seeds",
        "1",
    ]
    words += ["--samples", "1", "--sequence-length", "32", "--max-tokens", "64"]
    monkeypatch.setattr(sys, "argv", [*words, "--output", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    printed = capsys.readouterr().out
    assert "one layout" in printed
    assert all(name in printed for name in ("cmoe", "oracle", "neuron-oracle"))
    monkeypatch.setattr(sys, "argv", ["moesaic", "compare", "demo", "--sparsity", "half"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "0.25,0.5" in capsys.readouterr().err


def test_a_reference_that_cannot_reach_the_budget_is_left_out() -> None:
    small = SMALL | {"sparsity": (0.95,), "seeds": 1}
    result = moesaic.compare("demo", ["static"], references=("random",), **small)
    assert [row["method"] for row in result["rows"]] == ["static"]
    assert any(line.startswith("without random") for line in result["remarks"])


@pytest.mark.parametrize("samples", [0, -1, 10**12])
def test_a_number_of_windows_out_of_range_is_refused(samples: int) -> None:
    with pytest.raises(MoesaicError, match="samples"):
        moesaic.compare("demo", ["static"], **SMALL | {"samples": samples})


def test_a_method_that_diverges_is_said_and_the_others_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = Run.replace_ffns

    def diverges(self: Run, method: Any) -> Any:
        if method.name == "random":
            raise MoesaicError("layer 1 puts out NaN")
        return real(self, method)

    monkeypatch.setattr(Run, "replace_ffns", diverges)
    small = SMALL | {"seeds": 1}
    result = moesaic.compare("demo", ["static", "random"], references=(), output=tmp_path, **small)
    assert [row["method"] for row in result["rows"]] == ["static"]
    assert any("without random" in line and "NaN" in line for line in result["remarks"])
    assert "layer 1 puts out NaN" in (tmp_path / "compare.md").read_text()


def test_bad_text_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(MoesaicError):
        moesaic.compare("demo", ["static"], output=tmp_path / "new", **SMALL | {"text": ["none"]})
    assert not (tmp_path / "new").exists()
