"""The output folder: written layer by layer beside its final name, which it gets only when whole.

DIR.partial holds draft.json, which says what run it belongs to, reports of finished layers, and
DIR.partial/model with one safetensors shard per converted layer (already in its final form, so
nothing is written twice). A killed run leaves it for `--resume`; whatever a run replaces lies in
DIR.partial/old until the new model has its name.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from moesaic.conversion.layer_error import LayerReport
from moesaic.errors import MoesaicError
from moesaic.modeling import new_beside, new_block

_DRAFT, _MODEL, _OLD = "draft.json", "model", "old"
SHARD_SIZE = "5GB"


class UnfinishedError(MoesaicError):
    """What is finished is kept: the disk failed, or the draft belongs to another run."""


def check_output(output: Path, overwrite: bool, resume: bool) -> None:
    """Raises MoesaicError where `output` or its draft may not be written or replaced."""
    if not output.name:
        raise MoesaicError(f"output {output} exists; choose another")
    draft = draft_folder(output)
    empty = draft.is_dir() and not any(draft.iterdir())  # killed while it was made
    if draft.exists() and not empty and not (draft / _DRAFT).is_file():
        raise MoesaicError(
            f"{draft} is in the way and not ours; move it or choose another output"
        )
    if (draft / _MODEL).exists() and not resume and not overwrite:
        raise MoesaicError(
            f"{draft} is left from an unfinished run; pass --resume to go on with it or "
            "--overwrite to start again"
        )
    parent = output.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise MoesaicError(f"output {output}: {parent} is not a folder")
    if not os.access(parent, os.W_OK):
        raise MoesaicError(f"output {output}: {parent} may not be written")
    if not os.path.lexists(output):
        return
    if not overwrite:
        raise MoesaicError(
            f"output {output} exists; choose another or pass --overwrite"
        )
    if not _made_by_us(output) and not (output.is_dir() and not any(output.iterdir())):
        raise MoesaicError(
            f"output {output} is not a model made by moesaic, so --overwrite leaves it alone; "
            "choose another folder"
        )


def _made_by_us(folder: Path) -> bool:
    adapter = (folder / "adapter_config.json").is_file()
    if adapter and (folder / "moesaic_finetune.json").is_file():
        return not folder.is_symlink()
    try:
        config = json.loads((folder / "config.json").read_text())
        return bool(config["model_type"] == "moesaic") and not folder.is_symlink()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_space(output: Path, needed: int) -> None:
    """Raises MoesaicError where the disk has less room than the model, less a draft, takes."""
    draft, parent = draft_folder(output), output.parent
    while not parent.exists():
        parent = parent.parent
    needed -= sum(path.stat().st_size for path in draft.glob(f"{_MODEL}/*"))
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise MoesaicError(
            f"output {output}: the model takes {needed / 1e6:,.1f} MB more, the disk has "
            f"{free / 1e6:,.1f} MB free; make room or choose another disk"
        )


@contextmanager
def writing(draft: Path, kept: str = "finished layers") -> Iterator[None]:
    """Turns a full disk or a forbidden folder into one line that says what is kept."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(
            error
        )
        if isinstance(error, RuntimeError):  # torch.save's, which does not say why
            if "inline_container" not in str(error):
                raise
            full = full or shutil.disk_usage(draft.parent).free < 2**20
        if full:
            raise UnfinishedError(
                f"no space left on the disk; {kept} are kept in {draft}: make room and "
                "run again with --resume"
            ) from error
        raise UnfinishedError(f"cannot write {draft}: {error}") from error


