"""The training loop: transformers' Trainer, with our losses, optimizer groups and balance."""

from __future__ import annotations

import math
import os
import shutil
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, set_seed

from moesaic.finetune.balance import Balancer, Loads, measure_loads
from moesaic.finetune.distill import Mix, Teacher
from moesaic.finetune.lora import NAME, freeze, parameter_groups, routers_of, wrap
from moesaic.finetune.masked import masked
from moesaic.finetune.steps import EachStep
from moesaic.output.draft import UnfinishedError

SPREAD_TOKENS = 8192  # on which loads before training and the bias's bound are measured


@dataclass(frozen=True)
class Settings:
    """What decides the outcome of a run, besides the model and the text."""

    samples: int = 2048
    sequence_length: int = 2048
    epochs: int = 1
    batch_size: int = 16  # sequences of one optimiser step, over all processes
    rank: int = 8
    alpha: float = 32
    lora_lr: float = 5.95e-5
    scale_lr: float = 1e-3
    balance_rate: float = 1e-3
    freeze_router: bool = False
    mix: Mix = field(default_factory=Mix)
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Machine:
    """How a run is spread out: it changes rounding at most."""

    micro_batch: int | None = (
        None  # sequences at once on a device; None: about 4,096 tokens
    )
    use_cpu: bool = False
    gradient_checkpointing: bool = False
    tensorboard: str | None = None
    checkpoint_every: int | None = None  # optimiser steps; None: a tenth of the run
    progress: bool = False


@dataclass
class Trained:
    """The wrapped model after training, what was logged, and the loads before it."""

    model: Any
    history: list[dict[str, float]]
    loads_before: Loads | None
    sharded: Path | None = (
        None  # where the adapter lies that was gathered from several processes
    )


