"""Writes a converted model as a stock architecture: one folder or file, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM

from moesaic.calibration.text import to_ids
from moesaic.errors import MoesaicError, unknown
from moesaic.export import gguf_file, glm4_moe, qwen2_moe
from moesaic.export.model_card import export_card
from moesaic.export.scale import Scale, choose_scale
from moesaic.export.stock import blocks, check_converted_model, sizes_of
from moesaic.export.verify import Comparison, compare_models, router_inputs
from moesaic.families.load import (
    load_config,
    load_model,
    load_tokenizer,
    resolve,
    window_length,
)
from moesaic.output.atomic import check_new, new_path
from moesaic.output.model_card import licence_of

TARGETS: dict[str, ModuleType] = {"glm4_moe": glm4_moe, "qwen2_moe": qwen2_moe}
# GGUF holds either; llama.cpp has known qwen2moe for longer.
GGUF = {"gguf": "glm4_moe", "gguf-qwen2moe": "qwen2_moe"}
FORMATS = (*TARGETS, *GGUF)
DTYPES = ("auto", "float32", "bfloat16")
PROBE_TOKENS = 4096  # of text, on which the scale of the scores is chosen
VERIFY_TOKENS = 16_384  # on which perplexities are measured
UNFAITHFUL = 0.05  # mean difference of logits over their rms that no rounding explains
SHARD_SIZE = "5GB"


@dataclass(frozen=True)
class ExportReport:
    """What was written, what the stock router makes of every layer's scores, and how it compares.

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


def explain(model: str | Path, trust_remote_code: bool = False) -> dict[str, list[str]]:
    """For every format why it cannot hold a converted model; empty lists where it can.

    Reads the configuration, the tokenizer and, of a local folder, what training would have moved.
    """
    config = load_config(model, trust_remote_code)
    check_converted_model(config, str(model))
    tokenizer = load_tokenizer(model, trust_remote_code)
    folder = Path(resolve(model))
    trained = _trained(_stored(folder)) if folder.is_dir() else set()
    return {name: _reasons(config, name, tokenizer, trained) for name in FORMATS}


@torch.no_grad()
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

    `glm4_moe` and `qwen2_moe` write a folder in the hub layout of the stock class, `gguf` and
    `gguf-qwen2moe` one file (`dtype` also `float16` and `q8_0`). `epsilon`: how large the scores'
    standard deviation is made (default: as large as leaves the gates within about 2e-4 of 1).
    `verify`: a text on which the export is loaded beside the original and compared (of a GGUF
    file, the model it is written from). Needs the model in memory twice; one forward pass over
    PROBE_TOKENS tokens. Raises MoesaicError, and leaves nothing behind, for a model that the
    format cannot hold, and where the two models do not agree.
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    one_file = format in GGUF
    known = gguf_file.DTYPES if one_file else DTYPES
    if dtype not in known:
        if dtype == "float16":
            raise MoesaicError(
                f"dtype float16: the scaled router weights are below its range; {format} takes "
                f"{', '.join(DTYPES)}"
            )
        raise unknown("dtype", dtype, known)
    if epsilon is not None and not 2.0**-24 < epsilon < 1:
        raise MoesaicError(
            f"epsilon {epsilon} is outside (2^-24, 1); auto chooses about 2^-10"
        )
    path = Path(output)
    check_new(path, ".gguf" if one_file else "")
    config = load_config(model, trust_remote_code)
    check_converted_model(config, str(model))
    tokenizer = load_tokenizer(model, trust_remote_code)
    _check(model, format, _reasons(config, format, tokenizer, set()))
    target = TARGETS[GGUF.get(format, format)]
    length = min(window_length([config], None), 512)
    probe_ids = to_ids(verify or "demo", tokenizer, heldout=True)
    progress(f"reading {model}")
    loaded = load_model(model, "auto" if one_file else dtype, trust_remote_code)
    own_dtype = str(loaded.dtype).removeprefix("torch.")
    if own_dtype == "float16":
        if not one_file:
            raise MoesaicError(
                f"{model} is in float16, whose range the scaled router weights leave; pass --dtype "
                "float32 or bfloat16"
            )
        loaded = loaded.float()  # GGUF keeps the routers in float32
    trained = _trained(loaded.state_dict().items())
    _check(model, format, _reasons(config, format, tokenizer, trained))

    progress("choosing the scale of the scores")
    route = gguf_file.qwen2moe_route if format == "gguf-qwen2moe" else target.route
    scales = [
        choose_scale(
            x_TD,
            block.router.score_proj.weight,
            block.router.selection_bias,
            sizes_of(config).num_active,
            route,
            epsilon,
        )
        for x_TD, block in zip(
            router_inputs(loaded, probe_ids[:PROBE_TOKENS], length),
            blocks(loaded),
            strict=True,
        )
    ]
    stock = _build(target, loaded, [scale.factor for scale in scales], model)
    with new_path(path) as part:
        progress(f"writing {path}")
        if one_file:
            gguf_file.write(
                part, stock, tokenizer, own_dtype if dtype == "auto" else dtype
            )
        else:
            stock.save_pretrained(part, max_shard_size=SHARD_SIZE)
            tokenizer.save_pretrained(part)
            # What was written counts, not what was meant to be.
            stock = AutoModelForCausalLM.from_pretrained(part, dtype="auto").eval()
        progress("comparing with the original")
        quick = compare_models(
            loaded, stock, probe_ids[: 2 * length], length, 2 * length
        )
        if not quick.mean < UNFAITHFUL:
            changed = max(scale.changed for scale in scales)
            gates = max(scale.gate_error for scale in scales)
            raise MoesaicError(
                f"{model} as {stock.config.model_type} differs from the original by "
                f"{quick.mean:.2g} of the logits' rms; "
                + (
                    f"at epsilon {epsilon} gates are off by {gates:.2g} and {changed:.1%} of the "
                    "tokens run other experts: leave it out"
                    if epsilon
                    else "it computes something that this architecture does not: serve the model "
                    "as it is (docs/serving.md)"
                )
            )
        comparison = None
        if verify is not None:
            comparison = compare_models(loaded, stock, probe_ids, length, VERIFY_TOKENS)
        report = ExportReport(
            format,
            stock.config.model_type,
            str(path),
            dtype,
            scales,
            comparison,
            target.warnings(config),
        )
        if not one_file:
            (part / "README.md").write_text(
                export_card(report, config, licence_of(resolve(model))), "utf-8"
            )
            found = {"moesaic": config.moesaic.to_dict()} | report.to_dict()
            del found["output"]  # a path of this machine
            text = json.dumps(found, indent=2)
            (part / "moesaic_export.json").write_text(text + "\n", "utf-8")
    return report


