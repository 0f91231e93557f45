"""What the rows of a comparison are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from moesaic.errors import MoesaicError
from moesaic.methods.base import Method


def labels_of(methods: Sequence[Method]) -> list[str]:
    """What each is called. Raises MoesaicError where two are called the same."""
    labels: list[str] = []
    for method in methods:
        label = label_of(method)
        if label in labels:
            raise MoesaicError(
                f"method {label!r} is there twice; give each once, or other settings"
            )
        labels.append(label)
    return labels


def label_of(method: Method) -> str:
    """Its name and settings, as "teal where=ffn"; those at their defaults go unsaid."""
    words = [method.name]
    for field in fields(method):
        value = getattr(method, field.name)
        if value != _default(field):
            words.append(f"{field.name}={_word(value)}")
    return " ".join(words)


def _default(field: Any) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def _word(value: Any) -> str:
    """As `--set` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
