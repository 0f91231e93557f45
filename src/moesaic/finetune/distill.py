"""What is minimised: losses on the text, and against the dense model.

The dense model's losses are on logits, and FFN by FFN.

Shape suffixes: B windows, L tokens of one, D hidden_size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moesaic.families import find_ffns
from moesaic.families.head import Head
from moesaic.finetune.head_losses import Hidden, head_losses
from moesaic.finetune.lora import blocks_of
from moesaic.finetune.options import Mix


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


class Losses:
    """The losses of a student for some windows, in place of its logits.

    It is called as the student's own forward would be, so that what is wrapped around
    a model in training (several processes, shards, mixed precision) is around the
    losses too. An FFN is compared with the dense model's own on the same token, each in
    its own stream. (Against the dense FFN on the student's input attention would learn
    inputs that are easy to imitate: docs/log.md.)
    """

    def __init__(self, student: Any, mix: Mix, dense: Any = None):
        self.student = student
        self.head = Head(student)
        self.mix = mix
        self.teacher: Head | None = None
        self.imitated: list[Any] = []
        if dense is not None:
            self.teacher = Head(dense.eval().requires_grad_(False))
        if mix.ffn:
            ffns = find_ffns(dense)
            layers = student.config.moesaic.layers
            self.imitated = [ffns.last_module(layer) for layer in layers]

    def __call__(
        self, input_ids: Tensor, labels: Tensor, **_: Any
    ) -> dict[str, Tensor]:
        """`loss`, which has a gradient, and its parts `lm`, `logits` and `ffn`.

        Only those that count, but always `lm`.
        """
        teacher, targets = self._imitated(input_ids)
        with self._compared(targets, len(input_ids)) as errors:
            hidden_BLD = self.head.hidden_states(input_ids)
        student = Hidden(self.head, hidden_BLD)
        on_head = head_losses(student, teacher, labels, self.mix)
        losses = {"loss": on_head.weighted, "lm": on_head.lm}
        if self.mix.logits:
            losses["logits"] = on_head.logits
        if self.mix.ffn:
            error = torch.stack(errors).mean()
            losses["loss"] = losses["loss"] + self.mix.ffn * error
            losses["ffn"] = error.detach()
        return losses

    @torch.no_grad()
    def _imitated(self, ids_BL: Tensor) -> tuple[Hidden | None, list[Tensor]]:
        """The dense model's last hidden states, and what its FFNs put out."""
        if self.teacher is None:
            return None, []
        targets: list[Tensor] = []

        def keep(module: Any, args: Any, output: Tensor) -> None:
            targets.append(output)

        with hooked(self.imitated, keep):
            hidden_BLD = self.teacher.hidden_states(ids_BL)
        return Hidden(self.teacher, hidden_BLD), targets

    @contextmanager
    def _compared(
        self, targets: list[Tensor], windows: int
    ) -> Iterator[list[Tensor]]:
        """Every FFN's error against the first target left, as soon as it is known.

        Neither the output nor the target is needed then.
        """
        errors: list[Tensor] = []

        def compare(module: Any, args: Any, output: Tensor) -> None:
            target = targets.pop(0)
            # Some families flatten windows.
            shape = (windows, -1, output.shape[-1])
            # Kept as it is: gradient checkpointing would look for it when it calls the
            # block again, without this hook.
            with saved_tensors_hooks(_as_it_is, _as_it_is):
                error = relative_error(output.view(shape), target.view(shape))
            errors.append(error)

        blocks = blocks_of(self.student) if self.mix.ffn else []
        with hooked(blocks, compare):
            yield errors


@contextmanager
def hooked(modules: Iterable[Any], hook: Any) -> Iterator[None]:
    """Calls hook(module, args, output) for a while.

    Gradient checkpointing calls the modules again later, which does not count.
    """
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
