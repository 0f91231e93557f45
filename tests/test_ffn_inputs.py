"""Calibration tokens: which are fitted on, which are held out, and in which order they come."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.calibration.calibration_set import HELD_OUT, Split
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.statistics import PLAIN, StatisticsKind
from moesaic.families import DenseFFN

CPU = torch.device("cpu")


def inputs_of(
    tokens: int, size: int, hold_out: bool, window: int = 1
) -> tuple[torch.Tensor, FFNInputs]:
    x_TD = torch.arange(tokens * 2.0).view(tokens, 2)
    split = Split.last_eighth(tokens, window)
    return x_TD, FFNInputs(iter(x_TD.split(size)), split, hold_out, CPU, CPU)


def joined(blocks: object) -> torch.Tensor:
    return torch.cat([torch.empty(0, 2), *blocks])  # type: ignore[misc]


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 200), st.integers(1, 64), st.booleans())
def test_the_last_eighth_is_held_out_whatever_the_blocks(
    tokens: int, size: int, hold_out: bool
) -> None:
    x_TD, inputs = inputs_of(tokens, size, hold_out)
    held = max(tokens // HELD_OUT, 1)
    assert torch.equal(joined(inputs.heldout()), x_TD[tokens - held :])
    if hold_out and tokens >= HELD_OUT:
        assert inputs.hold_out
        assert inputs.tokens == tokens - held
        assert torch.equal(joined(inputs.fit()), x_TD[: tokens - held])
    else:
        assert not inputs.hold_out
        assert inputs.tokens == tokens
        assert torch.equal(joined(inputs.fit()), x_TD)


@pytest.mark.parametrize("hold_out", [True, False])
def test_every_pass_gives_the_same_blocks(hold_out: bool) -> None:
    _, inputs = inputs_of(100, 7, hold_out)
    for blocks in (inputs.fit, inputs.heldout):
        first, second = list(blocks()), list(blocks())
        assert [len(x) for x in first] == [len(x) for x in second]
        assert all(0 < len(x) <= 7 for x in first)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_fewer_tokens_than_can_be_split_are_fitted_on_and_measured() -> None:
    """And the report says that they were not held out."""
    x_TD, inputs = inputs_of(7, 3, hold_out=True)
    assert not inputs.hold_out
    assert torch.equal(joined(inputs.fit()), x_TD)
    assert torch.equal(joined(inputs.heldout()), x_TD[-1:])


@pytest.mark.parametrize(("windows", "held"), [(1, 2), (7, 14), (8, 16), (15, 16), (16, 32)])
def test_whole_windows_are_held_out_where_there_are_eight(windows: int, held: int) -> None:
    """Fewer give the last eighth of their tokens, of the last of them."""
    x_TD, inputs = inputs_of(windows * 16, 48, True, window=16)
    assert torch.equal(joined(inputs.heldout()), x_TD[-held:])
    assert torch.equal(joined(inputs.fit()), x_TD[:-held])
    assert torch.equal(joined(inputs.own()), x_TD)


@pytest.mark.parametrize("hold_out", [True, False])
def test_apart_holds_out_in_any_case_and_fits_on_evenly_spaced_tokens(hold_out: bool) -> None:
    x_TD, inputs = inputs_of(80, 40, hold_out)
    view = inputs.apart(35)
    assert view.hold_out
    assert view.tokens == 35
    assert torch.equal(joined(view.fit()), x_TD[[*range(0, 40, 2), *range(40, 70, 2)]])
    assert torch.equal(joined(view.heldout()), x_TD[70:])
    assert torch.equal(joined(inputs.apart(70).fit()), x_TD[:70])
    assert torch.equal(inputs.heldout_sample(4), x_TD[70::3])
    thinned = inputs.apart(70, heldout=4)
    assert torch.equal(joined(thinned.heldout()), x_TD[70::3])
    assert torch.equal(thinned.heldout_sample(2), x_TD[70::6])
    assert len(joined(inputs.heldout())) == 10
    assert inputs.hold_out == hold_out
    assert len(joined(inputs.fit())) == (70 if hold_out else 80)


def test_statistics_are_of_the_tokens_to_fit_on_and_known_ones_are_not_computed_again() -> None:
    x_TD, inputs = inputs_of(80, 40, hold_out=True)
    ffn = DenseFFN(up_FD=torch.eye(2), down_DF=torch.eye(2), activation="linear")
    computed = inputs.statistics(ffn, PLAIN)
    assert computed.tokens == 70
    assert computed.sum_F.tolist() == x_TD[:70].sum(0).tolist()
    known = replace(computed, tokens=3)
    inputs.keep_statistics(PLAIN, known)
    assert inputs.statistics(ffn, PLAIN) is known
    assert inputs.statistics(ffn, StatisticsKind(gram=True)).tokens == 70
    assert inputs.apart(35).statistics(ffn, PLAIN).tokens == 35


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 200), st.integers(1, 64), st.booleans())
def test_goals_stay_beside_their_tokens(tokens: int, size: int, hold_out: bool) -> None:
    """Also where the sample and blocks are cut: a goal is nine times its input here."""
    x_TD = torch.arange(tokens * 2.0).view(tokens, 2)
    split = Split.last_eighth(tokens)
    goals = zip(x_TD.split(size), (10 * x_TD).split(size), strict=True)
    inputs = FFNInputs(x_TD.split(size), split, hold_out, CPU, CPU, goals=goals)
    for blocks, beside in (
        (inputs.own_fit(), inputs.own_fit_goals()),
        (inputs.own_heldout(), inputs.own_heldout_goals()),
    ):
        for block_TD, goal_TD in zip(blocks, beside, strict=True):
            assert goal_TD is not None
            assert torch.equal(goal_TD, 9 * block_TD)
    sample_goal_TD = inputs.sample_goals()
    assert sample_goal_TD is not None
    assert torch.equal(sample_goal_TD, 9 * inputs.sample())
    _, without = inputs_of(tokens, size, hold_out)
    for sample in (inputs.apart(8), without):
        assert sample.sample_goals() is None
        assert all(goal is None for goal in sample.own_fit_goals())
        assert len(list(sample.own_fit_goals())) == len(list(sample.own_fit()))


@pytest.mark.parametrize(
    ("hold_out", "most", "once"),
    [(True, 160 * 4, True), (True, 160 * 4 - 1, False), (False, 1000, False)],
)
def test_hidden_states_are_computed_once_where_weights_are_fitted_and_they_fit(
    monkeypatch: pytest.MonkeyPatch, hold_out: bool, most: int, once: bool
) -> None:
    """80 tokens of 2 neurons of 4 bytes; of one FFN, and never those of other tokens."""
    monkeypatch.setattr("moesaic.calibration.ffn_inputs.HIDDEN_BYTES", most)
    computed: list[int] = []
    hidden = DenseFFN.hidden

    def counted(ffn: DenseFFN, x_TD: torch.Tensor) -> torch.Tensor:
        computed.append(len(x_TD))
        return hidden(ffn, x_TD)

    monkeypatch.setattr(DenseFFN, "hidden", counted)
    x_TD, inputs = inputs_of(80, 30, hold_out)
    up_FD = torch.tensor([[1.0, 1.0], [2.0, 0.0]])
    ffn = DenseFFN(up_FD=up_FD, down_DF=torch.eye(2), activation="linear")
    other = replace(ffn, up_FD=3 * up_FD)
    fitted = 70 if hold_out else 80
    for _ in range(2):
        inputs.statistics(ffn, PLAIN)
        for factor, one in ((1, ffn), (3, other)):
            pairs = list(inputs.own_fit_hidden(one))
            assert torch.equal(joined(x for x, _ in pairs), x_TD[:fitted])
            assert torch.equal(joined(h for _, h in pairs), factor * x_TD[:fitted] @ up_FD.T)
            held = list(inputs.own_heldout_hidden(one))
            assert torch.equal(joined(x for x, _ in held), x_TD[70:])
            assert torch.equal(joined(h for _, h in held), factor * x_TD[70:] @ up_FD.T)
        rows_TF = inputs.map_hidden(ffn, lambda h_TF: 2 * h_TF).whole()
        assert torch.equal(rows_TF, 2 * x_TD[:fitted] @ up_FD.T)
        sampled = inputs.apart(35).own_fit_hidden(ffn)
        thinned_TD = x_TD[[*range(0, 30, 2), *range(30, 60, 2), *range(60, 70, 2)]]
        assert torch.equal(joined(h for _, h in sampled), thinned_TD @ up_FD.T)
    of_other = fitted + 10
    of_first = 80 if once else 2 * (3 * fitted + 10)
    assert sum(computed) == of_first + 2 * (of_other + 35)
