"""Loads models and tokenizers, with errors that say what to do next."""

from __future__ import annotations

import json
import operator
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moesaic.demo import demo_path
from moesaic.errors import MoesaicError, first_line, reason_of, unknown
from moesaic.families.gguf_header import GgufHeader, read_header
from moesaic.modeling import ConfigError, MoEConfig

_DEVICES = ("cpu", "cuda", "mps", "xpu")
# Of a generation configuration: what counts where tokens are drawn, and else does nothing.
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)
DTYPES = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_DEFAULT_WINDOW = 2048


def resolve(model: str | Path) -> str:
    """Folder, GGUF file or hub id of a model; `demo` is the embedded one.

    Raises MoesaicError for a path that exists and is no model.
    """
    if str(model) == "demo":
        return str(demo_path())
    path = Path(model)
    if path.is_dir():
        _check_folder(path)
        return str(path)
    if is_gguf(path):
        _check_gguf(path)
        return str(path)
    if path.exists():
        raise MoesaicError(
            f"{path} is a file; give a model folder, a .gguf file or a hub id"
        )
    name = str(model)
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise MoesaicError(f"no such model folder: {path}")
    return name


def file_beside(model: str | Path, name: str) -> Path | None:
    """A file of a model's folder or of its place on the hub; None where it has none."""
    folder = Path(resolve(model))
    if folder.exists():
        path = folder / name
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(str(model), name))
    except (OSError, EntryNotFoundError):  # without a network, too
        return None


# transformers would put its matrices into the model, and check no other weights.
HOLDS_ADAPTER = (
    "holds a PEFT adapter beside the model: load both with PEFT and save "
    "merge_and_unload(), or take adapter_config.json away"
)


def _check_folder(folder: Path) -> None:
    """Raises MoesaicError for a folder that holds no whole model."""
    has_adapter = (folder / "adapter_config.json").is_file()
    if (folder / "config.json").is_file():
        if has_adapter:
            raise MoesaicError(f"{folder} {HOLDS_ADAPTER}")
        return
    if has_adapter:
        raise MoesaicError(
            f"{folder} is a PEFT adapter, and a whole model is needed here: fine-tune "
            "with --merge, or load it with PEFT and save merge_and_unload()"
        )
    gguf_names = [path.name for path in folder.glob("*.gguf")]
    if gguf_names:
        names = ", ".join(sorted(gguf_names))
        raise MoesaicError(
            f"{folder} has no config.json but GGUF files; give one of them: {names}"
        )
    raise MoesaicError(f"{folder} is no model folder: it has no config.json")


def is_gguf(path: Path) -> bool:
    """Whether the path is named as a GGUF file."""
    return path.suffix.lower() == ".gguf"


def _check_gguf(path: Path) -> None:
    """Raises MoesaicError for a GGUF file that is missing or no whole model."""
    if not path.is_file():
        raise MoesaicError(f"no such GGUF file: {path}")
    read_header(path)


def choose_device(device: str | torch.device) -> torch.device:
    """`auto` is the first GPU where there is one.

    Raises MoesaicError for a device that is not there.
    """
    name = str(device)
    if name == "auto":
        has_gpu = torch.cuda.is_available()
        return torch.device("cuda" if has_gpu else "cpu")
    kind, _, _ = name.partition(":")
    if kind not in _DEVICES:
        raise unknown("device", name, ["auto", *_DEVICES])
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (AssertionError, NotImplementedError) as error:
        raise MoesaicError(
            f"device {name!r} is not usable here: it is not in this build of torch; take "
            "auto or cpu"
        ) from error
    except RuntimeError as error:
        raise MoesaicError(
            f"device {name!r} is not usable here ({first_line(error)}); take auto or cpu"
        ) from error
    return chosen


def dtype_name(dtype: str | torch.dtype) -> str:
    """What the options call a dtype of torch; names stay."""
    return str(dtype).removeprefix("torch.")


def choose_dtype(dtype: str | torch.dtype) -> Any:
    """A dtype by its name; `auto` stays, and is the checkpoint's own."""
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    return DTYPES[name]


def context_of(config: Any) -> int:
    """Longest sequence that a model was made for; 2,048 where none is named."""
    text_config = config.get_text_config()
    context = getattr(text_config, "max_position_embeddings", None)
    return int(context or _DEFAULT_WINDOW)


