"""Losses against the dense model: on logits, and FFN by FFN.

Shape suffixes: B windows, L tokens of one, T tokens, D hidden_size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from moesaic.families import find_ffns
from moesaic.finetune.lora import blocks_of


@dataclass(frozen=True)
class Mix:
    """How much each loss counts.

    They are of the next token, the KL of the logits, and the FFNs' relative error.
    """

    lm: float = 1.0
    logits: float = 0.0
    ffn: float = 0.0


def logits_kl(student_BLV: Tensor, teacher_BLV: Tensor) -> Tensor:
    """KL(teacher || student), the mean over tokens, in nats."""
    student_TV = student_BLV.flatten(0, -2).float()
    teacher_TV = teacher_BLV.flatten(0, -2).float()
    student_TV = log_softmax(student_TV, dim=-1)
    teacher_TV = log_softmax(teacher_TV, dim=-1)
    return kl_div(
        student_TV, teacher_TV, reduction="batchmean", log_target=True
    )


def relative_error(y_BLD: Tensor, target_BLD: Tensor) -> Tensor:
    """norm(y - target)^2 / norm(target)^2 of a window; the mean over windows.

    The paper's eq. 2, relative. Window by window, so that the mean is the same in
    whatever micro-batches they come.
    """
    y_BLD = y_BLD.float()
    target_BLD = target_BLD.float()
    difference_BLD = y_BLD - target_BLD
    error_B = difference_BLD.square().sum((1, 2))
    energy_B = target_BLD.square().sum((1, 2))
    relative_B = error_B / energy_B.clamp(min=1e-20)
    return relative_B.mean()


class Teacher:
    """The dense model, frozen, and its losses for the student's tokens.

    An FFN is compared with the dense model's own on the same token, each in its own
    stream. (Against the dense FFN on the student's input attention would learn inputs
    that are easy to imitate: docs/log.md.)
    """

    def __init__(self, dense: Any, student: Any, mix: Mix):
        self.dense = dense.eval().requires_grad_(False)
        self.mix = mix
        self.outputs: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.recording = False
        if mix.ffn:
            self._record_ffns(student)

    def _record_ffns(self, student: Any) -> None:
        """Hooks that keep what each FFN, the student's and the dense one, puts out."""
        record_output = self._recorder(self.outputs)
        for block in blocks_of(student):
            block.register_forward_hook(record_output)
        record_target = self._recorder(self.targets)
        ffns = find_ffns(self.dense)
        for layer in student.config.moesaic.layers:
            module = ffns.last_module(layer)
            module.register_forward_hook(record_target)

    def _recorder(self, outputs: list[Tensor]) -> Any:
        def record(module: Any, args: Any, output: Tensor) -> None:
            if self.recording:
                outputs.append(output)

        return record

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the student's forward pass, before `losses`.

        A pass made again for gradient checkpointing is outside, and is not recorded.
        """
        self.outputs.clear()
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    def losses(self, ids: Tensor, logits: Tensor) -> dict[str, Tensor]:
        """`logits` and `ffn`, those that count, of the forward pass just made."""
        teacher_logits = self._dense_logits(ids)
        losses = {}
        if self.mix.logits:
            losses["logits"] = logits_kl(logits, teacher_logits)
        if self.mix.ffn:
            losses["ffn"] = self._ffn_error(ids)
        self.outputs.clear()
        self.targets.clear()
        return losses

    @torch.no_grad()
    def _dense_logits(self, ids: Tensor) -> Any:
        self.targets.clear()
        self.recording = True
        outputs = self.dense(input_ids=ids, use_cache=False)
        self.recording = False
        return outputs.logits

    def _ffn_error(self, ids: Tensor) -> Tensor:
        """The relative error, the mean over layers."""
        width = self.targets[0].shape[-1]
        shape = (*ids.shape, width)  # some families flatten windows
        errors = []
        for output, target in zip(self.outputs, self.targets, strict=True):
            y_BLD = output.view(shape)
            target_BLD = target.view(shape)
            error = relative_error(y_BLD, target_BLD)
            errors.append(error)
        return torch.stack(errors).mean()
