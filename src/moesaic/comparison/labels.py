"""What the rows of a comparison are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from moesaic.errors import MoesaicError
from moesaic.methods.base import Method


def labels_of(methods: Sequence[Method]) -> list[str]:
    """A method's name; with its settings, where the name is there more than once.

    Raises MoesaicError where two have the same settings as well.
    """
    count = Counter(method.name for method in methods)
    labels = []
    for method in methods:
        label = method.name
        if count[method.name] > 1:
            label = _with_settings(method)
        if label in labels:
            raise MoesaicError(
                f"method {label!r} is there twice; give each once, or other settings"
            )
        labels.append(label)
    return labels


def _with_settings(method: Method) -> str:
    """As "teal where=ffn": settings that are at their defaults go without saying."""
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