def window_length(configs: list[Any], length: int | None) -> int:
    """Tokens of a window: `length`, or the smaller of 2,048 and the contexts.

    Raises MoesaicError for a length that a context does not hold, or that predicts
    nothing, and for one that is no whole number.
    """
    context = min(context_of(config) for config in configs)
    if length is None:
        length = min(_DEFAULT_WINDOW, context)
    try:
        length = operator.index(length)
    except TypeError as error:
        raise MoesaicError(
            f"sequence length {length}: a whole number is needed"
        ) from error
    if not 2 <= length <= context:
        raise MoesaicError(
            f"sequence length {length} is outside 2..{context}, the model's context"
        )
    return length


def load_config(
    model: str | Path, trust_remote_code: bool = False, dtype: str = "auto"
) -> Any:
    """The configuration of a model, or of a config.json on its own.

    It says the dtype that `load_model` would load the weights in.
    """
    path = Path(model)
    is_config = path.is_file() and path.suffix == ".json"
    where = str(path) if is_config else resolve(model)
    try:
        with _shown_to_transformers(where) as (place, options):
            config = AutoConfig.from_pretrained(
                place, trust_remote_code=trust_remote_code, **options
            )
    except ConfigError as error:
        raise _config_error(model, error) from error
    except Exception as error:  # transformers raises many kinds for odd values
        family = _model_type(Path(where))
        if family is not None and family not in CONFIG_MAPPING:
            raise unknown("model family", family, CONFIG_MAPPING) from error
        raise _cannot_load(model, error) from error
    if is_gguf(Path(where)):
        _clear_gguf_marks(config, where)
        header = read_header(Path(where))
        _check_gguf_attention(config, header, where)
        config.dtype = header.dtype
    if dtype != "auto":
        config.dtype = choose_dtype(dtype)
    if getattr(config, "transformers_weights", None) is not None:
        raise MoesaicError(
            f"the config.json of {model} names files of weights (transformers_weights), "
            "which may lie anywhere; rename them as transformers does and remove the line"
        )
    if config.model_type == "moesaic":
        check_converted(config, str(model))
    return config


def _check_gguf_attention(config: Any, header: GgufHeader, where: str) -> None:
    """Raises MoesaicError where transformers leaves out what attention needs to know.

    It would then compute another model than llama.cpp does, on long texts or on all.
    """
    left_out = None
    # Learned positions have none; some families have one for each kind of layer.
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [one for one in rope.values() if isinstance(one, dict)] or [rope]
    is_scaled = any(
        one.get("rope_type", "default") != "default" for one in ropes
    )
    if header.context_scaling is not None and not is_scaled:
        left_out = f"its rope scaling ({header.context_scaling})"
    window = header.sliding_window
    if window not in (None, getattr(config, "sliding_window", None)):
        left_out = f"its sliding window of {window} tokens"
    if left_out is not None:
        raise MoesaicError(
            f"{where}: transformers leaves out {left_out} when it reads a GGUF, and would "
            "compute another model; give the model in safetensors, by hub id or folder"
        )


