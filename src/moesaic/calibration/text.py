"""Text sources to blocks of token ids.

Shape suffixes: N samples, L tokens of a sample.
"""

from __future__ import annotations

import gzip
import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.demo import DEMO_SPLITS, demo_documents
from moesaic.errors import MoesaicError, first_line


@dataclass(frozen=True)
class _HubText:
    """A text on the hub, and its splits for calibration and for evaluation."""

    hub_id: str
    calibration: str
    heldout: str
    most: int | None = None  # documents, of each split
    most_heldout: int | None = None
    configuration: str | None = None
    files: dict[str, str] | None = None


_HUB = {
    "wikitext2": _HubText(
        "Salesforce/wikitext",
        calibration="train",
        heldout="test",
        configuration="wikitext-2-raw-v1",
    ),
    "c4": _HubText(
        "allenai/c4",
        calibration="train",
        heldout="validation",
        # Some 36 million characters, of 800 million; and what papers evaluate on.
        most=16_384,
        most_heldout=1_100,
        files={
            "train": "en/c4-train.00000-of-01024.json.gz",
            "validation": "en/c4-validation.00000-of-00008.json.gz",
        },
    ),
}
_USUAL_FIELD = "text"
_PIECE = 2**24  # characters that a tokenizer gets at once


def has_heldout_split(source: Any) -> bool:
    """Whether a source has text of its own for evaluation."""
    if not isinstance(source, str):
        return False
    return source == "demo" or source in _HUB


def read_documents(source: str | Path, heldout: bool = False) -> list[str]:
    """The documents of a SOURCE.

    A SOURCE is a file (.txt and other text, .jsonl or .json lines, both also .gz, .zip
    of text, .parquet; `FILE:FIELD` names the field, "text" by default), `wikitext2`,
    `c4`, `hub:NAME:CONFIG:SPLIT:FIELD`, or `demo`. `heldout` chooses the evaluation
    split where a source has one. Raises MoesaicError for a source that is missing,
    unreadable or empty.
    """
    name = str(source)
    documents = _documents_of(name, heldout)
    with_text = [document for document in documents if document.strip()]
    if not with_text:
        raise MoesaicError(f"source {name!r} holds no text")
    return [whole_characters(document) for document in with_text]


def _documents_of(name: str, heldout: bool) -> list[str]:
    if name == "demo":
        return demo_documents("heldout" if heldout else "calibration")
    demo_split = name.removeprefix("demo:")
    if name.startswith("demo:") and demo_split in DEMO_SPLITS:
        return demo_documents(demo_split)
    if name in _HUB:
        return _known_on_hub(name, heldout)
    if name.startswith("hub:"):
        return _named_on_hub(name)
    return _file(name)


def _known_on_hub(name: str, heldout: bool) -> list[str]:
    text = _HUB[name]
    split = text.heldout if heldout else text.calibration
    most = text.most_heldout if heldout else text.most
    if most is not None:
        split = f"{split}[:{most}]"
    return _hub(
        name, text.hub_id, text.configuration, text.files, _USUAL_FIELD, split
    )


def _named_on_hub(name: str) -> list[str]:
    parts = name.split(":")[1:]
    if len(parts) != 4:
        raise MoesaicError(
            f"source {name!r}: expected hub:NAME:CONFIG:SPLIT:FIELD"
        )
    hub_id, configuration, split, field = parts
    return _hub(
        name,
        hub_id,
        configuration or None,
        None,
        field or _USUAL_FIELD,
        split or "train",
    )


def _hub(
    name: str,
    hub_id: str,
    configuration: str | None,
    files: dict[str, str] | None,
    field: str,
    split: str,
) -> list[str]:
    import datasets

    try:
        rows = datasets.load_dataset(
            hub_id, configuration, data_files=files, split=split
        )
        return [_text(value, name) for value in rows[field]]
    except Exception as error:  # the library raises many kinds for one cause
        reason = first_line(error)
        raise MoesaicError(
            f"source {name!r}: cannot load {hub_id} ({split}) from the hub: {reason}"
        ) from error


def _file(name: str) -> list[str]:
    """The documents of FILE or FILE:FIELD."""
    path, field = _path_and_field(name)
    if not path.is_file():
        raise MoesaicError(
            f"no such text: {name}; a source is a file (.txt, .jsonl, .zip, .parquet), "
            "wikitext2, c4, hub:NAME:CONFIG:SPLIT:FIELD or demo"
        )
    try:
        return _read_file(path, field)
    except MoesaicError:
        raise
    except (
        OSError,
        EOFError,
        ValueError,
        zipfile.BadZipFile,
        zlib.error,
        RuntimeError,
    ) as error:
        reason = first_line(error)
        if isinstance(error, UnicodeDecodeError):
            reason += "; text is read as UTF-8, so convert it first"
        raise MoesaicError(f"cannot read {path}: {reason}") from error


def place_of(name: str) -> tuple[Path, str]:
    """What two names of one source have in common: its file and the field of it."""
    path, field = _path_and_field(name)
    return path.resolve(), field or _USUAL_FIELD


def public_text(name: str) -> str:
    """What a source is called without private folders."""
    path, field = _path_and_field(name)
    if not path.is_file():
        return name
    return path.name if field is None else f"{path.name}:{field}"


def _path_and_field(name: str) -> tuple[Path, str | None]:
    """A colon within the name of a file that is there is no field."""
    path = Path(name)
    if path.is_file() or ":" not in name:
        return path, None
    head, _, field = name.rpartition(":")
    return Path(head), field


