"""Converts one model by several recipes at equal budgets and evaluates them on the same tokens."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch

from moesaic.calibration.checks import check_vocabulary, check_weights
from moesaic.calibration.hidden_states import Stream, check_stream
from moesaic.calibration.text import has_heldout_split, sample_windows, to_ids
from moesaic.comparison.rows import markdown, plot, ranked, remarks
from moesaic.conversion.layer_budgets import share_budgets
from moesaic.conversion.layers import convert_layers
from moesaic.conversion.plan import Plan, make_plan
from moesaic.conversion.prepare import check_samples, hold_out, usual_samples
from moesaic.errors import MoesaicError
from moesaic.evaluate.perplexity import perplexity
from moesaic.families import FFNs, find_ffns
from moesaic.families.load import choose_device, load_config, load_model, load_tokenizer
from moesaic.methods.recipe import Recipe, load_recipe
from moesaic.output.atomic import write_file
from moesaic.parts.routers import FITTED

# What every comparison is measured against.
REFERENCES = ("static", "static-repaired", "random", "oracle", "neuron-oracle")
TEXT_TOKENS = 65_536  # of each text, unless said


def compare(
    model: str,
    recipes: Sequence[str | Path | Recipe] = ("moesaic", "moesaic-dynamic", "cmoe"),
    *,
    sparsity: Sequence[float] = (0.25, 0.5),
    layout: str | None = None,
    grain: str = "medium",
    calibration: str = "wikitext2",
    text: Sequence[str] | None = None,
    references: Sequence[str] = REFERENCES,
    seeds: int = 3,
    samples: int | None = None,
    sequence_length: int | None = None,
    max_tokens: int = TEXT_TOKENS,
    output: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    progress: Callable[[str], Any] = lambda line: None,
) -> dict[str, Any]:
    """Perplexities by recipe: `settings`, `dense`, `cells`, ranked `rows` and `remarks`.

    All recipes see the same windows of the same calibration text, `seeds` drawings of them; the
    references are among the rows. A sparsity gives every recipe its own layout that skips that
    share of the FFN neurons as nearly as its number of experts allows (the rows say how many are
    active, and a reference that cannot come near is left out); a `layout` gives all the same. A
    text that is the calibration source itself is evaluated on what that keeps apart. With
    `output` writes compare.json after every conversion, then compare.md and compare.png; `resume`
    goes on with such a folder. Converted models are not kept. Costs per recipe, sparsity and seed
    one conversion and one pass over every text. Raises MoesaicError for bad input.
    """
    chosen = [load_recipe(recipe) for recipe in recipes]
    known = {recipe.name for recipe in chosen}
    chosen += [load_recipe(name) for name in references if name not in known]
    if len({recipe.name for recipe in chosen}) < len(chosen):
        raise MoesaicError(
            f"recipes {', '.join(r.name for r in chosen)}: each name once"
        )
    if seeds < 1 or max_tokens < 2 or not sparsity:
        raise MoesaicError(
            f"seeds {seeds}, max tokens {max_tokens}, sparsities {list(sparsity)}: at least 1 "
            "seed, 2 tokens and 1 sparsity are needed"
        )
    compute = choose_device(device)
    config = load_config(model, trust_remote_code)
    budgets: list[dict[str, Any]] = (
        [{"layout": layout}]
        if layout
        else [{"sparsity": s, "grain": grain} for s in sparsity]
    )
    plans: dict[tuple[str, float | None], Plan] = {}
    left_out: list[str] = []
    for budget, recipe in product(budgets, chosen):
        try:
            plans[recipe.name, budget.get("sparsity")] = make_plan(
                config,
                model,
                recipe,
                **budget,
                sequence_length=sequence_length,
                trust_remote_code=trust_remote_code,
            )
        except MoesaicError as error:
            if recipe.name in known:
                raise
            left_out.append(f"without {recipe.name}: {error}")
    if "static-repaired" in references:
        for budget in budgets:
            wanted = budget.get("sparsity")
            routed = [
                plans[r.name, wanted] for r in chosen if r.router in (*FITTED, "gates")
            ]
            if routed and (
                plan := _static_of_equal_macs(routed[0], config, sequence_length)
            ):
                plans[plan.recipe.name, wanted] = plan
    # One number for all: the recipe that needs most decides, or nobody's numbers are comparable.
    if samples is None:
        samples = max(usual_samples(plan) for plan in plans.values())
    length = next(iter(plans.values())).sequence_length
    check_samples(samples, length)
    tokenizer = load_tokenizer(model, trust_remote_code)
    ids, texts = _texts(calibration, text or [calibration], tokenizer, length)
    windows = [sample_windows(ids, samples, length, seed) for seed in range(seeds)]

    dense = load_model(model, dtype, trust_remote_code, compute)
    ffns = find_ffns(dense)
    check_vocabulary(dense, ids)
    settings = {
        "model": model,
        "weights": check_weights(ffns, dense),
        "dtype": str(dense.dtype).removeprefix("torch."),
        "device": compute.type,
        "calibration": {
            "source": calibration,
            "samples": samples,
            "sequence_length": length,
        },
        "calibration_tokens": _hash(ids),
        "texts": {name: _hash(found[:max_tokens]) for name, found in texts.items()},
        "max_tokens": max_tokens,
        "versions": {
            name: version(name) for name in ("moesaic", "torch", "transformers", "POT")
        },
    }
    check_stream(ffns, windows[0])
    result = _take_up(output, settings, resume)
    if not result["dense"]:
        progress("dense: evaluating")
        result["dense"] = _perplexities(dense, texts, length, max_tokens)
        _write(output, "compare.json", json.dumps(result, indent=2) + "\n")
    for (name, wanted), plan in plans.items():
        for seed in range(seeds):
            key = f"{name} {wanted or plan.layout} {seed} {_digest(plan)}"
            if key in result["cells"]:
                continue
            progress(f"{name}, {plan.layout}, seed {seed}")
            try:
                cell = _cell(
                    dense, ffns, plan, windows[seed], seed, compute, texts, max_tokens
                )
            except (
                MoesaicError
            ) as error:  # one that diverges is no reason to lose the others
                left_out.append(f"without {name}, {plan.layout}, seed {seed}: {error}")
                continue
            result["cells"][key] = {"sparsity": wanted, "seed": seed} | cell
            _write(output, "compare.json", json.dumps(result, indent=2) + "\n")
    wanted_cells = {
        f"{name} {wanted or plan.layout} {seed} {_digest(plan)}"
        for (name, wanted), plan in plans.items()
        for seed in range(seeds)
    }
    shown = {k: cell for k, cell in result["cells"].items() if k in wanted_cells}
    result["rows"] = ranked(shown, result["dense"])
    result["remarks"] = left_out + remarks(result["rows"])
    _write(output, "compare.json", json.dumps(result, indent=2) + "\n")
    _write(output, "compare.md", markdown(result))
    _write(output, "compare.png", plot(result))
    return result


def _static_of_equal_macs(
    routed: Plan, config: Any, sequence_length: int | None
) -> Plan | None:
    """Static pruning, repaired, that may also spend what a recipe's router costs.

    Equal neurons are not equal work where the router is large beside them, as in a small model
    with many experts. None where the router leaves nothing saved.
    """
    total = routed.sizes.total
    recipe = replace(
        load_recipe("static-repaired"),
        name=f"static-repaired, MACs of {routed.recipe.name}",
    )
    if routed.sizes.active == total:
        return None
    skipped = routed.dense_macs.ffn - routed.macs.ffn
    if routed.recipe.router == "gates":  # which skips two thirds of a neuron's work
        skipped *= 1.5
    per_neuron = skipped / (total - routed.sizes.active)
    neurons = total - int((routed.dense_macs.total - routed.macs.total) / per_neuron)
    if not 2 <= neurons < total:
        return None
    layout = f"S1A{neurons - 1}E{total}"
    return make_plan(
        config, routed.model, recipe, layout, sequence_length=sequence_length
    )


def _texts(
    calibration: str, sources: Sequence[str], tokenizer: Any, length: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Calibration ids and the ids of every text; none of the latter are among the former."""
    ids = to_ids(calibration, tokenizer)
    ids, apart, _ = hold_out(ids, calibration, tokenizer, length)
    texts = {}
    for source in sources:
        same = Path(source).resolve() == Path(calibration).resolve()
        if not same or has_heldout_split(source):
            texts[source] = to_ids(source, tokenizer, heldout=True)
        elif apart is not None:
            texts[source] = apart
        else:
            raise MoesaicError(
                f"{source} is too short to calibrate on nine tenths and evaluate on the rest; "
                "give another --text"
            )
    return ids, texts


