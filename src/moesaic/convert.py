"""Converts a dense model layer by layer: the thin loop around the ingredients.

Calibration is sequential: a layer is profiled on inputs that have passed through the converted
layers before it.
"""

from __future__ import annotations

import hashlib
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from moesaic import checkpoint
from moesaic.adapters import find_ffns
from moesaic.card import licence_of, model_card
from moesaic.carve import carve, partition
from moesaic.errors import MoesaicError
from moesaic.evaluate.perplexity import perplexity
from moesaic.layout import Layout
from moesaic.load import (
    choose_device,
    load_model,
    resolve,
)
from moesaic.measure import LayerMeter, LayerReport
from moesaic.modeling import install_block
from moesaic.plan import Plan
from moesaic.prepare import prepare, source_name
from moesaic.profile import profile_ffn
from moesaic.recipe import Recipe
from moesaic.report import ConversionReport
from moesaic.soundness import blame_a_layer, check_inputs, check_vocabulary, check_weights
from moesaic.stream import Stream, check_stream

HELDOUT_TOKENS = 16_384  # tokens on which the card's perplexities are measured


def convert(
    model: Any,
    recipe: str | Path | Recipe = "cmoe",
    layout: str | Layout = "S3A3E8",
    calibration: Any = "wikitext2",
    *,
    tokenizer: Any = None,
    output: str | Path | None = None,
    samples: int = 8,
    sequence_length: int | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    overwrite: bool = False,
    resume: bool = False,
    trust_remote_code: bool = False,
    command: str | None = None,
    progress: bool = False,
) -> tuple[Any, ConversionReport]:
    """Turns a dense causal language model into a mixture of experts, without training.

    `model` is a hub id, a folder, `demo`, or a model in memory, which is changed in place, in the
    dtype and on the device it has: its FFNs are replaced, its class becomes MoesaicForCausalLM,
    in evaluation mode. (Load it again after an error: its first layers may be converted.)
    `calibration` is a SOURCE (see `moesaic.data.read_documents`), a list of strings, a
    `datasets.Dataset`, or token ids: one row, from which `samples` windows of `sequence_length`
    are drawn, or a matrix of windows.
    `output` writes the model folder, layer by layer and resumable, and measures perplexity
    before and after on held-out text.

    Returns the converted model and its report. Raises MoesaicError for any bad input and leaves
    nothing on the disk then. Time: the layers take two to three forward passes over the
    calibration tokens; loading and the two perplexities come on top. Memory: the dense weights,
    one FFN more, and the inputs of one layer for all tokens.
    """
    started = time.perf_counter()
    target = Path(output).absolute() if output is not None else None
    ready = prepare(
        model, recipe, layout, calibration, tokenizer=tokenizer, output=target, samples=samples,
        sequence_length=sequence_length, seed=seed, overwrite=overwrite, resume=resume,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    todo, windows_NL, heldout_ids = ready.plan, ready.windows_NL, ready.heldout_ids
    in_memory = not isinstance(model, str | Path)
    if in_memory and (dtype, device) != ("auto", "auto"):
        raise MoesaicError("a model in memory keeps its dtype and device; move it before the call")
    compute = model.device if in_memory else choose_device(device)
    dense = model if in_memory else load_model(model, dtype, trust_remote_code)
    if any(p.is_meta for p in dense.parameters()):
        raise MoesaicError(
            f"{todo.model} has weights that are not in memory; pass its folder instead"
        )
    dense.eval()
    if not in_memory and _fits(dense, compute):
        dense.to(compute)
    ffns = find_ffns(dense)
    check_vocabulary(dense, windows_NL)
    weights = check_weights(ffns, dense)
    check_stream(ffns, windows_NL)

    report = ConversionReport(
        model=todo.model,
        recipe=todo.recipe.to_dict(),
        layout=str(todo.layout),
        shape=todo.shape,
        calibration=source_name(calibration),
        tokens=windows_NL.numel(),
        sequence_length=windows_NL.shape[1],
        seed=seed,
        active_ffn_fraction=todo.sizes.active / todo.sizes.total,
        dense_macs=todo.dense_macs.total,
        macs=todo.macs.total,
    )
    todo.config.moesaic["calibration"] = {
        "source": report.calibration,
        "tokens": report.tokens,
        "sequence_length": report.sequence_length,
        "seed": seed,
    }
    todo.config.dtype = str(dense.dtype).removeprefix("torch.")
    if target is None:
        _convert_layers(Stream(ffns, windows_NL, compute), todo, report, None, progress)
        _become_ours(dense, todo.config)
    else:
        checkpoint.check_space(target, sum(p.nbytes for p in dense.parameters()))
        length = todo.sequence_length
        if heldout_ids is not None:
            report.heldout = ready.heldout
            try:
                report.dense_perplexity, report.heldout_tokens = perplexity(
                    dense, heldout_ids, length, HELDOUT_TOKENS
                )
            except MoesaicError:
                blame_a_layer(Stream(ffns, windows_NL, compute))
                raise
        run = _fingerprint(todo, report, windows_NL, weights, compute)
        with checkpoint.open_draft(target, run, resume) as draft:
            _convert_layers(Stream(ffns, windows_NL, compute), todo, report, draft, progress)
            _become_ours(dense, todo.config)
            if heldout_ids is not None:
                report.perplexity, _ = perplexity(dense, heldout_ids, length, HELDOUT_TOKENS)
            licence = None if in_memory else licence_of(resolve(model))
            call = f"moesaic.convert({todo.model!r}, {todo.recipe.name!r}, {str(todo.layout)!r})"
            files = {
                "README.md": model_card(report, todo.config, licence, command or call),
                "moesaic_report.json": json.dumps(report.to_dict(timing=False), indent=2) + "\n",
            }
            checkpoint.finish(draft, target, dense, ready.tokenizer, files)
    report.seconds = time.perf_counter() - started
    return dense, report


def _convert_layers(
    stream: Stream, todo: Plan, report: ConversionReport, draft: Path | None, progress: bool
) -> None:
    """The loop. Layers that the draft holds are put in place and passed through."""
    clock = _Clock(report.step_seconds)
    layers, console = stream.ffns.layers, Console(stderr=True)
    for layer in track(
        range(len(layers)), "converting layers", console=console, disable=not progress
    ):
        home = next(layers[layer].parameters()).device
        layers[layer].to(stream.device)
        check_inputs(stream, layer)
        clock("check")
        report.layers.append(_convert_layer(stream, todo, layer, report.seed, draft, clock))
        layers[layer].to(home)


def _convert_layer(
    stream: Stream, todo: Plan, layer: int, seed: int, draft: Path | None, clock: _Clock
) -> LayerReport:
    """Profile, partition, carve, pass on. What it holds of the dense FFN goes when it returns."""
    ffns, recipe, config = stream.ffns, todo.recipe, todo.config
    prefix = ffns.state_prefix(layer)
    if draft and (done := checkpoint.load_layer(draft, layer, prefix, config)) is not None:
        install_block(ffns.base, config, layer, done[0].to(stream.device))
        stream.advance(layer)
        return done[1]
    begun = time.perf_counter()
    ffn = ffns.read(layer)
    try:
        inputs = stream.ffn_inputs(layer)
        profile = profile_ffn(inputs, ffn, recipe.activation_top_k, recipe.normalise)
    except MoesaicError as error:
        raise MoesaicError(f"layer {layer} of {todo.model}: {error}") from error
    clock("profile")
    parts = partition(profile, ffn, recipe, todo.sizes, np.random.default_rng([seed, layer]))
    clock("partition")
    block = carve(ffn, parts, recipe, config)
    install_block(ffns.base, config, layer, block)
    clock("carve")
    meter = LayerMeter(ffn, parts, block, profile.tokens)
    stream.advance(layer, meter)
    clock("advance and measure")
    report = meter.report(layer, time.perf_counter() - begun)
    if draft is not None:
        checkpoint.save_layer(draft, layer, prefix, block, report)
        clock("write")
    return report


def _become_ours(dense: Any, config: Any) -> None:
    """The dense model object, its FFNs replaced, becomes what loading the saved folder gives."""
    from transformers import AutoModelForCausalLM

    previous = dense.config
    config._attn_implementation = previous._attn_implementation
    dense.__class__ = AutoModelForCausalLM._model_mapping[type(config)]
    for module in dense.modules():
        if getattr(module, "config", None) is previous:
            module.config = config


def _fingerprint(
    todo: Plan,
    report: ConversionReport,
    windows_NL: torch.Tensor,
    weights: str,
    device: torch.device,
) -> dict[str, Any]:
    """What must be equal for finished layers to be worth keeping."""
    return {
        "model": todo.model,
        "weights": weights,
        "recipe": report.recipe,
        "layout": report.layout,
        "seed": report.seed,
        "dtype": todo.config.dtype,
        "device": device.type,
        "calibration tokens": hashlib.sha256(windows_NL.numpy().tobytes()).hexdigest(),
        "versions": todo.config.moesaic["versions"] | {"POT": version("POT")},
    }


def _fits(model: Any, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return bool(sum(p.nbytes for p in model.parameters()) < 0.7 * free)


class _Clock:
    """Adds the time since the last call to a named step."""

    def __init__(self, steps: dict[str, float]):
        self.steps, self.last = steps, time.perf_counter()

    def __call__(self, step: str) -> None:
        now = time.perf_counter()
        self.steps[step] = self.steps.get(step, 0.0) + now - self.last
        self.last = now
