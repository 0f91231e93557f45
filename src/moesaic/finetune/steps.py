"""What happens after every optimiser step: biases move, and the progress is told."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from moesaic.finetune.balance import Balancer
from moesaic.progress import Ticker


class EachStep(TrainerCallback):
    """Moves the biases after every optimiser step, and shows how far the run is.

    Progress is counted in windows, since a step may take minutes.
    """

    def __init__(self, balancer: Balancer | None, progress: bool):
        self.balancer = balancer
        self.wanted = progress
        self.ticker: Ticker | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **_: Any
    ) -> None:
        # Else a resumed run keeps the interval that it was started with.
        state.save_steps = args.save_steps
        step = _windows_at_once(args) * args.gradient_accumulation_steps
        shown_here = self.wanted and state.is_world_process_zero
        self.ticker = Ticker(
            "training, windows",
            state.max_steps * step,
            done=state.global_step * step,
            enabled=shown_here,
        )

    def on_substep_end(
        self, args: Any, state: Any, control: Any, **_: Any
    ) -> None:
        """After each micro-batch of a step but the last."""
        if self.ticker is not None:
            self.ticker.advance(_windows_at_once(args))

    def on_step_end(
        self, args: Any, state: Any, control: Any, **_: Any
    ) -> None:
        if self.balancer is not None:
            self.balancer.step()
        if self.ticker is not None:
            self.ticker.advance(_windows_at_once(args))

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any
    ) -> None:
        if self.ticker is not None and logs and "loss" in logs:
            self.ticker.describe(f"training, loss {logs['loss']:.4f}, windows")

    def on_train_end(
        self, args: Any, state: Any, control: Any, **_: Any
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the bar; again does nothing."""
        if self.ticker is not None:
            self.ticker.stop()
        self.ticker = None


def _windows_at_once(args: Any) -> int:
    """Windows of a micro-batch, over all processes."""
    windows: int = args.per_device_train_batch_size * args.world_size
    return windows