def _cell(
    dense: Any,
    ffns: FFNs,
    plan: Plan,
    windows_NL: torch.Tensor,
    seed: int,
    device: torch.device,
    texts: dict[str, torch.Tensor],
    max_tokens: int,
) -> dict[str, Any]:
    """Converts in memory, evaluates, and puts the dense FFNs back."""
    steps: dict[str, float] = {}
    started = time.perf_counter()
    plan = share_budgets(dense, ffns, plan, windows_NL, device, seed)
    steps["budgets"] = time.perf_counter() - started
    with ffns.restored():
        stream = Stream(ffns, windows_NL, device)
        layers = convert_layers(stream, plan, seed, steps, trial=True)
        found = _perplexities(dense, texts, plan.sequence_length, max_tokens)
    loads = [layer.expert_load for layer in layers if layer.expert_load]
    return {
        "recipe": plan.recipe.name,
        "layout": str(plan.layout),
        "shape": plan.shape,
        "active_ffn_fraction": plan.sizes.active / plan.sizes.total,
        "macs": plan.macs.total / plan.dense_macs.total,
        "perplexity": found,
        "relative_error": [layer.relative_error for layer in layers],
        "better_static": [layer.layer for layer in layers if layer.better_static],
        "load_max_over_mean": max(
            (max(x) * len(x) / sum(x) for x in loads), default=None
        ),
        "dead_experts": sum(v < 0.05 * sum(x) / len(x) for x in loads for v in x),
        "notes": sorted({note for layer in layers for note in layer.notes}),
        "seconds": sum(steps.values()),
    }


