"""How long training will take, by one forward pass over a little of the text.

Shape suffixes: N windows, L tokens of one.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from moesaic.finetune.masked import masked
from moesaic.finetune.prepare import TrainingInput
from moesaic.finetune.train import computes_again

PROBE_TOKENS = 1024
STUDENT_PASSES = 3.0  # its forward pass, and back as long as twice that
TEACHER_PASSES = 1.0


def training_seconds(
    student: Any, inputs: TrainingInput, processes: int
) -> float:
    """Of all steps; measuring and saving come on top. Costs two forward passes."""
    settings = inputs.settings
    probe = max(1, PROBE_TOKENS // settings.sequence_length)
    windows_NL = inputs.windows_NL[:probe]
    with masked(student):
        _seconds(student, windows_NL)  # the first pass takes longer
        seconds = _seconds(student, windows_NL)
    trained = STUDENT_PASSES
    if computes_again(settings, inputs.options.machine()):
        trained += 1
    passes = trained
    if inputs.teacher is not None:
        passes += TEACHER_PASSES
    if inputs.options.tune_teacher:
        passes += trained
    of_a_token = seconds / windows_NL.numel()
    tokens = inputs.windows_NL.numel() * settings.epochs
    return passes * of_a_token * tokens / processes


@torch.no_grad()
def _seconds(model: Any, windows_NL: Tensor) -> float:
    """Of one forward pass."""
    device = model.get_input_embeddings().weight.device
    started = time.perf_counter()
    logits = model(input_ids=windows_NL.to(device), use_cache=False).logits
    logits[0, 0, 0].item()  # waits for a GPU
    return time.perf_counter() - started
