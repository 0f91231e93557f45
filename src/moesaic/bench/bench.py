"""Times a model and the dense one in turn, in one engine (`moesaic bench`)."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from moesaic.bench.engine import (
    Engine,
    Worker,
    find_engine,
    has_module,
    started,
)
from moesaic.bench.floor import Counted, count, floor_of
from moesaic.bench.regimes import Regime, make_regimes
from moesaic.calibration.text import read_documents
from moesaic.errors import MoesaicError
from moesaic.evaluate.work import is_converted
from moesaic.families.load import (
    choose_device,
    choose_dtype,
    context_of,
    is_gguf,
    load_config,
    resolve,
)
from moesaic.parts.products import is_emulated

ROUNDS = 5
KINDS = ("prefill", "decode")
PROMPT = 512  # tokens, where nobody says how many
AUTO = "auto"


def bench(
    model: str,
    *,
    against: str | None = None,
    prefill: int | None = None,
    decode: int = 128,
    batches: Sequence[int] = (1, 16),
    engine: str = "transformers",
    engine_python: str | None = None,
    rounds: int = ROUNDS,
    threads: int | None = None,
    device: str = AUTO,
    dtype: str = AUTO,
    trust_remote_code: bool = False,
    progress: Callable[[str], Any] = lambda text: None,
) -> dict[str, Any]:
    """Seconds of a prompt and of tokens after it, beside those of the model `against`.

    Both models are loaded, each in a process of its own, and timed in turn: `rounds`
    times after one that warms up, for every number of sequences at once in `batches`.
    Without `prefill` a prompt has 512 tokens, or what the models' contexts leave. A row
    has, for the prompt or for the tokens, the median of the ratios with the least
    and the most, tokens per second, and the floor: the ratio of the counted works, where
    both are known. Memory is the most that a process held so far, in bytes, where the
    engine computes in it. A batch that stops the engine ends the run; the rows before it
    are kept, and `skipped` says why. `dtypes` are the number formats of both, None where
    the engine decides: by `dtype` "auto" each model has its own. `emulated` are those of
    them that this processor has no instructions for. `notes` say what slowed a model
    down, such as kernels of ours that could not be compiled.

    Models are folders or hub ids, for llama.cpp GGUF files. Raises MoesaicError for an
    engine that is not installed, a model that it cannot run, and numbers that do not fit.
    """
    # Before anything is read.
    make_regimes(1 if prefill is None else prefill, decode, batches)
    if rounds < 1:
        raise MoesaicError(f"rounds {rounds}: at least 1 is needed")
    if threads is not None and threads < 1:
        raise MoesaicError(f"threads {threads}: at least 1 computes")
    processors = os.cpu_count() or 1
    if threads is not None and threads > processors:
        raise MoesaicError(
            f"threads {threads}: this machine has {processors} processors; take at most "
            "one for each"
        )
    found, python = find_engine(engine, engine_python)
    _check_options(found, device=device, dtype=dtype, threads=threads)
    compute = AUTO
    if "device" not in found.refuses:
        compute = str(choose_device(device))
    names = [model] if against is None else [model, against]
    configs = [
        _config_of(name, found, trust_remote_code, dtype) for name in names
    ]
    if prefill is None:
        prefill = _usual_prompt(configs, decode)
    regimes = make_regimes(prefill, decode, batches)
    for name, config in zip(names, configs, strict=True):
        _check_context(name, config, prefill + decode)
    if not trust_remote_code:
        _check_code(names, configs, found, python)
    kept = regimes
    skipped: list[str] = []
    if compute == "cpu":
        kept, skipped = _held_by_memory(regimes, configs)
    counted = [_counted(config, prefill) for config in configs]
    settings = {
        "text": "\n".join(read_documents("demo", heldout=True)),
        "context": prefill + decode + 1,
        "threads": threads,
        "device": compute,
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "models": len(names),
        "most_at_once": max(regime.batch for regime in kept),
    }
    formats = [_format_of(config, dtype) for config in configs]
    with ExitStack() as stack:
        workers = []
        for name, config, own_format in zip(
            names, configs, formats, strict=True
        ):
            progress(f"loading {name}")
            own = {
                "model": resolve(name),
                "own_architecture": config is not None and is_converted(config),
                "cache_gib": _cache_gib(config, settings),
                # By itself vLLM takes 16 bits where a model has 32.
                "dtype": own_format or dtype,
            }
            worker = started(found, python, settings | own)
            workers.append(stack.enter_context(worker))
        rows, stopped = _rows(workers, kept, counted, rounds, progress)
        about = [worker.about for worker in workers]
        notes = {note for worker in workers for note in worker.notes}
    return {
        "model": model,
        "against": against,
        "engine": engine,
        "version": about[0]["version"],
        "device": about[0]["device"],
        "threads": threads,
        "dtype": dtype,
        "dtypes": formats,
        "emulated": _emulated(formats, found, compute),
        "notes": sorted(notes),
        "rounds": rounds,
        "rows": rows,
        "load_seconds": [one["load_seconds"] for one in about],
        "skipped": skipped + stopped,
    }


def _check_options(engine: Engine, **given: Any) -> None:
    """Refuses what the engine decides by itself."""
    for name in engine.refuses:
        if given[name] not in (None, AUTO):
            raise MoesaicError(
                f"--{name} {given[name]} does not go with {engine.name}, which decides "
                "that by itself"
            )


def _config_of(
    name: str,
    engine: Engine,
    trust_remote_code: bool,
    dtype: str,
) -> Any:
    """The configuration; None for llama.cpp. Raises MoesaicError for what cannot run."""
    path = Path(name)
    if engine.reads_gguf:
        if not is_gguf(path):
            raise MoesaicError(
                f"{engine.name} runs GGUF files, and {name} is none; moesaic export "
                "writes one of a converted model, llama.cpp's convert_hf_to_gguf.py one "
                "of any other"
            )
        if not path.is_file():
            raise MoesaicError(f"no such GGUF file: {name}")
        return None
    if is_gguf(path) and engine.name != "transformers":
        raise MoesaicError(
            f"{name} is a GGUF file, which --engine llama.cpp runs"
        )
    return load_config(name, trust_remote_code, dtype)


def _usual_prompt(configs: list[Any], decode: int) -> int:
    """Tokens of a prompt where nobody says how many, fewer where a context is short."""
    contexts = [context_of(config) for config in configs if config is not None]
    room = min(contexts, default=2 * PROMPT + decode) - decode - 1
    return max(1, min(PROMPT, room))


def _check_context(name: str, config: Any, tokens: int) -> None:
    if config is None:
        return
    context = context_of(config)
    # The last token's own answer is a token more.
    if tokens >= context:
        raise MoesaicError(
            f"prompt and tokens after it are {tokens} with one more to answer, and the "
            f"context of {name} is {context}; take a smaller --prefill or --decode"
        )


def _format_of(config: Any, dtype: str) -> str | None:
    """The number format that a model is timed in; None where no one says it.

    So in llama.cpp, and for a configuration without one.
    """
    if config is None:
        return None
    if dtype != AUTO:
        return dtype
    own = config.get_text_config().dtype
    if own is None:  # the weights decide, which are not read here
        return None
    return str(own).removeprefix("torch.")


def _emulated(
    formats: list[str | None], engine: Engine, device: str
) -> list[str]:
    """Those that torch computes without the processor's own instructions."""
    if engine.name != "transformers" or device != "cpu":
        return []
    named = {name for name in formats if name is not None}
    return sorted(name for name in named if is_emulated(choose_dtype(name)))


