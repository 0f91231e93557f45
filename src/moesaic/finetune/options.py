"""What a fine-tuning is asked to do, and what follows from it for the training loop."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

AUTO_TEACHER = "auto"  # the dense model that the converted one was made from
NO_TEACHER = "none"


@dataclass(frozen=True)
class FinetuneOptions:
    """Every option of a fine-tuning, as it was given.

    None stands for a default that depends on the model, the text or other options.
    """

    model: str
    output: Path
    data: Any = None
    samples: int = 2048
    sequence_length: int | None = None
    epochs: int = 1
    batch_size: int | None = None
    rank: int = 8
    alpha: float = 32
    lora_lr: float | None = None
    scale_lr: float = 1e-3
    balance_rate: float = 1e-3
    distill: str | Path = AUTO_TEACHER
    tune_teacher: bool = False
    freeze_router: bool = False
    merge: bool = True
    micro_batch: int | None = None
    gradient_checkpointing: bool | None = None
    checkpoint_every: int | None = None
    tensorboard: str | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    overwrite: bool = False
    resume: bool = False
    trust_remote_code: bool = False
    command: str | None = None
    progress: bool = False

    @property
    def use_cpu(self) -> bool:
        return self.device == "cpu" or not torch.cuda.is_available()

    def machine(self) -> Machine:
        """The part of the options that is about the machine."""
        return Machine(
            micro_batch=self.micro_batch,
            use_cpu=self.use_cpu,
            gradient_checkpointing=self.gradient_checkpointing,
            tensorboard=self.tensorboard,
            checkpoint_every=self.checkpoint_every,
            progress=self.progress,
        )


@dataclass(frozen=True)
class Mix:
    """How much each loss counts.

    They are of the next token, the KL of the logits, and the FFNs' relative error.
    """

    lm: float = 1.0
    logits: float = 0.0
    ffn: float = 0.0


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

    # Sequences at once on a device. None: about 4,096 tokens, 512 on a CPU.
    micro_batch: int | None = None
    use_cpu: bool = False
    # None: on a CPU, for sequences of more than 512 tokens.
    gradient_checkpointing: bool | None = None
    tensorboard: str | None = None
    # Optimiser steps between checkpoints. None: a tenth of the run.
    checkpoint_every: int | None = None
    progress: bool = False
