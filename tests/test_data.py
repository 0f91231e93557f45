"""Text sources: every kind of file, and what goes wrong with them."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from moesaic.calibration import text as text_module
from moesaic.calibration.text import (
    encode,
    has_heldout_split,
    read_documents,
    to_ids,
)
from moesaic.demo import DEMO_SPLITS, demo_documents
from moesaic.errors import MoesaicError

TEXTS = ["Grüße,\nWorld.", "second\u2028text", "third"]
ROWS = [{"text": text, "body": text.upper(), "n": i} for i, text in enumerate(TEXTS)]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)


def write_lines(path: Path) -> None:
    path.write_text(LINES + "\n\n", encoding="utf-8")


def write_gzip_lines(path: Path) -> None:
    path.write_bytes(gzip.compress(LINES.encode()))


def write_zip(path: Path) -> None:
    """Members in another order than that of their names, and one that is a folder."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("folder")
        for name, text in (("b.txt", TEXTS[1]), ("folder/c", TEXTS[2]), ("a.txt", TEXTS[0])):
            archive.writestr(name, text)


def write_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path)


STRUCTURED = {
    "x.jsonl": write_lines,
    "x.json": write_lines,
    "x.jsonl.gz": write_gzip_lines,
    "x.json.gz": write_gzip_lines,
    "x.v2.jsonl": write_lines,
    "x.parquet": write_parquet,
}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and <s> before the whole."""
    characters = "\n abcdefghijklmnopqrstuvwxyz"
    vocabulary = {"<s>": 0} | {character: i + 1 for i, character in enumerate(characters)}
    model = Tokenizer(WordLevel(vocabulary, unk_token="<s>"))
    model.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    model.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>")


# --- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.txt", "x.md", "x", "x.txt.gz"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    data = "\n\n".join(TEXTS).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert read_documents(tmp_path / name) == ["\n\n".join(TEXTS)]
    assert read_documents(str(tmp_path / name)) == ["\n\n".join(TEXTS)]


@pytest.mark.parametrize(("name", "write"), STRUCTURED.items())
def test_a_structured_file_is_one_document_a_row(
    tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    write(tmp_path / name)
    assert read_documents(tmp_path / name) == TEXTS
    assert read_documents(f"{tmp_path / name}:text") == TEXTS


@pytest.mark.parametrize(("name", "write"), STRUCTURED.items())
def test_the_field_can_be_named(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    write(tmp_path / name)
    assert read_documents(f"{tmp_path / name}:body") == [text.upper() for text in TEXTS]


def test_a_zip_is_one_document_a_member_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_zip(tmp_path / "x.zip")
    assert read_documents(tmp_path / "x.zip") == TEXTS


def test_a_colon_in_a_file_s_own_name_is_no_field(tmp_path: Path) -> None:
    (tmp_path / "a:b.txt").write_text("text")
    assert read_documents(tmp_path / "a:b.txt") == ["text"]


def test_blank_documents_are_left_out(tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("a", "", " \n\t", "b")]
    (tmp_path / "x.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows))
    assert read_documents(tmp_path / "x.jsonl") == ["a", "b"]


def test_a_missing_value_is_no_text(tmp_path: Path) -> None:
    """A null is not the word None."""
    pq.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "x.parquet")
    assert read_documents(tmp_path / "x.parquet") == ["a", "b"]
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": null}\n{"text": "b"}')
    assert read_documents(tmp_path / "x.jsonl") == ["a", "b"]


# --- files that are refused --------------------------------------------------------------------


@pytest.mark.parametrize(("name", "write"), STRUCTURED.items())
def test_a_wrong_field_lists_the_fields(
    tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    write(tmp_path / name)
    with pytest.raises(MoesaicError, match="field 'content'; it has text, body, n"):
        read_documents(f"{tmp_path / name}:content")


@pytest.mark.parametrize(("line", "found"), [('["text"]', "list"), ('"text"', "str"), ("3", "int")])
def test_a_line_that_is_no_record(tmp_path: Path, line: str, found: str) -> None:
    (tmp_path / "x.jsonl").write_text(f'{{"text": "a"}}\n{line}')
    with pytest.raises(MoesaicError, match=f"x.jsonl: line 2 has no field 'text'; it has {found}"):
        read_documents(tmp_path / "x.jsonl")


@pytest.mark.parametrize("data", [b"", b" \n\n\t"])
@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.txt.gz"])
def test_a_blank_file(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(MoesaicError, match=f"{name}.* holds no text"):
        read_documents(tmp_path / name)


def test_a_zip_and_a_table_without_rows(tmp_path: Path) -> None:
    zipfile.ZipFile(tmp_path / "x.zip", "w").close()
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "x.parquet")
    for name in ("x.zip", "x.parquet"):
        with pytest.raises(MoesaicError, match="holds no text"):
            read_documents(tmp_path / name)


@pytest.mark.parametrize("name", ["absent.txt", "absent.jsonl:body", "wikitext", "folder", ""])
def test_a_missing_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(MoesaicError, match="no such text") as refusal:
        read_documents(str(tmp_path / name) if name else "")
    assert name in str(refusal.value)


def truncated_gzip() -> bytes:
    return gzip.compress(LINES.encode())[:-12]


def corrupt_gzip() -> bytes:
    """Whole, with bytes in the middle that no deflate stream has."""
    data = bytearray(gzip.compress(LINES.encode()))
    data[12:30] = b"\xff" * 18
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"text": '),
        ("x.jsonl", b"plain words"),
        ("x.txt", "Grüße".encode("latin-1")),
        ("x.jsonl", '{"text": "Grüße"}'.encode("latin-1")),
        ("x.txt.gz", gzip.compress("Grüße".encode("latin-1"))),
        ("x.jsonl.gz", truncated_gzip()),
        ("x.jsonl.gz", corrupt_gzip()),
        ("x.jsonl.gz", LINES.encode()),
        ("x.zip", b"PK\x03\x04 and no more"),
        ("x.parquet", b"PAR1 and no more"),
    ],
    ids=["half a line", "no JSON", "Latin-1", "Latin-1 lines", "Latin-1 gzip", "half a gzip",
         "corrupt gzip", "no gzip", "no zip", "no parquet"],
)  # fmt: skip
def test_a_broken_file_is_named(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(MoesaicError, match=r"cannot read|line \d is not JSON \(") as refusal:
        read_documents(tmp_path / name)
    assert str(tmp_path / name) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("damage", ["truncated", "member", "encoding", "password"])
def test_a_broken_zip_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.zip"
    write_zip(path)
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        data = data[:-30]
    elif damage == "member":
        start = data.index(b"b.txt") + len("b.txt")
        data[start : start + 8] = b"\xff" * 8
    elif damage == "password":  # the flag says encrypted, in both headers of the member
        data[data.index(b"PK\x03\x04", 1) + 6] |= 1
        central = data.index(b"PK\x01\x02")
        data[data.index(b"PK\x01\x02", central + 1) + 8] |= 1
    path.write_bytes(data)
    if damage == "encoding":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.txt", "Grüße".encode("latin-1"))
    with pytest.raises(MoesaicError, match="cannot read") as refusal:
        read_documents(path)
    assert str(path) in str(refusal.value)


# --- other sources -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hub:", "hub:a/b", "hub:a/b:c:train", "hub:a/b:c:train:text:x"])
def test_a_malformed_hub_source(name: str) -> None:
    with pytest.raises(MoesaicError, match="expected hub:NAME:CONFIG:SPLIT:FIELD") as refusal:
        read_documents(name)
    assert name in str(refusal.value)


def test_only_named_sources_have_a_heldout_split() -> None:
    assert all(has_heldout_split(name) for name in ("wikitext2", "c4", "demo"))
    assert not has_heldout_split("x.txt")
    assert not has_heldout_split(torch.arange(3))


def test_demo_splits_are_disjoint_and_not_empty() -> None:
    splits = {name: {text for text in demo_documents(name) if text.strip()} for name in DEMO_SPLITS}
    assert sorted(splits) == ["calibration", "heldout", "train"]
    for name, texts in splits.items():
        assert sum(map(len, texts)) > 300_000, name
        assert all(texts.isdisjoint(splits[other]) for other in splits if other != name)


def test_demo_reads_calibration_or_heldout_text() -> None:
    calibration, heldout = read_documents("demo"), read_documents("demo", heldout=True)
    assert calibration == read_documents("demo:calibration")
    assert heldout == read_documents("demo:heldout", heldout=False)
    assert set(calibration).isdisjoint(heldout)
    with pytest.raises(ValueError, match="'test'"):
        demo_documents("test")
    with pytest.raises(MoesaicError, match="no such text: demo:test"):
        read_documents("demo:test")


# --- token ids ---------------------------------------------------------------------------------


def test_documents_are_joined_by_blank_lines(tokenizer: PreTrainedTokenizerFast) -> None:
    """And the tokenizer's special token stands once, before the whole."""
    ids = encode(tokenizer, ["ab", "c d", "e"])
    assert ids.dtype == torch.long
    assert tokenizer.convert_ids_to_tokens(ids.tolist()) == ["<s>", *"ab\n\nc d\n\ne"]


