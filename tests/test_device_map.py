"""Models that accelerate has spread over devices, converted in memory.

One processor stands for two devices here, under two names: hooks are accelerate's, and
weights do not move.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import dispatch_model

import moesaic
from moesaic.errors import MoesaicError
from moesaic.memory import gathered
from tests.families import CONTEXT, tiny_model, tokens

TIED = "gemma2"  # its head is its embedding
PLACES: dict[str, str | int | torch.device] = {
    "model.embed_tokens": "cpu:0",
    "model.layers.0": "cpu:0",
    "model.layers.1": "cpu:1",
    "model.layers.2": "cpu:1",
    "model.norm": "cpu:1",
    "model.rotary_emb": "cpu:1",
    "lm_head": "cpu:1",
}


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(*args: object, **kwargs: object) -> None:
        pass

    monkeypatch.setattr("accelerate.hooks.set_module_tensor_to_device", leave)


def spread_model(family: str) -> Any:
    model = tiny_model(family)
    if model.config.tie_word_embeddings:  # each of two devices would hold one
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    return dispatch_model(model, PLACES, skip_keys=model._skip_keys_device_placement)


def hooked_parts(model: Any) -> list[str]:
    return [name for name, part in model.named_modules() if hasattr(part, "_hf_hook")]


@pytest.mark.parametrize(
    ("family", "method"), [("qwen3", "moesaic"), ("qwen3", "sleb"), ("gemma2", "static")]
)
def test_a_spread_model_converts_as_any_other_and_is_spread_again(family: str, method: str) -> None:
    calibration = tokens(8, CONTEXT)
    whole = tiny_model(family)
    spread = spread_model(family)
    for model in (whole, spread):
        moesaic.convert(model, method, None, calibration, sparsity=0.25)
    left = dict(spread.named_modules())
    assert spread.hf_device_map == {k: v for k, v in PLACES.items() if k in left}
    assert set(hooked_parts(spread)) >= spread.hf_device_map.keys()
    weights = whole.state_dict()
    assert spread.state_dict().keys() == weights.keys()
    for name, weight in spread.state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=0)
    ids = tokens(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(spread(ids).logits, whole(ids).logits, rtol=0, atol=0)


def test_a_spread_model_is_on_one_device_while_it_is_converted() -> None:
    """No hook of accelerate's may take inputs elsewhere meanwhile."""
    model = spread_model(TIED)
    with gathered(model):
        assert hooked_parts(model) == []
        assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "model.layers.1" in hooked_parts(model)


def test_a_spread_model_is_spread_again_after_an_error() -> None:
    model = spread_model(TIED)
    with pytest.raises(MoesaicError, match="layout"):
        moesaic.convert(model, "static", "S2A300E8", tokens(8, CONTEXT))
    assert "model.layers.1" in hooked_parts(model)
