"""Losses against the dense model, on hand-worked numbers and on models that must agree."""

from __future__ import annotations

import math

import pytest
import torch

import moesaic
from moesaic.finetune.distill import Mix, Teacher, logits_kl, relative_error
from moesaic.finetune.options import Machine, Settings
from moesaic.finetune.train import train
from tests.families import CONTEXT, tiny_model, tokens


def test_kl_of_two_coins() -> None:
    """KL((1/2, 1/2) || (3/4, 1/4)) = ln 2 - ln 3 / 2 = 0.1438; a token that agrees adds 0."""
    teacher = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    student = torch.tensor([[math.log(3.0), 0.0], [6.0, 7.0]])
    found = logits_kl(student[None], teacher[None])
    assert float(found) == pytest.approx((math.log(2) - math.log(3) / 2) / 2 + 0, abs=1e-3)


def test_relative_error_is_a_mean_over_windows() -> None:
    target = torch.tensor([[[3.0], [4.0]], [[1.0], [0.0]]])
    y = torch.tensor([[[3.0], [-1.0]], [[0.5], [0.0]]])
    assert float(relative_error(y, target)) == pytest.approx((1 + 0.25) / 2)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma2"])
def test_a_student_that_skips_nothing_has_no_loss(family: str) -> None:
    """All experts active and no repair: the FFNs and the logits are the dense model's."""
    dense, ids = tiny_model(family), tokens(2, CONTEXT, seed=3)
    student, _ = moesaic.convert(tiny_model(family), "cmoe", "S2A6E8", tokens(4, CONTEXT))
    teacher = Teacher(dense, student, Mix(0, 1, 1))
    with torch.no_grad(), teacher.forward():
        logits = student(ids).logits
    losses = teacher.losses(ids, logits)
    assert float(losses["ffn"]) < 1e-9
    assert abs(float(losses["logits"])) < 1e-5
    pruned, _ = moesaic.convert(tiny_model(family), "cmoe", "S2A2E8", tokens(4, CONTEXT))
    teacher = Teacher(dense, pruned, Mix(0, 1, 1))
    with torch.no_grad(), teacher.forward():
        logits = pruned(ids).logits
    losses = teacher.losses(ids, logits)
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
