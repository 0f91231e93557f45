"""Times a model and the dense one in turn, in one engine (`moesaic bench`)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from moesaic.bench.engine import Engine, Worker, find_engine, started
from moesaic.bench.floor import Counted, floor_of
from moesaic.bench.regimes import Regime, make_regimes
from moesaic.calibration.text import read_documents
from moesaic.errors import MoesaicError
from moesaic.evaluate.work import is_converted
from moesaic.families.load import (
    choose_device,
    context_of,
    load_config,
    resolve,
)

ROUNDS = 5
KINDS = ("prefill", "decode")


def bench(
    model: str,
    *,
    against: str | None = None,
    prefill: int = 512,
    decode: int = 128,
    batches: Sequence[int] = (1, 16),
    engine: str = "transformers",
    engine_python: str | None = None,
    rounds: int = ROUNDS,
    threads: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    progress: Callable[[str], Any] = lambda text: None,
) -> dict[str, Any]:
    """Seconds of a prompt and of tokens after it, beside those of the model `against`.

    Both models are loaded, each in a process of its own, and timed in turn: `rounds`
    times after one that warms up, for every number of sequences at once in `batches`.
    A row has, for the prompt or for the tokens, the median of the ratios with the least
    and the most, tokens per second, and the floor: the ratio that the counted work would
    give. Memory is the most that a process held so far, in bytes, where it computes.

    Models are folders or hub ids, for llama.cpp GGUF files. Raises MoesaicError for an
    engine that is not installed, a model that it cannot run, and numbers that do not fit.
    """
    regimes = make_regimes(prefill, decode, batches)
    if rounds < 1:
        raise MoesaicError(f"rounds {rounds}: at least 1 is needed")
    if threads is not None and threads < 1:
        raise MoesaicError(f"threads {threads}: at least 1 computes")
    found, python = find_engine(engine, engine_python)
    compute = choose_device(device)
    names = [model] if against is None else [model, against]
    configs = [
        _check_model(name, found, prefill + decode, trust_remote_code)
        for name in names
    ]
    kept, skipped = _fitting(regimes, found)
    settings = {
        "text": "\n".join(read_documents("demo", heldout=True)),
        "context": prefill + decode + 1,
        "threads": threads,
        "device": str(compute),
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
    }
    with ExitStack() as stack:
        workers = []
        for name, config in zip(names, configs, strict=True):
            progress(f"loading {name}")
            own = config is not None and is_converted(config)
            where = resolve(name)
            more = settings | {"model": where, "own_architecture": own}
            workers.append(stack.enter_context(started(found, python, more)))
        rows = []
        for regime in kept:
            times = _timed(workers, regime, rounds, progress)
            for kind in KINDS:
                row = _row(regime, kind, times)
                row["floor"] = _floor(configs, regime, kind)
                rows.append(row)
        return {
            "model": model,
            "against": against,
            "engine": engine,
            "version": workers[0].version,
            "device": str(compute),
            "threads": threads,
            "dtype": dtype,
            "rounds": rounds,
            "rows": rows,
            "load_seconds": [worker.load_seconds for worker in workers],
            "skipped": skipped,
        }


def _check_model(
    name: str, engine: Engine, tokens: int, trust_remote_code: bool
) -> Any:
    """The configuration, None of a GGUF file. Raises MoesaicError for a wrong kind."""
    is_gguf = name.endswith(".gguf")
    if engine.reads_gguf:
        if not is_gguf:
            raise MoesaicError(
                f"{engine.name} runs GGUF files, and {name} is none; write one by "
                f"moesaic export {name} --format gguf --output MODEL.gguf"
            )
        if not Path(name).is_file():
            raise MoesaicError(f"{name}: no such file")
        return None
    if is_gguf and engine.name != "transformers":
        raise MoesaicError(
            f"{name} is a GGUF file, which --engine llama.cpp runs"
        )
    config = load_config(name, trust_remote_code)
    context = context_of(config)
    if tokens >= context:
        raise MoesaicError(
            f"{tokens} tokens of a prompt and after it do not fit the context of "
            f"{name}, {context}; take a smaller --prefill or --decode"
        )
    return config


def _fitting(
    regimes: list[Regime], engine: Engine
) -> tuple[list[Regime], list[str]]:
    """What the engine can run, and why not the others."""
    most = engine.most_at_once
    kept = [
        regime for regime in regimes if most is None or regime.batch <= most
    ]
    skipped = [
        f"batch {regime.batch}: {engine.name} runs {most} sequence at once here"
        for regime in regimes
        if regime not in kept
    ]
    if not kept:
        raise MoesaicError(skipped[0])
    return kept, skipped


def _timed(
    workers: list[Worker],
    regime: Regime,
    rounds: int,
    progress: Callable[[str], Any],
) -> list[list[dict[str, float]]]:
    """Times of every worker, one of each in turn; a first round warms up."""
    times: list[list[dict[str, float]]] = [[] for _ in workers]
    for number in range(rounds + 1):
        progress(f"batch {regime.batch}, round {number} of {rounds}")
        for worker, of_worker in zip(workers, times, strict=True):
            values = worker.time(regime)
            if number > 0:
                of_worker.append(values)
    return times


def _row(
    regime: Regime, kind: str, times: list[list[dict[str, float]]]
) -> dict[str, Any]:
    """One kind of work: tokens per second, and ours over the other one's seconds."""
    tokens = regime.batch * (regime.prompt if kind == "prefill" else regime.new)
    seconds = [[one[kind] for one in of_worker] for of_worker in times]
    row: dict[str, Any] = {
        "kind": kind,
        "batch": regime.batch,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": [
            tokens / statistics.median(of_worker) for of_worker in seconds
        ],
        "memory": [of_worker[-1].get("memory") for of_worker in times],
    }
    if len(seconds) == 2:
        ours, dense = seconds
        ratios = [a / b for a, b in zip(ours, dense, strict=True)]
        row["ratio"] = statistics.median(ratios)
        row["least"] = min(ratios)
        row["most"] = max(ratios)
    return row


def _floor(configs: list[Any], regime: Regime, kind: str) -> float | None:
    """The ratio that the counted work would give; None where it cannot be counted."""
    if len(configs) < 2 or None in configs:
        return None
    ours, dense = [Counted.of(config, regime.prompt) for config in configs]
    floor = floor_of(dense, ours, regime)
    return float(getattr(floor, kind))
