"""The output folder of a long run: written beside its final name, which it gets when whole.

DIR.partial holds draft.json, which says what run it belongs to, the reports of finished layers,
and DIR.partial/model, which becomes DIR. There every converted layer is a safetensors file of its
own, written once. While the run goes on it is called layer-00003.safetensors, since nobody knows
yet how many files there will be. `finish` renames them all as transformers would: the converted
layers come first, in order, then the files with all other weights. names.json says who gets which
name, so that a run killed in between can be resumed.

A killed run leaves DIR.partial for `--resume`. DIR.partial.lock keeps a second run out. What a
run replaces lies in DIR.partial/old until the new model has its name.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moesaic.calibration.share import ALONE, Share
from moesaic.errors import MoesaicError
from moesaic.output.atomic import (
    PART,
    check_parent,
    nearest_parent,
    new_file,
    sync,
    sync_all,
    write_file,
)
from moesaic.progress import step_log

SHARD_SIZE = "5GB"
INDEX = "model.safetensors.index.json"

# What a model's folder holds: what we write, transformers does, and the hub.
_MODEL_FILES = (
    "*.safetensors",
    "*_moesaic.py",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    INDEX,
    "moesaic_*.json",
    "report.html",
    "learning_curve.csv",
    "learning_curve.png",
    "loads.png",
    "README.md",
    "LICENSE*",
    "tokenizer*",
    "tokenization_*.py",
    "*.model",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    ".gitattributes",
)
_MODEL_FOLDERS = ("additional_chat_templates", ".cache", "__pycache__")
_NAMED = 3  # of the other files, in an error

_DRAFT = "draft.json"
_NAMES = "names.json"
_MODEL = "model"
_OLD = "old"  # what was replaced, whole
_GONE = "gone"  # the same while it is deleted

State = dict[str, Tensor]


class UnfinishedError(MoesaicError):
    """What is finished is kept: the disk failed, or the draft belongs to another run."""


# --- before a run ------------------------------------------------------------------------------


def check_output(output: Path, overwrite: bool, resume: bool) -> None:
    """Raises MoesaicError where `output` or its draft may not be written or replaced."""
    if not output.name:
        raise MoesaicError(f"output {output} exists; choose another")
    _check_draft(draft_folder(output), overwrite or resume)
    check_parent(output)
    # What a killed run had put aside, and not yet replaced, gets its name back.
    aside = draft_folder(output) / _OLD
    there = output if os.path.lexists(output) else aside
    if os.path.lexists(there):
        _check_replaceable(there, overwrite)


def check_space(output: Path, needed: int, files: str = f"{_MODEL}/*") -> None:
    """Raises MoesaicError where the model needs more room than the disk and a draft have.

    `files` are those of the draft that count, as a pattern.
    """
    there = draft_folder(output).glob(files)
    written = sum(path.stat().st_size for path in there if path.is_file())
    missing = needed - written
    disk = shutil.disk_usage(nearest_parent(output))
    if disk.free < missing:
        missing_mb = missing / 1e6
        free_mb = disk.free / 1e6
        raise MoesaicError(
            f"output {output}: the model takes {missing_mb:,.1f} MB more, the disk has "
            f"{free_mb:,.1f} MB free; make room or choose another disk"
        )


def draft_folder(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def is_begun(output: Path) -> bool:
    """Whether an earlier run has left something to resume."""
    model = draft_folder(output) / _MODEL
    return model.exists()


def _check_draft(draft: Path, expected: bool) -> None:
    """Raises MoesaicError for a folder of someone else's, or an unexpected one of ours."""
    is_draft = (draft / _DRAFT).is_file()
    if draft.exists() and not is_draft and not _is_empty(draft):
        raise MoesaicError(
            f"{draft} is in the way and not ours; move it or choose another output"
        )
    model = draft / _MODEL
    if model.exists() and not expected:
        raise MoesaicError(
            f"{draft} is left from an unfinished run; pass --resume to go on with it or "
            "--overwrite to start again"
        )


