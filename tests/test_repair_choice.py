"""Which repair is made: never one for the worse on tokens held out, and a note where none is.

Shape suffixes: T tokens, D hidden_size, F neurons, N neurons that are kept.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.calibration.calibration_set import Split
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.families import DenseFFN
from moesaic.parts.repair import Kept, Repair, choose_repairs, with_up_rows
from moesaic.parts.repair.least_squares import RIDGES, TOKENS_PER_NEURON

CPU = torch.device("cpu")
intercepts = pytest.mark.parametrize("intercept", [True, False])
SKIPPED = "repair skipped: it does not lower the error on held-out tokens"


def random_ffn(hidden: int = 6, neurons: int = 12, bias: bool = False) -> DenseFFN:
    return DenseFFN(
        up_FD=torch.randn(neurons, hidden),
        down_DF=torch.randn(hidden, neurons),
        activation="silu",
        gate_FD=torch.randn(neurons, hidden),
        down_bias_D=torch.randn(hidden) if bias else None,
    )


def identity_ffn(size: int) -> DenseFFN:
    return DenseFFN(up_FD=torch.eye(size), down_DF=torch.eye(size), activation="linear")


def inputs_of(x_TD: torch.Tensor, size: int = 64) -> FFNInputs:
    return FFNInputs(x_TD.split(size), Split.last_eighth(len(x_TD)), True, CPU, CPU)


def by_sign(x_TD: torch.Tensor, neurons: int) -> torch.Tensor:
    """A mask that depends on the input, as a router's does."""
    return (x_TD[:, :1] * torch.linspace(-1, 1, neurons) > -0.3).float()


def heldout_error(ffn: DenseFFN, changed: DenseFFN, kept: Kept, x_TD: torch.Tensor) -> float:
    """What the repaired FFN loses where only what is kept and unmasked is computed."""
    h_TF = ffn.hidden(x_TD)
    mask_TF = torch.zeros_like(h_TF)
    ones_TN = torch.ones(len(x_TD), len(kept.neurons_N))
    mask_TF[:, kept.neurons_N] = ones_TN if kept.mask is None else kept.mask(x_TD)
    zero = replace(ffn, down_bias_D=None)
    dense_TD = ffn.output(h_TF)
    error = (changed.output(h_TF * mask_TF) - dense_TD).double().square().sum()
    return float(error / zero.output(h_TF).double().square().sum())


