"""The first tokens of a prompt, which skip no inputs (`dense_start` of TEAL and WINA)."""

from __future__ import annotations

import pytest
import torch

import moesaic
from moesaic.modeling import LinearConfig, MoesaicThresholdedLinear
from tests.families import CONTEXT, tiny_model, tokens


def halving() -> MoesaicThresholdedLinear:
    """y = x where abs(x) > 1, else 0; the first hundredth of a prompt reads all."""
    linear = MoesaicThresholdedLinear(3, 3, False, 0.5, dense_start=0.01)
    linear.weight.data = torch.eye(3)
    linear.threshold.fill_(1.0)
    return linear.requires_grad_(False)


@pytest.mark.parametrize(("length", "dense"), [(2, 1), (100, 1), (150, 2), (1024, 11)])
def test_a_hundredth_of_each_prompt_rounded_up_reads_all(length: int, dense: int) -> None:
    x_BLI = torch.full((2, length, 3), 0.5)
    expected_BLN = torch.zeros_like(x_BLI)
    expected_BLN[:, :dense] = 0.5
    linear = halving()
    with torch.no_grad():
        assert torch.equal(linear(x_BLI), expected_BLN)
    runs_TI, _ = linear.units(x_BLI) or (None, None)
    assert runs_TI is not None
    assert runs_TI.sum() == 2 * dense * 3


def test_tokens_that_are_written_one_by_one_skip() -> None:
    """And rows that belong to nobody's prompt, as inside experts."""
    linear = halving()
    with torch.no_grad():
        assert not linear(torch.full((4, 1, 3), 0.5)).any()
        assert not linear(torch.full((200, 3), 0.5)).any()


@pytest.mark.parametrize("method", ["teal", "wina"])
def test_a_converted_model_has_it_and_its_logits_show(method: str) -> None:
    calibration = tokens(8, CONTEXT)
    logits = []
    for start in (0.0, 1.0):
        model = tiny_model("llama")
        converted, _ = moesaic.convert(
            model, method, None, calibration, sparsity=0.5, settings={"dense_start": start}
        )
        assert converted.config.moesaic.linears.dense_start == start
        with torch.no_grad():
            logits.append(converted(calibration[:1]).logits)
    with torch.no_grad():
        dense = tiny_model("llama")(calibration[:1]).logits
    torch.testing.assert_close(logits[1], dense, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits[0], dense, rtol=1e-2, atol=1e-2)


def test_older_configurations_have_none() -> None:
    assert LinearConfig("thresholded", ("layers.{}.mlp.up_proj",), 0.5).dense_start == 0
