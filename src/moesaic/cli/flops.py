"""`moesaic flops`: the work per token, from a configuration alone."""

from __future__ import annotations

from typing import Annotated

import typer

from moesaic.cli.options import Trust
from moesaic.cli.quiet import quieten
from moesaic.cli.tables import bytes_lines, macs_table
from moesaic.errors import MoesaicError

METHOD = "moesaic"


def flops_command(
    model: Annotated[
        str,
        typer.Argument(
            help="A model: hub id, folder, config.json, GGUF file, or demo."
        ),
    ],
    layout: Annotated[
        str | None,
        typer.Option(
            help="SxAyEz: x shared experts, y routed ones for each token, z in all."
        ),
    ] = None,
    sparsity: Annotated[
        float | None,
        typer.Option(
            help="Share of the FFN neurons that a token skips. "
            "[default: 0.25 without --layout]"
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(min=1, help="Count for a text of so many tokens."),
    ] = 128,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--method",
            "--recipe",
            help="The method that would convert the model (see moesaic methods). "
            f"[default: {METHOD}]",
        ),
    ] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Count a model's work before and after a conversion. Needs no weights.

    Multiply-accumulates of a text, and bytes of weights read for one token.
    """
    quieten()
    from moesaic.conversion.options import make_budget
    from moesaic.conversion.plan import make_plan
    from moesaic.evaluate.weight_bytes import count_bytes
    from moesaic.evaluate.work import count_macs, is_converted, meta_model
    from moesaic.families.load import load_config
    from moesaic.methods.load import load_method

    config = load_config(model, trust_remote_code)
    if is_converted(config):
        given = {
            "--layout": layout,
            "--sparsity": sparsity,
            "--method": recipe,
        }
        for option, value in given.items():
            if value is not None:
                raise MoesaicError(
                    f"{model} is converted already, as {config.moesaic.layout}: leave "
                    f"{option} out, or count its dense model"
                )
        skeleton = meta_model(config)
        converted = count_macs(skeleton, tokens)
        macs_table(f"{model}, {config.moesaic.layout}", None, converted, tokens)
        bytes_lines(None, count_bytes(skeleton))
        return
    method = load_method(recipe or METHOD)
    if not method.saves:
        raise MoesaicError(
            f"method {method.name!r} is a reference that computes every neuron; "
            "choose another --method"
        )
    budget = make_budget(layout, sparsity)
    plan = make_plan(config, model, method, budget)
    dense = count_macs(meta_model(config), tokens)
    converted = count_macs(meta_model(plan.config), tokens)
    title = f"{model}, {plan.label}: {plan.words}"
    macs_table(title, dense, converted, tokens)
    bytes_lines(plan.dense_bytes, plan.bytes)
