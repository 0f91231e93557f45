"""Defaults that follow from the length of a run and from the width of the model.

The paper trains models of hidden size 4,096 by 128 steps of 16 windows, without a
teacher, at a rate of 5.95e-5. That rate hardly moves a small model in a few steps.
What is below was measured on models of hidden size 128 to 576 (docs/log.md, 2026-11-22
and 2026-11-24).
"""

from __future__ import annotations

import math

PAPER_RATE = 5.95e-5
PAPER_BATCH = 16
PAPER_STEPS = 128
PAPER_HIDDEN_SIZE = 4096

LEAST_STEPS = 48  # fewer, and Adam has hardly begun
TEACHER_FACTOR = 1.5  # its targets are less noisy than the next token alone
LOWEST_RATE = 1e-5
HIGHEST_RATE = (
    1e-3  # 2e-3 is worse for the demo model, 6e-3 ruins babyllama-105
)


def usual_batch_size(windows: int, processes: int = 1, epochs: int = 1) -> int:
    """Windows of one optimiser step: 16, or fewer where that leaves under 48 steps.

    A multiple of the number of processes, which share a step's windows. The windows that
    no whole step is left for are the same in all epochs. With several the size is the
    one that leaves out the fewest, if it need not be less than half for that.
    """
    allowed = [
        size
        for size in range(processes, PAPER_BATCH + 1, processes)
        if windows // size * epochs >= LEAST_STEPS
    ]
    if not allowed:
        return processes
    largest = allowed[-1]
    if epochs == 1:
        return largest
    of_half = [size for size in allowed if 2 * size >= largest]
    return max(of_half, key=lambda size: (windows // size * size, size))


def usual_rate(steps: int, hidden_size: int, has_teacher: bool) -> float:
    """The learning rate of LoRA weights and routers for a run of so many steps.

    The paper's for the paper's run. Higher for fewer steps, which have to go further,
    for narrow models, and with a teacher.
    """
    for_steps = math.cbrt(PAPER_STEPS / steps)
    for_width = PAPER_HIDDEN_SIZE / hidden_size
    rate = PAPER_RATE * for_steps * for_width
    if has_teacher:
        rate *= TEACHER_FACTOR
    rate = max(rate, LOWEST_RATE)
    return min(rate, HIGHEST_RATE)