def _check_code(
    names: list[str], configs: list[Any], engine: Engine, python: str
) -> None:
    """Refuses our own architecture where the engine cannot have it from moesaic."""
    own = [
        name
        for name, config in zip(names, configs, strict=True)
        if config is not None and is_converted(config)
    ]
    if own and not has_module(python, "moesaic"):
        raise MoesaicError(
            f"{own[0]} is of moesaic's own architecture; install moesaic for {python}, "
            f"or say --trust-remote-code and {engine.name} runs the code beside the weights"
        )


def _counted(config: Any, prompt: int) -> Counted | None:
    """The model's work; None where it cannot be counted."""
    if config is None:
        return None
    try:
        return count(config, prompt)
    except MoesaicError:
        return None


def _held_by_memory(
    regimes: list[Regime], configs: list[Any]
) -> tuple[list[Regime], list[str]]:
    """Those whose keys and values this machine can hold, and why not the others."""
    pages = os.sysconf("SC_PHYS_PAGES")
    memory = pages * os.sysconf("SC_PAGE_SIZE") / 2**30
    kept = []
    skipped = []
    for regime in regimes:
        tokens = regime.batch * (regime.prompt + regime.new)
        needed = sum(_keys_gib(config, tokens) for config in configs) / 2
        if needed < memory:
            kept.append(regime)
            continue
        skipped.append(
            f"batch {regime.batch}: keys and values alone take {needed:,.0f} GiB in 16 "
            f"bits, and this machine has {memory:,.0f}; take a smaller --batch"
        )
    if not kept:
        raise MoesaicError(skipped[0])
    return kept, skipped


def _cache_gib(config: Any, settings: dict[str, Any]) -> int:
    """Room for keys and values of all sequences in float32, and 1 GiB."""
    tokens = settings["context"] * settings["most_at_once"]
    return 1 + math.ceil(_keys_gib(config, tokens))


def _keys_gib(config: Any, tokens: int) -> float:
    """Keys and values of so many tokens in float32; 0 where nothing is known."""
    if config is None:
        return 0.0
    text = config.get_text_config()
    if getattr(text, "is_heterogeneous", False):
        return 0.0  # its heads differ by layer
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    of_token = 2 * text.num_hidden_layers * key_heads * head_dim * 4
    gib: float = of_token * tokens / 2**30
    return gib


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


def _rows(
    workers: list[Worker],
    regimes: list[Regime],
    counted: list[Counted | None],
    rounds: int,
    progress: Callable[[str], Any],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Two of each regime, up to the one that stops an engine, and why it did."""
    rows: list[dict[str, Any]] = []
    for regime in regimes:
        try:
            times = _timed(workers, regime, rounds, progress)
        except MoesaicError as error:
            if not rows:
                raise
            return rows, [f"batch {regime.batch}: {error}"]
        for kind in KINDS:
            row = _row(regime, kind, times)
            row["floor"] = None
            if len(counted) == 2:
                ours, dense = counted
                row["floor"] = floor_of(ours, dense, regime, kind)
            rows.append(row)
    return rows, []


def _row(
    regime: Regime, kind: str, times: list[list[dict[str, float]]]
) -> dict[str, Any]:
    """One kind of work: tokens per second, and ours over the other one's seconds."""
    of_one = regime.prompt if kind == "prefill" else regime.new
    tokens = regime.batch * of_one
    seconds = [[one[kind] for one in of_worker] for of_worker in times]
    medians = [statistics.median(of_worker) for of_worker in seconds]
    row: dict[str, Any] = {
        "kind": kind,
        "batch": regime.batch,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": [tokens / median for median in medians],
        "memory": [of_worker[-1].get("memory") for of_worker in times],
    }
    if len(seconds) == 2:
        ours, dense = seconds
        ratios = [a / b for a, b in zip(ours, dense, strict=True)]
        row["ratio"] = statistics.median(ratios)
        row["least"] = min(ratios)
        row["most"] = max(ratios)
    return row