def _reasons(config: Any, format: str, tokenizer: Any, trained: set[str]) -> list[str]:
    """Why a format cannot hold a model; `trained` are the parts of its routers that are not 0."""
    target = GGUF.get(format, format)
    reasons: list[str] = TARGETS[target].supports(config)
    if format in GGUF and not reasons:
        reasons += gguf_file.supports(config, tokenizer, target)
    if "expert_scale" in trained:
        reasons.append(
            "its gates were trained (expert_scale is not 0), stock gates depend on scores alone; "
            "serve it as it is (docs/serving.md), or fine-tune with --scale-lr 0"
        )
    if "selection_bias" in trained and target == "qwen2_moe":
        other = TARGETS["glm4_moe"].supports(config)
        reasons.append(
            "its router has a selection bias, qwen2_moe has none; "
            + ("fine-tune with --balance-rate 0" if other else "glm4_moe may fit")
        )
    return reasons


def _check(model: str | Path, format: str, reasons: list[str]) -> None:
    if reasons:
        raise MoesaicError(f"{model} does not fit {format}: {'; '.join(reasons)}")


def _build(
    target: ModuleType, model: Any, factors: list[float], name: str | Path
) -> Any:
    """The stock model, around the converted one's tensors."""
    config = target.stock_config(model.config, model.dtype)
    with init_empty_weights(include_buffers=False):
        stock = AutoModelForCausalLM.from_config(config)
    state = {
        key: tensor.detach()
        for key, tensor in target.stock_state(model, factors).items()
    }
    missing, unexpected = stock.load_state_dict(state, strict=False, assign=True)
    stock.tie_weights()
    missing = [key for key in missing if key not in stock.all_tied_weights_keys]
    if missing or unexpected:
        key, what = (
            (missing or unexpected)[0],
            "asks for" if missing else "has no place for",
        )
        raise MoesaicError(f"{name} does not fit: {config.model_type} {what} {key}")
    stock.generation_config = model.generation_config
    return stock.eval()


def _stored(folder: Path) -> Iterable[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as shard:
                for key in shard.keys():  # noqa: SIM118 - no mapping
                    if key.endswith(("expert_scale", "selection_bias")):
                        yield key, shard.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise MoesaicError(
                f"cannot read {path}: {error}; fetch the model again"
            ) from error


def _trained(tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Which of the two parts of a router that a conversion leaves at zero are not."""
    names = ("expert_scale", "selection_bias")
    return {
        name
        for key, tensor in tensors
        for name in names
        if key.endswith(name) and tensor.any()
    }