def draft_folder(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


@contextmanager
def open_draft(output: Path, run: dict[str, Any], resume: bool) -> Iterator[Path]:
    """Creates DIR.partial, or takes it up again where it belongs to the same run, and locks it.

    Raises MoesaicError for a draft that was started with other settings or that another process
    is writing. Bad input inside the block removes the draft; a full disk or a kill leaves it.
    """
    draft = draft_folder(output)
    with writing(draft):
        draft.parent.mkdir(parents=True, exist_ok=True)
    lock = draft.with_name(draft.name + ".lock")
    with writing(draft), lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise MoesaicError(
                f"another run is writing {output}; choose another output"
            ) from error
        try:
            yield _prepare_draft(draft, output, run, resume)
        except UnfinishedError:
            raise
        except MoesaicError:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        finally:
            lock.unlink(missing_ok=True)


def _prepare_draft(
    draft: Path, output: Path, run: dict[str, Any], resume: bool
) -> Path:
    if (draft / _OLD).exists() and not output.exists():
        (draft / _OLD).rename(output)  # killed while a new model took an old one's name
    if (
        draft / _MODEL
    ).exists() and resume:  # without it, killed after the model got its name
        try:
            started = json.loads((draft / _DRAFT).read_text())
        except (OSError, ValueError) as error:
            raise UnfinishedError(
                f"{draft} cannot be resumed ({error}); pass --overwrite to start again"
            ) from error
        for key in sorted(set(run) | set(started)):
            if run.get(key) != started.get(key):
                raise UnfinishedError(
                    f"{draft} was started with {key} = {started.get(key)}, this run has "
                    f"{run.get(key)}; run with the same settings, or pass --overwrite"
                )
        return draft
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir()
    (draft / _DRAFT).write_text(json.dumps(run, indent=2, sort_keys=True) + "\n")
    (draft / _MODEL).mkdir()
    return draft


def _layer_file(draft: Path, layer: int) -> Path:
    return draft / _MODEL / f"model-ffn-{layer:05d}.safetensors"


def _report_file(draft: Path, layer: int) -> Path:
    # Not in the shard's metadata: safetensors writes several keys in an order that varies.
    return draft / f"report-{layer:05d}.json"


def save_layer(
    draft: Path,
    layer: int,
    prefixes: Sequence[str],
    blocks: Sequence[nn.Module],
    report: LayerReport,
) -> None:
    """Writes what replaces a layer's FFN, or its experts and the shared one, as a shard.

    Complete or not at all, and its report before it.
    """
    tensors = {
        f"{prefix}.{k}": v.cpu().contiguous()
        for prefix, block in zip(prefixes, blocks, strict=False)
        for k, v in block.state_dict().items()
    }
    _report_file(draft, layer).write_text(json.dumps(report.to_dict(timing=False)))
    _save(tensors, _layer_file(draft, layer))


def load_layer(
    draft: Path, layer: int, prefixes: Sequence[str], config: Any
) -> tuple[list[nn.Module], LayerReport] | None:
    """A layer that an earlier run finished, or None where it is absent or damaged.

    Which experts of a mixture it left whole goes into the configuration.
    """
    path = _layer_file(draft, layer)
    if not path.is_file():
        return None
    try:
        report = LayerReport(
            seconds=None, **json.loads(_report_file(draft, layer).read_text())
        )
        if whole := [row["expert"] for row in report.experts if "whole" in row]:
            config.moesaic["whole"][str(layer)] = whole
        with torch.device("meta"):
            blocks = [new_block(config, layer)]
            if "beside" in config.moesaic:
                blocks.append(new_beside(config))
        state = load_file(path)
        for prefix, block in zip(prefixes, blocks, strict=False):
            start = f"{prefix}."
            own = {
                k.removeprefix(start): v
                for k, v in state.items()
                if k.startswith(start)
            }
            block.load_state_dict(own, assign=True)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError):
        return None
    return [block.eval() for block in blocks], report


def finish(
    draft: Path, output: Path, model: Any, tokenizer: Any, files: dict[str, str]
) -> None:
    """Completes the draft and gives it its name.

    Writes the weights outside the FFNs, the index, configuration with its code, generation
    configuration, tokenizer and `files` (name to text).
    """
    folder = draft / _MODEL
    weight_map: dict[str, str] = {}
    for path in sorted(folder.glob("model-ffn-*.safetensors")):
        with safe_open(path, "pt") as shard:
            weight_map |= dict.fromkeys(shard.keys(), path.name)
    tied = set(model.all_tied_weights_keys)
    state = {
        k: v
        for k, v in model.state_dict().items()
        if k not in weight_map and k not in tied
    }
    shards = split_torch_state_dict_into_shards(
        state,
        filename_pattern="model-rest{suffix}.safetensors",
        max_shard_size=SHARD_SIZE,
    )
    for name, keys in shards.filename_to_tensors.items():
        _save({key: state[key].cpu().contiguous() for key in keys}, folder / name)
        weight_map |= dict.fromkeys(keys, name)
    bytes_total = sum(t.nbytes for k, t in model.state_dict().items() if k not in tied)
    index = {"metadata": {"total_size": bytes_total}, "weight_map": weight_map}
    files = files | {
        "model.safetensors.index.json": json.dumps(index, indent=2, sort_keys=True)
        + "\n"
    }
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    take_name(draft, output)


def take_name(draft: Path, output: Path) -> None:
    """Gives the finished folder in the draft its name; what had it goes only then."""
    folder = draft / _MODEL
    for path in (*folder.iterdir(), folder):
        _sync(path)
    if output.exists():
        output.rename(draft / _OLD)
    folder.rename(output)
    _sync(output.parent)
    shutil.rmtree(
        draft / _OLD, ignore_errors=True
    )  # before draft.json, which says it is ours
    shutil.rmtree(draft)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    part = path.with_suffix(".part")
    save_file(tensors, part, {"format": "pt"})
    part.chmod(
        (path.parent.stat().st_mode & 0o666) | 0o600
    )  # safetensors makes private files
    _sync(part)
    part.rename(path)


def _sync(path: Path) -> None:
    """On the disk before it gets its name, so that a power cut leaves no whole-looking folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
