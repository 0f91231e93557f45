"""The call that made a conversion, for its card, where no command was typed."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from moesaic.calibration.text import public_text
from moesaic.conversion.options import ConvertOptions
from moesaic.methods.base import Method


def python_call(options: ConvertOptions, model: str, **more: object) -> str:
    """One line of Python, with what was said and is no default.

    `model` is its public name. Texts that have no name are three dots, and so are models
    and tokenizers in memory.
    """
    budget = options.budget
    scope = options.scope
    named = isinstance(options.calibration, str)
    said: dict[str, Any] = {
        "settings": changed_settings(options.method),
        "layout": None if budget.layout is None else str(budget.layout),
        "sparsity": budget.sparsity,
        "grain": None if budget.grain == "medium" else budget.grain,
        "target_ratio": options.target_ratio,
        "calibration": public_text(options.calibration) if named else ...,
        "samples": options.samples,
        "sequence_length": options.sequence_length,
        "experts": scope.experts,
        "min_tokens": scope.min_tokens,
        "dense_layers": scope.dense_layers,
        "seed": options.seed or None,
        "dtype": None if options.dtype == "auto" else options.dtype,
    }
    arguments = [repr(model), repr(options.method.name)]
    for name, value in (said | more).items():
        if value is ...:
            arguments.append(f"{name}=...")
        elif value not in (None, (), {}):
            arguments.append(f"{name}={value!r}")
    return f"moesaic.convert({', '.join(arguments)})"


def changed_settings(method: Method) -> dict[str, Any]:
    """The settings that are no defaults, by name."""
    changed = {}
    for field in fields(method):
        value = getattr(method, field.name)
        if value != field.default:
            changed[field.name] = value
    return changed