def train(
    model: Any,
    windows_NL: torch.Tensor,
    settings: Settings,
    machine: Machine,
    dense: Any = None,
    folder: Path | None = None,
    resume: bool = False,
) -> Trained:
    """Trains LoRA weights, routers and expert_scale around a model in memory.

    Works on a dense model too, whose FFNs get LoRA weights like any other module: the fair
    reference. `folder` gets checkpoints; with `resume` the last complete one in it is continued.
    Raises UnfinishedError where the loss stops being finite.
    """
    set_seed(settings.seed)
    model.config.use_cache = False
    centre = [router.selection_bias.clone() for router in routers_of(model)]
    few = windows_NL[: max(1, SPREAD_TOKENS // windows_NL.shape[1])]
    loads = measure_loads(model, few)
    wrapped = wrap(model, settings.rank, settings.alpha, settings.freeze_router)
    balancer = None
    if loads is not None and settings.balance_rate:
        balancer = Balancer(wrapped, settings.balance_rate, centre, loads.spread_L)
    teacher = None if dense is None else Teacher(dense, wrapped, settings.mix)
    arguments = _arguments(model, settings, machine, folder, len(windows_NL))
    trainer = RecoveryTrainer(
        model=wrapped,
        args=arguments,
        train_dataset=[
            {"input_ids": window, "labels": window} for window in windows_NL
        ],
        settings=settings,
        balancer=balancer,
        teacher=teacher,
        progress=machine.progress,
    )
    last = last_checkpoint(folder) if resume and folder is not None else None
    with masked(wrapped):
        trainer.train(resume_from_checkpoint=str(last) if last else None)
    history = [row for row in trainer.state.log_history if "loss" in row]
    sharded = None
    if (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled) and folder is not None:
        trainer.save_model(str(sharded := folder / "trained"))  # gathers the shards
    trained = trainer.accelerator.unwrap_model(trainer.model)
    return Trained(trained, history, loads, sharded)


def gather(trained: Trained, model: Any, settings: Settings) -> None:
    """After sharded training: the trained weights around a model that was loaded anew."""
    trained.model = wrap(model, settings.rank, settings.alpha, settings.freeze_router)
    trained.model.load_adapter(str(trained.sharded), NAME)


def _arguments(
    model: Any, settings: Settings, machine: Machine, folder: Path | None, samples: int
) -> TrainingArguments:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    share = settings.batch_size // processes
    most = machine.micro_batch or max(1, 4096 // settings.sequence_length)
    micro = max(size for size in range(1, min(most, share) + 1) if share % size == 0)
    steps = -(-samples // settings.batch_size) * settings.epochs
    if machine.tensorboard is not None:
        os.environ["TENSORBOARD_LOGGING_DIR"] = machine.tensorboard
    checkpointing: dict[str, Any] = {}
    if machine.gradient_checkpointing:  # by the name that transformers gives it by now
        new = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
        name = "activation_checkpointing" if new else "gradient_checkpointing"
        checkpointing = {name: True, f"{name}_kwargs": {"use_reentrant": False}}
    arguments = TrainingArguments(
        output_dir=str(folder) if folder is not None else "unused",
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=share // micro,
        num_train_epochs=settings.epochs,
        learning_rate=settings.lora_lr,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        lr_scheduler_type="linear",
        warmup_steps=steps // 20,
        seed=settings.seed,
        data_seed=settings.seed,
        bf16=model.dtype == torch.bfloat16,
        use_cpu=machine.use_cpu,
        logging_steps=max(1, steps // 256),
        logging_nan_inf_filter=False,
        save_strategy="no" if folder is None else "steps",
        save_steps=machine.checkpoint_every or max(1, steps // 10),
        save_total_limit=2,
        report_to=["tensorboard"] if machine.tensorboard else [],
        disable_tqdm=True,
        dataloader_pin_memory=not machine.use_cpu,
        remove_unused_columns=False,
        **checkpointing,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs are for accelerate launch
    return arguments


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end; removes any that was not."""
    whole = []
    for path in folder.glob("checkpoint-*"):
        # Trainer writes its state last; a rename at the end would be better, but is not its way.
        if path.name[11:].isdigit() and (path / "trainer_state.json").is_file():
            whole.append(path)
        else:
            shutil.rmtree(path, ignore_errors=True)
    return max(whole, key=lambda path: int(path.name[11:]), default=None)


class RecoveryTrainer(Trainer):
    """Trainer with rates for each kind of weight, losses against the dense model, and balance."""

    def __init__(
        self,
        *,
        settings: Settings,
        balancer: Balancer | None,
        teacher: Teacher | None,
        progress: bool,
        **others: Any,
    ):
        super().__init__(**others)
        self.settings, self.balancer, self.teacher = settings, balancer, teacher
        self.model_accepts_loss_kwargs = (
            False  # windows are equally long: batch means are exact
        )
        self.parts: dict[str, list[torch.Tensor]] = {}
        self.callback_handler.callbacks = [
            callback
            for callback in self.callback_handler.callbacks
            if type(callback).__name__ != "PrinterCallback"
        ]
        self.add_callback(EachStep(balancer, progress))
        if teacher is not None:
            teacher.dense.to(self.args.device)

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            groups = parameter_groups(
                self.model if model is None else model,
                self.settings.lora_lr,
                self.settings.scale_lr,
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
        mix, ids = self.settings.mix, inputs["input_ids"]
        with ExitStack() as watched:
            for watcher in (self.balancer, self.teacher):
                if watcher is not None:
                    watched.enter_context(watcher.forward())
            outputs = model(input_ids=ids, labels=inputs["labels"], use_cache=False)
        parts = {"lm": outputs.loss}
        if self.teacher is not None:
            parts |= self.teacher.losses(ids, outputs.logits)
        loss = sum(getattr(mix, name) * part for name, part in parts.items())
        for name, part in parts.items():
            self.parts.setdefault(name, []).append(part.detach())
        return (loss, outputs) if return_outputs else loss

    def _clip_grad_norm(self, model: Any) -> Any:
        """Also stops before a step that would spoil the weights; the norm is of all processes."""
        norm = super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        if norm is not None and not math.isfinite(float(norm)):
            kept = last_checkpoint(Path(str(self.args.output_dir)))
            at = (
                f"the last good checkpoint is {kept}"
                if kept
                else "no checkpoint was due before it"
            )
            raise UnfinishedError(
                f"the loss or its gradient is not finite at step {self.state.global_step + 1} of "
                f"{self.state.max_steps}; {at}; take a lower --lora-lr or --scale-lr and another "
                "--output, or start again with --overwrite"
            )
        return norm

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: Any = None
    ) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        freeze(self.model, self.settings.freeze_router)  # PEFT thaws what it loads

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            means = {
                name: torch.stack(parts).mean() for name, parts in self.parts.items()
            }
            means = self.accelerator.reduce(
                means, "mean"
            )  # of all processes, like the loss
            logs |= {name: float(mean) for name, mean in means.items()}
            logs["samples"] = self.state.global_step * self.settings.batch_size
            self.parts = {}
        super().log(logs, start_time)
