"""Reads what a GGUF file says of itself: its metadata and its table of tensors.

Vocabularies are skipped, so this takes milliseconds. transformers reads the rest.
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Value

from moesaic.errors import MoesaicError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FORMATS = {
    Value.UINT8: "<B",
    Value.INT8: "<b",
    Value.BOOL: "<?",
    Value.UINT16: "<H",
    Value.INT16: "<h",
    Value.UINT32: "<I",
    Value.INT32: "<i",
    Value.FLOAT32: "<f",
    Value.UINT64: "<Q",
    Value.INT64: "<q",
    Value.FLOAT64: "<d",
}
_FLOATS = {
    Kind.F32: torch.float32,
    Kind.F16: torch.float16,
    Kind.BF16: torch.bfloat16,
}


@dataclass(frozen=True)
class GgufTensor:
    """One row of the table of tensors."""

    name: str
    elements: int
    kind: Kind
    start: int  # bytes after the start of the data


@dataclass(frozen=True)
class GgufHeader:
    """A GGUF file without its vocabulary and its weights."""

    metadata: dict[str, Any]
    tensors: list[GgufTensor]
    data_start: int

    @property
    def kind(self) -> Kind:
        """How most of the weights are stored."""
        elements: Counter[Kind] = Counter()
        for tensor in self.tensors:
            elements[tensor.kind] += tensor.elements
        ((most_used, _),) = elements.most_common(1)
        return most_used

    @property
    def quantised(self) -> bool:
        return self.kind not in _FLOATS

    @property
    def quantisation(self) -> str:
        """What llama.cpp calls the file's quantisation, such as Q4_K_M."""
        number = self.metadata.get("general.file_type", -1)
        try:
            file_type = gguf.LlamaFileType(number)
        except ValueError:
            return self.kind.name
        name = file_type.name.removeprefix("MOSTLY_")
        return name.removeprefix("ALL_")

    @property
    def dtype(self) -> torch.dtype:
        """The floats that most weights are stored in; bfloat16 for quantised ones.

        bfloat16 takes half of float32's space, and rounds by far less than
        quantisation did.
        """
        return _FLOATS.get(self.kind, torch.bfloat16)

    @property
    def context_scaling(self) -> str | None:
        """How positions are stretched, such as "linear, factor 4"; None where they are not.

        As llama.cpp reads it: linear where a factor comes without a name.
        """
        kind = self._of_model("rope.scaling.type") or "linear"
        factor = self._of_model("rope.scaling.factor")
        if factor is None:
            factor = self._of_model("rope.scale_linear")
        if kind == "none" or factor in (None, 0, 1):
            return None
        return f"{kind}, factor {factor}"

    @property
    def sliding_window(self) -> int | None:
        """Tokens that attention looks back, where those are fewer than the context."""
        window = self._of_model("attention.sliding_window")
        context = self._of_model("context_length")
        numbers = isinstance(window, int) and isinstance(context, int)
        return window if numbers and 0 < window < context else None

    def _of_model(self, key: str) -> Any:
        """A value of the model's architecture; None where the file does not say it."""
        architecture = self.metadata.get("general.architecture")
        return self.metadata.get(f"{architecture}.{key}")

    def weights(self, without: str | None = None) -> int:
        """Numbers in all tensors, or in all but one."""
        total = 0
        for tensor in self.tensors:
            if tensor.name != without:
                total += tensor.elements
        return total


def read_header(path: Path) -> GgufHeader:
    """Raises MoesaicError for a file that is no GGUF, is cut short or holds no model."""
    size = path.stat().st_size
    if size == 0:
        raise MoesaicError(
            f"{path} is empty, so it is no GGUF file; fetch it again"
        )
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        if data[:4] != _MAGIC:
            raise MoesaicError(
                f"{path} is no GGUF file: it does not begin with GGUF; fetch it again"
            )
        try:
            header = _Cursor(data).header()
        except struct.error as error:
            raise MoesaicError(
                f"{path} is cut short: it ends within its header; fetch it again"
            ) from error
        except (ValueError, OverflowError) as error:
            raise MoesaicError(
                f"{path} is damaged ({error}); fetch it again"
            ) from error
    _check_header(header, path, size)
    return header


def _check_header(header: GgufHeader, path: Path, size: int) -> None:
    """Raises MoesaicError unless the file is one whole model."""
    content = header.metadata.get("general.type", "model")
    if content != "model":
        raise MoesaicError(
            f"{path} holds a GGUF {content}; a whole model is needed"
        )
    parts = header.metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise MoesaicError(
            f"{path} is one of {parts} parts of a GGUF; join them with llama-gguf-split "
            "--merge"
        )
    if not header.tensors:
        raise MoesaicError(
            f"{path} holds no weights; fetch a GGUF of a whole model"
        )
    data_end = max(_end(tensor) for tensor in header.tensors)
    end = header.data_start + data_end
    if size < end:
        raise MoesaicError(
            f"{path} is cut short: it has {size:,} bytes of {end:,}; fetch it again"
        )


def _end(tensor: GgufTensor) -> int:
    """Where a tensor ends, in bytes after the start of the data."""
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
    blocks = tensor.elements // block_elements
    return tensor.start + blocks * block_bytes


class _Cursor:
    """A place in the file, moved forward by what is read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.place = len(_MAGIC)

    def header(self) -> GgufHeader:
        version = self.number("<I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, known are 2 and 3")
        tensor_count = self.number("<Q")
        metadata_count = self.number("<Q")
        metadata = {}
        for _ in range(metadata_count):
            key = self.text()
            kind = Value(self.number("<I"))
            metadata[key] = self.value(kind)
        tensors = [self.tensor() for _ in range(tensor_count)]
        alignment = metadata.get(
            "general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT
        )
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment!r}")
        blocks_before_data = -(-self.place // alignment)
        data_start = blocks_before_data * alignment
        return GgufHeader(metadata, tensors, data_start)

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.place)
        self.place += struct.calcsize(form)
        return value

    def text(self) -> str:
        length = self.number("<Q")
        start = self.place
        self.place += length
        text = self.data[start : self.place]
        return text.decode("utf-8")

    def value(self, kind: Value) -> Any:
        """A number or a text; None for an array, which is skipped."""
        if kind == Value.STRING:
            return self.text()
        if kind == Value.ARRAY:
            self.skip_array()
            return None
        return self.number(_FORMATS[kind])

    def skip_array(self) -> None:
        kind = Value(self.number("<I"))
        count = self.number("<Q")
        if kind in _FORMATS:
            element_bytes = struct.calcsize(_FORMATS[kind])
            self.place += count * element_bytes
            return
        for _ in range(count):
            self.skip_text(kind)

    def skip_text(self, kind: Value) -> None:
        if kind != Value.STRING:
            raise ValueError("it holds arrays of arrays")
        length = self.number("<Q")
        self.place += length

    def tensor(self) -> GgufTensor:
        name = self.text()
        dimensions = self.number("<I")
        shape = [self.number("<Q") for _ in range(dimensions)]
        kind = Kind(self.number("<I"))
        start = self.number("<Q")
        return GgufTensor(name, prod(shape), kind, start)
