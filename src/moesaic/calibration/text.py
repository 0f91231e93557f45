"""Text sources to blocks of token ids.

Shape suffixes: N samples, L tokens of a sample.
"""

from __future__ import annotations

import gzip
import io
import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from moesaic.demo import DEMO_SPLITS, demo_documents
from moesaic.errors import MoesaicError

# Shorthands: hub id, configuration, data files, field. Calibration reads "train".
_HUB = {
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", None, "text"),
    "c4": (
        "allenai/c4",
        None,
        {
            "train": "en/c4-train.00000-of-01024.json.gz",
            "validation": "en/c4-validation.00000-of-00008.json.gz",
        },
        "text",
    ),
}
HELD_OUT = 8  # one token in so many, the last of the windows, is not fitted on

_HELDOUT_SPLIT = {"wikitext2": "test", "c4": "validation", "demo": "heldout"}
_CALIBRATION_SPLIT = {"wikitext2": "train", "c4": "train", "demo": "calibration"}


def has_heldout_split(source: Any) -> bool:
    """Whether a source has text of its own for evaluation, apart from its calibration text."""
    return isinstance(source, str) and source in _HELDOUT_SPLIT


def read_documents(source: str | Path, heldout: bool = False) -> list[str]:
    """The documents of a SOURCE.

    A SOURCE is a file (.txt and other text, .jsonl or .json lines, both also .gz, .zip of text,
    .parquet; `FILE:FIELD` names the field, "text" by default), `wikitext2`, `c4`,
    `hub:NAME:CONFIG:SPLIT:FIELD`, or `demo`. `heldout` chooses the evaluation split where a
    source has one. Raises MoesaicError for a source that is missing, unreadable or empty.
    """
    name = str(source)
    if name in _HELDOUT_SPLIT:
        split = (_HELDOUT_SPLIT if heldout else _CALIBRATION_SPLIT)[name]
        documents = (
            demo_documents(split) if name == "demo" else _hub(name, *_HUB[name], split)
        )
    elif name.startswith("demo:") and name[5:] in DEMO_SPLITS:
        documents = demo_documents(name[5:])
    elif name.startswith("hub:"):
        parts = name.split(":")[1:]
        if len(parts) != 4:
            raise MoesaicError(f"source {name!r}: expected hub:NAME:CONFIG:SPLIT:FIELD")
        hub_id, config, split, field = parts
        documents = _hub(
            name, hub_id, config or None, None, field or "text", split or "train"
        )
    else:
        documents = _file(name)
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise MoesaicError(f"source {name!r} holds no text")
    return documents


def _file(name: str) -> list[str]:
    path, field, head = Path(name), "text", None
    if not path.is_file() and ":" in name:
        head, _, field = name.rpartition(":")
        path = Path(head)
    if not path.is_file():
        raise MoesaicError(
            f"no such text: {name}; a source is a file (.txt, .jsonl, .zip, .parquet), "
            "wikitext2, c4, hub:NAME:CONFIG:SPLIT:FIELD or demo"
        )
    try:
        kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                return [
                    archive.read(member).decode("utf-8")
                    for member in sorted(archive.namelist())
                    if not member.endswith("/")
                ]
        if path.suffix == ".parquet":
            import pyarrow.parquet

            table = pyarrow.parquet.read_table(path)
            return [
                _text(row) for row in _column(path, table.column_names, field, table)
            ]
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        text = data.decode("utf-8")
        if kind in {".jsonl", ".json"}:
            return [
                _field(path, row, field) for row in io.StringIO(text) if row.strip()
            ]
        if head is not None:
            raise MoesaicError(
                f"{path} is plain text, which has no fields; leave out :{field}"
            )
        return [text]
    except (
        OSError,
        EOFError,
        ValueError,
        zipfile.BadZipFile,
        zlib.error,
        RuntimeError,
    ) as error:
        if isinstance(error, MoesaicError):
            raise
        raise MoesaicError(
            f"cannot read {path}: {str(error).splitlines()[0]}"
        ) from error


def _column(path: Path, names: list[str], field: str, table: Any) -> Any:
    if field not in names:
        raise MoesaicError(f"{path} has no field {field!r}; it has {', '.join(names)}")
    return table.column(field).to_pylist()


