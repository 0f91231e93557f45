"""Converts a dense model: checks, chooses a layout, converts layer by layer, writes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from moesaic.calibration.checks import blame_a_layer, check_vocabulary, check_weights
from moesaic.calibration.hidden_states import Stream, check_stream
from moesaic.conversion.layer_budgets import share_budgets, with_budgets
from moesaic.conversion.layers import convert_layers
from moesaic.conversion.layout_search import HELDOUT_TOKENS, check_target, search_plan
from moesaic.conversion.model_card import model_card
from moesaic.conversion.plan import Plan
from moesaic.conversion.prepare import prepare, source_name
from moesaic.conversion.report import ConversionReport
from moesaic.errors import MoesaicError
from moesaic.evaluate.perplexity import perplexity
from moesaic.evaluate.work import active_ffn_fraction, count_macs, meta_model
from moesaic.families import find_ffns
from moesaic.families.load import (
    choose_device,
    load_model,
    resolve,
)
from moesaic.layout import Layout
from moesaic.methods.recipe import Recipe
from moesaic.output import draft as checkpoint
from moesaic.output.model_card import licence_of


def convert(
    model: Any,
    recipe: str | Path | Recipe = "moesaic",
    layout: str | Layout | None = None,
    calibration: Any = "wikitext2",
    *,
    sparsity: float | None = None,
    target_ratio: float | None = None,
    grain: str = "medium",
    tokenizer: Any = None,
    output: str | Path | None = None,
    samples: int | None = None,
    sequence_length: int | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    overwrite: bool = False,
    resume: bool = False,
    trust_remote_code: bool = False,
    experts: Sequence[int] | None = None,
    min_tokens: int | None = None,
    dense_layers: Sequence[int] = (),
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
    Without a `layout`, a share `sparsity` of the FFN neurons (0.25 unless given) is skipped, by
    the layout of that `grain` (coarse, medium, fine) with the least held-out error of a few
    layers; `target_ratio` skips as many as keep perplexity within that ratio of dense.
    In a model that is a mixture already, every expert is converted by itself, on the tokens that
    its router sends there (Section 4.4); a layout is of each expert. `experts` names those to
    convert; ones that see fewer than `min_tokens` (unless said, as many as an expert has neurons)
    stay whole, and the report names them. `dense_layers` stay as they are.
    `output` writes the model folder, layer by layer and resumable, and measures perplexity
    before and after on held-out text.

    Returns the converted model and its report. Raises MoesaicError for any bad input and leaves
    nothing on the disk then. Time: the layers take two (cmoe) to three and a half (moesaic)
    forward passes over the calibration tokens; loading, the choice of a layout and the two
    perplexities come on top. Memory: the dense weights, two FFNs more, the inputs of one layer
    and its FFN for all tokens, and what a recipe's statistics take (docs/architecture.md).
    """
    started = time.perf_counter()
    target = Path(output).absolute() if output is not None else None
    ready = prepare(
        model,
        recipe,
        layout,
        calibration,
        sparsity=sparsity,
        grain=grain,
        tokenizer=tokenizer,
        output=target,
        samples=samples,
        sequence_length=sequence_length,
        seed=seed,
        overwrite=overwrite,
        resume=resume,
        trust_remote_code=trust_remote_code,
        experts=experts,
        min_tokens=min_tokens,
        dense_layers=dense_layers,
    )
    todo, windows_NL, heldout_ids = ready.plans[0], ready.windows_NL, ready.heldout_ids
    if target_ratio is not None:
        check_target(target_ratio, layout, sparsity, heldout_ids)
    in_memory = not isinstance(model, str | Path)
    if in_memory and (dtype, device) != ("auto", "auto"):
        raise MoesaicError(
            "a model in memory keeps its dtype and device; move it before the call"
        )
    compute = model.device if in_memory else choose_device(device)
    dense = model if in_memory else load_model(model, dtype, trust_remote_code)
    if any(p.is_meta for p in dense.parameters()):
        raise MoesaicError(
            f"{todo.model} has weights that are not in memory; pass its folder instead"
        )
    dense.eval()
    if not in_memory and _fits(dense, compute):
        dense.to(compute)
    ffns = replace(find_ffns(dense), kept=tuple(dense_layers))
    check_vocabulary(dense, windows_NL)
    weights = check_weights(ffns, dense)
    check_stream(ffns, windows_NL)
    todo, search = search_plan(
        dense, ffns, ready, target_ratio, compute, seed, trust_remote_code, progress
    )
    report = ConversionReport(
        model=todo.model,
        recipe=todo.recipe.to_dict(),
        layout=str(todo.layout),
        shape=todo.shape,
        calibration=source_name(calibration),
        tokens=windows_NL.numel(),
        sequence_length=windows_NL.shape[1],
        seed=seed,
        active_ffn_fraction=active_ffn_fraction(todo.config),
        dense_macs=todo.dense_macs.total,
        macs=todo.macs.total,
        search=search,
    )
    todo.config.moesaic["calibration"] = {
        "source": report.calibration,
        "tokens": report.tokens,
        "sequence_length": report.sequence_length,
        "seed": seed,
    }
    todo.config.dtype = str(dense.dtype).removeprefix("torch.")

    def share(plan: Plan) -> Plan:
        tell = Console(stderr=True, quiet=not progress).print
        if target_ratio is not None and plan.recipe.layer_budgets:
            tell("layers keep equal budgets, with which the target was met")
            return plan
        return share_budgets(dense, ffns, plan, windows_NL, compute, seed, tell)

    if target is None:
        todo = share(todo)
        stream = Stream(ffns, windows_NL, compute)
        report.layers = convert_layers(
            stream, todo, seed, report.step_seconds, None, progress
        )
        _tell_apart(report, todo)
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
            todo = _shared(todo, share, draft)
            stream = Stream(ffns, windows_NL, compute)
            report.layers = convert_layers(
                stream, todo, seed, report.step_seconds, draft, progress
            )
            _tell_apart(report, todo)
            _become_ours(dense, todo.config)
            if heldout_ids is not None:
                report.perplexity, _ = perplexity(
                    dense, heldout_ids, length, HELDOUT_TOKENS
                )
            licence = None if in_memory else licence_of(resolve(model))
            call = f"moesaic.convert({todo.model!r}, {todo.recipe.name!r}, {str(todo.layout)!r})"
            files = {
                "README.md": model_card(report, todo.config, licence, command or call),
                "moesaic_report.json": json.dumps(
                    report.to_dict(timing=False), indent=2
                )
                + "\n",
            }
            checkpoint.finish(draft, target, dense, ready.tokenizer, files)
    report.seconds = time.perf_counter() - started
    return dense, report


def _shared(todo: Plan, share: Callable[[Plan], Plan], draft: Path) -> Plan:
    """The plan with its layers' budgets: those that an earlier run came to, if it did."""
    if not todo.recipe.layer_budgets:
        return todo
    path, part = draft / "budgets.json", draft / "budgets.part"
    if path.is_file():
        return with_budgets(todo, json.loads(path.read_text("utf-8")))
    found = share(todo)
    budgets = [
        found.sizes_of(layer).num_active for layer in found.config.moesaic["layers"]
    ]
    part.write_text(json.dumps(budgets), "utf-8")
    part.replace(path)
    return found


def _tell_apart(report: ConversionReport, todo: Plan) -> None:
    """What is known in the end only: layers' budgets, and experts of a mixture left whole."""
    report.shape, report.budgets = todo.shape, todo.config.moesaic.get("budgets", [])
    if todo.config.moesaic.get("whole"):
        report.macs = count_macs(meta_model(todo.config), 1).total
        report.active_ffn_fraction = active_ffn_fraction(todo.config)


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
        "experts": todo.config.moesaic.get("asked"),
        "layers": todo.config.moesaic["layers"],
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
