"""A method for the tests whose result is an ordinary model: the last blocks are taken out."""

from dataclasses import dataclass

from moesaic.errors import MoesaicError
from moesaic.methods.base import ModelMethod
from moesaic.methods.contents import Description
from moesaic.parts.blocks import block_changes, keep_blocks


@dataclass(frozen=True)
class LastBlocks(ModelMethod):
    """Keeps the first blocks, as many as the budget allows."""

    description = Description(
        "last-blocks", "", "Takes the last blocks out.", "transformers, vLLM, llama.cpp"
    )

    def changes(self, shape, sparsity):
        depth = shape.config["num_hidden_layers"]
        kept = round((1 - sparsity) * depth)
        if not kept:
            raise MoesaicError(
                f"sparsity {sparsity} leaves none of {depth} blocks; give less than "
                f"{1 - 0.5 / depth:.2f}"
            )
        return block_changes(shape.config, range(kept))

    def convert(self, model, calibration, plan, run):
        depth = plan.moe.changes["num_hidden_layers"]
        kept = run.remembered("kept", lambda: list(range(depth)))
        keep_blocks(model, kept)
        return []
