"""Windows of calibration tokens: where they are taken from, and which are held out of fits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.calibration.calibration_set import CalibrationSet, Split, check_samples
from moesaic.errors import MoesaicError


def windows_of(ids: torch.Tensor, samples: int, length: int, seed: int) -> torch.Tensor:
    return CalibrationSet.sample(ids, samples, length, seed).windows_NL


# --- windows -----------------------------------------------------------------------------------


def test_windows_depend_on_the_seed_and_on_nothing_else() -> None:
    ids = torch.arange(1000)
    first = windows_of(ids, 8, 16, seed=0)
    torch.manual_seed(5)
    assert torch.equal(windows_of(ids, 8, 16, seed=0), first)
    assert not torch.equal(windows_of(ids, 8, 16, seed=1), first)


def test_more_samples_begin_with_the_same() -> None:
    """But for those held out."""
    ids = torch.arange(1000)
    assert torch.equal(windows_of(ids, 20, 16, 0)[:7], windows_of(ids, 8, 16, 0)[:7])


def test_windows_are_consecutive_tokens_of_the_text() -> None:
    """Every place is drawn, the first and the last included, and none beyond."""
    windows_NL = windows_of(torch.arange(100, 180), 800, 16, seed=0)
    assert windows_NL.shape == (800, 16)
    assert (windows_NL.diff(dim=1) == 1).all()
    assert set(windows_NL[:700, 0].tolist()) == set(range(100, 149))
    assert set(windows_NL[700:, 0].tolist()) == {164}


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 3), st.data())
def test_windows_held_out_share_no_token_with_the_others(
    samples: int, length: int, seed: int, data: st.DataObject
) -> None:
    """Whatever the text's length, down to the two windows without which it cannot be."""
    ids = torch.arange(data.draw(st.integers(2 * length, 30 * length)))
    windows_NL = windows_of(ids, samples, length, seed)
    assert windows_NL.shape == (samples, length)
    held = max(samples // 8, 1)
    others = set(windows_NL[: samples - held].flatten().tolist())
    assert others.isdisjoint(windows_NL[samples - held :].flatten().tolist())


def test_a_text_of_one_window() -> None:
    assert windows_of(torch.arange(16), 1, 16, 0).tolist() == [list(range(16))]
    with pytest.raises(MoesaicError, match=r"31 tokens, at least 32 \(two windows of 16\)"):
        windows_of(torch.arange(31), 2, 16, 0)


def test_windows_are_taken_as_they_are() -> None:
    windows_NL = torch.arange(6).view(2, 3)
    assert torch.equal(windows_of(windows_NL, 99, 99, 0), windows_NL)


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(MoesaicError, match=r"15 tokens, at least 16 \(one window of 16\)"):
        windows_of(torch.arange(15), 1, 16, 0)


@pytest.mark.parametrize(
    ("samples", "length", "said"),
    [
        (0, 16, "0 calibration samples; at least 1 is needed"),
        (-3, 16, "-3 calibration samples; at least 1 is needed"),
        (2**14, 2**10 + 1, "are over 16,777,216 tokens"),
    ],
)
def test_numbers_of_samples_that_cannot_be_are_refused(
    samples: int, length: int, said: str
) -> None:
    check_samples(1, length)
    check_samples(2**14, 2**10)
    with pytest.raises(MoesaicError, match=said):
        check_samples(samples, length)


# --- which are held out ------------------------------------------------------------------------


def set_of(samples: int, length: int = 1) -> CalibrationSet:
    return CalibrationSet(torch.arange(samples * length).view(samples, length))


def test_a_set_knows_its_sizes() -> None:
    calibration_set = set_of(5, 3)
    sizes = (calibration_set.samples, calibration_set.length, calibration_set.tokens)
    assert sizes == (5, 3, 15)


def test_fewer_windows_keep_the_share_that_is_held_out() -> None:
    calibration_set = set_of(64)
    found = calibration_set.fewer(16).windows_NL.flatten().tolist()
    assert found == [*range(14), 62, 63]
    assert calibration_set.fewer(64) is calibration_set
    assert calibration_set.fewer(3).windows_NL.flatten().tolist() == [0, 1, 63]


@pytest.mark.parametrize(
    ("samples", "most", "expected"),
    [(64, 99, range(56, 64)), (64, 3, range(61, 64)), (8, 99, [7]), (2, 99, [1]), (1, 99, [0])],
)
def test_windows_held_out_by_hand(samples: int, most: int, expected: list[int]) -> None:
    """The last eighth, the last one at least; of those, the last where fewer are wanted."""
    assert set_of(samples).heldout(most).flatten().tolist() == list(expected)


@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 60))
def test_the_split_by_token_is_the_split_by_window(samples: int, length: int, fewer: int) -> None:
    """Where there are eight windows; fewer give a part of the last one."""
    for calibration_set in (set_of(samples, length), set_of(samples, length).fewer(fewer)):
        split = calibration_set.split
        assert split.tokens == calibration_set.tokens
        heldout = calibration_set.windows_NL.flatten()[split.first_heldout :]
        windows_NL = calibration_set.heldout(99)
        if calibration_set.samples >= 8:
            assert torch.equal(heldout, windows_NL.flatten())
        else:
            assert torch.equal(heldout, windows_NL.flatten()[-len(heldout) :])
            assert len(heldout) == max(calibration_set.tokens // 8, 1)


@pytest.mark.parametrize(
    ("tokens", "window", "first_heldout"),
    [(1, 1, 0), (7, 1, 6), (8, 1, 7), (80, 1, 70), (80, 10, 70), (80, 16, 70), (160, 16, 144)],
)
def test_the_last_eighth_by_hand(tokens: int, window: int, first_heldout: int) -> None:
    split = Split.last_eighth(tokens, window)
    assert split == Split(tokens, first_heldout)
    assert split.can_hold_out == (tokens >= 8)
