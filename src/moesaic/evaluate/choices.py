"""How much of what thresholds choose from runs on a text.

They are set so that a planned share runs on average over the calibration text; on another
text more or less does.

Shape suffixes: T tokens, U units: experts, neurons or inputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.modeling import MoesaicReplacement


@dataclass(frozen=True)
class ChosenShare:
    """Shares of a token's units, the mean over tokens and over the layers that choose."""

    planned: float
    ran: float


@dataclass
class Choices:
    """What was chosen in the calls so far.

    Sums over all tokens and layers of the share of a token's units; `ran` stays on each
    device, so that counting waits for none.
    """

    tokens: int = 0
    planned: float = 0.0
    ran: dict[torch.device, Tensor] = field(default_factory=dict)

    def see(self, module: Any, inputs: Any, named: Any, output: Any) -> None:
        """Hook of a replacement: counts one call."""
        chosen_TU = module.chosen(*inputs, *named.values())
        tokens, units = chosen_TU.shape
        counted = chosen_TU.count_nonzero().double() / units
        self.ran[counted.device] = self.ran.get(counted.device, 0.0) + counted
        self.planned += tokens * module.planned_share()
        self.tokens += tokens

    def share(self) -> ChosenShare | None:
        """None where no threshold decided anything."""
        if self.tokens == 0:
            return None
        ran = sum(counted.item() for counted in self.ran.values())
        return ChosenShare(self.planned / self.tokens, ran / self.tokens)


@contextmanager
def count_choices(model: nn.Module) -> Iterator[Choices]:
    """Counts for a while what thresholds choose in each call of a model.

    Costs the choice once more: of experts their scores, of neurons what tells of them
    (copies, or gates and a sketch).
    """
    choices = Choices()
    handles = []
    for module in model.modules():
        if not isinstance(module, MoesaicReplacement):
            continue
        if module.planned_share() is None:
            continue
        handle = module.register_forward_hook(choices.see, with_kwargs=True)
        handles.append(handle)
    try:
        yield choices
    finally:
        for handle in handles:
            handle.remove()
