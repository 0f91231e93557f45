"""A method by its name, from a Python file of the user's, or from a YAML file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from moesaic.errors import MoesaicError, unknown
from moesaic.methods.base import Method
from moesaic.methods.contents import METHODS, Description


def load_method(
    method: str | Path | Method, settings: Mapping[str, object] | None = None
) -> Method:
    """A method with its settings.

    `method` is a name (`moesaic methods`), NAME.py with one class that derives from
    Method, NAME.yaml with `method: NAME` and settings, or a Method. Raises MoesaicError
    for an unknown name, a file that is none of these, a class that lacks a step, and a
    setting that the method does not have or whose value it does not take. A Python
    file is run: give only one that you trust.
    """
    given = dict(settings or {})
    if isinstance(method, Method):
        return _with_settings(
            type(method), method.settings | given, method.name
        )
    path = Path(method)
    if str(method) in METHODS:
        return _with_settings(_class_of(str(method)), given, str(method))
    if path.suffix == ".py":
        return _with_settings(_class_in_file(path), given, path.name)
    if path.suffix in (".yaml", ".yml"):
        name, from_file = _read_yaml(path)
        return load_method(name, from_file | given)
    raise unknown("method", str(method), [*METHODS, "FILE.py", "FILE.yaml"])


def _class_of(name: str) -> type[Method]:
    module, _, class_name = METHODS[name].where.partition(":")
    found: type[Method] = getattr(importlib.import_module(module), class_name)
    return found


def _with_settings(
    method_class: type[Method], settings: Mapping[str, object], name: str
) -> Method:
    known = [one.name for one in fields(method_class)]
    for key in settings:
        if key not in known:
            raise unknown(
                f"setting of method {name}", str(key), known or ["none"]
            )
    values: Any = settings
    return method_class(**values)


def _class_in_file(path: Path) -> type[Method]:
    module = _run_file(path)
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, Method)
        and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise MoesaicError(
            f"{path} defines {len(classes)} classes that derive from Method; a method "
            "file defines one (docs/add_a_method.md)"
        )
    _check_class(path, classes[0])
    return classes[0]


def _check_class(path: Path, method_class: type[Method]) -> None:
    """Raises MoesaicError, before anything is converted, for a step that lacks."""
    name = method_class.__name__
    if not isinstance(getattr(method_class, "description", None), Description):
        raise MoesaicError(
            f"{path}: {name} has no `description`: its name, one sentence and where it "
            "runs (docs/add_a_method.md)"
        )
    missing: list[str] = sorted(
        getattr(method_class, "__abstractmethods__", ())
    )
    if missing:
        raise MoesaicError(
            f"{path}: {name} lacks the step {', '.join(missing)}; define it "
            "(docs/add_a_method.md)"
        )
    for one in fields(method_class):
        if one.default is MISSING and one.default_factory is MISSING:
            raise MoesaicError(
                f"{path}: {name} has a setting {one.name} without a default; give it one"
            )


def _run_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"moesaic_method_{path.stem}", path
    )
    if spec is None or spec.loader is None:
        raise MoesaicError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up annotations
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file raises
        del sys.modules[spec.name]
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        kind = type(error).__name__
        raise MoesaicError(f"{path} cannot be run: {kind}: {reason}") from error
    return module


def _read_yaml(path: Path) -> tuple[str, dict[str, object]]:
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise MoesaicError(f"method {path}: {reason}") from error
    if not isinstance(values, dict) or not isinstance(
        values.get("method"), str
    ):
        raise MoesaicError(
            f"method {path}: expected a mapping such as 'method: moesaic', and settings"
        )
    name = values.pop("method")
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return name, values