@contextmanager
def _shown_to_transformers(where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and the options by which `from_pretrained` finds a model.

    A GGUF file is shown alone in a folder: what lies beside it, such as an adapter or
    another tokenizer, is not of the model.
    """
    if not is_gguf(Path(where)):
        yield where, {}
        return
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / "model.gguf"
        link.symlink_to(Path(where).absolute())
        yield folder, {"gguf_file": link.name}


def _clear_gguf_marks(config: Any, where: str) -> None:
    """Makes a configuration read from a GGUF one that can be saved.

    transformers marks it as quantised, though its weights are plain numbers.
    """
    for mark in ("quantization_config", "_model_name_or_path"):
        config.__dict__.pop(mark, None)
    config.name_or_path = where


def check_converted(config: Any, model: str) -> None:
    """Raises MoesaicError where a converted model's configuration is damaged.

    Or contradicts itself, or is of an older form.
    """
    moe = config.moesaic
    text_config = config.get_text_config()
    hidden = text_config.hidden_size
    depth = text_config.num_hidden_layers
    try:
        # A dictionary where code that came with the model has read it.
        if not isinstance(moe, MoEConfig):
            moe = MoEConfig.from_dict(moe)
        moe.check(hidden, depth)
    except ConfigError as error:
        raise _config_error(model, error) from error


def _config_error(model: str | Path, error: ConfigError) -> MoesaicError:
    return MoesaicError(f"the config.json of {model} {error}")


def _check_index(folder: Path) -> None:
    """Shards of a local checkpoint must lie in its folder: an index is not trusted."""
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return
    try:
        index = json.loads(path.read_text())
        names = set(index["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MoesaicError(f"{path} is damaged ({reason_of(error)})") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise MoesaicError(
                f"{path} names {name!r}, which is no file of its folder"
            )
        if not name.endswith(".safetensors"):
            raise MoesaicError(
                f"{path} names {name!r}, which is no safetensors file"
            )


def check_files(model: str | Path) -> None:
    """Raises MoesaicError where a file of a folder's weights is missing or cut short.

    Reads headers only. Nothing is fetched from the hub, nor are GGUF files read.
    """
    folder = Path(resolve(model))
    if not folder.is_dir():
        return
    _check_index(folder)
    index = folder / "model.safetensors.index.json"
    names = {path.name for path in folder.glob("*.safetensors")}
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
    if not names:
        raise MoesaicError(f"{model} has no weights in safetensors files")
    for name in sorted(names):
        if not (folder / name).is_file():
            raise MoesaicError(
                f"{model}: {name}, which its index names, is missing; fetch the model again"
            )
        if not _is_whole(folder / name):
            raise MoesaicError(
                f"{model}: {name} is damaged or cut short, fetch the model again"
            )


def load_model(
    model: str | Path,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    device: Any = "cpu",
) -> Any:
    """A causal language model in evaluation mode, with every weight of its checkpoint.

    dtype `auto` is that of the checkpoint. The quantised weights of a GGUF file become
    bfloat16 then, half of the space of float32.
    Raises MoesaicError for what is no model, an unsupported family, truncated or
    tampered files, and weights that are missing or of another shape (transformers would
    fill them at random).
    """
    config = load_config(model, trust_remote_code)
    path = Path(resolve(model))
    _check_index(path)
    if is_gguf(path):
        loaded, info = _read_gguf(model, config, dtype)
    else:
        loaded, info = _read_checkpoint(model, config, dtype, trust_remote_code)
    _check_loaded(model, config, loaded, info)
    mend_generation(loaded, str(model))
    try:
        loaded = loaded.to(device)
        return loaded.eval()
    except torch.OutOfMemoryError as error:
        raise MoesaicError(
            f"{model} does not fit into the memory of {device}; try --device cpu"
        ) from error


def mend_generation(model: Any, name: str) -> None:
    """Makes sure that the generation configuration can be saved in the end.

    transformers may load one that it refuses to save: values for sampling where nothing is
    sampled. Such values do nothing, and get their defaults. Raises MoesaicError for what
    else is wrong.
    """
    found = _wrong_generation(model)
    if found is None:
        return
    defaults = GenerationConfig()
    if not model.generation_config.do_sample:
        for value in _SAMPLING:
            default = getattr(defaults, value, None)
            setattr(model.generation_config, value, default)
    found = _wrong_generation(model)
    if found is not None:
        raise MoesaicError(
            f"{name}: transformers refuses to save its generation configuration "
            f"({found}); mend its generation_config.json"
        )


def _wrong_generation(model: Any) -> str | None:
    """Why transformers would not save it. Some versions save what they have read."""
    try:
        model.generation_config.validate(strict=True)
        return None
    except ValueError:
        pass
    with tempfile.TemporaryDirectory() as scratch:
        try:
            model.generation_config.save_pretrained(scratch)
        except ValueError as error:
            return first_line(error)
    return None


def _read_checkpoint(
    model: str | Path, config: Any, dtype: str, trust_remote_code: bool
) -> tuple[Any, dict[str, Any]]:
    """A model from safetensors, and what transformers says of its weights."""
    return _from_pretrained(
        model,
        config.model_type,
        dtype=choose_dtype(dtype),
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
    )


def _read_gguf(
    model: str | Path, config: Any, dtype: str
) -> tuple[Any, dict[str, Any]]:
    """A model from a GGUF file, its weights dequantised tensor by tensor.

    Memory: the weights twice in `dtype`, for a moment, and one tensor in float32.
    Raises MoesaicError where transformers leaves out a part of the file.
    """
    path = Path(model)
    header = read_header(path)
    options: dict[str, Any] = {"config": config}
    options["dtype"] = choose_dtype(dtype)
    if dtype == "auto":
        options["dtype"] = header.dtype
    # Newer versions of transformers can keep the weights quantised, and must not.
    gguf_config: Any = getattr(transformers, "GgufConfig", None)
    if gguf_config is not None:
        options["quantization_config"] = gguf_config(dequantize=True)
    loaded, info = _from_pretrained(model, config.model_type, **options)
    for mark in ("hf_quantizer", "quantization_method", "is_quantized"):
        loaded.__dict__.pop(mark, None)
    _clear_gguf_marks(loaded.config, str(path))
    # Else PEFT takes the folder that is gone by now for a hub id, and asks the hub.
    loaded.name_or_path = ""
    # A tied model has no output layer of its own, even where the file repeats it.
    tied = loaded.config.tie_word_embeddings
    repeated = "output.weight" if tied else None
    in_file = header.weights(without=repeated)
    in_model = _distinct_weights(loaded)
    if in_file != in_model and not info.get("missing_keys"):
        raise MoesaicError(
            f"{model} holds {in_file:,} weights, and transformers reads {in_model:,} "
            f"({config.model_type}); take the original model folder instead"
        )
    return loaded, info


def _distinct_weights(model: Any) -> int:
    """Numbers in a state dict; a tensor that has two names counts once."""
    tensors = model.state_dict().values()
    sizes = {tensor.data_ptr(): tensor.numel() for tensor in tensors}
    return sum(sizes.values())


def _from_pretrained(
    model: str | Path, family: str, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """A model, and what transformers says of its weights."""
    try:
        with _shown_to_transformers(resolve(model)) as (place, found_by):
            loaded: Any
            info: dict[str, Any]
            loaded, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
                place,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported by name, by _check_loaded
                **found_by,
                **options,
            )
    except Exception as error:  # transformers raises many kinds for one cause
        if "Unrecognized configuration class" in str(error):
            raise MoesaicError(
                f"{model} ({family}) is no causal language model"
            ) from error
        raise _cannot_load(model, error) from error
    if getattr(loaded, "_hf_peft_config_loaded", False):  # of a hub id
        raise MoesaicError(f"{model} {HOLDS_ADAPTER}")
    return loaded, info


def _check_loaded(
    model: str | Path, config: Any, loaded: Any, info: dict[str, Any]
) -> None:
    """Raises MoesaicError unless checkpoint and configuration have the same weights."""
    missing = info.get("missing_keys") or ()
    mismatched = info.get("mismatched_keys") or ()
    # A mismatched key comes with its two shapes.
    mismatched_keys = [
        entry[0] if isinstance(entry, tuple) else entry for entry in mismatched
    ]
    _check_none(model, "missing", missing)
    _check_none(model, "mismatched", mismatched_keys)
    unexpected = info.get("unexpected_keys") or ()
    left_out = _left_out(config, loaded, unexpected)
    if left_out:
        raise MoesaicError(
            f"{model}: the checkpoint has weights that its config.json leaves out, "
            f"among them {left_out[0]}; one of the two is damaged"
        )


def _check_none(model: str | Path, problem: str, keys: Collection[str]) -> None:
    if keys:
        raise MoesaicError(
            f"{model}: {len(keys)} weights are {problem} in the checkpoint, among "
            f"them {min(keys)}; fetch the model again"
        )


def _left_out(config: Any, loaded: Any, unexpected: Iterable[str]) -> list[str]:
    """Weights that were not read and should have been.

    Those of layers beyond the last, and of modules that have another weight, such as
    biases that the configuration does not name; every one where the model is ours.
    """
    if config.model_type == "moesaic":
        return sorted(unexpected)
    depth = config.get_text_config().num_hidden_layers
    weighted = {
        name for name, module in loaded.named_modules() if _has_weight(module)
    }
    left_out = []
    for key in unexpected:
        module_name, _, _ = key.rpartition(".")
        if _layer_of(key) >= depth or module_name in weighted:
            left_out.append(key)
    return sorted(left_out)


def _has_weight(module: Any) -> bool:
    return "weight" in module._parameters


def _layer_of(key: str) -> int:
    """The number of a weight's layer, or -1."""
    match = re.search(r"\.([0-9]+)\.", key)
    if match is None:
        return -1
    return int(match[1])


def load_tokenizer(model: str | Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model. Raises MoesaicError where it has none."""
    where = resolve(model)
    try:
        with _shown_to_transformers(where) as (place, options):
            tokenizer = AutoTokenizer.from_pretrained(
                place, trust_remote_code=trust_remote_code, **options
            )
    except Exception as error:  # transformers raises many kinds for one cause
        line = first_line(error)
        raise MoesaicError(
            f"{model} has no usable tokenizer: {line}"
        ) from error
    tokenizer.name_or_path = where
    return tokenizer


def _model_type(where: Path) -> str | None:
    """What a local config.json calls its family.

    None where it cannot be read, or brings code of its own.
    """
    path = where / "config.json" if where.is_dir() else where
    try:
        values = json.loads(path.read_text())
        family = values["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(family, str) or "auto_map" in values:
        return None
    return family


def why_not_made(error: Exception) -> str:
    """Why transformers made no model of a configuration, in one line."""
    line = first_line(error)
    if isinstance(error, KeyError):  # which says the name alone
        line += " is no known name; see where its config.json has it"
    return line


def _cannot_load(model: str | Path, error: Exception) -> MoesaicError:
    line = why_not_made(error)
    if not Path(model).exists() and str(model) != "demo":
        return MoesaicError(
            f"{model}: no such folder, and the hub has no such model or cannot be reached ({line})"
        )
    if isinstance(error, SafetensorError):
        file = _damaged_file(Path(model))
        line += f"; {file} is damaged or cut short, fetch the model again"
    elif is_gguf(Path(model)) and "not supported" in line:
        line = (
            f"{line.rstrip('.')}; exports in GGUF run in llama.cpp, evaluate the folder that "
            "it was made from"
        )
    elif isinstance(error, FileNotFoundError) or "valid JSON" in line:
        line += "; the folder is not whole, fetch the model again"
    return MoesaicError(f"cannot load {model}: {line}")


def _damaged_file(folder: Path) -> str:
    """The first file of weights whose header does not fit it."""
    for path in sorted(folder.glob("*.safetensors")):
        if not _is_whole(path):
            return path.name
    return "a file of weights"


def _is_whole(path: Path) -> bool:
    """Whether a file's header fits it."""
    try:
        with safe_open(path, "pt"):
            return True
    except (OSError, SafetensorError):
        return False


def source_of(model: Any) -> str | None:
    """From what the weights of a GGUF file were read, for a card; else None."""
    if not isinstance(model, str | Path):
        return None
    path = Path(model)
    if not is_gguf(path):
        return None
    header = read_header(path)
    verb = "dequantised" if header.quantised else "read"
    return f"{verb} from {path.name} ({header.quantisation})"


def base_model_of(config: Any) -> str | None:
    """What a configuration calls the model it was made from; None for a dense one."""
    if config.model_type == "moesaic":
        return str(config.moesaic.base_model)
    for record in ("moesaic_conversion", "moesaic_export"):
        provenance = getattr(config, record, None)
        if isinstance(provenance, dict):
            return str(provenance.get("base_model", ""))
    return None


def dense_of(model: str | Path, config: Any) -> str | None:
    """Name or path of the dense model that a converted model was made from.

    A bare name is looked for in the working directory, beside the converted model, and
    beside its parent. None where it is not found, and for a dense model. Does not ask
    the hub.
    """
    base = base_model_of(config)
    if base is None:
        return None
    # No path: what a checkpoint names is not to be trusted.
    if base == "demo" or _HUB_ID.fullmatch(base):
        return base
    bare_name = Path(base).name == base and base not in ("", "..")
    if not bare_name:
        return None
    converted = Path(model).absolute()
    folders = [Path(), converted.parent, converted.parent.parent]
    for folder in folders:
        candidate = folder / base
        # A converted model may have its dense model's name, in another folder.
        is_itself = candidate.absolute() == converted
        if candidate.exists() and not is_itself:
            return str(candidate)
    return None
