"""The mixture that replaces a dense FFN: a shared expert, routed ones, and a router.

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: T tokens, D hidden_size, R routed experts, P pairs of a token and an
expert that runs for it, S neurons of the shared expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .experts_moesaic import MoesaicExperts, some_are_nobodys
from .hierarchy_moesaic import MoesaicHierarchy
from .moe_config_moesaic import BlockConfig, Sizes
from .replacement_moesaic import MoesaicReplacement
from .routers_moesaic import new_router

# Share of the experts up to which gathering tokens is faster than a mask.
GATHER_SHARE = 0.25
# Weights of an expert's matrix up to which that holds on a CPU where the model runs,
# too: it computes all of so small experts sooner than it gathers tokens for them.
SMALL_EXPERT = 2**17


class MoesaicSharedExpert(nn.Module):
    """The always-active neurons, contiguous: a dense FFN of S neurons."""

    def __init__(self, block: BlockConfig, size: int):
        super().__init__()
        hidden = block.hidden_size
        bias = block.bias
        self.gate_proj = None
        if block.gated:
            self.gate_proj = nn.Linear(hidden, size, bias=bias)
        self.up_proj = nn.Linear(hidden, size, bias=bias)
        self.down_proj = nn.Linear(size, hidden, bias=False)
        self.act_fn = ACT2FN[block.activation]

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(self.hidden(x_TD))

    def hidden(self, x_TD: Tensor) -> Tensor:
        """Hidden states of its neurons (T, S)."""
        up_TS = self.up_proj(x_TD)
        if self.gate_proj is None:
            return self.act_fn(up_TS)
        gate_TS = self.gate_proj(x_TD)
        gate_TS = self.act_fn(gate_TS)
        return gate_TS * up_TS


class MoesaicBlock(MoesaicReplacement):
    """F(x) = shared(x) + sum over chosen experts of gate * expert(x) (paper, eq. 4).

    A part of size zero is absent: without routed experts the block is a smaller dense
    FFN, which is what static pruning leaves.
    """

    stacked = MoesaicHierarchy
    unit = "expert"

    def __init__(self, block: BlockConfig, sizes: Sizes, router: Any = None):
        super().__init__()
        self.block = block
        self.sizes = sizes
        self.shared_expert = None
        self.router = None
        self.experts = None
        self.output_bias = None
        if sizes.shared:
            self.shared_expert = MoesaicSharedExpert(block, sizes.shared)
        if sizes.num_routed:
            if router is None:
                router = new_router(block, sizes)
            self.router = router
            self.experts = MoesaicExperts(block, sizes.num_routed, sizes.expert)
        if block.output_bias:
            zeros_D = torch.zeros(block.hidden_size)
            self.output_bias = nn.Parameter(zeros_D)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden = hidden_states.shape[-1]
        x_TD = hidden_states.reshape(-1, hidden)
        y_TD = self._at_once(x_TD)
        if y_TD is None:
            y_TD = self._part_by_part(x_TD)
        if self.output_bias is not None:
            y_TD = y_TD + self.output_bias
        return y_TD.view_as(hidden_states)

    def _at_once(self, x_TD: Tensor) -> Tensor | None:
        """By a function that runs whole blocks, where there is one for this."""
        if self.view is not None or not isinstance(
            self.experts, MoesaicExperts
        ):
            return None
        run = getattr(self.experts.own_function(), "block", None)
        return None if run is None else run(self, x_TD)

    def _part_by_part(self, x_TD: Tensor) -> Tensor:
        y_TD: Any = None
        if self.shared_expert is not None:
            y_TD = self.shared_expert(x_TD)
        if self.experts is not None:
            routed_TD = self._routed(x_TD)
            if y_TD is None:
                y_TD = routed_TD
            else:
                y_TD = y_TD + routed_TD
        return y_TD

    def _routed(self, x_TD: Tensor) -> Tensor:
        if self.view is not None:
            gate_TR = self._viewed_gates(x_TD)
            return self.experts(x_TD, None, gate_TR)
        if self._all_are_faster(x_TD):
            gate_TR = self.router.gates_of_all(x_TD)
            return self.experts(x_TD, None, gate_TR)
        if self.router.chooser == "topk":
            index_TK, gate_TK = self.router(x_TD)
            return self.experts(x_TD, index_TK, gate_TK)
        if some_are_nobodys(self.experts, x_TD):
            routed = self.sizes.num_routed
            gate_TR = self.router.gates_of_all(x_TD)
            index_R = torch.arange(routed, device=x_TD.device)
            index_TR = index_R.where(gate_TR != 0, routed)
            return self.experts(x_TD, index_TR, gate_TR)
        # Every pair as a token of its own with one expert: as much work as pairs.
        token_P, expert_P, gate_P = self.router(x_TD)
        x_PD = x_TD[token_P]
        expert_P1 = expert_P[:, None]
        gate_P1 = gate_P[:, None]
        y_PD = self.experts(x_PD, expert_P1, gate_P1)
        y_TD = torch.zeros_like(x_TD)
        return y_TD.index_add_(0, token_P, y_PD)

    def _all_are_faster(self, x_TD: Tensor) -> bool:
        """Whether to compute every expert, and multiply what was not chosen by 0.

        On a GPU of any size: transformers' grouped product copies a token for each of
        its experts, and took 1.2 to 8 times as long on an H200.
        """
        device = x_TD.device.type
        if device not in ("cpu", "cuda") or not self.mask_pays():
            return False
        # An engine may have put experts of its own into their place.
        if not isinstance(self.experts, MoesaicExperts):
            return False
        if device == "cuda" and self.router.chooser == "threshold":
            return True  # experts alone would get pairs, each as a token
        if self.experts.has_own_kernel(x_TD):
            return False
        if device == "cuda":
            return True
        weights = self.sizes.expert * self.block.hidden_size
        return weights <= SMALL_EXPERT

    def _viewed_gates(self, x_TD: Tensor) -> Tensor:
        router = self.router

        def values() -> Tensor:
            scores_TR = router.scores(x_TD.detach())
            return router.biased(scores_TR)

        gate_TR = router.gates_of_all(x_TD)
        return self.view(router, values, gate_TR)

    def planned_share(self) -> float | None:
        if self.router is None or self.router.chooser != "threshold":
            return None
        return self.sizes.num_active / self.sizes.num_routed

    def chosen(self, *inputs: Tensor) -> Tensor:
        """Which routed experts run (T, R)."""
        x_TD = inputs[0].flatten(0, -2)
        scores_TR = self.router.scores(x_TD)
        return self.router.choose(scores_TR)

    def units(self, *inputs: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.experts is None:
            return None
        x_TD = inputs[0].flatten(0, -2)
        scores_TR = self.router.scores(x_TD)
        chosen_TR = self.router.choose(scores_TR)
        gate_TR = self.router.gates(scores_TR)
        added_TR = gate_TR.abs() * self.experts.output_norms(x_TD)
        return chosen_TR, added_TR

    def hidden(self, x_TD: Tensor) -> Tensor:
        parts = []
        if self.shared_expert is not None:
            parts.append(self.shared_expert.hidden(x_TD))
        if self.experts is not None:
            h_TRM = self.experts.hidden(x_TD)
            parts.append(h_TRM.flatten(1))
        return torch.cat(parts, dim=1)

    def active_weights(self) -> float:
        neuron_weights = self.block.matrices * self.block.hidden_size
        return float(neuron_weights * self.sizes.active)

    def router_weights(self) -> float:
        if self.router is None:
            return 0.0
        weights = self.router.active_weights()
        return float(weights)

    def router_modules(self) -> dict[str, nn.Module]:
        if self.router is None:
            return {}
        return {"router": self.router}

    def mask_pays(self) -> bool:
        gathered_at_most = GATHER_SHARE * self.sizes.num_routed
        return self.sizes.num_active > gathered_at_most
