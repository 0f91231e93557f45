"""Whether replacements compute all their experts under a mask, or those that run alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moesaic.modeling import MoesaicReplacement, as_they_are


@contextmanager
def under_masks(model: Any) -> Iterator[None]:
    """On a CPU, all experts of a model are computed under a mask meanwhile.

    The fast path there lays weights out anew: those of a file would then be in memory.
    """
    masked = model.device.type == "cpu"
    set_views(model, masked)
    try:
        yield
    finally:
        set_views(model, masked=False)


def set_views(model: Any, masked: bool) -> None:
    """`set_view` of all that a model has."""
    for module in model.modules():
        set_view(module, masked)


def set_view(module: Any, masked: bool) -> None:
    """Whether a replacement computes all experts under a mask; others always do."""
    if isinstance(module, MoesaicReplacement):
        module.view = as_they_are if masked else None