@intercepts
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("method", ["mean", "least-squares"])
@pytest.mark.parametrize("masked", [True, False])
def test_applied_it_has_the_error_that_is_reported(
    intercept: bool, bias: bool, method: str, masked: bool
) -> None:
    ffn, x_TD = random_ffn(bias=bias), torch.randn(600, 6) + 0.3
    neurons_N = torch.tensor([7, 1, 4, 10, 2, 0, 5])
    kept = Kept(neurons_N, (lambda x: by_sign(x, 7)) if masked else None)
    inputs = inputs_of(x_TD)
    (repair,) = choose_repairs(inputs, ffn, [kept], method, intercept)
    changed = repair.apply(ffn, kept)
    held_TD = x_TD[-75:]
    torch.testing.assert_close(torch.cat(list(inputs.heldout())), held_TD)
    before, after = (heldout_error(ffn, one, kept, held_TD) for one in (ffn, changed))
    assert repair.error_before == pytest.approx(before, rel=1e-4)
    assert repair.error_after == pytest.approx(after, rel=1e-4)
    assert (after < before) == (repair.note is None)
    assert method == "mean" or repair.note is None
    dropped = [i for i in range(12) if i not in neurons_N.tolist()]
    assert torch.equal(changed.down_DF[:, dropped], ffn.down_DF[:, dropped])
    assert changed.up_FD is ffn.up_FD
    assert (changed.down_bias_D is None) == (not bias and not intercept)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10**6), st.integers(8, 300), st.integers(1, 12), st.booleans(),
    st.sampled_from(["mean", "least-squares"]), st.sampled_from([0.0, 1.0]),
)  # fmt: skip
def test_no_repair_is_worse_than_none_on_tokens_held_out(
    seed: int, tokens: int, neurons: int, intercept: bool, method: str, scale: float
) -> None:
    """Also for few tokens, few neurons and an FFN that puts out nothing."""
    torch.manual_seed(seed)
    ffn = random_ffn()
    ffn = replace(ffn, down_DF=ffn.down_DF * scale)
    x_TD = torch.randn(tokens, 6) + torch.randn(6)
    index_N = torch.randperm(12)[:neurons]
    both = [Kept(index_N, lambda x: by_sign(x, neurons)), Kept(index_N)]
    for kept, repair in zip(
        both, choose_repairs(inputs_of(x_TD), ffn, both, method, intercept), strict=True
    ):
        assert repair.error_after <= repair.error_before
        held_TD = x_TD[-max(tokens // 8, 1) :]
        changed = repair.apply(ffn, kept)
        assert torch.isfinite(changed.down_DF).all()
        if scale:
            after = heldout_error(ffn, changed, kept, held_TD)
            assert after == pytest.approx(repair.error_after, rel=1e-2, abs=1e-5)


@intercepts
@pytest.mark.parametrize("method", ["mean", "least-squares"])
def test_a_repair_that_harms_is_skipped_and_said(intercept: bool, method: str) -> None:
    """The dropped neuron follows the kept one while fitting and does the opposite afterwards."""
    x_TD = torch.rand(160, 2) + 1
    x_TD[:, 1] = x_TD[:, 0]
    x_TD[140:, 1] *= -1
    kept = Kept(torch.tensor([0]))
    (repair,) = choose_repairs(inputs_of(x_TD), identity_ffn(2), [kept], method, intercept)
    assert repair.candidate.name == "none"
    assert repair.error_after == repair.error_before == pytest.approx(0.5)
    assert repair.note == SKIPPED
    assert repair.apply(identity_ffn(2), kept).down_DF.tolist() == torch.eye(2).tolist()


@intercepts
@pytest.mark.parametrize("fewer", [0, 1])
def test_too_few_tokens_fall_back_to_mean_compensation_and_say_so(
    intercept: bool, fewer: int
) -> None:
    """4 neurons kept need 8 tokens to fit on; 9 or 10 leave 8 or 9 beside the one held out."""
    tokens = TOKENS_PER_NEURON * 4 + 1 - fewer
    x_TD = torch.rand(tokens, 8) + 1
    (repair,) = choose_repairs(
        inputs_of(x_TD), identity_ffn(8), [Kept(torch.arange(4))], "least-squares", intercept
    )
    if fewer:
        assert repair.candidate.name == "mean compensation"
        assert repair.note == (
            "least squares needs 8 tokens to fit on, 7 are there: mean compensation instead"
        )
    else:
        assert repair.candidate.name.startswith("least squares, ridge")
        assert repair.note is None
    assert repair.error_after < repair.error_before


def test_dead_neurons_are_said_and_leave_the_ffn_alone() -> None:
    ffn = replace(identity_ffn(3), up_FD=torch.diag(torch.tensor([0.0, 0.0, 1.0])))
    kept = Kept(torch.tensor([0, 1]))
    (repair,) = choose_repairs(inputs_of(torch.rand(80, 3)), ffn, [kept], "least-squares", False)
    assert isinstance(repair, Repair)
    assert repair.error_before == repair.error_after == pytest.approx(1)
    assert repair.note == "repair skipped: no neuron is ever active"
    assert repair.apply(ffn, kept) is ffn


def test_the_ridge_is_chosen_on_tokens_held_out() -> None:
    """No noise wants the smallest ridge, few tokens and much noise the largest."""
    ffn, kept = identity_ffn(40), Kept(torch.arange(20))
    mix_DD = torch.randn(20, 20)

    def chosen(tokens: int, noise: float) -> str:
        x_TD = torch.randn(tokens, 40)
        x_TD[:, 20:] = x_TD[:, :20] @ mix_DD + noise * torch.randn(tokens, 20)
        (repair,) = choose_repairs(inputs_of(x_TD), ffn, [kept], "least-squares", False)
        return repair.candidate.name

    assert chosen(2000, 0.0) == f"least squares, ridge {RIDGES[0]:g}"
    assert chosen(400, 12.0) == f"least squares, ridge {RIDGES[-1]:g}"


@pytest.mark.parametrize(("undo_drift", "scale"), [(0.0, 1.0), (0.5, 2.0), (1.0, 3.0)])
def test_goals_are_met_as_far_as_was_asked_for(undo_drift: float, scale: float) -> None:
    """The FFN gives x, the goal is 3 x, and all neurons are kept: W_down grows by 2 undo_drift."""
    bias_D = torch.tensor([5.0, 0.0, -5.0, 1.0])
    ffn = replace(identity_ffn(4), down_bias_D=bias_D)
    x_TD = torch.randn(4000, 4)
    split = Split.last_eighth(len(x_TD))
    # The bias is added all the same, and is no part of what W_down has to give.
    goals = [(block_TD, 4 * block_TD + bias_D) for block_TD in x_TD.split(64)]
    inputs = FFNInputs(x_TD.split(64), split, True, CPU, CPU, goals=goals)
    kept = Kept(torch.arange(4))
    (repair,) = choose_repairs(
        inputs, ffn, [kept], "least-squares", intercept=False, undo_drift=undo_drift
    )
    before = ((scale - 1) / scale) ** 2
    assert repair.error_before == pytest.approx(before, abs=1e-5)
    repaired = repair.apply(ffn, kept)
    torch.testing.assert_close(repaired.down_DF, scale * torch.eye(4), atol=0.02, rtol=0)


def test_rows_of_up_are_refitted_to_the_goals_too() -> None:
    """The FFN gives x and the goal is 3 x, half of it asked for: rows of W_up double."""
    x_TD = torch.randn(4000, 4)
    ffn = replace(identity_ffn(4), gate_FD=torch.zeros(4, 4), gate_bias_F=torch.ones(4))
    goals = [(block_TD, 4 * block_TD) for block_TD in x_TD.split(64)]
    split = Split.last_eighth(len(x_TD))
    inputs = FFNInputs(x_TD.split(64), split, True, CPU, CPU, goals=goals)
    kept = Kept(torch.arange(4))
    refitted = with_up_rows(inputs, ffn, ffn, kept, steps=20, undo_drift=0.5)
    torch.testing.assert_close(refitted.up_FD, 2 * torch.eye(4), atol=0.02, rtol=0)
    as_it_was = with_up_rows(inputs, ffn, ffn, kept, steps=20)
    torch.testing.assert_close(as_it_was.up_FD, torch.eye(4), atol=1e-4, rtol=0)
