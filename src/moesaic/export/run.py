"""Writes a converted model as a stock architecture: one folder or file, or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM

from moesaic.calibration.text import to_ids
from moesaic.conversion.report import EXPORT_FILE
from moesaic.errors import MoesaicError, unknown
from moesaic.export import gguf_file
from moesaic.export.fits import (
    FORMATS,
    GGUF,
    TARGETS,
    check_fits,
    reasons_against,
    trained_parts,
)
from moesaic.export.model_card import export_card
from moesaic.export.scale import Scale, choose_scale
from moesaic.export.stock import blocks, check_converted_model, sizes_of
from moesaic.export.verify import (
    Comparison,
    agreement,
    compare_models,
    experts_by_kernel,
    router_inputs,
)
from moesaic.families.load import (
    file_beside,
    load_config,
    load_model,
    load_tokenizer,
    window_length,
)
from moesaic.output.atomic import check_new, new_path
from moesaic.output.draft import SHARD_SIZE
from moesaic.output.model_card import CARD_FILE, licence_of
from moesaic.parts.products import widened_products

LONGEST_WINDOW = 512  # tokens of a window that models are compared on
PROBE_TOKENS = 4096  # of text, on which the scale of the scores is chosen
VERIFY_TOKENS = 16_384  # on which perplexities are measured
# Where both run the same experts: the mean difference of logits over their rms that is
# more than rounding, and the share of what chance would change that near ties cannot
# explain (SmolLM2 in bfloat16, 168 of 248 experts: 0.012).
UNFAITHFUL = 0.05
OTHER_CHOICES = 0.25


@dataclass(frozen=True)
class ExportOptions:
    """All of an export's input. `moesaic.export` says what each field means."""

    model: str | Path
    format: str
    output: Path
    epsilon: float | None
    dtype: str
    verify: str | None
    trust_remote_code: bool

    @property
    def one_file(self) -> bool:
        """Whether a GGUF file is written, and no folder."""
        return self.format in GGUF

    @property
    def target(self) -> ModuleType:
        """The stock architecture."""
        name = GGUF.get(self.format, self.format)
        return TARGETS[name]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What the weights may be written in."""
        if self.one_file:
            return gguf_file.DTYPES
        dtypes: tuple[str, ...] = self.target.DTYPES
        return dtypes

    @property
    def route(self) -> Any:
        """What the engine's router makes of scores."""
        if self.format == "gguf-qwen2moe":
            return gguf_file.qwen2moe_route
        return self.target.route

    def logit_dtype(self, dtype: str) -> torch.dtype:
        """What the engine's router computes scores in, of a model written in `dtype`."""
        if self.one_file or self.target.ROUTES_IN_FLOAT32:
            return torch.float32
        rounded: torch.dtype = getattr(torch, dtype)
        return rounded


@dataclass(frozen=True)
class ExportReport:
    """What was written, what stock routers make of every layer's scores, how it compares.

    `scales` by layer; `comparison` is None unless asked for.
    """

    format: str
    architecture: str
    output: str
    dtype: str
    scales: list[Scale]
    comparison: Comparison | None
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def export(
    model: str | Path,
    format: str,
    output: str | Path,
    *,
    epsilon: float | None = None,
    dtype: str = "auto",
    verify: str | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[str], Any] = lambda line: None,
) -> ExportReport:
    """Writes a converted model so that stock transformers, vLLM or llama.cpp run it.

    `glm4_moe` and `qwen2_moe` write a folder in the hub layout of the stock class,
    `dense` one of the family that was converted, where static pruning left equal widths,
    `gguf` and `gguf-qwen2moe` one file. `dtype` is `auto`, `float32` or `bfloat16`, of
    `dense` and one file also `float16`, of one file `q8_0`. `epsilon`: how large the
    scores' standard deviation is made (default: as large as leaves the gates within
    about 2e-4 of 1). `verify`: a text on which the export is loaded beside
    the original and compared (of a GGUF file, the model it is written from). Needs the
    model in memory twice; one forward pass over PROBE_TOKENS tokens. Raises
    MoesaicError, and leaves nothing behind, for a model that the format cannot hold,
    and where the two models do not agree.
    """
    path = Path(output)
    options = ExportOptions(
        model, format, path, epsilon, dtype, verify, trust_remote_code
    )
    return run_export(options, progress)