def _check_replaceable(output: Path, overwrite: bool) -> None:
    if not overwrite:
        raise MoesaicError(
            f"output {output} exists; choose another or pass --overwrite to replace it"
        )
    if not _made_by_us(output) and not _is_empty(output):
        raise MoesaicError(
            f"output {output} is not a model made by moesaic, so --overwrite leaves it "
            "alone; choose another folder"
        )
    others = _not_of_a_model(output)
    if others:
        named = ", ".join(others[:_NAMED])
        more = (
            f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        )
        raise MoesaicError(
            f"output {output} also holds {named}{more}, which --overwrite would delete; "
            "move what is not the model's elsewhere, or choose another folder"
        )


def _not_of_a_model(folder: Path) -> list[str]:
    """What else lies in a model's folder: notes, texts, other models."""
    others = []
    for path in sorted(folder.iterdir()):
        is_folder = path.is_dir()
        kinds = _MODEL_FOLDERS if is_folder else _MODEL_FILES
        if not any(fnmatchcase(path.name, kind) for kind in kinds):
            others.append(path.name + "/" * is_folder)
    return others


def _is_empty(folder: Path) -> bool:
    """As a run leaves it that is killed just after it made the folder."""
    if not folder.is_dir():
        return False
    return not any(folder.iterdir())


def _made_by_us(folder: Path) -> bool:
    if folder.is_symlink():
        return False
    adapter_config = folder / "adapter_config.json"
    finetune_notes = folder / "moesaic_finetune.json"
    if adapter_config.is_file() and finetune_notes.is_file():
        return True
    config_path = folder / "config.json"
    try:
        config = json.loads(config_path.read_text("utf-8"))
        is_ours = config["model_type"] == "moesaic"
        return bool(is_ours or "moesaic_conversion" in config)
    except (OSError, ValueError, KeyError, TypeError):
        return False


# --- a run's draft -----------------------------------------------------------------------------


@contextmanager
def open_draft(
    output: Path, run: dict[str, Any], resume: bool, progress: bool = False
) -> Iterator[Path]:
    """Makes DIR.partial, or takes it up again where it belongs to the same run, and locks it.

    With `progress` it says where there is nothing to resume. Raises MoesaicError for a draft
    that was started with other settings or that another process is writing. Bad input inside
    the block removes the draft; a full disk or a kill leaves it.
    """
    draft = draft_folder(output)
    log = step_log(progress)
    if resume and not is_begun(output):
        log(f"nothing to resume in {draft}; starting from the beginning")
    with writing(draft):
        draft.parent.mkdir(parents=True, exist_ok=True)
    with writing(draft), _locked(draft, output):
        try:
            yield _prepare_draft(draft, output, run, resume)
        except UnfinishedError:
            raise
        except MoesaicError:
            with suppress(OSError):
                _remove_draft(draft)
            raise


