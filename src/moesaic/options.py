"""Options that several commands share, and where they print."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

err = Console(stderr=True, soft_wrap=True)

Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the model brings along.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Grain = Annotated[
    str,
    typer.Option(
        help="coarse, medium or fine: at most 16, 32, 128 experts; slower, more accurate."
    ),
]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, float16.")]
