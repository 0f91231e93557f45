"""A converted layer as a masked dense FFN, and the oracle, which only exists as one.

Shape suffixes: T tokens, D hidden_size, F neurons, R routed experts, M neurons of one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import moesaic
from moesaic.families import DenseFFN, find_ffns
from moesaic.parts.masked import MaskedBlock, masked_view
from moesaic.parts.routers import expert_energies, expert_grams, oracle
from tests import reference
from tests.families import CONTEXT, FAMILIES, tiny_model, tokens

WINDOWS = tokens(4, CONTEXT, seed=1)
# Biases everywhere, fused, without a gate and Conv1D, inlined, biases without a gate.
SOME = ["llama", "phi3", "gpt2", "opt", "gemma2"]


def converted(family: str, recipe: str, layout: str) -> tuple[Any, DenseFFN, Any]:
    """The block of layer 1, the dense FFN it came from, and the configuration."""
    ffn = find_ffns(tiny_model(family)).read(1)
    model, _ = moesaic.convert(tiny_model(family), recipe, layout, WINDOWS)
    path = model.config.moesaic["ffn"]["path"].format(1)
    return model.base_model.get_submodule(path), ffn, model.config


def check_view(family: str, recipe: str, layout: str) -> MaskedBlock:
    block, ffn, config = converted(family, recipe, layout)
    view = masked_view(block, ffn, config)
    x = torch.randn(3, 20, ffn.up_FD.shape[1])
    with torch.no_grad():
        expected = block(x)
    torch.testing.assert_close(view(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(view(x[0]), expected[0], rtol=1e-5, atol=1e-5)
    return view


@pytest.mark.parametrize("family", FAMILIES)
def test_the_view_computes_what_the_block_computes(family: str) -> None:
    view = check_view(family, "moesaic-dynamic", "S3A3E8")
    assert view.ffn.intermediate_size == 52  # without the padding
    assert view.ffn.down_bias_D is not None


@pytest.mark.parametrize("layout", ["S3A3E8", "S0A3E3", "S0A1E13", "S1A7E8"])
@pytest.mark.parametrize("recipe", ["moesaic", "moesaic-quadratic", "cmoe", "cmoe-code", "random"])
@pytest.mark.parametrize("family", SOME)
def test_under_every_router_and_layout(family: str, recipe: str, layout: str) -> None:
    check_view(family, recipe, layout)


@pytest.mark.parametrize("recipe", ["static", "static-repaired"])
@pytest.mark.parametrize("family", SOME)
def test_without_experts(family: str, recipe: str) -> None:
    view = check_view(family, recipe, "S3A3E8")
    assert view.choose is None
    assert view.ffn.intermediate_size == 40


def test_the_view_does_not_share_memory_that_a_mask_could_overwrite() -> None:
    block, ffn, config = converted("llama", "moesaic", "S0A3E8")
    before = {name: value.clone() for name, value in block.state_dict().items()}
    view, x = masked_view(block, ffn, config), torch.randn(9, 32)
    kept = x.clone()
    first = view(x)
    assert torch.equal(view(x), first)
    assert torch.equal(x, kept)
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())


# --- parts of an FFN ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", SOME)
def test_a_subset_is_the_ffn_of_these_neurons_in_this_order(family: str) -> None:
    ffn, x = find_ffns(tiny_model(family)).read(0), torch.randn(5, 32)
    index = torch.tensor([50, 3, 3, 17])
    part = ffn.subset(index)
    assert part.intermediate_size == 4
    torch.testing.assert_close(part.hidden(x), ffn.hidden(x)[:, index])
    rest = 0 if ffn.down_bias_D is None else ffn.down_bias_D
    expected = ffn.hidden(x)[:, index] @ ffn.down_DF[:, index].T + rest
    torch.testing.assert_close(part.output(part.hidden(x)), expected)


def test_all_neurons_in_another_order_are_the_same_ffn() -> None:
    ffn, x = find_ffns(tiny_model("llama")).read(0), torch.randn(5, 32)
    part = ffn.subset(torch.randperm(52))
    expected = ffn.output(ffn.hidden(x))
    torch.testing.assert_close(part.output(part.hidden(x)), expected, rtol=1e-5, atol=1e-5)


def test_a_masked_block_by_hand() -> None:
    """One shared neuron and two experts of two: h is x, every output vector its own axis."""
    ffn = DenseFFN(torch.eye(5), torch.eye(5), "linear", down_bias_D=torch.full((5,), 0.5))
    first = MaskedBlock(ffn, 1, 2, lambda x: torch.tensor([[True, False], [False, True]]))
    x = torch.arange(1.0, 11).view(2, 5)
    assert first(x).tolist() == [[1.5, 2.5, 3.5, 0.5, 0.5], [6.5, 0.5, 0.5, 9.5, 10.5]]
    assert MaskedBlock(ffn, 1, 2, None)(x).tolist() == (x + 0.5).tolist()


# --- the oracle --------------------------------------------------------------------------------


def experts_of(neurons: int, r: int) -> torch.Tensor:
    return torch.randperm(neurons)[: r * (neurons // r)].view(r, -1)


@pytest.mark.parametrize("r", [1, 3, 52])
def test_energies_are_squared_norms_of_the_experts_outputs(r: int) -> None:
    ffn, x = find_ffns(tiny_model("llama")).read(0), torch.randn(30, 32)
    experts_RM = experts_of(52, r)
    given = expert_energies(ffn.hidden(x), experts_RM, expert_grams(ffn, experts_RM))
    expected = reference.expert_energies(
        ffn.hidden(x).double().numpy(), ffn.down_DF.double().numpy(), experts_RM.numpy()
    )
    assert given.shape == (30, r)
    np.testing.assert_allclose(given.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_energies_that_cancel_are_not_negative() -> None:
    """Two neurons with opposite output vectors: nothing is left but rounding."""
    down_D = torch.randn(16)
    ffn = DenseFFN(torch.randn(2, 8), torch.stack([down_D, -down_D], dim=1), "linear")
    ffn = replace(ffn, up_FD=ffn.up_FD[[0, 0]] * 37.7)
    experts_RM = torch.tensor([[0, 1]])
    h_TF = ffn.hidden(torch.randn(200, 8))
    assert (expert_energies(h_TF, experts_RM, expert_grams(ffn, experts_RM)) >= 0).all()


@pytest.mark.parametrize("num_active", [1, 2, 4])
def test_the_oracle_runs_the_experts_of_largest_output(num_active: int) -> None:
    ffn, x = find_ffns(tiny_model("llama")).read(0), torch.randn(30, 32)
    experts_RM = experts_of(52, 4)
    energy_TR = reference.expert_energies(
        ffn.hidden(x).double().numpy(), ffn.down_DF.double().numpy(), experts_RM.numpy()
    )
    chosen = oracle(ffn, experts_RM, num_active)(x)
    assert chosen.dtype == torch.bool
    for chosen_R, energy_R in zip(chosen, energy_TR, strict=True):
        best = sorted(range(4), key=lambda j: -energy_R[j])[:num_active]
        assert chosen_R.nonzero()[:, 0].tolist() == sorted(best)