@given(text=st.text(alphabet="ab \n", min_size=1, max_size=60), piece=st.integers(1, 20))
def test_pieces_are_the_text_and_begin_with_line_ends(text: str, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "_PIECE", piece)
        pieces = list(text_module._pieces(text))
    assert "".join(pieces) == text
    for one, following in pairwise(pieces):
        assert 0 < len(one) <= piece
        assert following[0] == "\n" or "\n" not in one[1:]


def test_a_long_text_goes_through_the_tokenizer_in_pieces(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The special token stands once."""
    whole = encode(tokenizer, ["ab", "c d", "e"])
    monkeypatch.setattr(text_module, "_PIECE", 3)
    assert torch.equal(encode(tokenizer, ["ab", "c d", "e"]), whole)


def test_of_c4_a_part_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(hub_id: str, configuration: Any, data_files: Any, split: str) -> Any:
        asked.append(split)
        return {"text": ["a text"]}

    monkeypatch.setattr(datasets, "load_dataset", load)
    for source in ("c4", "wikitext2"):
        for heldout in (False, True):
            read_documents(source, heldout)
    assert asked == ["train[:16384]", "validation[:1100]", "train", "test"]


def test_a_mark_before_the_text_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("ab", "utf-8-sig")
    (tmp_path / "x.jsonl").write_text('{"text": "ab"}', "utf-8-sig")
    for name in ("x.txt", "x.jsonl"):
        assert read_documents(tmp_path / name) == ["ab"]


def test_ids_from_a_file_a_list_and_a_tensor_are_the_same(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "ab"}\n{"text": "c"}')
    expected = encode(tokenizer, ["ab", "c"])
    for source in (tmp_path / "x.jsonl", str(tmp_path / "x.jsonl"), ["ab", "c"], expected.int()):
        ids = to_ids(source, tokenizer)
        assert ids.dtype == torch.long
        assert torch.equal(ids, expected)


def test_ids_from_a_dataset(tokenizer: PreTrainedTokenizerFast) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["ab", "c"]})
    assert torch.equal(to_ids(rows, tokenizer), encode(tokenizer, ["ab", "c"]))
    with pytest.raises(MoesaicError, match=r"no field 'text'; it has \['body'\]"):
        to_ids(rows.rename_column("text", "body"), tokenizer)


@pytest.mark.parametrize("source", [[], [""], [" \n"]])
def test_empty_text_is_refused(source: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(MoesaicError, match="empty"):
        to_ids(source, tokenizer)


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(MoesaicError, match="needs a tokenizer"):
        to_ids(["ab"], None)
    assert to_ids(torch.arange(3), None).tolist() == [0, 1, 2]


# --- what is no text ---------------------------------------------------------------------------


def test_half_a_character_becomes_a_question_mark(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Lines of JSON that were cut within an emoji; tokenizers refuse such text."""
    path = tmp_path / "cut.jsonl"
    path.write_text('{"text": "ab\\ud83d"}\n{"text": "whole \\ud83d\\ude00"}\n')
    assert read_documents(path) == ["ab?", "whole 😀"]
    assert to_ids(["ab\ud83d"], tokenizer).tolist() == [0, 3, 4, 0]


@pytest.mark.parametrize("value", [{"a": 1}, ["a"], 7])
def test_a_field_that_holds_no_text_is_refused(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": value}))
    with pytest.raises(MoesaicError, match=f"has a {type(value).__name__} where text should be"):
        read_documents(path)


def test_a_zip_has_no_fields(tmp_path: Path) -> None:
    write_zip(tmp_path / "x.zip")
    with pytest.raises(MoesaicError, match="has no fields; leave out :body"):
        read_documents(f"{tmp_path}/x.zip:body")