def _read_file(path: Path, field: str | None) -> list[str]:
    if path.suffix == ".zip":
        _check_no_field(path, field)
        return list(_zip_members(path))
    if path.suffix == ".parquet":
        return _parquet_rows(path, field or _USUAL_FIELD)
    data = path.read_bytes()
    kind = path.suffix
    if kind == ".gz":
        data = gzip.decompress(data)
        kind = path.with_suffix("").suffix
    text = data.decode("utf-8-sig")  # some tools write a mark before the text
    if kind in {".jsonl", ".json"}:
        # Not splitlines: a line separator within a string ends no line of JSON.
        lines = text.split("\n")
        numbered = enumerate(lines, start=1)
        rows = [(number, line) for number, line in numbered if line.strip()]
        name = field or _USUAL_FIELD
        return [_field_of(path, number, row, name) for number, row in rows]
    _check_no_field(path, field)
    return [text]


def _check_no_field(path: Path, field: str | None) -> None:
    if field is not None:
        raise MoesaicError(
            f"{path} holds plain text, which has no fields; leave out :{field}"
        )


def _zip_members(path: Path) -> Iterator[str]:
    """The texts of an archive, in the order of their names."""
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            is_folder = name.endswith("/")
            if not is_folder:
                yield archive.read(name).decode("utf-8-sig")


def _parquet_rows(path: Path, field: str) -> list[str]:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    if field not in table.column_names:
        names = ", ".join(table.column_names)
        raise MoesaicError(f"{path} has no field {field!r}; it has {names}")
    values = table.column(field).to_pylist()
    return [_text(value, str(path)) for value in values]


def _field_of(path: Path, number: int, row: str, field: str) -> str:
    """One field of a line of JSON."""
    try:
        record = json.loads(row)
    except json.JSONDecodeError as error:
        raise MoesaicError(
            f"{path}: line {number} is not JSON ({error.msg} at column {error.colno}); "
            "every line holds one record"
        ) from error
    if isinstance(record, dict) and field in record:
        return _text(record[field], str(path))
    names = type(record).__name__
    if isinstance(record, dict):
        names = ", ".join(record)
    raise MoesaicError(
        f"{path}: line {number} has no field {field!r}; it has {names}"
    )


def _text(value: Any, source: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise MoesaicError(
            f"{source} has a {type(value).__name__} where text should be; name the field "
            "that holds the text"
        )
    return value


def whole_characters(text: str) -> str:
    """The text, a question mark for each half of a character.

    JSON that was cut within an emoji holds such halves; tokenizers refuse them.
    """
    return text.encode("utf-8", "replace").decode("utf-8")


def encode(tokenizer: Any, documents: list[str]) -> Tensor:
    """Token ids of all documents in one row.

    Joined by blank lines, as the paper's code does; but `wikitext2` comes without the
    rows that are blank, which that code keeps. The tokenizer adds its special tokens
    once, to the whole. Long texts go through it in pieces: it holds some 140 bytes for
    each character meanwhile.
    """
    text = whole_characters("\n\n".join(documents))
    pieces: list[Tensor] = []
    for piece in _pieces(text):
        is_first = not pieces
        found = tokenizer(piece, verbose=False, add_special_tokens=is_first)
        pieces.append(torch.tensor(found["input_ids"], dtype=torch.long))
    return torch.cat(pieces)


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces of some _PIECE characters, which begin with their line ends."""
    start = 0
    while len(text) - start > _PIECE:
        line_end = text.rfind("\n", start + 1, start + _PIECE)
        end = line_end if line_end > 0 else start + _PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def to_ids(source: Any, tokenizer: Any, heldout: bool = False) -> Tensor:
    """Token ids from text, or ids as they are.

    `source` is a SOURCE, a list of strings, a `datasets.Dataset` or a tensor of ids.
    """
    if isinstance(source, Tensor):
        return _checked_ids(source)
    texts = _texts_of(source, heldout)
    if any(not isinstance(text, str | None) for text in texts):
        raise MoesaicError(
            "the texts of a list must be strings (token ids go into a tensor)"
        )
    documents = [text for text in texts if text and text.strip()]
    if not documents:
        raise MoesaicError("the calibration text is empty")
    if tokenizer is None:
        raise MoesaicError(
            "text needs a tokenizer: pass one, or token ids, with a model in memory"
        )
    return encode(tokenizer, documents)


def _checked_ids(ids: Tensor) -> Tensor:
    row_or_windows = ids.ndim in (1, 2)
    whole_numbers = not ids.is_floating_point()
    if not row_or_windows or not whole_numbers or ids.numel() == 0:
        raise MoesaicError(
            f"token ids of shape {tuple(ids.shape)} and {ids.dtype}; expected one row, "
            "or a matrix of windows, of whole numbers"
        )
    return ids.long().cpu()


def _texts_of(source: Any, heldout: bool) -> list[Any]:
    """The entries of a source that should be strings."""
    if isinstance(source, str | Path):
        return list(read_documents(source, heldout))
    if hasattr(source, "column_names"):
        if _USUAL_FIELD not in source.column_names:
            raise MoesaicError(
                f"the dataset has no field 'text'; it has {source.column_names}"
            )
        return list(source[_USUAL_FIELD])
    if isinstance(source, Iterable) and not isinstance(source, Mapping):
        return list(source)
    raise MoesaicError(
        f"a {type(source).__name__} is no text; pass a list of strings"
    )