@contextmanager
def writing(draft: Path, kept: str = "finished layers") -> Iterator[None]:
    """Turns a full disk or a forbidden folder into one line that says what is kept."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_of_torch_save(error):
            raise
        if not _is_full_disk(error, draft):
            raise UnfinishedError(f"cannot write {draft}: {error}") from error
        raise UnfinishedError(
            f"no space left on the disk; {kept} are kept in {draft}: make room and run again "
            "with --resume"
        ) from error


def _is_of_torch_save(error: RuntimeError) -> bool:
    return "inline_container" in str(error)


def _is_full_disk(error: Exception, draft: Path) -> bool:
    if "No space left" in str(error):
        return True
    if isinstance(error, RuntimeError):  # torch.save does not say why it failed
        disk = shutil.disk_usage(draft.parent)
        return disk.free < 2**20
    code = getattr(error, "errno", None)
    return code == errno.ENOSPC


@contextmanager
def _locked(draft: Path, output: Path) -> Iterator[None]:
    path = draft.with_name(draft.name + ".lock")
    lock = FileLock(path, blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise MoesaicError(
            f"another run is writing {output}; choose another output"
        ) from error
    try:
        yield
    finally:
        # While it is ours, so that nobody else's goes.
        path.unlink(missing_ok=True)
        lock.release()


def _prepare_draft(
    draft: Path, output: Path, run: dict[str, Any], resume: bool
) -> Path:
    old = draft / _OLD
    folder = draft / _MODEL
    if old.exists() and not output.exists():  # killed between two renames
        old.rename(output)
    elif old.exists():  # killed after the second one
        shutil.rmtree(old)
    if resume and folder.exists():  # else killed after the model got its name
        _check_same_run(draft, run)
        _take_names_back(draft)
        return draft
    if draft.exists():
        _remove_draft(draft)
    draft.mkdir()
    _write_json(draft / _DRAFT, run)
    folder.mkdir()
    return draft


def _check_same_run(draft: Path, run: dict[str, Any]) -> None:
    path = draft / _DRAFT
    try:
        earlier_run = dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UnfinishedError(
            f"{draft} cannot be resumed ({error}); pass --overwrite to start again"
        ) from error
    if set(run) != set(earlier_run):
        raise UnfinishedError(
            f"{draft} is left from another command or another version; choose another "
            "output, or pass --overwrite to start again"
        )
    difference = _first_difference(earlier_run, run)
    if difference is not None:
        key, before, now = difference
        raise UnfinishedError(
            f"{draft} was started with {key} = {before}, this run has {now}; run with "
            "the same settings, or pass --overwrite"
        )


def _first_difference(
    before: dict[str, Any], now: dict[str, Any]
) -> tuple[str, Any, Any] | None:
    """What two runs have otherwise, with both values: a key, and its own within a mapping."""
    for key in sorted(set(before) | set(now)):
        one = before.get(key)
        other = now.get(key)
        if one == other:
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            inner = _first_difference(one, other)
            assert inner is not None
            return f"{key}.{inner[0]}", *inner[1:]
        return key, one, other
    return None


def remembered(
    draft: Path | None,
    name: str,
    compute: Callable[[], Any],
    share: Share = ALONE,
) -> Any:
    """What `compute` gives, which JSON must hold; what it gave in an earlier run, if it did.

    Of several processes the first has the draft, and all get what it has.
    """
    earlier = None
    if draft is not None:
        earlier = _read_if_there(draft / f"{name}.json")
    earlier = share.agreed(earlier)
    if earlier is not None:
        return earlier
    value = share.agreed(compute())
    if draft is not None:
        write_file(draft / f"{name}.json", json.dumps(value))
    return value


def _read_if_there(path: Path) -> Any:
    """What a JSON file holds; None, to be computed anew, where none is there or whole."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None


# --- converted layers --------------------------------------------------------------------------


def save_layer(
    draft: Path, layer: int, state: State, report: dict[str, Any]
) -> None:
    """Writes a converted layer as a file of the final model, complete or not at all.

    `state` has the tensors by their names in the whole model.
    """
    # Not in the metadata of safetensors, which come in an order that varies.
    text = json.dumps(report)
    write_file(_report_file(draft, layer), text)
    _save(state, _layer_file(draft, layer))


def load_layer(draft: Path, layer: int) -> tuple[State, dict[str, Any]] | None:
    """What `save_layer` wrote, or None where it is absent or damaged."""
    report_path = _report_file(draft, layer)
    layer_path = _layer_file(draft, layer)
    try:
        report = json.loads(report_path.read_text("utf-8"))
        state = load_file(layer_path)
    except (OSError, ValueError, SafetensorError):
        return None
    return state, report


def _layer_file(draft: Path, layer: int) -> Path:
    return draft / _MODEL / f"layer-{layer:05d}.safetensors"


def _report_file(draft: Path, layer: int) -> Path:
    return draft / f"report-{layer:05d}.json"


def _save(state: State, path: Path) -> None:
    tensors = {}
    for key, tensor in state.items():
        tensors[key] = tensor.cpu().contiguous()
    with new_file(path) as part:
        save_file(tensors, part, {"format": "pt"})


# --- the end of a run --------------------------------------------------------------------------


def finish(
    draft: Path,
    output: Path,
    model: Any,
    tokenizer: Any,
    files: dict[str, str],
    overwrite: bool,
) -> None:
    """Completes the draft and gives it its name.

    Adds the weights outside the converted layers, the index, configuration with its code,
    generation configuration, tokenizer and `files` (name to text). `overwrite` is that of
    `take_name`.
    """
    folder = draft / _MODEL
    state = _state_without_ties(model)
    located = _locate_converted(folder)
    others = {
        key: tensor for key, tensor in state.items() if key not in located
    }
    located |= _save_others(others, folder)
    names = _final_names(located)
    for name, text in files.items():
        write_file(folder / name, text)
    _write_index(folder, state, located, names)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    _give_names(draft, names)
    take_name(draft, output, overwrite)


