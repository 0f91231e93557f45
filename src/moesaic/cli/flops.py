"""`moesaic flops`: the work per token, from a configuration alone."""

from __future__ import annotations

from typing import Annotated

import typer

from moesaic.cli.options import Trust
from moesaic.cli.tables import macs_table
from moesaic.conversion.plan import make_plan
from moesaic.errors import MoesaicError
from moesaic.evaluate.work import count_macs, meta_model
from moesaic.families.load import load_config


def flops_command(
    model: Annotated[str, typer.Argument(help="Hub id, folder, config.json, or demo.")],
    layout: Annotated[str, typer.Option(help="SxAyEz.")] = "S3A3E8",
    tokens: Annotated[int, typer.Option(min=1, help="Length of the context.")] = 128,
    recipe: Annotated[str, typer.Option()] = "cmoe",
    trust_remote_code: Trust = False,
) -> None:
    """Count multiply-accumulates before and after, from the configuration alone."""
    config = load_config(model, trust_remote_code)
    if config.model_type == "moesaic":
        ours = count_macs(meta_model(config, trust_remote_code), tokens)
        macs_table(f"{model}, {config.moesaic['layout']}", None, ours, tokens)
        return
    todo = make_plan(config, model, recipe, layout, trust_remote_code=trust_remote_code)
    if todo.recipe.router == "oracle":
        raise MoesaicError(
            f"recipe {recipe!r} is a reference that computes every neuron"
        )
    dense = count_macs(meta_model(config, trust_remote_code), tokens)
    ours = count_macs(meta_model(todo.config), tokens)
    macs_table(f"{model}, {layout}: {todo.shape}", dense, ours, tokens)
