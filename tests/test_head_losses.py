"""Losses computed some tokens at a time, against all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moesaic
from moesaic.errors import MoesaicError
from moesaic.families.head import Head, check_head
from moesaic.finetune import head_losses as head_losses_module
from moesaic.finetune.distill import Losses
from moesaic.finetune.head_losses import IGNORED, Hidden, head_losses, next_tokens
from moesaic.finetune.lora import wrap
from moesaic.finetune.options import Mix
from tests import reference
from tests.families import CONTEXT, FAMILIES, tiny_model, tokens

IDS = tokens(3, CONTEXT, seed=5)
MASKED = IDS.clone()
MASKED[0, :40] = IGNORED
MASKED[1] = IGNORED


def test_a_token_is_followed_by_the_next_label() -> None:
    labels = torch.tensor([[3, 4, 5], [6, IGNORED, 8]])
    expected = torch.tensor([[4, 5, IGNORED], [IGNORED, 8, IGNORED]])
    assert torch.equal(next_tokens(labels), expected)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_layers_and_head_in_two_parts_are_the_model(family: str) -> None:
    model = tiny_model(family)
    check_head(model, IDS[0])
    head = Head(model)
    with torch.no_grad():
        hidden_BLD = head.hidden_states(IDS)
        found_CV = head.logits(hidden_BLD[1, 5:9])
        expected_BLV = model(input_ids=IDS).logits
    torch.testing.assert_close(found_CV, expected_BLV[1, 5:9], rtol=1e-5, atol=1e-5)
    assert "forward" not in head.decoder.__dict__


def test_a_head_that_cannot_be_told_apart_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    forward = type(model).forward

    def wilful(self: Any, input_ids: Any, **others: Any) -> Any:
        outputs = forward(self, input_ids, **others)
        outputs.logits = outputs.logits + input_ids[..., None]
        return outputs

    monkeypatch.setattr(type(model), "forward", wilful)
    with pytest.raises(MoesaicError, match="cannot be run apart from its layers"):
        check_head(model, IDS[0])
    monkeypatch.setattr(type(model), "get_decoder", lambda self: self)
    with pytest.raises(MoesaicError, match=r"LlamaForCausalLM cannot be run apart .*; take"):
        check_head(model, IDS[0])


@pytest.mark.parametrize("labels", [IDS, MASKED])
@pytest.mark.parametrize("mix", [Mix(0.5, 0.5, 3.0), Mix(1, 0, 0), Mix(0, 2, 0)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "granite", "cohere", "gpt2", "opt"])
def test_losses_and_gradients_are_those_of_all_logits_at_once(
    family: str, mix: Mix, labels: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LoRA on, tied heads (qwen2, gpt2, opt), softcapping (gemma2), scales (granite, cohere)."""
    compare(family, mix, labels, torch.float32, monkeypatch, 1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_same_in_bf16(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(family, Mix(0.5, 0.5, 3.0), MASKED, torch.bfloat16, monkeypatch, 3e-2)


@pytest.mark.parametrize("labels", [IDS, MASKED])
def test_without_a_teacher(labels: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    compare("qwen3", Mix(), labels, torch.float32, monkeypatch, 1e-5, teacher=False)


def compare(
    family: str,
    mix: Mix,
    labels: torch.Tensor,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    tolerance: float,
    teacher: bool = True,
) -> None:
    """Chunks of 7 tokens against the twin, on a converted model with LoRA weights that act."""
    monkeypatch.setattr(head_losses_module, "CHUNK_NUMBERS", 7 * 96)
    dense = tiny_model(family, seed=1).to(dtype) if teacher else None
    student, _ = moesaic.convert(
        tiny_model(family).to(dtype), "cmoe", "S2A3E8", tokens(4, CONTEXT, seed=1)
    )
    wrapped = wrap(student, 4, 8, freeze_router=False).eval()  # no dropout
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16)
    found = []
    for losses in (Losses(student, mix, dense), reference.Losses(student, mix, dense)):
        wrapped.zero_grad()
        with autocast:
            values = losses(input_ids=IDS, labels=labels)
        values["loss"].backward()
        gradients = {
            name: parameter.grad.clone()
            for name, parameter in wrapped.named_parameters()
            if parameter.grad is not None
        }
        found.append((values, gradients))
    (values, gradients), (expected_values, expected) = found
    assert values.keys() == expected_values.keys()
    for name, value in values.items():
        torch.testing.assert_close(
            value.detach(), expected_values[name].detach(), rtol=tolerance, atol=tolerance, msg=name
        )
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        scale = float(expected[name].norm())
        assert float((gradient - expected[name]).norm()) <= 10 * tolerance * scale + 1e-9, name
    assert sum(float(gradient.norm()) for gradient in gradients.values()) > 0


def test_a_loss_that_nothing_counts_for_is_zero() -> None:
    model = tiny_model("llama")
    head = Head(model)
    hidden = Hidden(head, head.hidden_states(IDS).detach().requires_grad_())
    losses = head_losses(hidden, None, torch.full_like(IDS, IGNORED), Mix())
    losses.weighted.backward()
    assert float(losses.weighted.detach()) == 0
    assert hidden.states.grad is not None
    assert float(hidden.states.grad.norm()) == 0
