"""Loads models and tokenizers, with errors that say what to do next."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import moesaic.modeling  # noqa: F401 - registers our architecture with transformers
from moesaic.demo import demo_path
from moesaic.errors import MoesaicError, unknown
from moesaic.layout import Layout

KINDS = (
    "representative",
    "random",
    "linear",
    "quadratic",
    "gates",
    "none",
)  # of routers
_DEVICES = ("cpu", "cuda", "mps", "xpu")
DTYPES = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve(model: str | Path) -> str:
    """Folder or hub id of a model; `demo` is the embedded one.

    Raises MoesaicError for a path that exists and is no model folder.
    """
    if str(model) == "demo":
        return str(demo_path())
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            if (path / "adapter_config.json").is_file():
                raise MoesaicError(
                    f"{path} is a PEFT adapter, and a whole model is needed here: fine-tune with "
                    "--merge, or load it with PEFT and save merge_and_unload()"
                )
            raise MoesaicError(f"{path} is no model folder: it has no config.json")
        return str(path)
    if path.exists():
        raise MoesaicError(f"{path} is a file; give a model folder or a hub id")
    if str(model).count("/") > 1 or str(model).startswith((".", "/", "~")):
        raise MoesaicError(f"no such model folder: {path}")
    return str(model)


def choose_device(device: str | torch.device) -> torch.device:
    """`auto` is the first GPU where there is one. Raises MoesaicError for one that is not there."""
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if str(device).partition(":")[0] not in _DEVICES:
        raise unknown("device", str(device), ["auto", *_DEVICES])
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise MoesaicError(
            f"device {str(device)!r} is not usable here ({reason}); try auto, cpu or cuda"
        ) from error
    return chosen


def choose_dtype(dtype: str) -> Any:
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    return DTYPES[dtype]


def context_of(config: Any) -> int:
    """Longest sequence that a model was made for; 2,048 where its configuration names none."""
    return int(
        getattr(config.get_text_config(), "max_position_embeddings", None) or 2048
    )


def window_length(configs: list[Any], asked: int | None) -> int:
    """Tokens of a window: `asked`, or the smaller of 2,048 and the contexts.

    Raises MoesaicError for a length that a context does not hold or that predicts nothing.
    """
    context = min(context_of(config) for config in configs)
    length = min(2048, context) if asked is None else asked
    if not 2 <= length <= context:
        raise MoesaicError(
            f"sequence length {length} is outside 2..{context}, the model's context"
        )
    return length


def load_config(model: str | Path, trust_remote_code: bool = False) -> Any:
    """The configuration of a model folder or hub id, or of a config.json on its own."""
    path = Path(model)
    where = str(path) if path.is_file() and path.suffix == ".json" else resolve(model)
    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many kinds for odd values
        family = _model_type(Path(where))
        if family is not None and family not in CONFIG_MAPPING:
            raise unknown("model family", family, CONFIG_MAPPING) from error
        raise _cannot_load(model, error) from error
    if config.model_type == "moesaic":
        check_converted(config, str(model))
    return config


def check_converted(config: Any, model: str) -> None:
    """Raises MoesaicError where a converted model's configuration contradicts itself."""
    try:
        moe = config.moesaic
        layout, routed = (
            Layout.parse(moe["layout"]),
            moe["recipe"]["grouping"] != "none",
        )
        depth = config.get_text_config().num_hidden_layers
        wrong = [] if moe["num_shared"] == layout.num_shared else ["num_shared"]
        wrong += _wrong_sizes(moe, layout, routed)
        if "num_outer" in moe:
            wrong += _wrong_outer(moe, depth)
            if "beside" in moe:
                moe["beside"]["path"].format(0)
                wrong += [
                    f"beside {key}"
                    for key in _wrong_sizes(moe["beside"], layout, routed)
                ]
        elif not moe["layers"] or moe["layers"] != sorted(
            set(moe["layers"]) & set(range(depth))
        ):
            wrong.append("layers")
        if "budgets" in moe and (
            "num_outer" in moe
            or moe["router"]["gating"] != "threshold"
            or len(moe["budgets"]) != len(moe["layers"])
            or sum(moe["budgets"]) != moe["num_active"] * len(moe["layers"])
            or not all(
                type(k) is int and 1 <= k <= moe["num_routed"] for k in moe["budgets"]
            )
        ):
            wrong.append("budgets")
        ffn = moe["ffn"]
        if (
            moe["router"]["kind"] == "gates"
        ):  # experts of one neuron, and nothing beside them
            alone = (moe["expert_size"], moe["shared_size"], moe["dropped"]) == (
                1,
                0,
                0,
            )
            wrong += (
                []
                if alone and ffn["gated"] and "num_outer" not in moe
                else ["router kind"]
            )
        ffn["path"].format(0), [path.format(0) for path in ffn["identities"]]
        wrong += [key for key in ("gated", "bias") if type(ffn[key]) is not bool]
        wrong += [] if type(moe["output_bias"]) is bool else ["output_bias"]
        wrong += _wrong_router(moe["router"], config.hidden_size)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise MoesaicError(
            f"the config.json of {model} is damaged ({error!r})"
        ) from error
    if wrong:
        raise MoesaicError(
            f"the config.json of {model} contradicts itself: {wrong[0]} does not fit the layout "
            f"{layout}"
        )


