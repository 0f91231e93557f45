"""`moesaic flops`: the work per token, from a configuration alone."""

from __future__ import annotations

from typing import Annotated

import typer

from moesaic.cli.options import Trust
from moesaic.cli.quiet import quieten
from moesaic.cli.tables import macs_table
from moesaic.errors import MoesaicError


def flops_command(
    model: Annotated[
        str,
        typer.Argument(help="A model: hub id, folder, config.json, or demo."),
    ],
    layout: Annotated[
        str,
        typer.Option(
            help="SxAyEz: x shared experts, y routed ones for each token, z in all."
        ),
    ] = "S3A3E8",
    tokens: Annotated[
        int,
        typer.Option(min=1, help="Count for a text of so many tokens."),
    ] = 128,
    recipe: Annotated[
        str,
        typer.Option(
            "--method",
            "--recipe",
            help="The method that would convert the model (see moesaic methods).",
        ),
    ] = "cmoe",
    trust_remote_code: Trust = False,
) -> None:
    """Count multiply-accumulates before and after a conversion. Needs no weights."""
    quieten()
    from moesaic.conversion.plan import make_plan
    from moesaic.evaluate.work import count_macs, meta_model
    from moesaic.families.load import load_config

    config = load_config(model, trust_remote_code)
    if config.model_type == "moesaic":
        converted = count_macs(meta_model(config, trust_remote_code), tokens)
        title = f"{model}, {config.moesaic['layout']}"
        macs_table(title, None, converted, tokens)
        return
    plan = make_plan(
        config,
        model,
        recipe,
        layout,
        trust_remote_code=trust_remote_code,
    )
    if plan.recipe.router == "oracle":
        raise MoesaicError(
            f"method {recipe!r} is a reference that computes every neuron; "
            "choose another --method"
        )
    dense = count_macs(meta_model(config, trust_remote_code), tokens)
    converted = count_macs(meta_model(plan.config), tokens)
    macs_table(f"{model}, {layout}: {plan.shape}", dense, converted, tokens)
