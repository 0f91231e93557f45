"""`moesaic bench`: how fast a model runs, beside the dense one it came from."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moesaic.cli.evaluate import default_dense
from moesaic.cli.options import (
    Device,
    Dtype,
    JsonFile,
    Trust,
    check_json_file,
    numbers,
    write_json,
)
from moesaic.cli.quiet import quieten
from moesaic.cli.tables import explained, out
from moesaic.progress import status


def bench_command(
    model: Annotated[
        str,
        typer.Argument(
            help="A model: folder (dense or converted), hub id, or GGUF file for llama.cpp."
        ),
    ],
    against: Annotated[
        str | None,
        typer.Option(
            help="Model to time in turn with it; none: time it alone. "
            "[default: the model that was converted]"
        ),
    ] = None,
    prefill: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a prompt, read at once. [default: 512, or what the "
            "context leaves]"
        ),
    ] = None,
    decode: Annotated[
        int, typer.Option(help="Tokens after it, one at a time.")
    ] = 128,
    batch: Annotated[
        str, typer.Option(help="Sequences at once, with commas.")
    ] = "1,16",
    engine: Annotated[
        str, typer.Option(help="transformers, vllm or llama.cpp.")
    ] = "transformers",
    engine_python: Annotated[
        str | None,
        typer.Option(
            help="The Python that has the engine. [default: this one]"
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="Measured so often, after one that warms up.")
    ] = 5,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads of a CPU. [default: what the engine takes; for llama.cpp one "
            "for each processor]"
        ),
    ] = None,
    json_file: JsonFile = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: Trust = False,
) -> None:
    """Time a prompt and the tokens after it, in turn with the dense model.

    For a machine that does nothing else. Both models are in memory at the same time,
    each in a process of its own.
    """
    check_json_file(json_file)
    batches = numbers("--batch", batch, "1,16") or []
    quieten()
    from moesaic.bench.bench import bench
    from moesaic.bench.engine import end_with_this_process

    end_with_this_process()

    if against == "none":
        against = None
    elif against is None and not model.lower().endswith(".gguf"):
        against = default_dense(model, trust_remote_code)
    with status("timing") as tell:
        result = bench(
            model,
            against=against,
            prefill=prefill,
            decode=decode,
            batches=batches,
            engine=engine,
            engine_python=engine_python,
            rounds=rounds,
            threads=threads,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            progress=tell,
        )
    print_result(result)
    write_json(json_file, result)


def print_result(result: dict[str, Any]) -> None:
    beside = result["against"] is not None
    names = ["", "batch", "tokens/s"]
    meanings = [
        "prefill: tokens of a prompt, read at once",
        "decode: tokens after it, one at a time of every sequence",
        "batch: sequences at once; tokens/s are those of all together",
    ]
    if beside:
        names += ["the other's", "time over the other's", "floor", "over floor"]
        meanings += [
            f"the other: {result['against']}",
            "time over the other's: median of the rounds (least to most); below 1 is "
            "faster",
            "floor: what the counted work would give: multiply-accumulates of a prompt, "
            "bytes of weights for a token",
            "over floor: the time over that of the counted work",
        ]
    table = explained(*names, meanings=meanings)
    for row in result["rows"]:
        speeds = [f"{speed:,.1f}" for speed in row["tokens_per_second"]]
        cells = [row["kind"], str(row["batch"]), *speeds]
        if beside:
            span = f"{row['least']:.2f}-{row['most']:.2f}"
            cells.append(f"{row['ratio']:.2f} ({span})")
            cells += _floor_cells(row)
        table.add_row(*cells)
    out.print(table)
    where = f"{result['engine']} {result['version']} on {result['device']}"
    about = f"{result['model']}, {where}, rounds: {result['rounds']}"
    out.print(about, highlight=False)
    if len(set(result["dtypes"])) > 1:
        own, others = result["dtypes"]
        out.print(
            f"it was timed in {own}, the other in {others}: --dtype makes them equal",
            highlight=False,
        )
    for name in result["emulated"]:
        out.print(
            f"this processor has no instructions for {name}, and torch is much "
            "slower in it than in float32; see what --dtype float32 says",
            highlight=False,
        )
    for note in result["notes"]:
        out.print(f"note: {note}", highlight=False)
    _print_memory(result)
    for line in result["skipped"]:
        out.print(f"not timed: {line}", highlight=False)


def _floor_cells(row: dict[str, Any]) -> list[str]:
    if row["floor"] is None:
        return ["", ""]
    return [f"{row['floor']:.2f}", f"{row['ratio'] / row['floor']:.2f}"]


def _print_memory(result: dict[str, Any]) -> None:
    """The most that either process held, where the engine computes in it."""
    held = result["rows"][-1]["memory"]
    if None in held:
        return
    words = [f"{size / 2**30:.1f} GiB" for size in held]
    other = f", of the other {words[1]}" if len(words) > 1 else ""
    out.print(f"memory held at most: {words[0]}{other}")
