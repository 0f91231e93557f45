"""`moesaic eval`: perplexity or answers of a model, beside the dense one it came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.cli.options import (
    Device,
    Dtype,
    JsonFile,
    SequenceLength,
    Trust,
    check_json_file,
    err,
    numbers,
    write_json,
)
from moesaic.cli.quiet import quieten
from moesaic.cli.tables import (
    ACTIVE_FFN,
    PERPLEXITY,
    explained,
    folded,
    out,
    tasks_table,
)
from moesaic.errors import MoesaicError
from moesaic.progress import progress


def evaluate_command(
    model: Annotated[
        str,
        typer.Argument(
            help="A model: hub id, folder (dense or converted), GGUF file, or demo."
        ),
    ],
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to measure on: FILE[:FIELD], wikitext2, c4, "
            "hub:NAME:CONFIG:SPLIT:FIELD or demo. May be given more than once. "
            "[default: wikitext2, or demo for what came from the demo model]"
        ),
    ] = None,
    sequence_length: SequenceLength = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Use only so many tokens, from the start of each text."
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Model to compare with on the same text or questions; none: do not compare. "
            "[default: the model that was converted]"
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Ask questions instead, with commas: piqa, winogrande, arc_easy, "
            "arc_challenge, hellaswag, mmlu, gsm8k, humaneval. "
            "Needs pip install 'lm-eval>=0.4.13'."
        ),
    ] = None,
    fewshot: Annotated[
        int | None,
        typer.Option(
            help="Questions with their answers shown before each question. "
            "[default: the paper's: 5 for mmlu, 8 for gsm8k, else 0]"
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Ask only so many questions of each task, evenly spaced. Of mmlu so many "
            "in all: each subject gives its share."
        ),
    ] = None,
    batch_size: Annotated[
        str | None,
        typer.Option(
            help="Answers computed at once, or auto: up to 16 on a CPU, what fits on a GPU. "
            "[default: auto]"
        ),
    ] = None,
    task_data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the questions as TASK.SPLIT.jsonl. [default: the hub's]"
        ),
    ] = None,
    allow_code_execution: Annotated[
        bool,
        typer.Option(
            "--allow-code-execution",
            help="Run what the model writes for humaneval, under limits, on this machine.",
        ),
    ] = False,
    self_consistency: Annotated[
        str | None,
        typer.Option(
            help="Draw so many answers to each question and let them vote; several numbers "
            "with commas, as 1,3,5, come from one set of answers. Not for humaneval."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Same seed, same answers drawn. [default: 0]"),
    ] = None,
    json_file: JsonFile = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: Trust = False,
) -> None:
    """Measure perplexity on text, or ask questions, beside the dense model.

    Text is cut into windows that do not overlap. Questions are asked by EleutherAI's
    lm-evaluation-harness.
    """
    check_json_file(json_file)
    only_text = {
        "--text": text,
        "--sequence-length": sequence_length,
        "--max-tokens": max_tokens,
    }
    only_tasks = {
        "--fewshot": fewshot,
        "--limit": limit,
        "--batch-size": batch_size,
        "--task-data": task_data,
        "--allow-code-execution": allow_code_execution or None,
        "--self-consistency": self_consistency,
        "--seed": seed,
    }
    if tasks is None:
        _check_unused(only_tasks, "measures perplexity on text; name --tasks")
    else:
        _check_unused(only_text, "asks questions; measure text in another run")
        if self_consistency is None:
            drawn = {"--seed": seed}
            _check_unused(drawn, "draws no answers; name --self-consistency")
    quieten()
    from moesaic.families.load import choose_device

    compute = choose_device(device)
    if against is None:
        against = default_dense(model, trust_remote_code)
    elif against == "none":
        against = None
    if tasks is not None:
        from moesaic.evaluate.tasks import evaluate_tasks

        votes = numbers("--self-consistency", self_consistency, "1,3,5")
        result = evaluate_tasks(
            model,
            [name.strip() for name in tasks.split(",") if name.strip()],
            against=against,
            fewshot=fewshot,
            limit=limit,
            batch_size=_batch_size(batch_size),
            task_data=task_data,
            allow_code_execution=allow_code_execution,
            self_consistency=votes or [],
            seed=seed or 0,
            device=compute,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
        tasks_table(result)
        write_json(json_file, result)
        return

    from moesaic.evaluate import evaluate

    with ExitStack() as bars:

        def begin(name: str, tokens: int) -> Callable[[int], None]:
            bars.close()  # a terminal shows one bar at a time
            return bars.enter_context(progress(f"evaluating {name}", tokens))

        result = evaluate(
            model,
            text,
            against=against,
            sequence_length=sequence_length,
            max_tokens=max_tokens,
            device=compute,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            progress=begin,
        )
    _print(result)
    write_json(json_file, result)


def _check_unused(options: Mapping[str, object], what: str) -> None:
    """Refuses options that the other kind of measurement has."""
    for option, value in options.items():
        if value is not None:
            raise MoesaicError(f"{option} does not go with a run that {what}")


def _batch_size(text: str | None) -> int | str:
    if text is None:
        return "auto"
    try:
        return int(text)
    except ValueError:
        return text


def default_dense(model: str, trust_remote_code: bool) -> str | None:
    """The dense model that a converted one was made from, if it can be had."""
    from moesaic.families import load

    config = load.load_config(model, trust_remote_code)
    if load.base_model_of(config) is None:
        return None
    dense = load.dense_of(model, config)
    if dense is None:
        err.print(
            "the dense model was not found: no comparison; name it by --against"
        )
        return None
    try:
        load.load_config(dense, trust_remote_code)
    except MoesaicError as error:
        err.print(
            f"no comparison with the dense model: {error}",
            highlight=False,
        )
        return None
    return str(dense)


def _print(result: dict[str, Any]) -> None:
    rows = [result]
    if "against" in result:
        rows.append(result["against"])
    table = explained(
        "model",
        "text",
        "perplexity",
        "tokens",
        "active FFN",
        meanings=[PERPLEXITY, "tokens: how many were predicted", ACTIVE_FFN],
    )
    for row in rows:
        for source, value in row["perplexity"].items():
            table.add_row(
                *folded(row["model"], source),
                f"{value:.4f}",
                f"{row['tokens'][source]}",
                _share(row["active_ffn_fraction"]),
            )
    out.print(table)
    for row in rows:
        for source, share in row.get("choices", {}).items():
            out.print(
                f"thresholds of {row['model']} on {source}: {share['ran']:.1%} of what is "
                f"chosen from ran, {share['planned']:.1%} were planned"
            )
    for row in rows:
        if "prompt" in row:
            out.print(
                f"{row['model']} runs all neurons for the first {row['prompt']} tokens of "
                "every window; active FFN is that of the others"
            )
    if len({row["dtype"] for row in rows}) > 1:
        formats = " and ".join(f"{row['model']} {row['dtype']}" for row in rows)
        out.print(
            f"number formats differ: {formats}; --dtype gives both the same"
        )
    for source, ratio in result.get("ratio", {}).items():
        out.print(
            f"ratio on {source}: {ratio:.4f} "
            f"(perplexity over that of {result['against']['model']})"
        )


def _share(fraction: float | None) -> str:
    """In percent; a dash where it is not known."""
    return "-" if fraction is None else f"{fraction:.1%}"
