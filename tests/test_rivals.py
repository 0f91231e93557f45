"""TEAL, WINA and FLAP: worked by hand, and what they leave alone."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import moesaic
from moesaic import load_method
from moesaic.calibration.calibration_set import Split
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.errors import MoesaicError
from moesaic.families import DenseFFN
from moesaic.modeling import MoesaicThresholdedLinear, Sizes
from tests.families import CONTEXT, LAYERS, tiny_model, tokens

CPU = torch.device("cpu")
WINDOWS = tokens(16, CONTEXT, seed=1)
METHODS = Path(moesaic.__file__).parent / "methods"


def inputs_of(x_TI: torch.Tensor) -> FFNInputs:
    """The rows to fit on, eight times, and once more, which is held out."""
    x_TI = x_TI.repeat(9, 1)
    split = Split(len(x_TI), len(x_TI) // 9 * 8)
    return FFNInputs([x_TI], split, hold_out=True, storage=CPU, device=CPU)


def converted(name: str, linear: nn.Linear, x_TI: torch.Tensor, share: float) -> Any:
    method: Any = load_method(name)
    generator = np.random.default_rng(0)
    return method.convert_linear(linear, inputs_of(x_TI), share, generator)


def linear_of(weight: list[list[float]]) -> nn.Linear:
    weight_NI = torch.tensor(weight)
    linear = nn.Linear(weight_NI.shape[1], len(weight_NI))
    with torch.no_grad():
        linear.weight.copy_(weight_NI)
        linear.bias.fill_(100.0)
    return linear


# Sizes 1 to 6: half of them, 4, 5 and 6, are above the threshold of 3.
INPUTS = torch.tensor([[1.0, -6.0, 3.0], [-5.0, 2.0, 4.0]])


def test_teal_reads_the_inputs_of_largest_magnitude() -> None:
    linear = linear_of([[1.0, 10.0, 1.0], [0.0, 0.0, 1.0]])
    teal = converted("teal", linear, INPUTS, 0.5)
    assert teal.threshold == 3.0
    expected = torch.tensor([[100 - 60.0, 100.0], [100 - 5.0 + 4.0, 100 + 4.0]])
    torch.testing.assert_close(teal(INPUTS), expected)


def test_wina_reads_the_inputs_that_weigh_most() -> None:
    # Norms 1, 0.1, 2: sizes 1, 0.6, 6 and 5, 0.2, 8.
    linear = linear_of([[1.0, 0.0, 0.0], [0.0, 0.1, 2.0]])
    wina = converted("wina", linear, INPUTS, 0.5)
    torch.testing.assert_close(wina.input_scale, torch.tensor([1.0, 0.1, 2.0]))
    expected = torch.tensor([[100.0, 100 + 6.0], [100 - 5.0, 100 + 8.0]])
    torch.testing.assert_close(wina(INPUTS), expected)


def test_wina_with_columns_of_unit_length_is_teal() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(16, 8)
    with torch.no_grad():
        linear.weight.div_(linear.weight.norm(dim=0))
    x_TI = torch.randn(40, 16)
    both = [converted(name, linear, x_TI, 0.6) for name in ("teal", "wina")]
    torch.testing.assert_close(both[0].threshold, both[1].threshold)
    torch.testing.assert_close(both[0](x_TI), both[1](x_TI))
    # And with unequal ones it is not.
    with torch.no_grad():
        linear.weight.mul_(torch.linspace(0.1, 2, 16))
    both = [converted(name, linear, x_TI, 0.6) for name in ("teal", "wina")]
    assert not torch.allclose(both[0](x_TI), both[1](x_TI), atol=0.1)


@pytest.mark.parametrize("name", ["teal", "wina"])
def test_with_a_share_of_one_all_inputs_are_read(name: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(16, 8)
    x_TI = torch.randn(40, 16)
    x_TI[0] = 0
    kept = converted(name, linear, x_TI, 1.0)
    assert torch.equal(kept(x_TI), linear(x_TI))
    assert kept.threshold < 0
    for share in (0.1, 0.25, 0.9):
        kept = converted(name, linear, x_TI, share)
        sizes = x_TI.abs() * kept.input_scale
        assert int((sizes > kept.threshold).sum()) == round(share * x_TI.numel())


@pytest.mark.parametrize("name", ["teal", "wina"])
@pytest.mark.parametrize("family", ["llama", "phi3", "opt"])
def test_where_is_the_ffn_attention_stays(name: str, family: str) -> None:
    model, _ = moesaic.convert(
        tiny_model(family), name, sparsity=0.5, calibration=WINDOWS, settings={"where": "ffn"}
    )
    replaced = {
        path for path, module in model.named_modules()
        if isinstance(module, MoesaicThresholdedLinear)
    }  # fmt: skip
    ends = {
        "llama": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        "phi3": ("mlp.gate_up_proj", "mlp.down_proj"),
        "opt": ("fc1", "fc2"),
    }[family]
    assert all(path.endswith(ends) for path in replaced)
    assert len(replaced) == LAYERS * len(ends)
    everywhere, _ = moesaic.convert(tiny_model(family), name, sparsity=0.5, calibration=WINDOWS)
    kinds = [isinstance(m, MoesaicThresholdedLinear) for m in everywhere.modules()]
    assert sum(kinds) > len(replaced)


def test_a_place_that_is_not_known_and_a_model_without_linear_layers_are_refused() -> None:
    with pytest.raises(MoesaicError, match="unknown where 'attention'"):
        load_method("teal", {"where": "attention"})
    with pytest.raises(MoesaicError, match="no linear layers"):
        moesaic.convert(tiny_model("gpt2"), "teal", sparsity=0.5, calibration=WINDOWS)


# --- FLAP --------------------------------------------------------------------------------------


def flap_of(ffn: DenseFFN, x_TD: torch.Tensor, kept: int) -> Any:
    method: Any = load_method("flap")
    sizes = Sizes(kept, 0, 0, 0, ffn.intermediate_size)
    return method.convert_ffn(ffn, inputs_of(x_TD), sizes, np.random.default_rng(0))


def test_the_bias_is_the_mean_of_what_was_pruned() -> None:
    """Hidden states are relu of the inputs: (1, 4, 2), (3, 4, 0)."""
    down_DF = torch.tensor([[1.0, 10.0, 1.0], [0.0, 2.0, -3.0], [0.0, 0.0, 0.0]])
    ffn = DenseFFN(torch.eye(3), down_DF, "relu")
    x_TD = torch.tensor([[1.0, 4.0, 2.0], [3.0, 4.0, -1.0]])
    # Variances 1, 0, 1; norms of the columns 1, 104, 10: the last is kept, though the
    # second adds most. Means of the others: 2 (1, 0) + 4 (10, 2).
    replacement = flap_of(ffn, x_TD, 1)
    torch.testing.assert_close(replacement.output_bias, torch.tensor([42.0, 8.0, 0.0]))
    expected = torch.tensor([[42.0 + 2, 8.0 - 6, 0.0], [42.0, 8.0, 0.0]])
    torch.testing.assert_close(replacement(x_TD), expected)


def test_on_average_nothing_is_lost_and_a_bias_of_the_family_stays() -> None:
    torch.manual_seed(0)
    ffn = DenseFFN(
        torch.randn(24, 12), torch.randn(12, 24), "silu", torch.randn(24, 12),
        down_bias_D=torch.randn(12),
    )  # fmt: skip
    x_TD = torch.randn(64, 12)
    dense_TD = ffn.output(ffn.hidden(x_TD))
    for kept in (6, 18):
        y_TD = flap_of(ffn, x_TD, kept)(x_TD)
        assert not torch.allclose(y_TD, dense_TD, atol=0.1)
        torch.testing.assert_close(y_TD.mean(0), dense_TD.mean(0), rtol=1e-4, atol=1e-4)
    whole = flap_of(ffn, x_TD, 24)
    torch.testing.assert_close(whole.output_bias, ffn.down_bias_D)
    torch.testing.assert_close(whole(x_TD), dense_TD, rtol=1e-5, atol=1e-5)


# --- the files ---------------------------------------------------------------------------------


def test_no_method_stands_on_another() -> None:
    """`references` does: its oracle is one of moesaic's experts."""
    shared = {"base", "contents", "expert_method", "largest_inputs", "load", "router_choice"}
    for path in METHODS.glob("*.py"):
        if path.stem in shared | {"references", "__init__"}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("moesaic.methods."):
                assert str(node.module).split(".")[2] in shared, path.name
