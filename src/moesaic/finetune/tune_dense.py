"""The dense model trained on the text before it is converted.

Where the text itself teaches the dense model something, what is converted afterwards
starts from there, and only has to imitate. Trained after the conversion alone, it has to
learn both (docs/finetuning.md).
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from accelerate import PartialState

from moesaic.families.load import load_config, load_model
from moesaic.finetune.fingerprint import WEIGHTS, check_same_weights
from moesaic.finetune.lora import merge
from moesaic.finetune.options import NO_TEACHER, FinetuneOptions
from moesaic.finetune.prepare import (
    TrainingInput,
    TrainingText,
    TunedDense,
    windows_and_settings,
)
from moesaic.finetune.run import announce
from moesaic.finetune.save import heldout_perplexity
from moesaic.finetune.train import train
from moesaic.output.atomic import sync_all, write_file
from moesaic.parts.products import widened_products

# Experts have LoRA weights each. So that the dense model trains about as many.
DENSE_RANK = 128
RECORD = "moesaic_dense.json"


def tune_dense(
    after: FinetuneOptions, text: TrainingText, folder: Path
) -> TunedDense:
    """Trains the dense model that `after` imitates, by next tokens, and writes it.

    The same windows and the same length of run, with LoRA weights of rank 128 (a quarter
    of the hidden size where that is less), and alpha so that alpha over the root of the
    rank stays. A folder that an earlier run has written is taken as it is; one that was
    killed goes on from its checkpoints. Raises UnfinishedError where that run had other
    weights. Costs three forward passes for each token, and two over the held-out text.
    Memory: the dense model and activations.
    """
    name = str(after.distill)
    options = replace(after, model=name, distill=NO_TEACHER)
    inputs = _input(options, text)
    device = PartialState(cpu=options.use_cpu).device
    dense = load_model(name, options.dtype, options.trust_remote_code, device)
    trainer = folder.with_name(f"{folder.name}-trainer")
    check_same_weights(dense, name, folder.with_name(WEIGHTS))
    record = folder / RECORD
    if record.is_file():
        values = json.loads(record.read_text("utf-8"))
        # The draft may have been moved since.
        return TunedDense(**values | {"folder": str(folder)})
    with widened_products(dense.dtype, dense.device):
        before = heldout_perplexity(dense, inputs)
        announce(dense, inputs)
        trained = train(
            dense,
            inputs.windows_NL,
            inputs.settings,
            options.machine(),
            folder=trainer,
            resume=True,
        )
        merged = merge(trained.model)
        afterwards = heldout_perplexity(merged, inputs)
    tuned = TunedDense(
        folder=str(folder),
        name=name,
        perplexity_before=before,
        perplexity=afterwards,
        trained_weights=trained.weights,
    )
    _write(merged, text.tokenizer, tuned)
    for checkpoint in trainer.glob("checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)
    return tuned


def dense_rank(config: Any) -> int:
    """The rank of the dense model's LoRA weights: a quarter of its hidden size at most."""
    hidden_size: int = config.get_text_config().hidden_size
    return min(DENSE_RANK, max(1, hidden_size // 4))


def _input(options: FinetuneOptions, text: TrainingText) -> TrainingInput:
    """The dense model's own training: as `options`, but for the LoRA weights."""
    config = load_config(options.model, options.trust_remote_code)
    rank = dense_rank(config)
    alpha = options.alpha * math.sqrt(rank / options.rank)
    options = replace(options, rank=rank, alpha=alpha)
    assert options.sequence_length is not None
    windows_NL, settings = windows_and_settings(
        options, text.ids, options.sequence_length, config, has_teacher=False
    )
    return TrainingInput(options, settings, text, windows_NL, teacher=None)


def _write(model: Any, tokenizer: Any, tuned: TunedDense) -> None:
    """The record comes last: a folder without it is written again."""
    folder = Path(tuned.folder)
    shutil.rmtree(folder, ignore_errors=True)
    model.config.use_cache = True  # training turned it off
    model.cpu().save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    sync_all(folder)
    write_file(folder / RECORD, json.dumps(asdict(tuned)) + "\n")
