"""The command line: every command, and one line with exit code 2 for bad input.

A command imports torch when it runs, not before. So help and errors come at once.
"""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer
from typer.exceptions import TyperException
from typer.main import get_command

from moesaic import launch
from moesaic._version import __version__
from moesaic.cli.bench import bench_command
from moesaic.cli.compare import compare_command
from moesaic.cli.convert import convert_command
from moesaic.cli.demo import demo_command
from moesaic.cli.evaluate import evaluate_command
from moesaic.cli.export import export_command
from moesaic.cli.finetune import finetune_command
from moesaic.cli.flops import flops_command
from moesaic.cli.inspect import inspect_command
from moesaic.cli.methods import methods_command
from moesaic.cli.options import err
from moesaic.cli.reproduce import reproduce_command
from moesaic.cli.tables import out
from moesaic.errors import LostError, MoesaicError

INTERRUPTED = 130
# Seconds in which a launcher has ended all processes that one of them left.
TO_BE_ENDED = 20

app = typer.Typer(
    help="Turns a dense language model into a Mixture-of-Experts, without training.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("convert")(convert_command)
app.command("eval")(evaluate_command)
app.command("inspect")(inspect_command)
app.command("compare")(compare_command)
app.command("bench")(bench_command)
app.command("finetune")(finetune_command)
app.command("export")(export_command)
app.command("flops")(flops_command)
app.command("reproduce")(reproduce_command)
app.command("methods")(methods_command)
app.command("recipes", hidden=True)(methods_command)  # the old name
app.command("demo")(demo_command)


def _version_and_exit(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_version_and_exit,
            is_eager=True,
            help="Print the version and stop.",
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: bad input is one line on stderr and exit code 2."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    out.quiet = not launch.is_first()
    try:
        code = app(standalone_mode=False)
    except (MoesaicError, OSError) as error:
        code = _refuse(" ".join(str(error).split()))
    except TyperException as error:
        code = _refuse(f"{error.format_message()} (see {_help_of(error)})")
    except LostError as error:
        code = _refuse(f"{error}{_how_to_go_on()}", first_speaks=False)
    except RuntimeError as error:
        if not _gpu_is_full(error):
            raise
        code = _refuse(f"out of memory on the GPU; try {_less_memory()}")
    if code == INTERRUPTED:
        err.print(f"interrupted{_how_to_go_on()}")
    sys.exit(code)


def _refuse(message: str, first_speaks: bool = True) -> int:
    """Says why, on one line.

    Of an error that several processes have the first one speaks. The launcher then ends
    the others; who is not ended has an error of its own.
    """
    if not (launch.is_first() and first_speaks):
        time.sleep(TO_BE_ENDED)
    err.print(f"error: {message}", highlight=False)
    return 2


def _help_of(error: TyperException) -> str:
    """What to type for the help of the command that was misused."""
    context = getattr(error, "ctx", None)
    if context is not None and context.parent is not None:
        return f"moesaic {context.info_name} --help"
    # An option whose value is missing is found before there is a context.
    first = sys.argv[1]
    if first in get_command(app).commands:  # type: ignore[attr-defined]
        return f"moesaic {first} --help"
    return "moesaic --help"


def _gpu_is_full(error: RuntimeError) -> bool:
    torch = sys.modules.get("torch")  # no command has filled a GPU without it
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _less_memory() -> str:
    if sys.argv[1] == "finetune":
        return "--micro-batch 1, --gradient-checkpointing or a smaller --sequence-length"
    if "--tasks" in sys.argv:
        return "--device cpu or a smaller --batch-size"
    return "--device cpu or shorter windows (--sequence-length)"


def _how_to_go_on() -> str:
    if sys.argv[1] in {"convert", "finetune", "compare"}:
        return "; what had begun goes on with --resume"
    if sys.argv[1] == "reproduce":
        return "; the same command goes on"
    return ""
