"""Which neurons are shared and which make up each routed expert.

Shape suffixes: T tokens, S shared neurons, R routed experts, M neurons of one, N all
neurons that are held.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NO_EXPERTS: NDArray[np.int64] = np.empty((0, 0), dtype=np.int64)


@dataclass(frozen=True)
class Partition:
    """Index lists into the dense FFN's neurons. They may overlap.

    Where they do not and none is left out, they are a permutation. Static pruning has
    no experts (R = 0). `kept_energy` is the share of the routed neurons' energy in the
    experts chosen, at the start and after every round of re-assignment.
    """

    shared_S: NDArray[np.int64]
    experts_RM: NDArray[np.int64]
    kept_energy: list[float] = field(default_factory=list)

    @property
    def neurons_N(self) -> NDArray[np.int64]:
        """All neurons that are held: the shared ones, then expert by expert."""
        routed = self.experts_RM.reshape(-1)
        return np.concatenate([self.shared_S, routed])

    def mask(self, chosen_TR: Tensor) -> Tensor:
        """1.0 for each of `neurons_N` that runs for a token, else 0.0 (T, N)."""
        tokens = len(chosen_TR)
        shared = len(self.shared_S)
        size = self.experts_RM.shape[1]
        shared_TS = chosen_TR.new_ones(tokens, shared, dtype=torch.float32)
        routed_TN = chosen_TR.float().repeat_interleave(size, dim=1)
        return torch.cat([shared_TS, routed_TN], dim=1)
