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

from moesaic.conversion.layout_search import HELDOUT_TOKENS
from moesaic.evaluate.perplexity import perplexity
from moesaic.families.load import load_config, load_model
from moesaic.finetune.lora import merge
from moesaic.finetune.options import NO_TEACHER, FinetuneOptions
from moesaic.finetune.prepare import (
    TrainingInput,
    TrainingText,
    TunedDense,
    windows_and_settings,
)
from moesaic.finetune.run import announce
from moesaic.finetune.train import train
from moesaic.output.atomic import write_file
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
    killed goes on from its checkpoints. Costs three forward passes for each token, and
    two over the held-out text. Memory: the dense model and activations.
    """
    record = folder / RECORD
    if record.is_file():
        return TunedDense(**json.loads(record.read_text("utf-8")))
    name = str(after.distill)
    options = replace(after, model=name, distill=NO_TEACHER)
    inputs = _input(options, text)
    device = PartialState(cpu=options.use_cpu).device
    dense = load_model(name, options.dtype, options.trust_remote_code, device)
    with widened_products(dense.dtype, dense.device):
        before = _measured(dense, inputs)
        announce(dense, inputs)
        trained = train(
            dense,
            inputs.windows_NL,
            inputs.settings,
            options.machine(),
            folder=folder.with_name(f"{folder.name}-trainer"),
            resume=True,
        )
        merged = merge(trained.model)
        afterwards = _measured(merged, inputs)
    tuned = TunedDense(
        folder=str(folder),
        name=name,
        perplexity_before=before,
        perplexity=afterwards,
        trained_weights=trained.weights,
    )
    _write(merged, text.tokenizer, tuned)
    return tuned


def _input(options: FinetuneOptions, text: TrainingText) -> TrainingInput:
    """The dense model's own training: as `options`, but for the LoRA weights."""
    config = load_config(options.model, options.trust_remote_code)
    hidden_size = config.get_text_config().hidden_size
    rank = min(DENSE_RANK, max(1, hidden_size // 4))
    alpha = options.alpha * math.sqrt(rank / options.rank)
    options = replace(options, rank=rank, alpha=alpha)
    assert options.sequence_length is not None
    windows_NL, settings = windows_and_settings(
        options, text.ids, options.sequence_length, config, has_teacher=False
    )
    return TrainingInput(options, settings, text, windows_NL, teacher=None)


def _measured(model: Any, inputs: TrainingInput) -> float | None:
    validation = inputs.text.validation
    if validation is None:
        return None
    length = inputs.settings.sequence_length
    value, _ = perplexity(model, validation.ids, length, HELDOUT_TOKENS)
    return value


def _write(model: Any, tokenizer: Any, tuned: TunedDense) -> None:
    """The record comes last: a folder without it is written again."""
    folder = Path(tuned.folder)
    shutil.rmtree(folder, ignore_errors=True)
    model.config.use_cache = True  # training turned it off
    model.cpu().save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    write_file(folder / RECORD, json.dumps(asdict(tuned)) + "\n")
