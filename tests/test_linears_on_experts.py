"""Linear layers that skip inputs inside a model that moesaic made already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import moesaic
from moesaic.errors import MoesaicError
from moesaic.evaluate.weight_bytes import count_bytes
from moesaic.evaluate.work import count_macs
from moesaic.modeling import MoesaicExperts, MoesaicThresholdedLinear
from tests.families import CONTEXT, HIDDEN, LAYERS, tiny_model, tokens
from tests.mixtures import tiny_mixture

WINDOWS = tokens(16, CONTEXT, seed=1)


def made(folder: Path, method: str = "cmoe", family: str = "qwen3") -> Path:
    """A converted model on disk."""
    tiny_model(family).save_pretrained(folder / "dense")
    output = folder / "experts"
    moesaic.convert(folder / "dense", method, "S2A2E8", WINDOWS, output=output)
    return output


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(2, 48, seed=2), use_cache=False).logits


def on_top(experts: Path, method: str = "teal", sparsity: float = 0.5, **more: Any) -> Any:
    return moesaic.convert(experts, method, sparsity=sparsity, calibration=WINDOWS, **more)


@pytest.mark.parametrize("family", ["qwen3", "opt"])
@pytest.mark.parametrize("method", ["teal", "wina"])
def test_it_is_saved_loaded_and_counted(method: str, family: str, tmp_path: Path) -> None:
    experts = made(tmp_path, family=family)
    before = AutoModelForCausalLM.from_pretrained(experts).eval()
    output = tmp_path / "both"
    model, report = on_top(experts, method, output=output)
    loaded = AutoModelForCausalLM.from_pretrained(output).eval()
    assert torch.equal(logits(model), logits(loaded))
    assert not torch.allclose(logits(loaded), logits(before), atol=1e-2)
    replaced = {
        name for name, module in loaded.named_modules()
        if isinstance(module, MoesaicThresholdedLinear)
    }  # fmt: skip
    left = [n for n, m in loaded.get_decoder().layers.named_modules() if type(m) is nn.Linear]
    assert all(".router." in name for name in left)
    routed = [m for m in loaded.modules() if isinstance(m, MoesaicExperts)]
    assert len(routed) == LAYERS
    assert any("shared_expert" in name for name in replaced)
    weights = [m.weight for m in loaded.modules() if isinstance(m, MoesaicThresholdedLinear)]
    skipped = sum(weight.numel() for weight in weights) / 2
    assert report.dense_macs == count_macs(before, 1).total
    assert report.macs == count_macs(loaded, 1).total
    assert report.macs == pytest.approx(report.dense_macs - skipped)
    assert report.bytes == count_bytes(loaded).total
    assert report.bytes == pytest.approx(report.dense_bytes - 4 * skipped)


def test_experts_that_are_chosen_by_token_know_which_tokens_come(tmp_path: Path) -> None:
    """Windows of which a block is no multiple: each call is told its own ids."""
    experts = made(tmp_path, "moebert")
    odd = tokens(40, CONTEXT, seed=1)
    model, _ = moesaic.convert(experts, "teal", sparsity=0.0, calibration=odd)
    before = AutoModelForCausalLM.from_pretrained(experts).eval()
    torch.testing.assert_close(logits(model), logits(before), rtol=1e-5, atol=1e-5)
    moesaic.convert(experts, "teal", sparsity=0.5, calibration=odd)


def test_nothing_skipped_is_the_model_of_before(tmp_path: Path) -> None:
    experts = made(tmp_path)
    before = AutoModelForCausalLM.from_pretrained(experts).eval()
    model, report = on_top(experts, sparsity=0.0)
    torch.testing.assert_close(logits(model), logits(before), rtol=1e-5, atol=1e-5)
    assert (report.macs, report.bytes) == (report.dense_macs, report.dense_bytes)


def test_the_configuration_says_both(tmp_path: Path) -> None:
    experts = made(tmp_path, "moesaic")
    before = AutoModelForCausalLM.from_pretrained(experts).config.moesaic
    output = tmp_path / "both"
    _, report = on_top(experts, output=output)
    after = AutoModelForCausalLM.from_pretrained(output).config.moesaic
    assert after.name == "teal"
    assert after.method["after"] == before.method
    assert (after.sizes, after.block, after.layers) == (before.sizes, before.block, before.layers)
    assert after.base_model == before.base_model == "dense"
    assert after.layout == report.layout == "S2A2E8, 50% sparse"
    assert "and then with linear layers" in (output / "README.md").read_text()


@pytest.mark.parametrize("method", ["moesaic-neurons", "cats", "griffin"])
def test_rows_that_neurons_skip_are_left_alone(method: str, tmp_path: Path) -> None:
    experts = made(tmp_path, method)
    model, report = on_top(experts)
    names = [n for n, m in model.named_modules() if isinstance(m, MoesaicThresholdedLinear)]
    assert len(names) == 4 * LAYERS
    assert all("self_attn" in name for name in names)
    attention = LAYERS * HIDDEN * (HIDDEN + 16 + 16 + HIDDEN)
    assert report.macs == pytest.approx(report.dense_macs - attention / 2)


def test_what_cannot_stand_on_another_is_refused_in_one_line(tmp_path: Path) -> None:
    experts = made(tmp_path)
    both = tmp_path / "both"
    on_top(experts, output=both)
    mixture, _ = moesaic.convert(tiny_mixture("mixtral"), "cmoe", "S2A2E8", WINDOWS, min_tokens=1)
    for model, method, message in (
        (both, "wina", "skip inputs already"),
        (experts, "moesaic", "converted already"),
        (experts, "sleb", "converted already"),
        (mixture, "teal", "was a mixture before"),
    ):
        with pytest.raises(MoesaicError, match=message) as refusal:
            moesaic.convert(model, method, sparsity=0.5, calibration=WINDOWS)
        assert "\n" not in str(refusal.value)
    with pytest.raises(MoesaicError, match="not fine-tuned yet"):
        moesaic.finetune(both, tmp_path / "tuned", WINDOWS, samples=4, distill="none")


def test_it_stands_in_a_comparison_of_the_converted_model(tmp_path: Path) -> None:
    """The orthogonality table: what is lost on top of the experts."""
    tuned = tmp_path / "experts"
    moesaic.convert("demo", "cmoe", "S2A2E8", "demo", samples=4, sequence_length=64, output=tuned)
    result = moesaic.compare(
        str(tuned), ["teal"], sparsity=(0.25,), calibration="demo", seeds=1, samples=4,
        sequence_length=64, max_tokens=1024, references=(),
    )  # fmt: skip
    rows = {row["method"]: row for row in result["rows"]}
    assert rows["teal"]["macs"] < 1
    assert rows["teal"]["ratio"]["demo"] != 1
    assert 0.9 < rows["teal"]["ratio"]["demo"] < 1.5
