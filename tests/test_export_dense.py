"""Static pruning as a model of the dense one's own family."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import moesaic
from moesaic import load_method
from moesaic.cli.main import main
from moesaic.errors import MoesaicError
from moesaic.families.load import load_model
from tests.families import tokens
from tests.stock_models import converted_folder

STATIC = {
    "static": load_method("static"),
    "repaired": load_method("static-repaired"),
    "flap": load_method("flap", {"widths": "equal"}),
}
STATIC_BY_LAYER = load_method("static-repaired", {"layer_budgets": "gradient"})


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("llama", "static"),
        ("llama", "flap"),
        ("mistral", "static"),
        ("qwen2", "repaired"),
        ("qwen3", "repaired"),
    ],
)
def test_stock_transformers_loads_a_narrower_model(name: str, method: str, tmp_path: Path) -> None:
    """The same logits, by the family's own class, without code of ours."""
    folder = converted_folder(name, tmp_path / "ours", STATIC[method], "S2A3E8")
    report = moesaic.export(str(folder), "dense", tmp_path / "out", verify="demo")
    stock: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(stock).__module__.startswith(f"transformers.models.{name}")
    original = load_model(str(folder))
    sizes = original.config.moesaic.first_sizes
    assert stock.config.intermediate_size == sizes.active < sizes.total
    assert not hasattr(stock.config, "moesaic")
    ids = tokens(4, 64, seed=5)
    with torch.no_grad():
        torch.testing.assert_close(stock(ids).logits, original(ids).logits, rtol=1e-4, atol=1e-5)
    assert report.scales == []
    assert report.comparison.changed == []
    assert (tmp_path / "out" / "tokenizer.json").exists()
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"pruned to {sizes.active} of {sizes.total} neurons" in card


@pytest.mark.parametrize(
    ("name", "method", "dense_layers", "reason"),
    [
        ("llama", load_method("flap"), (), "--set widths=equal"),
        ("llama", load_method("static"), (0,), "different widths"),
        ("llama", STATIC_BY_LAYER, (), "layer_budgets=uniform"),
        ("qwen2", STATIC["flap"], (), "output bias, which qwen2 models have not"),
        ("phi3", load_method("static"), (), "family phi3"),
        ("llama", load_method("moesaic"), (), "run different neurons"),
    ],
)
def test_what_the_family_cannot_hold(
    name: str, method: Any, dense_layers: tuple[int, ...], reason: str, tmp_path: Path
) -> None:
    folder = converted_folder(name, tmp_path / "ours", method, dense_layers=dense_layers)
    with pytest.raises(MoesaicError, match=reason):
        moesaic.export(str(folder), "dense", tmp_path / "out")
    assert any(reason in why for why in moesaic.explain(str(folder))["dense"])
    assert not (tmp_path / "out").exists()


def test_float16_is_kept(tmp_path: Path) -> None:
    """No router is there whose weights would leave its range."""
    folder = converted_folder("llama", tmp_path / "ours", "static")
    moesaic.export(str(folder), "dense", tmp_path / "half", dtype="float16")
    stock: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert stock.dtype == torch.float16


def test_there_are_no_scores_to_scale(tmp_path: Path) -> None:
    folder = converted_folder("llama", tmp_path / "ours", "static")
    with pytest.raises(MoesaicError, match=r"for the scores of a router, and .* has none"):
        moesaic.export(str(folder), "dense", tmp_path / "out", epsilon=2.0**-9)
    assert not (tmp_path / "out").exists()


def test_other_formats_say_that_it_is_there(tmp_path: Path) -> None:
    folder = converted_folder("llama", tmp_path / "ours", "static")
    assert moesaic.explain(str(folder))["dense"] == []
    assert any("--format dense" in why for why in moesaic.explain(str(folder))["glm4_moe"])


def test_weights_that_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moesaic.export import dense

    real = dense.stock_state

    def wrong(model: Any, factors: list[float]) -> Any:
        state = real(model, factors)
        return {k: v * 1.5 if "down_proj" in k else v for k, v in state.items()}

    monkeypatch.setattr(dense, "stock_state", wrong)
    folder = converted_folder("llama", tmp_path / "ours", "static")
    with pytest.raises(MoesaicError, match="differs from the original"):
        moesaic.export(str(folder), "dense", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = converted_folder("llama", tmp_path / "ours", "static")
    words = ["export", str(folder), "--format", "dense", "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["moesaic", *words, "--verify", "demo"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    printed = capsys.readouterr()
    said = " ".join(printed.out.split())
    assert "logits differ by" in said
    assert "other experts" not in said
    assert "choosing the scale" not in printed.err
    assert "(llama), which needs no moesaic" in said
    assert "gate error" not in said
