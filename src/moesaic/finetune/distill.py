"""Losses against the dense model: on logits, and FFN by FFN.

Shape suffixes: B windows, L tokens of one, T tokens, D hidden_size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import kl_div, log_softmax

from moesaic.families import find_ffns
from moesaic.finetune.lora import blocks_of


@dataclass(frozen=True)
class Mix:
    """How much each loss counts: next token, KL of the logits, relative error of the FFNs."""

    lm: float = 1.0
    logits: float = 0.0
    ffn: float = 0.0


def logits_kl(student_TV: torch.Tensor, teacher_TV: torch.Tensor) -> torch.Tensor:
    """KL(teacher || student), the mean over tokens, in nats."""
    student_TV, teacher_TV = student_TV.flatten(0, -2), teacher_TV.flatten(0, -2)
    student_TV = log_softmax(student_TV.float(), dim=-1)
    teacher_TV = log_softmax(teacher_TV.float(), dim=-1)
    return kl_div(student_TV, teacher_TV, reduction="batchmean", log_target=True)


def relative_error(y_BLD: torch.Tensor, target_BLD: torch.Tensor) -> torch.Tensor:
    """norm(y - target)^2 / norm(target)^2 of a window (paper, eq. 2, relative); the windows' mean.

    Window by window, so that the mean is the same in whatever micro-batches they come.
    """
    y_BLD, target_BLD = y_BLD.float(), target_BLD.float()
    error_B = (y_BLD - target_BLD).square().sum((1, 2))
    return (error_B / target_BLD.square().sum((1, 2)).clamp(min=1e-20)).mean()


class Teacher:
    """The dense model, frozen, and what it says to the student's tokens.

    An FFN is compared with the dense model's own on the same token, each in its own stream.
    (Against the dense FFN on the student's input attention would learn inputs that are easy to
    imitate: docs/log.md.)
    """

    def __init__(self, dense: Any, student: Any, mix: Mix):
        self.dense, self.mix = dense.eval().requires_grad_(False), mix
        self.outputs: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []
        self.watching = False
        if mix.ffn:
            for block in blocks_of(student):
                block.register_forward_hook(self._keep(self.outputs))
            ffns = find_ffns(dense)
            for layer in student.config.moesaic.layers:
                ffns.last_module(layer).register_forward_hook(self._keep(self.targets))

    def _keep(self, kept: list[torch.Tensor]) -> Any:
        def keep(module: Any, args: Any, output: torch.Tensor) -> None:
            if self.watching:
                kept.append(output)

        return keep

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the student's forward pass, before `losses`; recomputed ones are not kept."""
        self.outputs.clear()
        self.watching = True
        try:
            yield
        finally:
            self.watching = False

    def losses(
        self, ids: torch.Tensor, logits: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """`logits` and `ffn`, those that count, of the forward pass just made."""
        found = {}
        with torch.no_grad():
            self.targets.clear()
            self.watching = True
            expected = self.dense(input_ids=ids, use_cache=False).logits
            self.watching = False
        if self.mix.logits:
            found["logits"] = logits_kl(logits, expected)
        if self.mix.ffn:
            shape = (
                *ids.shape,
                self.targets[0].shape[-1],
            )  # some families flatten windows
            errors = [
                relative_error(y.view(shape), target.view(shape))
                for y, target in zip(self.outputs, self.targets, strict=True)
            ]
            found["ffn"] = torch.stack(errors).mean()
        self.outputs.clear()
        self.targets.clear()
        return found