@torch.no_grad()
def run_export(
    options: ExportOptions, progress: Callable[[str], Any]
) -> ExportReport:
    """Check, read, choose scales, build the stock model, write, compare, report."""
    check_options(options)
    config = load_config(options.model, options.trust_remote_code)
    check_converted_model(config, str(options.model))
    tokenizer = load_tokenizer(options.model, options.trust_remote_code)
    _check_format(options, config, tokenizer, set())
    length = min(window_length([config], None), LONGEST_WINDOW)
    text = options.verify or "demo"
    ids = to_ids(text, tokenizer, heldout=True)
    progress(f"reading {options.model}")
    loaded, dtype = _load(options)
    trained = trained_parts(loaded.state_dict().items())
    _check_format(options, config, tokenizer, trained)
    if config.moesaic.router is not None:
        progress("choosing the scale of the scores")
    probe_ids = ids[:PROBE_TOKENS]
    widened = partial(widened_products, loaded.dtype, loaded.device)
    with widened():
        scales = _choose_scales(options, loaded, probe_ids, length, dtype)
    factors = [scale.factor for scale in scales]
    stock = _build(options, loaded, factors)
    with new_path(options.output) as part:
        progress(f"writing {options.output}")
        stock = _write(options, part, stock, tokenizer, dtype)
        progress("comparing with the original")
        comparison = None
        with widened():
            _check_faithful(options, loaded, stock, ids, length, scales)
            if options.verify is not None:
                with experts_by_kernel(stock):
                    comparison = compare_models(
                        loaded, stock, ids, length, VERIFY_TOKENS
                    )
        report = ExportReport(
            format=options.format,
            architecture=stock.config.model_type,
            output=str(options.output),
            dtype=options.dtype,
            scales=scales,
            comparison=comparison,
            warnings=options.target.warnings(config),
        )
        if not options.one_file:
            _write_card(options, part, report, config)
    return report


def check_options(options: ExportOptions) -> None:
    """Raises MoesaicError for a format, dtype, epsilon or output that cannot be."""
    if options.format not in FORMATS:
        raise unknown("format", options.format, FORMATS)
    known = options.dtypes
    if options.dtype == "float16" and options.dtype not in known:
        dtypes = ", ".join(known)
        raise MoesaicError(
            "dtype float16: the scaled router weights are below its range; "
            f"{options.format} takes {dtypes}"
        )
    if options.dtype not in known:
        raise unknown("dtype", options.dtype, known)
    epsilon = options.epsilon
    if epsilon is not None and not 2.0**-24 < epsilon < 1:
        raise MoesaicError(
            f"epsilon {epsilon} is outside (2^-24, 1); auto chooses about 2^-10"
        )
    suffix = ".gguf" if options.one_file else ""
    check_new(options.output, suffix)


def _check_format(
    options: ExportOptions, config: Any, tokenizer: Any, trained: set[str]
) -> None:
    """Raises MoesaicError where the format cannot hold the model, or has no scores."""
    reasons = reasons_against(config, options.format, tokenizer, trained)
    check_fits(options.model, options.format, reasons)
    if options.epsilon is not None and config.moesaic.router is None:
        raise MoesaicError(
            f"epsilon {options.epsilon} is for the scores of a router, and "
            f"{options.model} has none: leave it out"
        )


def _load(options: ExportOptions) -> tuple[Any, str]:
    """The converted model, and the dtype that it is written in."""
    load_dtype = "auto" if options.one_file else options.dtype
    loaded = load_model(options.model, load_dtype, options.trust_remote_code)
    dtype = str(loaded.dtype).removeprefix("torch.")
    if dtype == "float16" and dtype not in options.dtypes:
        raise MoesaicError(
            f"{options.model} is in float16, whose range the scaled router weights "
            "leave; pass --dtype float32 or bfloat16"
        )
    if dtype == "float16" and options.one_file:
        loaded = loaded.float()  # GGUF keeps the routers in float32
    if options.dtype != "auto":
        dtype = options.dtype
    return loaded, dtype


