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
    merges = _merges(model)
    if any(merge.count(" ") != 1 for merge in merges):
        raise MoesaicError(
            "its tokenizer merges tokens with spaces, which GGUF cannot hold"
        )
    for token in spec["added_tokens"]:
        if token["lstrip"] or token["rstrip"]:
            raise MoesaicError(
                f"its token {token['content']!r} takes spaces beside it, which llama.cpp "
                "does not see"
            )
    tokens, types = _tokens(spec, size)
    if _is_sentencepiece(model):
        _check_sentencepiece(spec)
        return Vocabulary(
            model="llama",
            pre="default",
            tokens=tokens,
            types=types,
            scores=_scores(tokens, merges),
            merges=None,
            space_prefix=_space_prefix(spec),
        )
    return Vocabulary(
        model="gpt2",
        pre=_pre(spec),
        tokens=tokens,
        types=types,
        scores=None,
        merges=merges,
        space_prefix=False,
    )


def _is_sentencepiece(model: dict[str, Any]) -> bool:
    return bool(model.get("byte_fallback"))


def _merges(model: dict[str, Any]) -> list[str]:
    """Pairs of tokens with a space between them; newer files hold them as lists."""
    merges: list[str] = []
    for merge in model["merges"]:
        text = merge if isinstance(merge, str) else " ".join(merge)
        merges.append(text)
    return merges


def _tokens(spec: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Every row's token, and its type as GGUF numbers them."""
    model = spec["model"]
    sentencepiece = _is_sentencepiece(model)
    by_id = {index: token for token, index in model["vocab"].items()}
    added = {token["id"]: token for token in spec["added_tokens"]}
    tokens = []
    types = []
    for index in range(size):
        token = by_id.get(index)
        kind = gguf.TokenType.NORMAL
        if index in added:
            token = added[index]["content"]
            kind = gguf.TokenType.USER_DEFINED
            if added[index]["special"]:
                kind = gguf.TokenType.CONTROL
        if token is None:
            token = f"[PAD{index}]"
            kind = gguf.TokenType.UNUSED
        elif sentencepiece and token == model.get("unk_token"):
            kind = gguf.TokenType.UNKNOWN
        elif sentencepiece and _is_byte(token):
            kind = gguf.TokenType.BYTE
        tokens.append(token)
        types.append(int(kind))
    return tokens, types


def _is_byte(token: str) -> bool:
    """Whether a token stands for one byte, as <0x0A> does."""
    return len(token) == 6 and token.startswith("<0x")


def _pre(spec: dict[str, Any]) -> str:
    """llama.cpp's name for how a byte-level tokenizer cuts text before it merges."""
    normalizer = spec["normalizer"]
    if normalizer and normalizer["type"] != "NFC":
        raise MoesaicError(
            f"its tokenizer changes text by {normalizer['type']} first"
        )
    steps = _steps(spec["pre_tokenizer"], "pretokenizers")
    name = PRE_TOKENIZERS.get(_pattern(steps) or "")
    if name is None:
        kinds = " and ".join(step["type"] for step in steps)
        known = ", ".join(PRE_TOKENIZERS.values())
        raise MoesaicError(
            f"its tokenizer cuts text by {kinds or 'nothing'} in a way that "
            f"llama.cpp has no name for here ({known} are known)"
        )
    ignores_merges = bool(spec["model"].get("ignore_merges"))
    if ignores_merges != (name == "llama-bpe"):
        raise MoesaicError(
            f"its tokenizer merges otherwise than llama.cpp's {name}"
        )
    return name


def _pattern(steps: list[dict[str, Any]]) -> str | None:
    """The regular expression that text is cut by; None where there is not just one."""
    kinds = [step["type"] for step in steps]
    if kinds not in (["ByteLevel"], ["Split", "ByteLevel"]):
        return None
    byte_level = steps[-1]
    if byte_level["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return _GPT2 if byte_level["use_regex"] else None
    split = steps[0]
    if byte_level["use_regex"] or split["invert"]:
        return None
    if split["behavior"] != "Isolated":
        return None
    pattern: str | None = split["pattern"].get("Regex")
    return pattern


def _check_sentencepiece(spec: dict[str, Any]) -> None:
    """Spaces become U+2581, perhaps with one in front; nothing else is known to llama.cpp."""
    for step in _steps(spec["normalizer"], "normalizers"):
        kind = step["type"]
        one_space = {"String": " "}
        of_spaces = kind == "Replace" and step["pattern"] == one_space
        if kind != "Prepend" and not of_spaces:
            raise MoesaicError(f"its tokenizer changes text by {kind} first")
    for step in _steps(spec["pre_tokenizer"], "pretokenizers"):
        kind = step["type"]
        if kind != "Metaspace":
            raise MoesaicError(
                f"its tokenizer cuts text by {kind} before it merges"
            )


def _steps(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer, which may be none, one or a sequence."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    steps: list[dict[str, Any]] = step[name]
    return steps


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """llama.cpp merges the pair whose result scores highest: minus the rank of its first merge."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        token = merge.replace(" ", "")
        ranks.setdefault(token, rank)
    last = len(ranks)
    return [-float(ranks.get(token, last)) for token in tokens]


def _space_prefix(spec: dict[str, Any]) -> bool:
    """Whether a space is put in front of a text."""
    steps = [spec["normalizer"], spec["pre_tokenizer"]]
    text = json.dumps(steps, ensure_ascii=False)
    marks = (
        '"Prepend"',
        '"prepend_scheme": "always"',
        '"prepend_scheme": "first"',
    )
    return any(mark in text for mark in marks)
