"""The training loop: transformers' Trainer with our losses, optimizer and balance.

Shape suffixes: N windows, L tokens of one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, set_seed

from moesaic.families.head import check_head, replaced_forward
from moesaic.finetune.balance import Balancer, Loads, measure_loads
from moesaic.finetune.distill import Losses
from moesaic.finetune.lora import (
    NAME,
    freeze,
    parameter_groups,
    routers_of,
    trained_weights,
    wrap,
)
from moesaic.finetune.masked import masked
from moesaic.finetune.options import Machine, Settings
from moesaic.finetune.steps import EachStep
from moesaic.output.draft import UnfinishedError

# Training tokens on which loads, gates, thresholds and the bias's bound are measured.
LOAD_TOKENS = 8192
# Tokens at once, unless said. On a CPU more are no faster, and take more memory.
GPU_TOKENS = 4096
CPU_TOKENS = 512
CHECKPOINTS_KEPT = 2
# A new one is written before one goes.
CHECKPOINTS_AT_ONCE = CHECKPOINTS_KEPT + 1
WARMUP_SHARE = 20  # one step in so many
LOGGED_STEPS = 256
CHECKPOINTS = 10  # of a run


@dataclass
class Trained:
    """A model after training, still wrapped, with what was logged and its loads.

    `sharded` is the folder of the adapter that several processes gathered, else None.
    `weights` counts what was trained.
    """

    model: Any
    history: list[dict[str, float]]
    loads_before: Loads | None
    sharded: Path | None = None
    loads_after: Loads | None = None
    weights: int = 0


def first_windows(windows_NL: Tensor) -> Tensor:
    """The training windows of the first LOAD_TOKENS tokens; one at least."""
    count = LOAD_TOKENS // windows_NL.shape[1]
    return windows_NL[: max(1, count)]


def train(
    model: Any,
    windows_NL: Tensor,
    settings: Settings,
    machine: Machine,
    dense: Any = None,
    *,
    folder: Path | None = None,
    resume: bool = False,
) -> Trained:
    """Trains LoRA weights, routers and expert_scale around a model in memory.

    `dense` is the teacher, if there is one. A dense model can be trained as well: its
    FFNs get LoRA weights like any other module, which makes it the fair reference.
    `folder` gets checkpoints; with `resume` the last whole one in it is continued.
    Raises UnfinishedError where the loss stops being finite.
    """
    set_seed(settings.seed)
    model.config.use_cache = False
    check_head(model, windows_NL[0])
    # Measured before wrapping: the balance keeps the biases near where they were.
    routers = routers_of(model)
    centre = [router.selection_bias.clone() for router in routers]
    loads = measure_loads(model, first_windows(windows_NL))
    wrapped = wrap(model, settings.rank, settings.alpha, settings.freeze_router)
    weights = trained_weights(wrapped)
    balancer = None
    if loads is not None and settings.balance_rate:
        balancer = Balancer(
            wrapped, settings.balance_rate, centre, loads.spread_L
        )
    losses = Losses(model, settings.mix, dense)
    rows = []
    for window_L in windows_NL:
        row = {"input_ids": window_L, "labels": window_L}
        rows.append(row)
    checkpoint = None
    if resume and folder is not None:
        checkpoint = last_checkpoint(folder)
    path = None if checkpoint is None else str(checkpoint)
    with _trainers_folder(folder) as place:
        trainer = RecoveryTrainer(
            model=wrapped,
            args=_arguments(model, settings, machine, folder, place),
            train_dataset=rows,
            settings=settings,
            balancer=balancer,
            teacher=dense,
            progress=machine.progress,
        )
        with (
            masked(wrapped),
            replaced_forward(model, losses),
            without_dropout(wrapped),
        ):
            trainer.train_to_the_end(path)
    log = trainer.state.log_history
    history = [line for line in log if "loss" in line]
    sharded = _gathered_adapter(trainer, folder)
    unwrapped = trainer.accelerator.unwrap_model(trainer.model)
    return Trained(unwrapped, history, loads, sharded, weights=weights)


@contextmanager
def without_dropout(model: Any) -> Iterator[None]:
    """For a while nothing is dropped: a teacher drops nothing, and noise is not imitated.

    Families keep their rates in modules of torch's or as numbers of their own.
    """
    rates = []
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = "drop" in name or isinstance(module, nn.Dropout)
            if is_rate and isinstance(value, float):
                rates.append((module, name, value))
    for module, name, _ in rates:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in rates:
            setattr(module, name, value)


@contextmanager
def _trainers_folder(folder: Path | None) -> Iterator[str]:
    """Where Trainer may write. It makes a folder even where it saves nothing."""
    if folder is not None:
        yield str(folder)
        return
    with tempfile.TemporaryDirectory() as empty:
        yield empty


def _gathered_adapter(trainer: Trainer, folder: Path | None) -> Path | None:
    """Writes the adapter where its weights lie in shards; None where they do not."""
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if not is_sharded or folder is None:
        return None
    adapter = folder / "trained"
    trainer.save_model(str(adapter))
    return adapter


def gather(trained: Trained, model: Any, settings: Settings) -> None:
    """After sharded training: puts the trained weights around a model loaded anew."""
    wrapped = wrap(model, settings.rank, settings.alpha, settings.freeze_router)
    wrapped.load_adapter(str(trained.sharded), NAME)
    trained.model = wrapped


def _arguments(
    model: Any,
    settings: Settings,
    machine: Machine,
    folder: Path | None,
    place: str,
) -> TrainingArguments:
    """The Trainer's arguments for a run; checkpoints only with a `folder`."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    share = settings.batch_size // processes
    micro = windows_at_once(share, settings, machine)
    steps_of_epoch = math.ceil(settings.samples / settings.batch_size)
    steps = steps_of_epoch * settings.epochs
    again = computes_again(settings, machine)
    log_every = max(1, steps // LOGGED_STEPS)
    lines = max(1, steps // CHECKPOINTS // log_every)
    save_every = machine.checkpoint_every or lines * log_every
    if machine.tensorboard is not None:
        os.environ["TENSORBOARD_LOGGING_DIR"] = machine.tensorboard
    arguments = TrainingArguments(
        output_dir=place,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=share // micro,
        num_train_epochs=settings.epochs,
        learning_rate=settings.lora_lr,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        lr_scheduler_type="linear",
        warmup_steps=steps // WARMUP_SHARE,
        seed=settings.seed,
        data_seed=settings.seed,
        bf16=model.dtype == torch.bfloat16,
        use_cpu=machine.use_cpu,
        # A checkpoint keeps no sums of a line that is not yet written.
        logging_steps=math.gcd(log_every, save_every),
        logging_nan_inf_filter=False,
        save_strategy="no" if folder is None else "steps",
        save_steps=save_every,
        save_total_limit=CHECKPOINTS_KEPT,
        report_to=["tensorboard"] if machine.tensorboard else [],
        disable_tqdm=True,
        dataloader_pin_memory=not machine.use_cpu,
        remove_unused_columns=False,
        **_checkpointing(again),
    )
    # Several GPUs are for accelerate launch; Trainer would take them all.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def windows_at_once(share: int, settings: Settings, machine: Machine) -> int:
    """The largest part of a process's windows that divides them and fits the memory."""
    most = machine.micro_batch
    if most is None:
        fitting = _tokens_at_once(machine) // settings.sequence_length
        most = max(1, fitting)
    size = min(most, share)
    while share % size:
        size -= 1
    return size


def _tokens_at_once(machine: Machine) -> int:
    return CPU_TOKENS if machine.use_cpu else GPU_TOKENS


def computes_again(settings: Settings, machine: Machine) -> bool:
    """Whether activations are computed again instead of kept (gradient checkpointing).

    Unless said, where one window is more than should be kept at once on a CPU.
    """
    if machine.gradient_checkpointing is not None:
        return machine.gradient_checkpointing
    return machine.use_cpu and settings.sequence_length > CPU_TOKENS


def _checkpointing(again: bool) -> dict[str, Any]:
    """Arguments that compute activations again, by the name transformers has for it."""
    if not again:
        return {}
    name = "gradient_checkpointing"
    newer_name = "activation_checkpointing"
    if newer_name in TrainingArguments.__dataclass_fields__:
        name = newer_name
    return {name: True, f"{name}_kwargs": {"use_reentrant": False}}


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end; removes any that was not."""
    steps = {}
    for path in folder.glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        if number.isdigit() and _is_whole(path):
            steps[int(number)] = path
        else:
            shutil.rmtree(path, ignore_errors=True)
    if not steps:
        return None
    newest = max(steps)
    return steps[newest]


def _is_whole(checkpoint: Path) -> bool:
    """Trainer writes its state last, in place; after a power cut files may be empty."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
        for path in checkpoint.glob("*.safetensors"):
            with safe_open(path, "pt"):
                pass
    except (OSError, ValueError, SafetensorError):
        return False
    of_torch = [*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")]
    return all(zipfile.is_zipfile(path) for path in of_torch)


class RecoveryTrainer(Trainer):
    """Trainer with a rate for each kind of weight, and balance.

    The model is one whose forward gives `Losses`.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        balancer: Balancer | None,
        teacher: Any,
        progress: bool,
        **others: Any,
    ):
        super().__init__(**others)
        self.settings = settings
        self.balancer = balancer
        # Windows are equally long, so that means over batches are exact.
        self.model_accepts_loss_kwargs = False
        self.parts: dict[str, list[Tensor]] = {}
        self._remove_printer()
        self.each_step = EachStep(balancer, progress)
        self.add_callback(self.each_step)
        self.teacher = teacher
        if teacher is not None:
            teacher.to(self.args.device)

    def train_to_the_end(self, checkpoint: str | None) -> None:
        """Trains; however that ends, terminal and routers are left as they were."""
        try:
            self.train(resume_from_checkpoint=checkpoint)
        finally:
            self.each_step.stop()
            if self.balancer is not None:
                self.balancer.remove_hooks()

    def _remove_printer(self) -> None:
        """Trainer's own printing of every logged line to standard output."""
        handler = self.callback_handler
        handler.callbacks = [
            callback
            for callback in handler.callbacks
            if type(callback).__name__ != "PrinterCallback"
        ]

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            trained = self.model if model is None else model
            settings = self.settings
            groups = parameter_groups(
                trained, settings.lora_lr, settings.scale_lr
            )
            betas = (self.args.adam_beta1, self.args.adam_beta2)
            self.optimizer = torch.optim.Adam(groups, betas=betas)
        return self.optimizer

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        counted: Any = nullcontext()
        if self.balancer is not None:
            counted = self.balancer.forward()
        with counted:
            losses = model(
                input_ids=inputs["input_ids"], labels=inputs["labels"]
            )
        loss = losses.pop("loss")
        for name, part in losses.items():
            logged = self.parts.setdefault(name, [])
            logged.append(part)
        return (loss, losses) if return_outputs else loss

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clips, and stops before a step that would spoil the weights.

        The norm is that of all processes.
        """
        norm = super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        if norm is None:
            return norm
        if not math.isfinite(float(norm)):
            raise self._not_finite()
        return norm

    def _not_finite(self) -> UnfinishedError:
        folder = Path(str(self.args.output_dir))
        checkpoint = last_checkpoint(folder)
        left = f"the last good checkpoint is {checkpoint}"
        if checkpoint is None:
            left = "no checkpoint was due before it"
        step = self.state.global_step + 1
        return UnfinishedError(
            f"the loss or its gradient is not finite at step {step} of "
            f"{self.state.max_steps}; {left}; train again by moesaic finetune, which "
            "takes lower rates (--lora-lr, --scale-lr)"
        )

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: Any = None
    ) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        # PEFT thaws what it loads.
        freeze(self.model, self.settings.freeze_router)

    def log(
        self, logs: dict[str, float], start_time: float | None = None
    ) -> None:
        if "loss" in logs:
            logs |= self._mean_parts()
            steps = self.state.global_step
            logs["samples"] = steps * self.settings.batch_size
            self.parts = {}
        super().log(logs, start_time)

    def _mean_parts(self) -> dict[str, float]:
        """Each loss since the last line of the log, over all processes."""
        means = {}
        for name, parts in self.parts.items():
            stacked = torch.stack(parts)
            means[name] = stacked.mean()
        means = self.accelerator.reduce(means, "mean")
        numbers = {}
        for name, mean in means.items():
            numbers[name] = float(mean)
        return numbers
