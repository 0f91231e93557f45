"""What happens after every optimiser step: biases move, the progress bar goes on."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from transformers import TrainerCallback

from moesaic.finetune.balance import Balancer


class EachStep(TrainerCallback):
    """Moves the biases after every optimiser step, and shows how far the run is."""

    def __init__(self, balancer: Balancer | None, progress: bool):
        self.balancer, self.wanted = balancer, progress
        self.bar: Progress | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.wanted and state.is_world_process_zero:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
            )
            self.bar = Progress(
                *columns,
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self.bar.start()
            self.task = self.bar.add_task("training", total=state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.balancer is not None:
            self.balancer.step()
        if self.bar is not None:
            self.bar.update(self.task, completed=state.global_step)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any
    ) -> None:
        if self.bar is not None and logs and "loss" in logs:
            self.bar.update(self.task, description=f"training, loss {logs['loss']:.4f}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.bar.stop()