def _wrong_sizes(moe: dict[str, Any], layout: Layout, routed: bool) -> list[str]:
    """Keys of one FFN's sizes that the layout does not give."""
    total = moe["shared_size"] + moe["num_routed"] * moe["expert_size"] + moe["dropped"]
    sizes, alone = layout.sizes(total), moe.get("router", {}).get("kind") == "gates"
    expected = {
        "num_routed": sizes.num_routed if routed else 0,
        "num_active": sizes.num_active if routed else 0,
        "shared_size": sizes.shared if routed else sizes.active,
        "expert_size": sizes.expert,
        "padded_size": sizes.expert if alone else -(-sizes.expert // 8) * 8,
        "dropped": 0 if routed else total - sizes.active,
    }
    return [key for key, value in expected.items() if moe[key] != value]


def _wrong_outer(moe: dict[str, Any], depth: int) -> list[str]:
    """Keys of a converted mixture's configuration whose values make no sense."""
    outer, active, layers = moe["num_outer"], moe["outer_active"], moe["layers"]
    numbers = {str(layer) for layer in layers}
    right = {
        "num_outer": type(outer) is int and outer >= 1,
        "outer_active": type(active) is int and 1 <= active <= outer,
        "layers": layers == sorted(set(layers)) and set(layers) <= set(range(depth)),
        "mixtures": len(layers) <= moe["mixtures"] <= depth,
        "whole": all(
            key in numbers
            and kept == sorted(set(kept))
            and set(kept) <= set(range(outer))
            for key, kept in moe["whole"].items()
        ),
    }
    return [key for key, fits in right.items() if not fits]


def _wrong_router(router: dict[str, Any], hidden_size: int) -> list[str]:
    """Keys of a router's configuration whose values make no sense."""
    cap, directions = router["cap"], router["features"]
    right = {
        "kind": router["kind"] in KINDS,
        "absolute": type(router["absolute"]) is bool,
        "gating": router["gating"] in ("topk", "threshold"),
        "features": type(directions) is int and 0 <= directions <= hidden_size,
        "cap": cap is None or (type(cap) is int and cap >= 1),
    }
    return [f"router {key}" for key, fits in right.items() if not fits]


def _check_index(folder: Path) -> None:
    """Shards of a local checkpoint must lie in its folder: names in an index are not trusted."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MoesaicError(f"{index} is damaged ({error!r})") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise MoesaicError(
                f"{index} names {name!r}, which is no file of its folder"
            )


def load_model(
    model: str | Path,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    device: Any = "cpu",
) -> Any:
    """A causal language model in evaluation mode, every weight of it read from the checkpoint.

    Raises MoesaicError for what is no model, an unsupported family, truncated or tampered files,
    and weights that are missing or of another shape (transformers would fill them at random).
    """
    config = load_config(model, trust_remote_code)
    _check_index(Path(resolve(model)))
    try:
        loaded: Any
        info: dict[str, Any]
        loaded, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            resolve(model),
            dtype=choose_dtype(dtype),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            use_safetensors=True,
        )
    except Exception as error:  # transformers raises many kinds for one cause
        if "Unrecognized configuration class" in str(error):
            raise MoesaicError(
                f"{model} ({config.model_type}) is no causal language model"
            ) from error
        raise _cannot_load(model, error) from error
    for what in ("missing_keys", "mismatched_keys"):
        keys = [
            key[0] if isinstance(key, tuple) else key for key in info.get(what) or ()
        ]
        if keys:
            raise MoesaicError(
                f"{model}: {len(keys)} weights are {what.split('_')[0]} in the checkpoint, "
                f"among them {min(keys)}; fetch the model again"
            )
    if beyond := _beyond(config, info.get("unexpected_keys") or ()):
        raise MoesaicError(
            f"{model}: the checkpoint has weights that its config.json leaves out, among them "
            f"{beyond[0]}; one of the two is damaged"
        )
    try:
        return loaded.to(device).eval()
    except torch.OutOfMemoryError as error:
        raise MoesaicError(
            f"{model} does not fit into the memory of {device}; try --device cpu"
        ) from error


def load_tokenizer(model: str | Path, trust_remote_code: bool = False) -> Any:
    try:
        return AutoTokenizer.from_pretrained(
            resolve(model), trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers raises many kinds for one cause
        raise MoesaicError(
            f"{model} has no usable tokenizer: {_first_line(error)}"
        ) from error


def _model_type(where: Path) -> str | None:
    """What a local config.json calls its family, where it can be read and brings no code."""
    try:
        values = json.loads(
            (where / "config.json" if where.is_dir() else where).read_text()
        )
        family = values["model_type"]
        return family if isinstance(family, str) and "auto_map" not in values else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _beyond(config: Any, unexpected: Iterable[str]) -> list[str]:
    """Weights that were not read: of layers beyond the last, or any where the model is ours."""
    last, ours = (
        config.get_text_config().num_hidden_layers,
        config.model_type == "moesaic",
    )
    numbers = ((key, re.search(r"\.([0-9]+)\.", key)) for key in unexpected)
    return sorted(
        key for key, number in numbers if ours or (number and int(number[1]) >= last)
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _cannot_load(model: str | Path, error: Exception) -> MoesaicError:
    line = _first_line(error)
    if not Path(model).exists() and str(model) != "demo":
        return MoesaicError(
            f"{model}: no such folder, and the hub has no such model or cannot be reached ({line})"
        )
    return MoesaicError(f"cannot load {model}: {line}")


def dense_of(model: str | Path, config: Any) -> str | None:
    """Name or path of the dense model that a converted model was made from.

    A folder's bare name is looked for here and beside the converted model. None where
    it is not found.
    """
    base = str(config.moesaic["base_model"])
    if base == "demo" or "/" in base:
        return base
    for place in (Path(), Path(model).absolute().parent):
        candidate = place / base
        if candidate.is_dir():
            return str(candidate)
    return None
