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

from moesaic.adapters import find_ffns
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

    Its FFNs are applied to the student's own FFN inputs: what a block is to imitate is its own
    FFN, on what really reaches it, as in the conversion.
    """

    def __init__(self, dense: Any, student: Any, mix: Mix):
        self.dense, self.mix = dense.eval().requires_grad_(False), mix
        self.found = find_ffns(dense)
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.watching = False
        for block in blocks_of(student):
            block.register_forward_hook(self._keep)

    def _keep(self, block: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        if self.watching:
            self.seen.append((args[0].detach(), output))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the student's forward pass, before `losses`."""
        self.seen, self.watching = [], self.mix.ffn != 0
        try:
            yield
        finally:
            self.watching = False

    def losses(self, ids: torch.Tensor, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """`logits` and `ffn`, those that count, of the forward pass just made."""
        found = {}
        if self.mix.logits:
            with torch.no_grad():
                expected = self.dense(input_ids=ids, use_cache=False).logits
            found["logits"] = logits_kl(logits, expected)
        if self.mix.ffn:
            errors = []
            for layer, (x, y) in enumerate(self.seen):
                with torch.no_grad():
                    ffn = self.found.read(layer)  # views, where the weights are now
                    target = ffn.output(ffn.hidden(x.to(ffn.up_FD.dtype)))
                windows = (len(ids), -1, y.shape[-1])  # some families flatten them
                errors.append(relative_error(y.view(windows), target.view(windows)))
            found["ffn"] = torch.stack(errors).mean()
        self.seen = []
        return found
