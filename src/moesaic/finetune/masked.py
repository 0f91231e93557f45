"""Training under a mask: every expert on every token, gates of 0 where none was chosen.

The same outputs as when the model runs, up to rounding, and the same gradients but for
the router's: since every expert's output is known, it also learns from those that did
not run.

Shape suffixes: T tokens, R routed experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from moesaic.finetune.lora import blocks_of
from moesaic.parts.thresholds import choice_thresholds, soft_choice


def straight_through(
    router: Any, values: Callable[[], Tensor], gate_TR: Tensor
) -> Tensor:
    """A view in which gates also teach the scores that chose them.

    Their gradient is as if a gate were a sigmoid of how far its expert is above the
    threshold between the last that runs and the first that does not. The values are
    the replacement's own.
    """
    if router.num_active == router.num_routed:
        return gate_TR  # all run
    value_TR: Tensor = values()
    if router.choice_width is not None:
        soft_TR = (value_TR / router.choice_width).sigmoid()
    else:
        threshold = choice_thresholds(router, value_TR)
        soft_TR = soft_choice(value_TR, threshold)
    straight_TR: Tensor = soft_TR - soft_TR.detach()
    return gate_TR + straight_TR


@contextmanager
def masked(model: Any) -> Iterator[None]:
    """All experts are computed for a while, where that is worth it."""
    blocks = [block for block in blocks_of(model) if block.mask_pays()]
    for block in blocks:
        block.view = straight_through
    try:
        yield
    finally:
        for block in blocks:
            block.view = None