def _field(path: Path, row: str, field: str) -> str:
    record = json.loads(row)
    if not isinstance(record, dict) or field not in record:
        names = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise MoesaicError(
            f"{path} has a line without the field {field!r}; it has {names}"
        )
    return _text(record[field])


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _hub(
    name: str, hub_id: str, config: Any, files: Any, field: str, split: str
) -> list[str]:
    import datasets

    try:
        rows = datasets.load_dataset(hub_id, config, data_files=files, split=split)
        return [_text(row) for row in rows[field]]
    except Exception as error:  # the library raises many kinds for one cause
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MoesaicError(
            f"source {name!r}: cannot load {hub_id} ({split}) from the hub: {reason}"
        ) from error


def encode(tokenizer: Any, documents: list[str]) -> torch.Tensor:
    """Token ids of all documents in one row, joined by blank lines as the paper's code does.

    The tokenizer adds its special tokens once, to the whole.
    """
    ids = tokenizer("\n\n".join(documents), verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def to_ids(source: Any, tokenizer: Any, heldout: bool = False) -> torch.Tensor:
    """Token ids from a SOURCE, a list of strings, a `datasets.Dataset` or a tensor of ids."""
    if isinstance(source, torch.Tensor):
        if (
            source.ndim not in (1, 2)
            or source.numel() == 0
            or source.is_floating_point()
        ):
            raise MoesaicError(
                f"token ids of shape {tuple(source.shape)} and {source.dtype}; expected one row, "
                "or a matrix of windows, of whole numbers"
            )
        return source.long().cpu()
    if isinstance(source, str | Path):
        documents = read_documents(source, heldout)
    elif hasattr(source, "column_names"):
        if "text" not in source.column_names:
            raise MoesaicError(
                f"the dataset has no field 'text'; it has {source.column_names}"
            )
        documents = source["text"]
    elif isinstance(source, Iterable) and not isinstance(source, Mapping):
        documents = list(source)
    else:
        raise MoesaicError(
            f"a {type(source).__name__} is no text; pass a list of strings"
        )
    if any(not isinstance(text, str | None) for text in documents):
        raise MoesaicError(
            "the texts of a list must be strings (token ids go into a tensor)"
        )
    documents = [text for text in map(_text, documents) if text.strip()]
    if not documents:
        raise MoesaicError("the calibration text is empty")
    if tokenizer is None:
        raise MoesaicError(
            "text needs a tokenizer: pass one, or token ids, with a model in memory"
        )
    return encode(tokenizer, documents)


def sample_windows(
    ids: torch.Tensor, samples: int, length: int, seed: int
) -> torch.Tensor:
    """Windows (N, L) at random places of the text, drawn with the seed (paper, Section 5.1).

    The last eighth of them (one at least, of several) come from the last eighth of the text (one
    window at least), the others from before: what is held out of a fit shares no token with what
    is fitted. A 2-D tensor of ids is taken as windows already. Raises MoesaicError for a text too
    short for that.
    """
    if ids.ndim == 2:
        return ids
    apart = max(len(ids) // HELD_OUT, length) if samples > 1 else 0
    before = len(ids) - apart
    if before < length:
        needed = "one sample needs" if samples == 1 else "two that share none need"
        raise MoesaicError(
            f"the calibration text has {len(ids)} tokens, {needed} "
            f"{min(samples, 2) * length}; give a longer text or a smaller --sequence-length"
        )
    generator = torch.Generator().manual_seed(seed)
    place_N = torch.rand(samples, generator=generator, dtype=torch.float64)
    held = max(samples // HELD_OUT, 1) if apart else 0
    starts_N = (place_N * (before - length + 1)).long()
    late_N = place_N[samples - held :]
    starts_N[samples - held :] = before + (late_N * (apart - length + 1)).long()
    return ids[starts_N[:, None] + torch.arange(length)]


def fewer_windows(windows_NL: torch.Tensor, samples: int) -> torch.Tensor:
    """At most so many of them, of those held out and of the others in proportion."""
    if samples >= len(windows_NL):
        return windows_NL
    held = max(samples // HELD_OUT, 1) if samples > 1 else 0
    return torch.cat(
        [windows_NL[: samples - held], windows_NL[len(windows_NL) - held :]]
    )
