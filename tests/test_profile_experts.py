"""Grouped profiles against the slow twin: every expert profiled by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moesaic.calibration import expert_statistics as profile_experts
from moesaic.calibration import statistics as profile
from moesaic.calibration.ffn_inputs import Inputs
from moesaic.calibration.statistics import Profile, profile_ffn
from moesaic.errors import MoesaicError
from moesaic.families import DenseFFN
from moesaic.modeling import Sizes
from moesaic.methods.recipe import RECIPES, Recipe
from moesaic.parts.partition import partition

CPU = torch.device("cpu")
TOKENS = (2, 23, 9, 57)


def experts(
    hidden: int, neurons: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Inputs], list[DenseFFN]]:
    torch.manual_seed(0)
    inputs, ffns = [], []
    for tokens in TOKENS:
        x_TD = torch.randn(tokens, hidden).to(dtype)
        inputs.append(Inputs(x_TD.split(5), tokens, True, CPU, CPU))
        gate_MD, up_MD = torch.randn(2, neurons, hidden).to(dtype)
        ffns.append(DenseFFN(up_MD, torch.randn(hidden, neurons).to(dtype), "silu", gate_MD))
    return inputs, ffns


def one_by_one(
    inputs: list[Inputs], ffns: list[DenseFFN], sample: bool = False, **wanted: Any
) -> list[Profile]:
    return [
        profile_ffn(one.fit(), ffn, **wanted, sample_of=one.tokens if sample else None)
        for one, ffn in zip(inputs, ffns, strict=True)
    ]


def assert_same(ours: Profile, twin: Profile, tolerance: float = 1e-5) -> None:
    assert ours.tokens == twin.tokens
    for name in ("energy_F", "sum_F"):
        expected_F = getattr(twin, name)  # a sum over tokens may cancel: what counts is the largest
        size = np.abs(expected_F).max()
        np.testing.assert_allclose(getattr(ours, name), expected_F, rtol=0, atol=tolerance * size)
    assert (ours.active is None) == (twin.active is None)
    if ours.active is not None and twin.active is not None:
        assert (ours.active != twin.active).nnz == 0
    for name in ("gram_FF", "sample_x_SD", "sample_h_SF"):
        found, expected = getattr(ours, name), getattr(twin, name)
        assert (found is None) == (expected is None)
        if expected is not None:
            size = float(expected.abs().max())
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("hidden", [16, 18])  # rows of whole 16 bytes, and others
@pytest.mark.parametrize("neurons", [12, 13])
@pytest.mark.parametrize("block", [1, 7, 4096])
@pytest.mark.parametrize("normalise", [False, True])
def test_as_each_expert_by_itself(
    monkeypatch: pytest.MonkeyPatch, hidden: int, neurons: int, block: int, normalise: bool
) -> None:
    monkeypatch.setattr(profile_experts, "BLOCK_PAIRS", block)
    for module in (profile, profile_experts):
        monkeypatch.setattr(module, "SAMPLE_TOKENS", 10)
    inputs, ffns = experts(hidden, neurons)
    wanted = {"activation_top_k": 3, "normalise": normalise, "sample": True, "gram": True}
    found = profile_experts.profile_experts(inputs, ffns, **wanted)
    twins = one_by_one(inputs, ffns, **wanted)
    for ours, twin in zip(found, twins, strict=True):
        assert_same(ours, twin)
    assert [p.tokens for p in found] == [one.tokens for one in inputs]
    assert [len(p.sample_h_SF) for p in found if p.sample_h_SF is not None] == [2, 7, 8, 10]


def test_in_bfloat16() -> None:
    inputs, ffns = experts(16, 8, torch.bfloat16)
    found = profile_experts.profile_experts(inputs, ffns, sample=True)
    for ours, twin in zip(found, one_by_one(inputs, ffns, sample=True), strict=True):
        assert_same(ours, twin, tolerance=1e-2)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("importance", [None, "observability"])
def test_every_recipe_finds_what_it_needs(recipe: Recipe, importance: str | None) -> None:
    """Both profiles serve the partition, and give the same."""
    if importance is not None:
        if recipe.normalise:
            pytest.skip("importance of a normalised FFN means nothing")
        recipe = replace(recipe, importance=importance)
    inputs, ffns = experts(16, 12)
    inputs, ffns = inputs[3:], ffns[3:]
    wanted = recipe.statistics | {"sample": recipe.samples_hidden}
    (ours,) = profile_experts.profile_experts(inputs, ffns, **wanted)
    (twin,) = one_by_one(inputs, ffns, **wanted)
    sizes = Sizes(4, 4, 2, 1) if recipe.routed else Sizes(8, 1, 4, 0)
    if recipe.grouping == "neurons":
        sizes = Sizes(4, 1, 8, 2)
    parts = [
        partition(profile, ffns[0], recipe, sizes, np.random.default_rng(0))
        for profile in (ours, twin)
    ]
    np.testing.assert_array_equal(parts[0].shared_S, parts[1].shared_S)
    np.testing.assert_array_equal(parts[0].experts_RM, parts[1].experts_RM)


def test_names_the_experts_that_are_broken() -> None:
    inputs, ffns = experts(16, 12)
    for broken in (1, 3):
        ffns[broken].up_FD[0, 0] = torch.nan
    with pytest.raises(MoesaicError, match="not finite") as caught:
        profile_experts.profile_experts(inputs, ffns)
    assert caught.value.experts == [1, 3]  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [8, 9])
def test_grouped_products_with_empty_groups(width: int) -> None:
    x_PD, weight_END = torch.randn(10, width), torch.randn(4, 5, width)
    size_E = torch.tensor([0, 3, 0, 7])
    expected = torch.cat([x_PD[:3] @ weight_END[1].T, x_PD[3:] @ weight_END[3].T])
    torch.testing.assert_close(profile_experts.grouped_linear(x_PD, weight_END, size_E), expected)
    gram_EMM = profile_experts.grouped_gram(x_PD, size_E)
    torch.testing.assert_close(gram_EMM[3], x_PD[3:].T @ x_PD[3:])
    assert not gram_EMM[0].any()


def test_products_without_a_grouped_kernel_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an old GPU or an old torch."""
    inputs, ffns = experts(16, 12)
    wanted: dict[str, Any] = {"activation_top_k": 3, "sample": True, "gram": True}
    grouped = profile_experts.profile_experts(inputs, ffns, **wanted)
    monkeypatch.setattr(profile_experts, "can_group", lambda rows: False)
    for ours, twin in zip(
        profile_experts.profile_experts(inputs, ffns, **wanted), grouped, strict=True
    ):
        assert_same(ours, twin)
