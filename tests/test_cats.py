"""CATS: a threshold on gates, by hand and against a double loop, and the work it leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import moesaic
from moesaic.calibration.calibration_set import Split
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.errors import MoesaicError
from moesaic.evaluate.work import count_macs
from moesaic.families import DenseFFN
from moesaic.methods.load import load_method
from moesaic.modeling import Sizes
from tests import reference
from tests.families import CONTEXT, HIDDEN, LAYERS, NEURONS, tiny_model, tokens
from tests.mixtures import tiny_mixture

CPU = torch.device("cpu")
WINDOWS = tokens(16, CONTEXT, seed=1)


def cats_of(ffn: DenseFFN, x_TD: torch.Tensor, active: int) -> Any:
    """The rows to fit on, eight times, and once more, which is held out."""
    x_TD = x_TD.repeat(9, 1)
    split = Split(len(x_TD), len(x_TD) // 9 * 8)
    inputs = FFNInputs([x_TD], split, hold_out=True, storage=CPU, device=CPU)
    neurons = ffn.intermediate_size
    method: Any = load_method("cats")
    sizes = Sizes(0, 1, neurons, active)
    return method.convert_ffn(ffn, inputs, sizes, np.random.default_rng(0))


def test_by_hand() -> None:
    """Gates are relu(x): (1, 0, 3), (2, 4, 0); the third of six runs whose gate is above 2."""
    up_FD = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.0], [10.0, 0.0, 0.0]])
    ffn = DenseFFN(up_FD, torch.eye(3), "relu", torch.eye(3))
    x_TD = torch.tensor([[1.0, -5.0, 3.0], [2.0, 4.0, 0.0]])
    replacement = cats_of(ffn, x_TD, 1)
    # Of the first token the last neuron, 3 x 10 x 1; of the second the middle one, 4 x 2.
    expected = torch.tensor([[0.0, 0.0, 30.0], [0.0, 8.0, 0.0]])
    torch.testing.assert_close(replacement(x_TD), expected)
    assert replacement.chosen(x_TD).tolist() == [[False, False, True], [False, True, False]]
    # All three: nothing is skipped, gates of exactly 0 included.
    torch.testing.assert_close(cats_of(ffn, x_TD, 3)(x_TD), ffn.output(ffn.hidden(x_TD)))


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_it_is_what_a_double_loop_computes(rows: int) -> None:
    """For few tokens only rows that run are multiplied; for many all are, under a mask."""
    torch.manual_seed(0)
    ffn = DenseFFN(torch.randn(20, 8), torch.randn(8, 20), "silu", torch.randn(20, 8))
    x_TD = torch.randn(64, 8)
    replacement = cats_of(ffn, x_TD, 7)
    # The threshold is one of the sizes; rounding must not let that one run in the loop.
    threshold = float(torch.exp(-replacement.router.selection_bias[0] / 2)) * (1 + 1e-5)
    assert torch.equal(
        replacement.router.selection_bias,
        replacement.router.selection_bias[:1].expand(20),
    )
    size_TF = ffn.gates(x_TD).abs()
    assert int((size_TF > threshold).sum()) == 7 * 64
    with torch.no_grad():
        y_TD = replacement(x_TD[:rows])
    expected = reference.cats(x_TD[:rows], ffn, threshold)
    torch.testing.assert_close(y_TD.double(), expected, rtol=1e-4, atol=1e-4)


def test_the_gates_are_always_read() -> None:
    """Half of the neurons: a third of the FFN and half of the rest."""
    model, report = moesaic.convert(tiny_model("qwen3"), "cats", sparsity=0.5, calibration=WINDOWS)
    matrix = HIDDEN * NEURONS
    macs = count_macs(model, 1)
    assert macs.ffn == LAYERS * 2 * matrix
    assert macs.router == 0
    assert report.active_ffn_fraction == 0.5
    assert report.dense_bytes - report.bytes == 4 * LAYERS * matrix


def test_what_has_no_gates_of_its_own_is_refused() -> None:
    with pytest.raises(MoesaicError, match="FFNs without a gate"):
        moesaic.convert(tiny_model("opt"), "cats", sparsity=0.5, calibration=WINDOWS)
    with pytest.raises(MoesaicError, match="is a mixture of experts"):
        moesaic.convert(tiny_mixture("mixtral"), "cats", sparsity=0.5, calibration=WINDOWS)
    with pytest.raises(MoesaicError, match=r"outside \(0, 1\)"):
        moesaic.convert(tiny_model("qwen3"), "cats", sparsity=0.0, calibration=WINDOWS)
