"""`moesaic methods`: the methods there are, and the settings of one."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

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
    """Every method in three lines at most, those that run alike together."""
    groups: dict[str | None, list[Description]] = {}
    for description in METHODS.values():
        groups.setdefault(description.runs, []).append(description)
    for runs, descriptions in groups.items():
        title = f"Runs in {runs}:"
        if runs is None:
            title = "References to compare with; no model can hold them:"
        out.print(title, style="bold", highlight=False)
        _print("")
        for description in descriptions:
            _print_description(description)
        _print("")
    _print("The settings of one: moesaic methods NAME")
    _print("All of them on your model: moesaic compare MODEL --methods all")


def _print_description(description: Description) -> None:
    """Name, sentence and paper."""
    line = Text(description.name, style="bold")
    line.append(f"  {description.about}", style="not bold")
    out.print(line, highlight=False)
    if description.paper is not None:
        _print(_INDENT + description.paper)
    if description.url is not None:
        _print(_INDENT + description.url)


def _print_runs(description: Description) -> None:
    if description.runs is None:
        _print(f"{_INDENT}a reference to compare with: no model can hold it")
    else:
        _print(f"{_INDENT}runs in: {description.runs}")


def _print_settings(name: str) -> None:
    is_file = name.endswith((".py", ".yaml", ".yml"))
    if name not in METHODS and not is_file:
        raise unknown("method", name, [*METHODS, "FILE.py", "FILE.yaml"])
    if name in METHODS:
        _print_description(METHODS[name])
        _print_runs(METHODS[name])
    quieten()
    from moesaic.methods.load import load_method

    method: Any = load_method(name, None)
    if is_file:
        _print_description(method.description)
        _print_runs(method.description)
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
    out.print(line, highlight=False)
