"""SliceGPT: the residual stream rotated to its principal axes, the least of them cut.

Ashkboos et al., SliceGPT: Compress Large Language Models by Deleting Rows and Columns,
arXiv:2401.15024. Every attention and every FFN reads the stream in axes of its own, and
what passes by is turned from one to the next by a matrix on the shortcut. With
axes=model one rotation serves the whole model instead: nothing stands on a shortcut, and
the result is a narrower model of its family.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from moesaic.calibration.checks import check_on
from moesaic.errors import MoesaicError
from moesaic.methods.base import (
    Budget,
    ModelMethod,
    ModelShape,
    refuse_mixture,
    setting,
)
from moesaic.methods.contents import METHODS
from moesaic.modeling import MoEConfig
from moesaic.parts.rotation import rotate, rotate_blocks, stream_axes

# Families with RMSNorms before attention and FFN, and heads of a size of their own.
FAMILIES = ("llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
AXES = ("block", "model")
ROUND = 8  # axes are kept in groups of so many, as in the paper


@dataclass(frozen=True)
class SliceGPT(ModelMethod):
    """Fewer axes of the residual stream, in every matrix, embeddings and head.

    The sparsity is the share of axes, so the work that goes is that share of
    everything, less that of the shortcuts: 2 K^2 a layer. Two forward passes over the
    calibration tokens, and 4 D^3 a layer; with one rotation one pass, and 2 D^3.
    """

    description = METHODS["slicegpt"]

    axes: str = setting(
        "block",
        "Axes of every block's own, as in the paper, or the same for the whole model, "
        "which stays a stock model.",
        choices=AXES,
    )

    def plans(self, shape: ModelShape, budget: Budget) -> list[MoEConfig]:
        plans = super().plans(shape, budget)
        if self.axes == "model":
            return plans
        turned = []
        for moe in plans:
            assert moe.changes is not None
            width = moe.changes["hidden_size"]
            block = replace(moe.block, hidden_size=width)
            turned.append(replace(moe, block=block, shortcuts=True))
        return turned

    def changes(self, shape: ModelShape, sparsity: float) -> dict[str, Any]:
        family = shape.config["model_type"]
        if family not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise MoesaicError(
                f"{shape.name} ({family}) cannot be rotated: method {self.name!r} wants "
                f"RMSNorms before each block, as in {known}; take another method"
            )
        refuse_mixture(self, shape, "rotates dense models")
        width = shape.ffn.hidden_size
        heads = shape.config["num_attention_heads"]
        # transformers wants a width that is a multiple of the heads.
        step = math.lcm(ROUND, heads)
        kept = round((1 - sparsity) * width / step) * step
        if sparsity == 0:
            kept = width
        if not kept:
            most = 1 - step / width
            raise MoesaicError(
                f"sparsity {sparsity} leaves none of {width} axes; take at most "
                f"{most:.2f}"
            )
        if kept >= width and sparsity:
            raise MoesaicError(
                f"sparsity {sparsity} cuts off none of {width} axes, which stay in groups "
                f"of {step}; take at least {step / width:.2f}"
            )
        head_size = shape.config.get("head_dim") or width // heads
        return {
            "hidden_size": kept,
            "head_dim": head_size,
            "tie_word_embeddings": False,
        }

    def convert(
        self, model: Any, calibration: Any, plan: Any, run: Any
    ) -> list[Any]:
        """Finds axes on all calibration tokens, and keeps the largest."""
        check_on(model, run.stream.device, f"method {self.name!r} turns")
        changes = plan.moe.changes
        kept = changes["hidden_size"]
        if self.axes == "block":
            rotate_blocks(model, run.stream, kept, run.progress)
        else:
            axes_DD = stream_axes(model, calibration.windows_NL)
            rotate(model, axes_DD[:, :kept])
        model.config.get_text_config().head_dim = changes["head_dim"]
        return []
