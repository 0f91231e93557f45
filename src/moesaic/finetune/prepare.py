"""All of a fine-tuning's input but the weights: checked, and its text read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from moesaic.calibration.text import to_ids
from moesaic.conversion.prepare import hold_out, source_name
from moesaic.errors import MoesaicError
from moesaic.families import find_ffns
from moesaic.families.load import (
    choose_device,
    load_config,
    load_tokenizer,
    window_length,
)
from moesaic.finetune.distill import Mix
from moesaic.finetune.train import Settings
from moesaic.output import draft as checkpoint

MOST_TOKENS = 2**28  # 2 GB of ids
DISTILLED = Mix(lm=0.5, logits=0.5, ffn=3.0)
PLAIN_LR = 5.95e-5  # the paper's
DISTILLED_LR = 3e-4


@dataclass(frozen=True)
class Ready:
    """A fine-tuning whose every input has been checked and read, but for the weights."""

    settings: Settings
    config: Any
    tokenizer: Any
    windows_NL: torch.Tensor
    source: str
    heldout_ids: torch.Tensor | None
    heldout: str | None

    def check_teacher(self, model: Any, dense: Any) -> None:
        """Raises MoesaicError for a dense model that the converted one was not made from."""
        ours, theirs = model.config, dense.config
        if theirs.model_type == "moesaic":
            raise MoesaicError(
                "--distill names a converted model; name the dense one it came from"
            )
        pairs = {
            "family": (ours.base_model_type, theirs.model_type),
            "vocabulary": (ours.vocab_size, theirs.vocab_size),
            "hidden size": (ours.hidden_size, theirs.hidden_size),
            "layers": (ours.num_hidden_layers, theirs.num_hidden_layers),
        }
        for name, (own, other) in pairs.items():
            if own != other:
                raise MoesaicError(
                    f"--distill: its {name} is {other}, the converted model's {own}; name the "
                    f"dense model it came from ({ours.moesaic['base_model']})"
                )
        find_ffns(dense)


def prepare(
    model: str | Path,
    output: Path,
    data: Any,
    *,
    distill: str | Path | None,
    tune_teacher: bool,
    samples: int,
    sequence_length: int | None,
    epochs: int,
    batch_size: int,
    rank: int,
    alpha: float,
    lora_lr: float | None,
    scale_lr: float,
    balance_rate: float,
    freeze_router: bool,
    micro_batch: int | None,
    checkpoint_every: int | None,
    tensorboard: str | None,
    seed: int,
    device: str,
    overwrite: bool,
    resume: bool,
    trust_remote_code: bool,
) -> Ready:
    """Checks all of a fine-tuning's input and reads its text.

    Raises MoesaicError for any bad input but broken weights; writes nothing.
    """
    whole = {
        "samples": samples,
        "epochs": epochs,
        "batch size": batch_size,
        "rank": rank,
        "micro batch": micro_batch,
        "checkpoint every": checkpoint_every,
    }
    for name, value in whole.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise MoesaicError(
                f"{name} {value}: a whole number of at least 1 is needed"
            )
    rates = {
        "alpha": alpha,
        "lora lr": lora_lr,
        "scale lr": scale_lr,
        "balance rate": balance_rate,
    }
    for name, rate in rates.items():
        least = "at least 0" if name in ("scale lr", "balance rate") else "above 0"
        if rate is not None and not (
            0 < rate < 1e4 or (rate == 0 and least == "at least 0")
        ):
            raise MoesaicError(f"{name} {rate}: a number {least} is needed")
    if not 0 <= seed < 2**31:
        raise MoesaicError(f"seed {seed} is outside 0..{2**31 - 1}")
    if choose_device(device).index is not None:
        raise MoesaicError(
            f"device {device}: training takes the first GPU, or those of accelerate launch; set "
            "CUDA_VISIBLE_DEVICES"
        )
    if tune_teacher and distill is None:
        raise MoesaicError(
            "--tune-teacher needs --distill, which names the dense model to tune"
        )
    sharded = [
        n for n in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED") if _is_set(n)
    ]
    if tune_teacher and sharded:
        raise MoesaicError(
            "--tune-teacher is for one process or data-parallel ones; where weights are sharded, "
            "tune the dense model before and name it with --distill"
        )
    if tensorboard is not None and find_spec("tensorboard") is None:
        raise MoesaicError("--tensorboard needs the package: pip install tensorboard")
    batch_size = min(batch_size, samples)
    processes = PartialState(
        cpu=device == "cpu" or not torch.cuda.is_available()
    ).num_processes
    if batch_size % processes:
        raise MoesaicError(
            f"a batch of {batch_size} cannot be split over {processes} processes"
        )
    config = load_config(model, trust_remote_code)
    if config.model_type != "moesaic":
        raise MoesaicError(
            f"{model} is a {config.model_type} model that moesaic has not converted; run moesaic "
            "convert first, and fine-tune its output"
        )
    if data is None:
        data = "demo" if config.moesaic["base_model"] == "demo" else "wikitext2"
    if PartialState().is_main_process:
        checkpoint.check_output(output, overwrite, resume)
    if distill is not None:
        load_config(distill, trust_remote_code)
    length = window_length([config], sequence_length)
    tokenizer = load_tokenizer(model, trust_remote_code)
    ids, heldout_ids, heldout = hold_out(
        to_ids(data, tokenizer), data, tokenizer, length
    )
    if samples * length > MOST_TOKENS:
        raise MoesaicError(
            f"{samples} samples of {length} are over {MOST_TOKENS:,} tokens, the most that are "
            "trained on; take fewer --samples"
        )
    if rank > config.get_text_config().hidden_size:
        raise MoesaicError(
            f"rank {rank} is above the model's hidden size {config.get_text_config().hidden_size}; "
            "8 is usual"
        )
    windows_NL = draw_windows(ids, samples, length, seed)
    # Whole steps only: the mean over a shorter last one would depend on how it is split.
    batch_size = min(batch_size, len(windows_NL))
    windows_NL = windows_NL[: len(windows_NL) // batch_size * batch_size]
    samples, length = windows_NL.shape
    window_length([config], length)  # windows that were given may be too long
    mix = Mix() if distill is None else DISTILLED
    usual = PLAIN_LR if distill is None else DISTILLED_LR
    settings = Settings(
        samples,
        length,
        epochs,
        batch_size,
        rank,
        alpha,
        lora_lr or usual,
        scale_lr,
        balance_rate,
        freeze_router,
        mix,
        seed,
    )
    return Ready(
        settings, config, tokenizer, windows_NL, source_name(data), heldout_ids, heldout
    )


def _is_set(name: str) -> bool:
    return os.environ.get(name, "false").lower() == "true"


def draw_windows(
    ids: torch.Tensor, samples: int, length: int, seed: int
) -> torch.Tensor:
    """Windows (N, L), one from each of N equal stretches of the text, in random order.

    They overlap where the text has fewer than N L tokens. A 2-D tensor is taken as windows
    already. Raises MoesaicError for a text shorter than one window.
    """
    if ids.ndim == 2:
        return ids
    room = len(ids) - length
    if room < 0:
        raise MoesaicError(
            f"the training text has {len(ids)} tokens, one sample needs {length}; give a longer "
            "text or a smaller --sequence-length"
        )
    generator = torch.Generator().manual_seed(seed)
    place_N = torch.arange(samples) + torch.rand(
        samples, generator=generator, dtype=torch.double
    )
    starts_N = (place_N / samples * (room + 1)).long().clamp(max=room)
    starts_N = starts_N[torch.randperm(samples, generator=generator)]
    return ids[starts_N[:, None] + torch.arange(length)]
