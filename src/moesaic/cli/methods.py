"""`moesaic methods`: the methods there are, and the settings of one."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from moesaic.cli.quiet import quieten
from moesaic.cli.tables import folded, out
from moesaic.errors import unknown
from moesaic.methods.contents import METHODS, Description

_INDENT = "    "


def methods_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A method, FILE.py or FILE.yaml: show its settings."
        ),
    ] = None,
) -> None:
    """List the methods of conversion, or the settings of one."""
    if name is None:
        _print_all()
    else:
        _print_settings(name)


def _print_all() -> None:
    for description in METHODS.values():
        _print_description(description)
        _print("")
    _print("For the settings of one: moesaic methods NAME")


def _print_description(description: Description) -> None:
    out.print(description.name, style="bold", markup=False, highlight=False)
    _print(_INDENT + description.about)
    if description.runs is None:
        _print(f"{_INDENT}a reference to compare with: no model can hold it")
    else:
        _print(f"{_INDENT}runs in: {description.runs}")
    if description.paper is not None:
        _print(f"{_INDENT}paper: {description.paper}")
    if description.url is not None:
        _print(_INDENT + description.url)


def _print_settings(name: str) -> None:
    is_file = name.endswith((".py", ".yaml", ".yml"))
    if name not in METHODS and not is_file:
        raise unknown("method", name, [*METHODS, "FILE.py", "FILE.yaml"])
    if name in METHODS:
        _print_description(METHODS[name])
    quieten()
    from moesaic.methods.load import load_method

    method: Any = load_method(name, None)
    if is_file:
        _print_description(method.description)
    settings = [field for field in fields(method) if field.init]
    if not settings:
        _print("It has no settings.")
        return
    named = Column("setting", no_wrap=True)
    table = Table(named, "value", "meaning")
    for field in settings:
        value = str(getattr(method, field.name))
        meaning = field.metadata.get("help", "")
        table.add_row(*folded(field.name, value, meaning))
    out.print(table)
    _print("Change one: moesaic convert ... --set NAME=VALUE")


def _print(line: str) -> None:
    out.print(line, markup=False, highlight=False)
