"""Fitted methods on damaged models and too few tokens: never NaN, and the report says why."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import moesaic
from moesaic.families import DenseFFN
from moesaic.families.ffn import unit_rows
from moesaic.parts.repair import Repair
from tests.families import CONTEXT, tiny_model, tokens
from tests.test_fitted_methods import DYNAMIC, STATIC_REPAIRED, convert, fitted, logits


def check_finite(model: Any, report: Any) -> None:
    for name, value in model.state_dict().items():
        assert torch.isfinite(value).all(), name
    assert torch.isfinite(logits(model, tokens(2, 32, seed=9))).all()
    for layer in report.layers:
        numbers = [layer.relative_error, *layer.references.values(), *layer.expert_load]
        numbers += [layer.router_recall or 0, layer.mass_kept or 0, layer.oracle_mass or 0]
        assert all(math.isfinite(number) for number in [*numbers, *layer.kept_energy])


def test_a_last_layer_that_puts_out_infinity_is_refused() -> None:
    model = tiny_model("llama").half()
    model.model.layers[-1].mlp.up_proj.weight.data *= 30
    model.model.layers[-1].mlp.down_proj.weight.data *= 6e4
    with pytest.raises(moesaic.MoesaicError, match="what replaces its FFN puts out NaN"):
        moesaic.convert(model, "cmoe", "S3A3E8", tokens(4, 32))


def test_llama_moe_v2_looks_at_what_it_clusters() -> None:
    model = tiny_model("llama").half()
    model.model.layers[1].mlp.up_proj.weight.data *= 3e4
    with pytest.raises(moesaic.MoesaicError, match="layer 1 puts out NaN or infinity"):
        moesaic.convert(model, "llama-moe-v2", sparsity=0.25, calibration=tokens(8, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_of_zeros_stays_one(dtype: torch.dtype) -> None:
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=dtype)
    expected = torch.tensor([[0.0, 0.0], [0.6, 0.8]], dtype=dtype)
    torch.testing.assert_close(unit_rows(rows), expected)


def test_layers_that_are_one_module_are_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(moesaic.MoesaicError, match="layers 0 and 1 are one module"):
        moesaic.convert(model, "cmoe", "S3A3E8", tokens(4, 32))


def test_windows_of_one_token_are_refused() -> None:
    with pytest.raises(moesaic.MoesaicError, match="windows of one token"):
        moesaic.convert(tiny_model("llama"), "sleb", calibration=tokens(8, 1), sparsity=0.34)


def test_an_activation_with_weights_is_refused() -> None:
    model = tiny_model("llama")
    model.config.hidden_act = "xielu"
    with pytest.raises(moesaic.MoesaicError, match="'xielu' has weights of its own"):
        moesaic.convert(model, "cmoe", "S3A3E8", tokens(4, 32))


def silence(count: int) -> Callable[[Any], None]:
    """Neurons that never do anything; qwen3's FFN has no biases."""

    def damage(ffn: Any) -> None:
        ffn.up_proj.weight[:count] = 0

    return damage


def zero_output(ffn: Any) -> None:
    ffn.down_proj.weight.zero_()


def twins(ffn: Any) -> None:
    for weight in (ffn.up_proj.weight, ffn.gate_proj.weight, ffn.down_proj.weight.T):
        weight[1::2] = weight[::2].clone()


def copies_of_one(ffn: Any) -> None:
    for weight in (ffn.up_proj.weight, ffn.gate_proj.weight, ffn.down_proj.weight.T):
        weight[:] = weight[:1].clone()


def tiny_output(ffn: Any) -> None:
    ffn.down_proj.weight.mul_(1e-20)


def huge_neuron(ffn: Any) -> None:
    ffn.up_proj.weight[7] *= 1e6


@pytest.mark.parametrize(
    "damage",
    [silence(20), silence(46), silence(51), silence(52), zero_output, twins, copies_of_one,
     tiny_output, huge_neuron],
    ids=["20 dead", "46 dead", "51 dead", "all dead", "no output", "twins", "copies", "tiny",
         "huge"],
)  # fmt: skip
@fitted
def test_degenerate_ffns_never_end_in_nan(method: Any, damage: Callable[[Any], None]) -> None:
    model = tiny_model("qwen3")
    with torch.no_grad():
        damage(model.model.layers[1].mlp)
    check_finite(*convert(model, method))


@fitted
def test_text_of_one_repeated_token_never_ends_in_nan(method: Any) -> None:
    """Inputs and hidden states never vary: every centred Gram matrix is zero up to rounding."""
    check_finite(*convert(tiny_model("qwen3"), method, windows=torch.full((8, CONTEXT), 5)))


@pytest.mark.parametrize("shape", [(1, CONTEXT), (1, 16), (1, 9), (1, 8), (1, 3), (1, 2), (2, 2)])
@fitted
def test_few_tokens_fall_back_to_mean_compensation_and_say_so(
    method: Any, shape: tuple[int, int]
) -> None:
    """28 neurons run or more: 56 tokens are needed to fit on, and 64 leave just 56."""
    windows = tokens(*shape, seed=1)
    model, report = convert(tiny_model("qwen3"), method, windows=windows)
    check_finite(model, report)
    count = windows.numel()
    held = max(count // 8, 1)
    for layer in report.layers:
        assert layer.tokens == held
        assert layer.heldout == (count >= 8)
        neurons = 28 if method is STATIC_REPAIRED else 52
        if layer.repair != "none":
            few = count - held * layer.heldout < 2 * neurons
            assert layer.repair.startswith("mean" if few else "least squares")
            assert any("mean compensation instead" in note for note in layer.notes) == few
        else:
            assert layer.notes


def test_a_layer_with_a_note_says_the_numbers() -> None:
    """Of tokens by which both notes come about."""
    _, report = convert(tiny_model("qwen3"), DYNAMIC, windows=tokens(1, 32, seed=3))
    said = "least squares needs 104 tokens to fit on, 28 are there: mean compensation instead"
    skipped = "repair skipped: it does not lower the error on held-out tokens"
    notes = [[n for n in layer.notes if "run for none" not in n] for layer in report.layers]
    assert all(lines in ([said], [skipped]) for lines in notes)
    assert [said] in notes
    assert [skipped] in notes


@fitted
def test_a_repair_beyond_the_range_of_float16_is_not_made(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflow(self: Repair, ffn: DenseFFN, kept: object) -> DenseFFN:
        return replace(ffn, down_DF=ffn.down_DF * 1e30)

    monkeypatch.setattr(Repair, "apply", overflow)
    model, report = convert(tiny_model("llama").half(), method)
    check_finite(model, report)
    for layer in report.layers:
        assert "repair skipped: it exceeds the range of torch.float16" in layer.notes
        before = layer.references["static" if method is STATIC_REPAIRED else "unrepaired"]
        assert layer.relative_error == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("power", [8, 18, 30])
@pytest.mark.parametrize("part", ["up_proj", "down_proj"])
@fitted
def test_numbers_too_large_for_float32_are_refused_or_finite(
    method: Any, part: str, power: int
) -> None:
    model = tiny_model("qwen3")
    with torch.no_grad():
        getattr(model.model.layers[1].mlp, part).weight.mul_(10.0**power)
    try:
        converted, report = convert(model, method)
    except moesaic.MoesaicError:
        assert power > 8  # 10^8 times as large is still a model
        return
    check_finite(converted, report)
