"""Losses against the dense model, on hand-worked numbers and on models that must agree."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import moesaic
from moesaic.finetune.distill import Losses, relative_error
from moesaic.finetune.head_losses import Hidden, head_losses
from moesaic.finetune.options import Machine, Mix, Settings
from moesaic.finetune.train import train
from tests.families import CONTEXT, tiny_model, tokens


class Words:
    """A head without weights: hidden states are logits."""

    vocabulary = 2

    def logits(self, hidden_CD: torch.Tensor) -> torch.Tensor:
        return hidden_CD


def test_losses_of_two_coins() -> None:
    """KL((1/2, 1/2) || (3/4, 1/4)) = ln 2 - ln 3 / 2 = 0.1438; a token that agrees adds 0.

    The student gives the next labels, 0 and 1, the probabilities 3/4 and 1 / (1 + 1/e).
    """
    teacher = torch.tensor([[[0.0, 0.0], [1.0, 2.0], [9.0, 0.0]]])
    student = torch.tensor([[[math.log(3.0), 0.0], [6.0, 7.0], [0.0, 9.0]]])
    labels = torch.tensor([[1, 0, 1]])
    head: Any = Words()
    found = head_losses(Hidden(head, student), Hidden(head, teacher), labels, Mix(0.5, 2))
    kl = (math.log(2) - math.log(3) / 2) / 2
    lm = (math.log(4 / 3) + math.log(1 + math.exp(-1))) / 2
    assert float(found.logits) == pytest.approx(kl)
    assert float(found.lm) == pytest.approx(lm)
    assert float(found.weighted) == pytest.approx(0.5 * lm + 2 * kl)


def test_relative_error_is_a_mean_over_windows() -> None:
    target = torch.tensor([[[3.0], [4.0]], [[1.0], [0.0]]])
    y = torch.tensor([[[3.0], [-1.0]], [[0.5], [0.0]]])
    assert float(relative_error(y, target)) == pytest.approx((1 + 0.25) / 2)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma2"])
def test_a_student_that_skips_nothing_has_no_loss(family: str) -> None:
    """All experts active and no repair: the FFNs and the logits are the dense model's."""
    dense, ids = tiny_model(family), tokens(2, CONTEXT, seed=3)
    student, _ = moesaic.convert(tiny_model(family), "cmoe", "S2A6E8", tokens(4, CONTEXT))
    with torch.no_grad():
        losses = Losses(student, Mix(0, 1, 1), dense)(ids, ids)
    assert float(losses["ffn"]) < 1e-9
    assert abs(float(losses["logits"])) < 1e-5
    pruned, _ = moesaic.convert(tiny_model(family), "cmoe", "S2A2E8", tokens(4, CONTEXT))
    with torch.no_grad():
        losses = Losses(pruned, Mix(0, 1, 1), dense)(ids, ids)
    assert float(losses["ffn"]) > 0.01
    assert float(losses["logits"]) > 0.001


def test_each_loss_falls_when_it_is_trained_on() -> None:
    for name, mix in (("logits", Mix(0, 1, 0)), ("ffn", Mix(0, 0, 1))):
        student, _ = moesaic.convert(
            tiny_model("qwen3"), "cmoe", "S2A2E8", tokens(4, CONTEXT, seed=1)
        )
        settings = Settings(
            samples=64, sequence_length=CONTEXT, batch_size=4, lora_lr=3e-3, mix=mix, epochs=3,
            balance_rate=0,
        )  # fmt: skip
        done = train(
            student, tokens(64, CONTEXT, seed=2), settings, Machine(use_cpu=True),
            tiny_model("qwen3"),
        )  # fmt: skip
        assert set(done.history[0]) >= {"lm", name}
        assert done.history[-1][name] < 0.97 * done.history[0][name]
