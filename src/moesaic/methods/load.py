"""A method by its name, from a Python file of the user's, or from a YAML file."""

from __future__ import annotations

import hashlib
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

from moesaic.errors import MoesaicError, reason_of, unknown
from moesaic.methods.base import Method
from moesaic.methods.contents import METHODS, Description

_YAML = "a right file has lines such as 'method: flap' and 'widths: equal'"


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
        all_settings = method.settings | given
        return _with_settings(type(method), all_settings, method.name)
    name = str(method)
    path = Path(name)
    if name in METHODS:
        method_class = _class_of(name)
        return _with_settings(method_class, given, name)
    if path.suffix == ".py":
        method_class = _class_in_file(path)
        return _with_settings(method_class, given, path.name)
    if path.suffix in (".yaml", ".yml"):
        name, from_file = _read_yaml(path)
        return load_method(name, from_file | given)
    known = [*METHODS, "FILE.py", "FILE.yaml"]
    raise unknown("method", name, known)


def _class_of(name: str) -> type[Method]:
    """The class of one of our methods. Imports its module."""
    where = METHODS[name].where
    module_name, _, class_name = where.partition(":")
    module = importlib.import_module(module_name)
    method_class: type[Method] = getattr(module, class_name)
    return method_class


def _with_settings(
    method_class: type[Method], settings: Mapping[str, object], name: str
) -> Method:
    known = [row.name for row in fields(method_class)]
    for key in settings:
        if key not in known:
            what = f"setting of method {name}"
            raise unknown(what, str(key), known or ["none"])
    values: Any = settings
    return method_class(**values)


def _class_in_file(path: Path) -> type[Method]:
    """The one method that a user's file defines; those it imports do not count."""
    if not path.is_file():
        raise _no_such_file(path)
    module = _run_file(path)
    classes = []
    for value in vars(module).values():
        if not inspect.isclass(value) or not issubclass(value, Method):
            continue
        if value.__module__ == module.__name__:
            classes.append(value)
    if len(classes) != 1:
        raise MoesaicError(
            f"{path} defines {len(classes)} classes that derive from Method; a method "
            "file defines one (docs/add_a_method.md)"
        )
    method_class = classes[0]
    _check_class(path, method_class)
    content = hashlib.sha256(path.read_bytes())
    method_class.file_digest = content.hexdigest()[:16]
    return method_class


def _check_class(path: Path, method_class: type[Method]) -> None:
    """Raises MoesaicError, before anything is converted, for a step that lacks."""
    name = method_class.__name__
    description = getattr(method_class, "description", None)
    if not isinstance(description, Description):
        raise MoesaicError(
            f"{path}: {name} has no `description`: its name, one sentence and where it "
            "runs (docs/add_a_method.md)"
        )
    missing: list[str] = sorted(
        getattr(method_class, "__abstractmethods__", ())
    )
    if missing:
        steps = ", ".join(missing)
        raise MoesaicError(
            f"{path}: {name} lacks the step {steps}; define it (docs/add_a_method.md)"
        )
    for row in fields(method_class):
        if row.default is MISSING and row.default_factory is MISSING:
            raise MoesaicError(
                f"{path}: {name} has a setting {row.name} without a default; give it one"
            )


def _run_file(path: Path) -> ModuleType:
    module_name = f"moesaic_method_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise MoesaicError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up annotations
    try:
        spec.loader.exec_module(module)
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever a file of the user's does
        del sys.modules[spec.name]
        raise MoesaicError(
            f"{path} cannot be run: {reason_of(error)}"
        ) from error
    return module


def _no_such_file(path: Path) -> MoesaicError:
    return MoesaicError(f"no such file: {path}; give a method's name or a file")


def _read_yaml(path: Path) -> tuple[str, dict[str, object]]:
    try:
        text = path.read_text("utf-8")
        values = yaml.safe_load(text)
    except FileNotFoundError as error:
        raise _no_such_file(path) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        words = str(error).split()
        reason = " ".join(words)
        raise MoesaicError(f"method {path}: {reason}; {_YAML}") from error
    name = None
    if isinstance(values, dict):
        name = values.pop("method", None)
    if not isinstance(name, str):
        raise MoesaicError(f"method {path}: it names no method; {_YAML}")
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return name, values
