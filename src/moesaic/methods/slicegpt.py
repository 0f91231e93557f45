"""SliceGPT: the residual stream rotated to its principal axes, the least of them cut.

Ashkboos et al., SliceGPT: Compress Large Language Models by Deleting Rows and Columns,
arXiv:2401.15024. The paper rotates every block by itself, with a matrix on each
shortcut from one block's axes to the next; here one rotation serves the whole model, so
that nothing stands on a shortcut and the result is a narrower model of its family
(docs/deviations.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moesaic.errors import MoesaicError
from moesaic.methods.base import ModelMethod, ModelShape
from moesaic.methods.contents import METHODS
from moesaic.parts.rotation import rotate, stream_axes

# Families with RMSNorms before attention and FFN, and heads of a size of their own.
FAMILIES = ("llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
ROUND = 8  # axes are kept in groups of so many, as in the paper


@dataclass(frozen=True)
class SliceGPT(ModelMethod):
    """Fewer axes of the residual stream, in every matrix, embeddings and head.

    The sparsity is the share of axes, so the work that goes is that share of
    everything. One forward pass over the calibration tokens, and D^3.
    """

    description = METHODS["slicegpt"]

    def changes(self, shape: ModelShape, sparsity: float) -> dict[str, Any]:
        family = shape.config["model_type"]
        if family not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise MoesaicError(
                f"{shape.name} ({family}) cannot be rotated: method {self.name!r} wants "
                f"RMSNorms before each block, as in {known}; take another method"
            )
        if shape.outer is not None:
            raise MoesaicError(
                f"{shape.name} is a mixture of experts, and method {self.name!r} "
                "rotates dense models; take another method"
            )
        width = shape.ffn.hidden_size
        kept = round((1 - sparsity) * width / ROUND) * ROUND
        if sparsity == 0:
            kept = width
        if not kept:
            most = 1 - ROUND / width
            raise MoesaicError(
                f"sparsity {sparsity} leaves none of {width} axes; take at most "
                f"{most:.2f}"
            )
        if kept >= width and sparsity:
            raise MoesaicError(
                f"sparsity {sparsity} cuts off none of {width} axes, which stay in groups "
                f"of {ROUND}; take at least {ROUND / width:.2f}"
            )
        heads = shape.config["num_attention_heads"]
        head_size = shape.config.get("head_dim") or width // heads
        return {
            "hidden_size": kept,
            "head_dim": head_size,
            "tie_word_embeddings": False,
        }

    def convert(
        self, model: Any, calibration: Any, plan: Any, run: Any
    ) -> list[Any]:
        """Finds the axes on all calibration tokens, and keeps the largest."""
        changes = plan.moe.changes
        axes_DD = stream_axes(model, calibration.windows_NL)
        rotate(model, axes_DD[:, : changes["hidden_size"]])
        model.config.get_text_config().head_dim = changes["head_dim"]
        return []
