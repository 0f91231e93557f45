"""Decoder layers with a matrix on each shortcut, for a residual stream that turns.

Around attention and around the FFN the residual stream goes on in other axes than it
came in, so what is passed by is turned too (Ashkboos et al., SliceGPT,
arXiv:2401.15024, Section 3.3).

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: B samples, L tokens of a sample, K axes.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

SHORTCUTS = ("attention_shortcut", "ffn_shortcut")


class _TurnedLayer:
    """Mixed into a family's decoder layer that normalises before attention and FFN."""

    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        h_BLK = hidden_states
        attended_BLK, _ = self.self_attn(
            hidden_states=self.input_layernorm(h_BLK), **kwargs
        )
        h_BLK = self.attention_shortcut(h_BLK) + attended_BLK
        fed_BLK = self.mlp(self.post_attention_layernorm(h_BLK))
        turned_BLK: Tensor = self.ffn_shortcut(h_BLK)
        return turned_BLK + fed_BLK


@functools.cache
def _turned_class(dense: type[nn.Module]) -> type[nn.Module]:
    # By its name transformers knows what must not be split among devices.
    return type(dense.__name__, (_TurnedLayer, dense), {})


def with_shortcuts(layer: nn.Module, width: int) -> nn.Module:
    """A layer with the parts of this one and two shortcuts (K, K), without weights.

    The layer itself stays as it is.
    """
    kind = _turned_class(type(layer))
    turned = kind.__new__(kind)
    attributes = vars(layer)
    for table in ("_modules", "_parameters", "_buffers"):
        attributes = attributes | {table: dict(attributes[table])}
    vars(turned).update(attributes)
    for name in SHORTCUTS:
        setattr(turned, name, nn.Linear(width, width, bias=False))
    return turned
