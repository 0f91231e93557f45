"""SLEB takes out what is missed least, and nothing where nothing is to go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moesaic
from moesaic.errors import MoesaicError
from moesaic.methods import sleb as sleb_module
from moesaic.parts.blocks import keep_blocks, losses_without
from tests.families import CONTEXT, tiny_model, tokens
from tests.mixtures import tiny_mixture
from tests.reference import loss_without

WINDOWS = tokens(6, CONTEXT, seed=1)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(2, 48, seed=2), use_cache=False).logits


def with_idle_block(layer: int) -> Any:
    """A model one of whose blocks adds nothing."""
    model = tiny_model("qwen3")
    block = model.model.layers[layer]
    block.self_attn.o_proj.weight.data.zero_()
    block.mlp.down_proj.weight.data.zero_()
    return model


@pytest.mark.parametrize("idle", [0, 1, 2])
def test_a_block_that_adds_nothing_is_not_missed(idle: int) -> None:
    model = with_idle_block(idle)
    depth = len(model.model.layers)
    kept = [block for block in range(depth) if block != idle]
    expected = logits(model)
    with torch.no_grad():
        loss = float(model(input_ids=WINDOWS, labels=WINDOWS, use_cache=False).loss)
    losses = losses_without(model, range(depth), WINDOWS)
    assert losses[idle] == pytest.approx(loss, rel=1e-6)
    assert len(model.model.layers) == depth
    assert model.config.num_hidden_layers == depth
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)
    keep_blocks(model, kept)
    assert len(model.model.layers) == depth - 1 == model.config.num_hidden_layers
    torch.testing.assert_close(logits(model), expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "qwen2"])
@pytest.mark.parametrize("kept", [[0, 1, 2], [0, 2], [1]])
def test_losses_are_those_of_whole_passes(family: str, kept: list[int]) -> None:
    """What enters the block left out is remembered: the slow twin starts from the tokens."""
    model = tiny_model(family)
    losses = losses_without(model, kept, WINDOWS)
    for block, loss in zip(kept, losses, strict=True):
        others = [layer for layer in kept if layer != block]
        assert loss == pytest.approx(loss_without(tiny_model(family), others, WINDOWS), rel=1e-6)


def test_the_greedy_choice_is_the_best_single_block() -> None:
    """Against every block taken out by hand."""
    dense = tiny_model("qwen3")
    depth = len(dense.model.layers)
    losses = []
    for block in range(depth):
        model = tiny_model("qwen3")
        del model.model.layers[block]
        for place, layer in enumerate(model.model.layers):
            layer.self_attn.layer_idx = place
        model.config.num_hidden_layers = depth - 1
        with torch.no_grad():
            loss = model(input_ids=WINDOWS, labels=WINDOWS, use_cache=False).loss
        losses.append(float(loss))
    best = losses.index(min(losses))
    smaller, _ = moesaic.convert(dense, "sleb", calibration=WINDOWS, sparsity=1 / depth)
    kept = tiny_model("qwen3").model.layers
    left = [kept[block] for block in range(depth) if block != best]
    for ours, theirs in zip(smaller.model.layers, left, strict=True):
        assert torch.equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight)


def test_all_blocks_gone_is_refused() -> None:
    with pytest.raises(MoesaicError, match="leaves none of"):
        moesaic.convert(tiny_model("qwen3"), "sleb", calibration=WINDOWS, sparsity=0.99)


def test_no_block_gone_is_refused() -> None:
    """Else a table would call the dense model sparse."""
    with pytest.raises(MoesaicError, match="takes out none of"):
        moesaic.convert(tiny_model("qwen3"), "sleb", calibration=WINDOWS, sparsity=0.01)


def test_blocks_of_several_kinds_are_refused_before_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which one stays would change the work, and what the configuration has to say."""
    model = tiny_mixture("qwen3_moe", mlp_only_layers=[0])
    monkeypatch.setattr(sleb_module, "losses_without", None)
    with pytest.raises(MoesaicError, match="block 1 is of another kind than block 0"):
        moesaic.convert(model, "sleb", calibration=WINDOWS, sparsity=0.34)


@pytest.mark.parametrize("method", ["sleb", "slicegpt"])
def test_a_model_that_puts_out_infinity_is_refused(method: str) -> None:
    model = tiny_model("llama").half()
    model.model.layers[1].mlp.up_proj.weight.data *= 3e4
    with pytest.raises(MoesaicError, match="layer 1 puts out NaN or infinity"):
        moesaic.convert(model, method, calibration=WINDOWS, sparsity=0.5)


def test_a_depth_by_another_name_is_refused() -> None:
    with pytest.raises(MoesaicError, match="gpt2 model has no num_hidden_layers"):
        moesaic.convert(tiny_model("gpt2"), "sleb", calibration=WINDOWS, sparsity=0.5)
