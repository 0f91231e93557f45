"""Conversion as users call it, with recovery right after it where they ask for it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from moesaic import launch
from moesaic.conversion.convert import check_conversion, convert_prepared
from moesaic.conversion.options import make_options
from moesaic.conversion.prepare import Prepared, source_name
from moesaic.conversion.report import ConversionReport
from moesaic.errors import MoesaicError
from moesaic.families.load import check_files
from moesaic.inspection.beside import draw_beside
from moesaic.layout import Layout
from moesaic.methods.base import Method
from moesaic.output.draft import check_space


def convert(
    model: Any,
    recipe: str | Path | Method = "moesaic",
    layout: str | Layout | None = None,
    calibration: Any = "wikitext2",
    *,
    settings: Mapping[str, object] | None = None,
    sparsity: float | None = None,
    target_ratio: float | None = None,
    grain: str | None = None,
    tokenizer: Any = None,
    output: str | Path | None = None,
    samples: int | None = None,
    sequence_length: int | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    overwrite: bool = False,
    resume: bool = False,
    trust_remote_code: bool = False,
    experts: Sequence[int] | None = None,
    min_tokens: int | None = None,
    dense_layers: Sequence[int] = (),
    recover: int | None = None,
    tune_dense: bool = False,
    command: str | None = None,
    progress: bool = False,
) -> tuple[Any, ConversionReport]:
    """Turns a dense causal language model into a mixture of experts, without training.

    `model` is a hub id, a folder, a GGUF file, `demo`, or a model in memory, which is
    changed in place, in the dtype and on the device it has: its FFNs are replaced, its
    class becomes MoesaicForCausalLM, in evaluation mode. (Load it again after an error:
    its first layers may be converted.) One that a `device_map` has spread over GPUs is in
    main memory meanwhile. `recipe` is a method: its name (`moesaic
    methods`), a file, or a Method; `settings` are its fields. `calibration` is a SOURCE
    (see `moesaic.calibration.text.read_documents`), a list of strings, a
    `datasets.Dataset`, or token ids: one row, from which `samples` windows of
    `sequence_length` are drawn, or a matrix of windows; or several of these in a
    mapping by name, which give as many windows each. Without a `layout`, a share
    `sparsity` of the FFN neurons (0.25 unless given) is skipped, by the layout of that
    `grain` (coarse, medium unless given, fine) with the least held-out error of a few layers;
    `target_ratio` skips as many as keep perplexity within that ratio of dense. In a
    model that is a mixture already, every expert is converted by itself, on the tokens
    that its router sends there (Section 4.4); a layout is of each expert. `experts`
    names those to convert; ones that see fewer than `min_tokens` (unless said, as many
    as an expert has neurons) stay whole, and the report names them. `dense_layers` stay
    as they are. `output` writes the model folder, layer by layer and resumable, measures
    perplexity before and after on held-out text, and draws report.html into it.

    `recover` trains the converted model on so many tokens of the same text, as
    `moesaic.finetune` would, to imitate the dense model. It needs an `output` and a
    model that is no object in memory. The report's `recovery` says what it gained. With
    `tune_dense` the dense model is first trained on the same tokens by next-token loss,
    and that one is converted and imitated: `report.dense_perplexity` is its, then.

    Returns the converted model and its report. Raises MoesaicError for any bad input
    and leaves nothing on the disk then. Time: the layers take two (cmoe) to four and a
    half (moesaic) forward passes over the calibration tokens; loading, the choice of a
    layout and the two perplexities come on top. Memory: the dense weights, two FFNs
    more, the inputs of one layer and its FFN for all tokens, and what a method's
    statistics take (docs/architecture.md). Under torchrun or accelerate launch all
    processes must make the same call: they share the calibration windows, and the
    first one writes. `recover` costs about four forward passes for each of its tokens,
    and then holds the converted model and the dense one; `tune_dense` three passes more.
    """
    check_tune_dense(tune_dense, recover)
    options = make_options(
        model,
        recipe,
        layout,
        calibration,
        settings=settings,
        sparsity=sparsity,
        target_ratio=target_ratio,
        grain=grain,
        tokenizer=tokenizer,
        output=output,
        samples=samples,
        sequence_length=sequence_length,
        seed=seed,
        device=device,
        dtype=dtype,
        overwrite=overwrite,
        resume=resume,
        trust_remote_code=trust_remote_code,
        experts=experts,
        min_tokens=min_tokens,
        dense_layers=dense_layers,
        command=command,
        progress=progress and launch.is_first(),
    )
    started = time.perf_counter()
    prepared = check_conversion(options)
    if recover is None:
        converted, report = convert_prepared(prepared)
    else:
        # Training takes long to import.
        from moesaic.finetune.recover import convert_and_recover

        converted, report = convert_and_recover(prepared, recover, tune_dense)
    report.seconds = time.perf_counter() - started
    _draw_page(prepared, converted)
    return converted, report


def check_tune_dense(tune_dense: bool, recover: int | None) -> None:
    if tune_dense and recover is None:
        raise MoesaicError(
            "tune_dense trains on the tokens of recover; say how many, as recover "
            "50000"
        )


def _draw_page(prepared: Prepared, converted: Any) -> None:
    """Puts report.html beside a model that was written; shows held-out text."""
    options = prepared.options
    if options.output is None or not launch.is_first():
        return
    validation = prepared.validation
    if validation is None:
        ids_T = prepared.texts[0].flatten()
        source = source_name(options.calibration)
    else:
        ids_T = validation.ids
        source = validation.name
    draw_beside(
        options.output,
        converted,
        ids_T,
        source,
        prepared.tokenizer,
        options.trust_remote_code,
    )


def dry_run(
    model: Any,
    recipe: Any,
    layout: Any,
    calibration: Any,
    *,
    recover: int | None = None,
    tune_dense: bool = False,
    **others: Any,
) -> Prepared:
    """Checks all that `convert` is given, of weights the files' headers. Writes nothing."""
    check_tune_dense(tune_dense, recover)
    options = make_options(model, recipe, layout, calibration, **others)
    if isinstance(model, str | Path):
        check_files(model)
    prepared = check_conversion(options)
    if recover is None:
        _check_space(prepared)
    else:
        from moesaic.finetune.recover import check_recovery

        check_recovery(prepared, recover, tune_dense)
    return prepared


def _check_space(prepared: Prepared) -> None:
    """Raises MoesaicError where the disk has no room for the usual plan's model."""
    output = prepared.options.output
    plan = prepared.plans[0]
    dtype = plan.dense_config.dtype
    if output is not None and dtype is not None:
        check_space(output, plan.stored_bytes(dtype))
