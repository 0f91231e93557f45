"""Writes what a fine-tuning made: the merged model or the adapter, and its reports.

Shape suffixes: R routed experts, N windows, L tokens of one.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from moesaic.conversion.layout_search import HELDOUT_TOKENS
from moesaic.conversion.report import CONVERSION_FILE, RECOVERY_FILE
from moesaic.evaluate.perplexity import perplexity
from moesaic.families.load import file_beside
from moesaic.finetune.curves import curve_csv, curve_png, loads_png
from moesaic.finetune.fold import fold_scale, mean_gates
from moesaic.finetune.lora import blocks_of, is_mixture, routers_of
from moesaic.finetune.lora import merge as merge_lora
from moesaic.finetune.masked import masked
from moesaic.finetune.model_card import finetune_card
from moesaic.finetune.prepare import TrainingInput
from moesaic.finetune.report import FinetuneReport
from moesaic.finetune.train import Trained
from moesaic.output.atomic import set_usual_permissions
from moesaic.output.draft import SHARD_SIZE
from moesaic.output.model_card import CARD_FILE, licence_of

# Gates are folded where the perplexity rises to no more than this times itself.
# A model that a stock engine serves is worth that much (SmolLM2-135M: 1.0013).
FOLD_LOSS = 1.005


def save_model(
    wrapped: Any,
    folder: Path,
    inputs: TrainingInput,
    windows_NL: Tensor,
    report: FinetuneReport,
) -> None:
    """Writes the adapter or the merged model, with its tokenizer.

    The gates of a merged model are folded where that costs little. Puts the
    perplexities into the report.
    """
    _clear(folder)
    wrapped.config.use_cache = True
    if inputs.options.merge:
        model = merge_lora(wrapped)
        report.perplexity = heldout_perplexity(model, inputs)
        if can_fold(model):
            _fold_if_cheap(model, inputs, windows_NL, report)
        moe = replace(model.config.moesaic, finetune=report.recipe())
        model.config.moesaic = moe
        model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    else:
        with masked(wrapped):
            report.perplexity = heldout_perplexity(wrapped, inputs)
        wrapped.save_pretrained(folder)
    if inputs.text.tokenizer is not None:
        inputs.text.tokenizer.save_pretrained(folder)


def _clear(folder: Path) -> None:
    """Empties the folder: a killed run may have begun to write into it.

    The folder itself stays, since a draft without it would be none.
    """
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def heldout_perplexity(model: Any, inputs: TrainingInput) -> float | None:
    """On the text that was held out; None where there is none."""
    validation = inputs.text.validation
    if validation is None:
        return None
    length = inputs.settings.sequence_length
    value, _ = perplexity(model.eval(), validation.ids, length, HELDOUT_TOKENS)
    return value


def can_fold(model: Any) -> bool:
    """Whether a stock architecture would hold the router, but no gates."""
    if not routers_of(model) or is_mixture(model):
        return False
    router = model.config.moesaic.router
    return bool(router.is_matrix and router.fixed_count)


def _fold_if_cheap(
    model: Any,
    inputs: TrainingInput,
    windows_NL: Tensor,
    report: FinetuneReport,
) -> None:
    """Folds the gates into the experts, and back again where that costs too much."""
    blocks = [block for block in blocks_of(model) if block.router is not None]
    scales = []
    downs = []
    for block in blocks:
        scales.append(block.router.expert_scale.clone())
        downs.append(block.experts.down_proj.clone())
    gates = mean_gates(model, windows_NL)
    fold_scale(model, gates)
    report.folded_perplexity = heldout_perplexity(model, inputs)
    report.folded = _folding_is_cheap(report)
    if report.folded:
        return
    for block, scale_R, down in zip(blocks, scales, downs, strict=True):
        scale = block.router.expert_scale
        scale.data.copy_(scale_R)
        block.experts.down_proj.data.copy_(down)


def _folding_is_cheap(report: FinetuneReport) -> bool:
    """By the two perplexities; true where nothing was held out to measure them on."""
    unfolded = report.perplexity
    folded = report.folded_perplexity
    if unfolded is None or folded is None:
        return True
    return folded <= FOLD_LOSS * unfolded


def _keep_conversion(model: str, folder: Path) -> None:
    """The report of the conversion that was trained goes along, for `inspect`."""
    conversion = file_beside(model, CONVERSION_FILE)
    if conversion is not None:
        shutil.copyfile(conversion, folder / CONVERSION_FILE)


def write_files(
    folder: Path, report: FinetuneReport, trained: Trained, command: str | None
) -> None:
    """Writes the learning curve, the loads, the report and the model card."""
    curve = curve_csv(trained.history)
    (folder / "learning_curve.csv").write_text(curve, "utf-8")
    picture = curve_png(trained.history)
    (folder / "learning_curve.png").write_bytes(picture)
    before = trained.loads_before
    after = trained.loads_after
    if before is not None and after is not None:
        picture = loads_png(before, after)
        (folder / "loads.png").write_bytes(picture)
    values = report.to_dict()
    text = json.dumps(values, indent=2)
    (folder / RECOVERY_FILE).write_text(text + "\n", "utf-8")
    _keep_conversion(report.model, folder)
    licence = licence_of(file_beside(report.model, CARD_FILE))
    card = finetune_card(report, licence, command)
    (folder / CARD_FILE).write_text(card, "utf-8")
    for path in filter(Path.is_file, folder.iterdir()):
        set_usual_permissions(path)  # safetensors makes private files
