"""Experts that put out their mean where they do not run (G-MoEfication).

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: T tokens, D hidden_size, R routed experts, K of them run for a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .block_moesaic import MoesaicBlock
from .moe_config_moesaic import BlockConfig, Sizes


class MoesaicMeanBlock(MoesaicBlock):
    """F(x) = shared(x) + sum_j (g_j E_j(x) + (1 - g_j) m_j), m_j the mean of E_j.

    g_j is 0 for an expert that does not run. Where all run with a gate of 1 no mean is
    left (Lee et al., EMNLP 2024).
    """

    stacked = None

    def __init__(self, block: BlockConfig, sizes: Sizes, router: Any = None):
        super().__init__(block, sizes, router)
        zeros_RD = torch.zeros(sizes.num_routed, block.hidden_size)
        self.expert_means = nn.Parameter(zeros_RD)

    def _routed(self, x_TD: Tensor) -> Tensor:
        if self.view is not None:
            gate_TR = self._viewed_gates(x_TD)
            y_TD = self.experts(x_TD, None, gate_TR)
        else:
            index_TK, gate_TK = self.router(x_TD)
            y_TD = self.experts(x_TD, index_TK, gate_TK)
            none_TR = gate_TK.new_zeros(len(x_TD), self.sizes.num_routed)
            gate_TR = none_TR.scatter(1, index_TK, gate_TK)
        missing_TR = (1 - gate_TR).to(y_TD.dtype)
        return y_TD + missing_TR @ self.expert_means

    def active_weights(self) -> float:
        """The means count as one more matrix of the router's size."""
        return super().active_weights() + float(self.expert_means.numel())
