"""TEAL's search for the shares of a block's matrices: by hand, and inside whole models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import moesaic
from moesaic.calibration.calibration_set import Split
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.linear_trial import LinearTrial
from moesaic.conversion import run as run_module
from moesaic.errors import MoesaicError
from moesaic.evaluate.work import count_macs
from moesaic.methods.load import load_method
from moesaic.modeling import MoesaicThresholdedLinear
from moesaic.parts.inputs import greedy_shares, keep_largest, spend_greedily
from tests.families import CONTEXT, tiny_model, tokens

CPU = torch.device("cpu")
WINDOWS = tokens(16, CONTEXT, seed=1)


def test_the_search_by_hand() -> None:
    """Two matrices of 1 and 3 weights; a step skips a quarter of all: all of one, a third."""
    tried: list[tuple[float, ...]] = []

    def error(sparsities: Sequence[float]) -> float:
        tried.append(tuple(round(value, 3) for value in sparsities))
        small, large = sparsities
        return 2 * small + large**2

    # A third of the large one costs 1/9, 0.95 of the small one 1.9; then 4/9, and 1.9 + 1/9.
    found = spend_greedily([1, 3], 0.5, error, step=0.25)
    assert found == pytest.approx([0.0, 2 / 3])
    assert tried == [(0.95, 0.0), (0.0, 0.333), (0.95, 0.333), (0.0, 0.667)]
    assert spend_greedily([1, 3], 0.0, error) == [0.0, 0.0]


def test_of_equal_costs_the_search_comes_close_to_the_optimum() -> None:
    """sum a_i f_i s_i^2 is least where all a_i s_i are equal."""
    weights = [40, 10, 30, 20]
    cost = [1.0, 3.0, 2.0, 6.0]

    def error(sparsities: Sequence[float]) -> float:
        return sum(a * f * s**2 for a, f, s in zip(cost, weights, sparsities, strict=True))

    found = spend_greedily(weights, 0.3, error, step=0.001)
    scale = 0.3 * 100 / sum(f / a for a, f in zip(cost, weights, strict=True))
    assert found == pytest.approx([scale / a for a in cost], abs=0.02)
    spent = sum(f * s for f, s in zip(weights, found, strict=True)) / 100
    assert spent == pytest.approx(0.3, abs=1e-6)


@pytest.mark.parametrize("target", [0.01, 0.33, 0.9, 0.96, 0.999])
def test_the_budget_is_spent_and_no_matrix_goes_whole(target: float) -> None:
    weights = [1, 7, 50, 50]

    def error(sparsities: Sequence[float]) -> float:
        return -sparsities[0]  # a matrix that gets better and better without its inputs

    found = spend_greedily(weights, target, error)
    spent = sum(f * s for f, s in zip(weights, found, strict=True)) / sum(weights)
    assert spent == pytest.approx(target, abs=1e-6)
    assert all(0 <= sparsity <= max(target, 0.95) + 1e-9 for sparsity in found)


def test_a_trial_has_the_thresholds_that_the_result_will_have() -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(12, 6), nn.Linear(6, 9)]
    inputs = []
    for linear in linears:
        x_TI = torch.randn(80, linear.in_features)
        inputs.append(FFNInputs([x_TI], Split(80, 70), True, CPU, CPU))
    scales = [torch.ones(12), torch.rand(6)]
    seen: list[list[float]] = []

    def error_of(samples: int) -> Any:
        assert samples == 4

        def error(replacements: Sequence[Any]) -> float:
            seen.append([float(replacement.threshold) for replacement in replacements])
            return float(replacements[1].threshold)

        return error

    trial = LinearTrial(linears, inputs, 20, error_of)
    shares = greedy_shares(trial, 0.5, scales, 80)
    assert shares[1] > 0.9
    expected = []
    for linear, x, share, scale in zip(linears, inputs, shares, scales, strict=True):
        expected.append(float(keep_largest(linear, x, share, scale).threshold))
    assert expected in seen[-2:]


def converted(name: str, family: str = "qwen3", **settings: Any) -> Any:
    return moesaic.convert(
        tiny_model(family), name, sparsity=0.5, calibration=WINDOWS, settings=settings
    )


def block_error(model: Any, layer: int) -> float:
    """Of the first block, whose inputs no conversion changes."""
    dense = tiny_model("qwen3")
    outputs = []
    for either in (dense, model):
        kept: list[torch.Tensor] = []
        handle = either.model.layers[layer].register_forward_hook(
            lambda module, args, output, kept=kept: kept.append(output)
        )
        with torch.no_grad():
            either(WINDOWS, use_cache=False)
        handle.remove()
        outputs.append(kept[0])
    return float((outputs[1] - outputs[0]).norm() / outputs[0].norm())


@pytest.mark.parametrize("name", ["teal", "wina"])
def test_a_block_loses_less_than_with_equal_shares(name: str) -> None:
    greedy, report = converted(name)
    equal, equal_report = converted(name, shares="equal")
    assert block_error(greedy, 0) < block_error(equal, 0)
    assert report.macs == pytest.approx(equal_report.macs, rel=1e-6)
    assert report.bytes == pytest.approx(equal_report.bytes, rel=1e-6)
    assert "not all alike" in report.shape
    for layer, row in enumerate(report.layers):
        modules = [
            module for module in greedy.model.layers[layer].modules()
            if isinstance(module, MoesaicThresholdedLinear)
        ]  # fmt: skip
        assert [module.share for module in modules] == row.shares
        weights = [module.weight.numel() for module in modules]
        mean = np.average(row.shares, weights=weights)
        assert mean == pytest.approx(0.5, abs=1e-6)
        assert len(set(row.shares)) > 1


def test_shares_are_those_of_a_loaded_model_too(tmp_path: Path) -> None:
    """Work is counted from the configuration, before weights are read."""
    folder = tmp_path / "dense"
    tiny_model("llama").save_pretrained(folder)
    choices: dict[str, Any] = {"sparsity": 0.4, "calibration": WINDOWS, "command": "x"}
    model, report = moesaic.convert(folder, "teal", output=tmp_path / "out", **choices)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for ours, theirs in zip(model.modules(), loaded.modules(), strict=True):
        if isinstance(ours, MoesaicThresholdedLinear):
            assert ours.share == theirs.share
            assert torch.equal(ours.threshold, theirs.threshold)
    said = loaded.config.moesaic.linears
    assert said.shares["1"] == report.layers[1].shares
    assert count_macs(loaded, 1).total == report.macs


def test_a_resumed_search_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "dense"
    tiny_model("qwen3").save_pretrained(folder)
    choices: dict[str, Any] = {"sparsity": 0.4, "calibration": WINDOWS, "command": "x"}
    moesaic.convert(folder, "teal", output=tmp_path / "whole", **choices)
    saved: list[int] = []
    save = run_module.save_layer

    def die(*args: Any) -> None:
        if len(saved) == 2:
            raise KeyboardInterrupt
        saved.append(1)
        save(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "save_layer", die)
        with pytest.raises(KeyboardInterrupt):
            moesaic.convert(folder, "teal", output=tmp_path / "again", **choices)
    moesaic.convert(folder, "teal", output=tmp_path / "again", resume=True, **choices)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_a_threshold_of_zero_is_exact() -> None:
    """And so is a share of 1, which no search is made for."""
    model, _ = converted("teal")
    dense = tiny_model("qwen3")
    for module in model.modules():
        if isinstance(module, MoesaicThresholdedLinear):
            module.threshold.fill_(0.0)
    ids = tokens(2, 48, seed=2)
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, dense(ids, use_cache=False).logits)
    whole = moesaic.convert(tiny_model("qwen3"), "teal", sparsity=0.0, calibration=WINDOWS)
    assert not any(row.shares for row in whole[1].layers)


def test_where_is_the_ffn_the_search_is_among_its_matrices() -> None:
    model, report = converted("teal", "phi3", where="ffn")
    for row in report.layers:
        assert len(row.shares) == 2
    assert type(model.model.layers[0].self_attn.qkv_proj) is nn.Linear


def test_unknown_shares_are_refused() -> None:
    with pytest.raises(MoesaicError, match="unknown shares 'best'"):
        load_method("wina", {"shares": "best"})
