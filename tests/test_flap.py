"""FLAP's widths over all layers: by hand, against a slow twin, and in whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import moesaic
from moesaic.parts.widths import global_widths
from tests import reference
from tests.families import CONTEXT, LAYERS, NEURONS, tiny_model, tokens
from tests.mixtures import tiny_mixture

WINDOWS = tokens(16, CONTEXT, seed=1)
ACTIVE = 38  # of 52: S1A18E26 runs 19 of 26 pairs


def widths_of(model: Any) -> list[int]:
    return [sizes.shared for sizes in model.config.moesaic.sizes]


def test_widths_by_hand() -> None:
    """Standardised, the first layer's are -1 and 1 twice, the second's three below a large one.

    Means 2 and 3, deviations 1 and 10 / 3 ** 0.5: 1, 1, -1, -1 and 1.73, -0.58 three times.
    """
    even = np.array([3.0, 1.0, 3.0, 1.0])
    odd = np.array([0.0, 40.0, 0.0, 0.0])
    assert global_widths([even, odd], 2) == [1, 1]
    assert global_widths([even, odd], 3) == [2, 1]
    assert global_widths([even, odd], 6) == [2, 4]
    assert global_widths([even, odd], 8) == [4, 4]


def test_a_layer_is_no_wider_for_larger_activations() -> None:
    score_F = np.random.default_rng(0).exponential(size=40)
    twice = global_widths([score_F, 1000 * score_F + 7], 40)
    assert twice == [20, 20]
    flat = np.ones(40)
    assert global_widths([flat, flat], 2) == [1, 1]


@pytest.mark.parametrize("total", [4, 13, 40, 77])
def test_widths_are_those_of_the_slow_twin(total: int) -> None:
    generator = np.random.default_rng(total)
    scores = [generator.exponential(size=20) ** power for power in (1, 2, 3, 1)]
    found = global_widths(scores, total)
    assert found == reference.global_widths([row.tolist() for row in scores], total)
    assert sum(found) == total


@pytest.mark.parametrize("sparsity", [0.25, 0.5])
def test_widths_differ_by_layer_and_keep_the_budget(sparsity: float, tmp_path: Path) -> None:
    dense = tiny_model("qwen3")
    model, report = moesaic.convert(
        dense, "flap", sparsity=sparsity, calibration=WINDOWS, output=tmp_path / "out"
    )
    equal, equal_report = moesaic.convert(
        tiny_model("qwen3"), "flap", sparsity=sparsity, calibration=WINDOWS,
        settings={"widths": "equal"},
    )  # fmt: skip
    widths = widths_of(model)
    assert len(set(widths)) > 1
    assert len(set(widths_of(equal))) == 1
    assert sum(widths) == sum(widths_of(equal))
    assert (report.macs, report.bytes) == (equal_report.macs, equal_report.bytes)
    assert report.active_ffn_fraction == pytest.approx(sum(widths) / NEURONS / LAYERS)
    assert f"({min(widths)} to {max(widths)} in a layer)" in report.shape
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert widths_of(loaded) == widths
    for layer, width in zip(loaded.model.layers, widths, strict=True):
        assert layer.mlp.shared_expert.up_proj.weight.shape[0] == width
    ids = tokens(2, 48, seed=2)
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, loaded(ids, use_cache=False).logits)


def test_widths_are_of_what_is_measured_on_the_dense_model() -> None:
    """Against the fluctuation of each layer, from hooks and loops."""
    dense = tiny_model("llama")
    scores = []
    for layer in dense.model.layers:
        seen: list[torch.Tensor] = []
        handle = layer.mlp.down_proj.register_forward_pre_hook(
            lambda module, args, seen=seen: seen.append(args[0].flatten(0, 1).double())
        )
        with torch.no_grad():
            dense(WINDOWS, use_cache=False)
        handle.remove()
        norm_F = layer.mlp.down_proj.weight.double().square().sum(0)
        scores.append((torch.cat(seen).var(0) * norm_F).tolist())
    model, _ = moesaic.convert(dense, "flap", sparsity=0.25, calibration=WINDOWS)
    assert widths_of(model) == reference.global_widths(scores, 3 * ACTIVE)


def test_layers_that_stay_dense_share_nothing() -> None:
    model, _ = moesaic.convert(
        tiny_model("qwen3"), "flap", sparsity=0.25, calibration=WINDOWS, dense_layers=[1]
    )
    assert model.config.moesaic.layers == (0, 2)
    assert sum(widths_of(model)) == 2 * ACTIVE


def test_experts_of_a_mixture_keep_equal_widths() -> None:
    model, _ = moesaic.convert(
        tiny_mixture("mixtral"), "flap", sparsity=0.5, calibration=WINDOWS, min_tokens=1
    )
    assert len(set(widths_of(model))) == 1