def _choose_scales(
    options: ExportOptions, model: Any, ids: Tensor, length: int, dtype: str
) -> list[Scale]:
    """The scale of every layer's scores, on a text; none where nothing is routed."""
    if model.config.moesaic.router is None:
        return []
    num_active = sizes_of(model.config).num_active
    inputs = router_inputs(model, ids, length)
    layers = model.config.moesaic.layers
    scales = []
    for layer, x_TD, block in zip(layers, inputs, blocks(model), strict=True):
        router = block.router
        scale = choose_scale(
            x_TD,
            router.score_proj.weight,
            router.selection_bias,
            num_active,
            options.route,
            options.epsilon,
            options.logit_dtype(dtype),
        )
        scales.append(replace(scale, layer=layer))
    return scales


def _build(options: ExportOptions, model: Any, factors: list[float]) -> Any:
    """The stock model, around the converted one's tensors."""
    config = options.target.stock_config(model.config, model.dtype)
    # eval and bench look for the dense model by it.
    config.moesaic_export = {"base_model": model.config.moesaic.base_model}
    with init_empty_weights(include_buffers=False):
        stock = AutoModelForCausalLM.from_config(config)
    tensors = options.target.stock_state(model, factors)
    state = {key: tensor.detach() for key, tensor in tensors.items()}
    missing, unexpected = stock.load_state_dict(
        state, strict=False, assign=True
    )
    stock.tie_weights()
    tied = stock.all_tied_weights_keys
    for key in missing:
        if key not in tied:
            raise _misfit(options, config, "asks for", key)
    for key in unexpected:
        raise _misfit(options, config, "has no place for", key)
    stock.generation_config = model.generation_config
    return stock.eval()


def _misfit(
    options: ExportOptions, config: Any, what: str, key: str
) -> MoesaicError:
    return MoesaicError(
        f"{options.model} does not fit: {config.model_type} {what} {key}"
    )


def _write(
    options: ExportOptions, part: Path, stock: Any, tokenizer: Any, dtype: str
) -> Any:
    """Writes the stock model; returns what is to be compared with the original."""
    if options.one_file:
        gguf_file.write(part, stock, tokenizer, dtype)
        return stock
    stock.save_pretrained(part, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(part)
    # Read again: what is in the files counts.
    written = AutoModelForCausalLM.from_pretrained(part, dtype="auto")
    return written.eval()


def _check_faithful(
    options: ExportOptions,
    model: Any,
    stock: Any,
    ids: Tensor,
    length: int,
    scales: list[Scale],
) -> None:
    """Raises MoesaicError where the two models do not agree on two windows."""
    tokens = 2 * length
    agreed = agreement(model, stock, ids[:tokens], length)
    if agreed.difference < UNFAITHFUL and agreed.changed < OTHER_CHOICES:
        return
    why = (
        "it computes something that this architecture does not: serve the model as it "
        "is (docs/serving.md)"
    )
    if options.epsilon and scales:
        changed = max(scale.changed for scale in scales)
        gates = max(scale.gate_error for scale in scales)
        why = (
            f"at epsilon {options.epsilon} gates are off by {gates:.2g} and "
            f"{changed:.1%} of the tokens run other experts: leave it out"
        )
    raise MoesaicError(
        f"{options.model} as {stock.config.model_type} differs from the original by "
        f"{agreed.difference:.2g} of the logits' rms with the same experts, and its "
        f"choices differ {agreed.changed:.0%} as often as by chance; {why}"
    )


def _write_card(
    options: ExportOptions, part: Path, report: ExportReport, config: Any
) -> None:
    """The card and the report, beside the weights."""
    licence = licence_of(file_beside(options.model, CARD_FILE))
    card = export_card(report, config, licence)
    card_path = part / CARD_FILE
    card_path.write_text(card, "utf-8")
    values = {"moesaic": config.moesaic.to_dict()} | report.to_dict()
    del values["output"]  # a path of this machine
    text = json.dumps(values, indent=2)
    report_path = part / EXPORT_FILE
    report_path.write_text(text + "\n", "utf-8")
