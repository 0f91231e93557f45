"""Grouped statistics against the slow twin: those of every expert by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moesaic.calibration import expert_statistics, statistics
from moesaic.calibration.calibration_set import Split
from moesaic.calibration.expert_statistics import compute_expert_statistics
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.statistics import (
    PLAIN,
    Statistics,
    StatisticsKind,
    compute_statistics,
)
from moesaic.errors import MoesaicError
from moesaic.families import DenseFFN
from moesaic.methods.contents import METHODS
from moesaic.methods.expert_method import ExpertMethod
from moesaic.methods.load import load_method
from moesaic.methods.moesaic import IMPORTANCE
from moesaic.modeling import Sizes

CPU = torch.device("cpu")
TOKENS = (2, 23, 9, 57)


def experts(
    hidden: int, neurons: int, dtype: torch.dtype = torch.float32
) -> tuple[list[FFNInputs], list[DenseFFN]]:
    torch.manual_seed(0)
    inputs, ffns = [], []
    for tokens in TOKENS:
        x_TD = torch.randn(tokens, hidden).to(dtype)
        inputs.append(FFNInputs(x_TD.split(5), Split.last_eighth(tokens), True, CPU, CPU))
        gate_MD, up_MD = torch.randn(2, neurons, hidden).to(dtype)
        ffns.append(DenseFFN(up_MD, torch.randn(hidden, neurons).to(dtype), "silu", gate_MD))
    return inputs, ffns


def one_by_one(
    inputs: list[FFNInputs], ffns: list[DenseFFN], kind: StatisticsKind
) -> list[Statistics]:
    return [
        compute_statistics(one.fit(), ffn, kind, one.tokens)
        for one, ffn in zip(inputs, ffns, strict=True)
    ]


def assert_same(ours: Statistics, twin: Statistics, tolerance: float = 1e-5) -> None:
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
    monkeypatch.setattr(expert_statistics, "BLOCK_PAIRS", block)
    monkeypatch.setattr(statistics, "SAMPLE_TOKENS", 10)
    inputs, ffns = experts(hidden, neurons)
    kind = StatisticsKind(3, normalise, sample=True, gram=True)
    found = compute_expert_statistics(inputs, ffns, kind)
    twins = one_by_one(inputs, ffns, kind)
    for ours, twin in zip(found, twins, strict=True):
        assert_same(ours, twin)
    assert [p.tokens for p in found] == [one.tokens for one in inputs]
    assert [len(p.sample_h_SF) for p in found if p.sample_h_SF is not None] == [2, 7, 8, 10]


def test_in_bfloat16() -> None:
    inputs, ffns = experts(16, 8, torch.bfloat16)
    kind = StatisticsKind(sample=True)
    found = compute_expert_statistics(inputs, ffns, kind)
    for ours, twin in zip(found, one_by_one(inputs, ffns, kind), strict=True):
        assert_same(ours, twin, tolerance=1e-2)


CUTTING = {name: load_method(name) for name in METHODS}
CUTTING = {name: one for name, one in CUTTING.items() if isinstance(one, ExpertMethod)}
CUTTING = {name: one for name, one in CUTTING.items() if not one.needs}
CUTTING |= {f"moesaic, {i}": load_method("moesaic", {"importance": i}) for i in IMPORTANCE}


@pytest.mark.parametrize("name", CUTTING)
def test_every_method_finds_what_it_needs(name: str) -> None:
    """Statistics of either kind serve the partition, and give the same."""
    method: ExpertMethod = CUTTING[name]  # type: ignore[assignment]
    kinds = method.statistics_kinds()
    assert set(kinds) >= {method.statistics_kind}
    sizes = Sizes(4, 4, 2, 1)
    if name.startswith("static"):
        sizes = Sizes(8, 0, 0, 0, 12)
    if name == "moesaic-neurons":
        sizes = Sizes(0, 1, 12, 6)
    parts = []
    for compute in (compute_expert_statistics, one_by_one):
        inputs, ffns = experts(16, 12)
        for kind in kinds:
            for one, found in zip(inputs, compute(inputs, ffns, kind), strict=True):
                one.keep_statistics(kind, found)
        known = inputs[3]
        known.fit = None  # type: ignore[assignment, method-assign]  # nothing else is asked for
        fit = method.begin(ffns[3], known, sizes, np.random.default_rng(0))
        parts.append(method.partition(fit))
    np.testing.assert_array_equal(parts[0].shared_S, parts[1].shared_S)
    np.testing.assert_array_equal(parts[0].experts_RM, parts[1].experts_RM)


def test_names_the_experts_that_are_broken() -> None:
    inputs, ffns = experts(16, 12)
    for broken in (1, 3):
        ffns[broken].up_FD[0, 0] = torch.nan
    with pytest.raises(MoesaicError, match="not finite") as caught:
        compute_expert_statistics(inputs, ffns, PLAIN)
    assert caught.value.experts == [1, 3]  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [8, 9])
def test_grouped_products_with_empty_groups(width: int) -> None:
    x_PD, weight_END = torch.randn(10, width), torch.randn(4, 5, width)
    size_E = torch.tensor([0, 3, 0, 7])
    expected = torch.cat([x_PD[:3] @ weight_END[1].T, x_PD[3:] @ weight_END[3].T])
    torch.testing.assert_close(expert_statistics.grouped_linear(x_PD, weight_END, size_E), expected)
    gram_EMM = expert_statistics.grouped_gram(x_PD, size_E)
    torch.testing.assert_close(gram_EMM[3], x_PD[3:].T @ x_PD[3:])
    assert not gram_EMM[0].any()


def test_products_without_a_grouped_kernel_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an old GPU or an old torch."""
    inputs, ffns = experts(16, 12)
    kind = StatisticsKind(3, sample=True, gram=True)
    grouped = compute_expert_statistics(inputs, ffns, kind)
    monkeypatch.setattr(expert_statistics, "can_group", lambda rows: False)
    ungrouped = compute_expert_statistics(inputs, ffns, kind)
    for ours, twin in zip(ungrouped, grouped, strict=True):
        assert_same(ours, twin)
