"""The token that every window of a Gemma begins with, and of no other model."""

from __future__ import annotations

import pytest
import torch

import moesaic
from moesaic.calibration.calibration_set import CalibrationSet
from moesaic.calibration.first_token import first_token
from moesaic.conversion.options import make_options
from moesaic.conversion.prepare import prepare
from moesaic.finetune.prepare import draw_of_each, draw_windows
from tests.families import FAMILIES, tiny_model, tokens

BOS = 1
ROW = tokens(1, 400)[0]  # without BOS


@pytest.mark.parametrize("family", FAMILIES)
def test_only_gemma_must_begin_with_it(family: str) -> None:
    expected = BOS if family.startswith("gemma") else None
    assert first_token(tiny_model(family).config) == expected


def test_a_converted_gemma_is_still_one() -> None:
    model, _ = moesaic.convert(
        tiny_model("gemma2"),
        "cmoe",
        layout="S1A1E4",
        calibration=ROW,
        samples=4,
        sequence_length=16,
    )
    assert model.config.model_type == "moesaic"
    assert first_token(model.config) == BOS


def test_it_takes_the_place_of_a_windows_first_token() -> None:
    plain_NL = CalibrationSet.sample(ROW, 4, 16, seed=0).windows_NL
    begun_NL = CalibrationSet.sample(ROW, 4, 16, seed=0, first=BOS).windows_NL
    assert (begun_NL[:, 0] == BOS).all()
    assert torch.equal(begun_NL[:, 1:], plain_NL[:, 1:])


@pytest.mark.parametrize("texts", [1, 2])
def test_a_gemma_is_converted_and_trained_on_such_windows(texts: int) -> None:
    calibration = ROW if texts == 1 else {"one": ROW, "other": ROW.flip(0)}
    options = make_options(
        tiny_model("gemma2"), "cmoe", "S1A1E4", calibration, samples=4, sequence_length=16
    )
    assert (prepare(options).windows_NL[:, 0] == BOS).all()
    assert (draw_windows(ROW, 4, 16, seed=0, first=BOS)[:, 0] == BOS).all()
    both_NL = draw_of_each([ROW, ROW.flip(0)], 4, 16, seed=0, first=BOS)
    assert (both_NL[:, 0] == BOS).all()


def test_windows_that_were_given_stay_as_they_are() -> None:
    given_NL = tokens(4, 16)
    options = make_options(tiny_model("gemma2"), "cmoe", "S1A1E4", given_NL)
    assert torch.equal(prepare(options).windows_NL, given_NL)
