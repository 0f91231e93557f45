"""A tokenizer as GGUF knows it: byte-level BPE by its regular expression, or SentencePiece BPE."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import gguf

from moesaic.errors import MoesaicError

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How text is cut before merging, and what llama.cpp calls it (its source, llama-vocab.cpp).
PRE_TOKENIZERS = {
    rf"{_WORDS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+": "gpt-2",
    rf"(?i:{_WORDS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}": "llama-bpe",
    rf"(?i:{_WORDS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}": "qwen2",
}
_GPT2 = next(iter(PRE_TOKENIZERS))


@dataclass(frozen=True)
class Vocabulary:
    """What llama.cpp needs to cut text as the tokenizer does."""

    model: str  # gpt2 (byte-level BPE) or llama (SentencePiece BPE)
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    merges: list[str] | None
    space_prefix: bool


def read_vocabulary(tokenizer: Any, size: int) -> Vocabulary:
    """The vocabulary, filled up to the embedding's `size` rows.

    Raises MoesaicError for a tokenizer that llama.cpp cannot follow, with the reason.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise MoesaicError(
            "its tokenizer is not of the tokenizers library (tokenizer.json)"
        )
    spec = json.loads(backend.to_str())
    model = spec["model"]
    if model["type"] != "BPE":
        raise MoesaicError(
            f"its tokenizer is {model['type']}, GGUF is written for BPE only"
        )
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    if any(merge.count(" ") != 1 for merge in merges):
        raise MoesaicError(
            "its tokenizer merges tokens with spaces, which GGUF cannot hold"
        )
    by_id = {index: token for token, index in model["vocab"].items()}
    added = {token["id"]: token for token in spec["added_tokens"]}
    sentencepiece = bool(model.get("byte_fallback"))
    tokens, types = [], []
    for index in range(size):
        kind = gguf.TokenType.NORMAL
        token = by_id.get(index)
        if index in added:
            token = added[index]["content"]
            special = added[index]["special"]
            kind = (
                gguf.TokenType.CONTROL
                if special
                else gguf.TokenType.USER_DEFINED
            )
        if token is None:
            token, kind = f"[PAD{index}]", gguf.TokenType.UNUSED
        elif sentencepiece and token == model.get("unk_token"):
            kind = gguf.TokenType.UNKNOWN
        elif sentencepiece and len(token) == 6 and token.startswith("<0x"):
            kind = gguf.TokenType.BYTE
        tokens.append(token)
        types.append(int(kind))
    if sentencepiece:
        _check_sentencepiece(spec)
        return Vocabulary(
            "llama",
            "default",
            tokens,
            types,
            _scores(tokens, merges),
            None,
            _space_prefix(spec),
        )
    return Vocabulary("gpt2", _pre(spec), tokens, types, None, merges, False)


def _pre(spec: dict[str, Any]) -> str:
    """llama.cpp's name for how a byte-level tokenizer cuts text before it merges."""
    if (spec["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        raise MoesaicError(
            f"its tokenizer changes text by {spec['normalizer']['type']} first"
        )
    parts = _parts(spec["pre_tokenizer"], "pretokenizers")
    kinds = [part["type"] for part in parts]
    pattern = None
    if kinds[-1:] == ["ByteLevel"] and not parts[-1]["add_prefix_space"]:
        if kinds == ["ByteLevel"] and parts[0]["use_regex"]:
            pattern = _GPT2
        elif kinds == ["Split", "ByteLevel"] and not parts[1]["use_regex"]:
            usual = (
                parts[0]["behavior"] == "Isolated" and not parts[0]["invert"]
            )
            pattern = parts[0]["pattern"].get("Regex") if usual else None
    name = PRE_TOKENIZERS.get(pattern or "")
    if name is None:
        raise MoesaicError(
            f"its tokenizer cuts text by {' and '.join(kinds) or 'nothing'} in a way that "
            f"llama.cpp has no name for here ({', '.join(PRE_TOKENIZERS.values())} are known)"
        )
    if bool(spec["model"].get("ignore_merges")) != (name == "llama-bpe"):
        raise MoesaicError(
            f"its tokenizer merges otherwise than llama.cpp's {name}"
        )
    return name


def _check_sentencepiece(spec: dict[str, Any]) -> None:
    """Spaces become U+2581, perhaps with one in front; nothing else is known to llama.cpp."""
    for step in _parts(spec["normalizer"], "normalizers"):
        spaces = step["type"] == "Replace" and step["pattern"] == {
            "String": " "
        }
        if not (step["type"] == "Prepend" or spaces):
            raise MoesaicError(
                f"its tokenizer changes text by {step['type']} first"
            )
    for step in _parts(spec["pre_tokenizer"], "pretokenizers"):
        if step["type"] != "Metaspace":
            raise MoesaicError(
                f"its tokenizer cuts text by {step['type']} before it merges"
            )


def _parts(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer, which may be none, one or a sequence."""
    if step is None:
        return []
    found: list[dict[str, Any]] = (
        step[name] if step["type"] == "Sequence" else [step]
    )
    return found


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """llama.cpp merges the pair whose result scores highest: minus the rank of its first merge."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [
        -float(ranks[token]) if token in ranks else -float(len(ranks))
        for token in tokens
    ]


def _space_prefix(spec: dict[str, Any]) -> bool:
    found = json.dumps(
        [spec["normalizer"], spec["pre_tokenizer"]], ensure_ascii=False
    )
    return (
        '"Prepend"' in found
        or '"prepend_scheme": "always"' in found
        or ('"prepend_scheme": "first"' in found)
    )