def _perplexities(
    model: Any, texts: dict[str, torch.Tensor], length: int, max_tokens: int
) -> dict[str, float]:
    return {
        name: perplexity(model, ids, length, max_tokens)[0]
        for name, ids in texts.items()
    }


def _hash(ids: torch.Tensor) -> str:
    return hashlib.sha256(ids.numpy().tobytes()).hexdigest()


def _digest(plan: Plan) -> str:
    """Tells recipes of one name but other fields apart."""
    recipe = json.dumps(
        plan.recipe.to_dict() | {"layout": str(plan.layout)}, sort_keys=True
    )
    return hashlib.sha256(recipe.encode()).hexdigest()[:12]


def _take_up(
    output: str | Path | None, settings: dict[str, Any], resume: bool
) -> dict[str, Any]:
    """The cells that an earlier run finished; raises MoesaicError where it had other settings."""
    fresh: dict[str, Any] = {"settings": settings, "dense": {}, "cells": {}, "rows": []}
    if output is None:
        return fresh
    path = Path(output) / "compare.json"
    if not path.exists():
        return fresh
    if not resume:
        raise MoesaicError(
            f"{path} exists; pass --resume to go on with it, or choose another output"
        )
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        earlier = found["settings"]
        found["dense"], found["cells"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MoesaicError(
            f"{path} cannot be resumed ({error!r}); remove it"
        ) from error
    for key in settings:
        if earlier.get(key) != settings[key]:
            raise MoesaicError(
                f"{path} was made with {key} = {earlier.get(key)}, this run has {settings[key]}; "
                "choose another output"
            )
    return found


def _write(output: str | Path | None, name: str, content: str | bytes) -> None:
    """The whole file or the old one: a killed run leaves no half."""
    if output is None:
        return
    path = Path(output) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
    except OSError as error:
        raise MoesaicError(f"cannot write {path}: {error}") from error