def take_name(
    draft: Path, output: Path, overwrite: bool, folder: Path | None = None
) -> None:
    """Gives the finished folder in the draft its name; what had it goes only then.

    That is `model` unless another one is named. Raises UnfinishedError where something
    that may not be replaced has taken the name since the run began.
    """
    if folder is None:
        folder = draft / _MODEL
    old = draft / _OLD
    sync_all(folder)
    if os.path.lexists(output):
        try:
            _check_replaceable(output, overwrite)
        except MoesaicError as error:
            raise UnfinishedError(
                f"{output} was made or changed by someone else since this run began, and is "
                f"left alone; the finished model is kept in {draft}: move {output} away and "
                "run again with --resume"
            ) from error
        output.rename(old)
    folder.rename(output)
    sync(output.parent)
    if old.exists():
        old.rename(draft / _GONE)
    _remove_draft(draft)


def _remove_draft(draft: Path) -> None:
    """Removes a draft, draft.json last: that file says that the draft is ours."""
    for path in draft.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _DRAFT:
            path.unlink()
    shutil.rmtree(draft)


def _state_without_ties(model: Any) -> State:
    """The model's tensors, each once."""
    tied = set(model.all_tied_weights_keys)
    state = model.state_dict()
    return {key: tensor for key, tensor in state.items() if key not in tied}


def _locate_converted(folder: Path) -> dict[str, str]:
    """The file of every tensor of the converted layers."""
    located: dict[str, str] = {}
    for path in sorted(folder.glob("layer-*.safetensors")):
        with safe_open(path, "pt") as file:
            located |= dict.fromkeys(file.keys(), path.name)
    return located


def _save_others(state: State, folder: Path) -> dict[str, str]:
    """Writes all other tensors. Returns the file of each."""
    split = split_torch_state_dict_into_shards(
        state,
        filename_pattern="others{suffix}.safetensors",
        max_shard_size=SHARD_SIZE,
    )
    for name, keys in split.filename_to_tensors.items():
        shard = {key: state[key] for key in keys}
        _save(shard, folder / name)
    return split.tensor_to_filename


def _final_names(located: dict[str, str]) -> dict[str, str]:
    """What transformers would call the files: "layer-" sorts before "others-"."""
    files = sorted(set(located.values()))
    total = len(files)
    names = {}
    for number, file in enumerate(files, start=1):
        names[file] = f"model-{number:05d}-of-{total:05d}.safetensors"
    return names


def _write_index(
    folder: Path, state: State, located: dict[str, str], names: dict[str, str]
) -> None:
    size = sum(tensor.nbytes for tensor in state.values())
    weight_map = {key: names[file] for key, file in located.items()}
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    _write_json(folder / INDEX, index)


def _give_names(draft: Path, names: dict[str, str]) -> None:
    """Renames the files of weights, after writing down who gets which name."""
    folder = draft / _MODEL
    _write_json(draft / _NAMES, names)
    sync(draft)
    for private, final in names.items():
        path = folder / private
        path.rename(folder / final)


def _take_names_back(draft: Path) -> None:
    """Undoes what a killed run has done of `_give_names`, and removes half-written files."""
    folder = draft / _MODEL
    names_path = draft / _NAMES
    for part in folder.glob(f"*{PART}"):
        part.unlink()
    if not names_path.is_file():
        return
    try:
        names = dict(json.loads(names_path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise UnfinishedError(
            f"{names_path} is damaged ({error}); pass --overwrite to start again"
        ) from error
    for private, final in names.items():
        path = folder / final
        if path.exists():
            path.rename(folder / private)
    sync(folder)
    names_path.unlink()  # last, so that this too can be killed and done again


def _write_json(path: Path, values: dict[str, Any]) -> None:
    text = json.dumps(values, indent=2, sort_keys=True)
    write_file(path, text + "\n")
