"""Two-level routing: the experts of an existing mixture, each cut into sub-experts.

The family's outer router, gate normalisation and shared experts stay its own code; what
stands here replaces its fused experts and is called as they are (paper, Section 4.4).

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: T tokens, D hidden_size, O outer experts of a token, P = T O pairs of a
token and an outer expert, E outer experts, R routed sub-experts of one, K of them run
for a pair, Q triples of a token, an outer expert and a sub-expert, U = O R sub-experts of
a token's outer ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .experts_moesaic import MoesaicExperts, some_are_nobodys
from .moe_config_moesaic import BlockConfig, OuterConfig, Sizes
from .replacement_moesaic import MoesaicReplacement
from .routers_moesaic import new_router


class MoesaicHierarchy(MoesaicReplacement):
    """Replaces a family's fused experts: E_i(x) = shared_i(x) + sum of gate * sub_ij(x).

    The outer gate weight multiplies the whole mixture of an outer expert. All outer
    experts have the same sizes; those in `whole` run all their sub-experts, which is
    the expert as it was. (Without routed sub-experts, which is what static pruning
    leaves, a layer with whole experts stores all shared parts as wide as theirs.)
    """

    unit = "sub-expert"

    def __init__(
        self,
        block: BlockConfig,
        sizes: Sizes,
        outer: OuterConfig,
        whole: list[int],
    ):
        super().__init__()
        self.block = block
        self.sizes = sizes
        self.outer_active = outer.num_active
        self.whole = whole
        self.num_outer = outer.num_experts
        self.num_routed = sizes.num_routed
        self.shared_experts = None
        self.router = None
        self.experts = None
        self.output_bias = None
        shared = sizes.shared
        if whole and not sizes.num_routed:
            shared = sizes.total
        if shared:
            self.shared_experts = MoesaicExperts(block, self.num_outer, shared)
        if sizes.num_routed:
            self.router = new_router(block, sizes, self.num_outer)
            count = self.num_outer * sizes.num_routed
            self.experts = MoesaicExperts(block, count, sizes.expert)
        if block.output_bias:
            zeros_ED = torch.zeros(self.num_outer, block.hidden_size)
            self.output_bias = nn.Parameter(zeros_ED)

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
    ) -> Tensor:
        y_TD = torch.zeros_like(hidden_states)
        if self.shared_experts is not None:
            y_TD = self.shared_experts(
                hidden_states, top_k_index, top_k_weights
            )
        if self.experts is not None:
            routed_TD = self._routed(hidden_states, top_k_index, top_k_weights)
            y_TD = y_TD + routed_TD
        if self.output_bias is not None:
            weight_TO = top_k_weights.to(self.output_bias.dtype)
            bias_TD = nn.functional.embedding_bag(
                top_k_index,
                self.output_bias,
                mode="sum",
                per_sample_weights=weight_TO,
            )
            y_TD = y_TD + bias_TD
        return y_TD

    def _routed(
        self, x_TD: Tensor, index_TO: Tensor, weight_TO: Tensor
    ) -> Tensor:
        tokens, outer = index_TO.shape
        x_PD = x_TD.repeat_interleave(outer, dim=0)
        expert_P = index_TO.reshape(-1)
        weight_P = weight_TO.reshape(-1)
        if self.router.chooser == "topk" and not self.whole:
            sub_PK, gate_PK = self.router(x_PD, expert_P)
            # Experts lie one outer expert after the other.
            first_P = expert_P * self.num_routed
            index_PK = first_P[:, None] + sub_PK
            gate_PK = gate_PK * weight_P[:, None]
            per_token = outer * self.router.num_active
            index_TOK = index_PK.view(tokens, per_token)
            gate_TOK = gate_PK.view(tokens, per_token)
            return self.experts(x_TD, index_TOK, gate_TOK)
        whole_E = self._whole_marks(x_TD.device)
        pair_Q, sub_Q, gate_Q = self.router(x_PD, expert_P, whole_E)
        first_Q = expert_P[pair_Q] * self.num_routed
        index_Q = first_Q + sub_Q
        gate_Q = gate_Q * weight_P[pair_Q]
        if some_are_nobodys(self.experts, x_TD):
            nobody = self.num_outer * self.num_routed
            index_PR = index_Q.new_full((len(x_PD), self.num_routed), nobody)
            index_PR[pair_Q, sub_Q] = index_Q
            gate_PR = gate_Q.new_zeros(index_PR.shape)
            gate_PR[pair_Q, sub_Q] = gate_Q
            units = outer * self.num_routed
            index_TU = index_PR.view(tokens, units)
            gate_TU = gate_PR.view(tokens, units)
            return self.experts(x_TD, index_TU, gate_TU)
        # Every triple as a token of its own with one expert: as much work as triples.
        x_QD = x_PD[pair_Q]
        index_Q1 = index_Q[:, None]
        gate_Q1 = gate_Q[:, None]
        y_QD = self.experts(x_QD, index_Q1, gate_Q1)
        token_Q = pair_Q // outer
        y_TD = torch.zeros_like(x_TD)
        return y_TD.index_add_(0, token_Q, y_QD)

    def _whole_marks(self, device: torch.device) -> Tensor | None:
        """Which outer experts stay as they were (E,); None where none does."""
        if not self.whole:
            return None
        whole_E = torch.zeros(self.num_outer, dtype=torch.bool, device=device)
        whole_E[self.whole] = True
        return whole_E

    def planned_share(self) -> float | None:
        if self.router is None or self.router.chooser != "threshold":
            return None
        return self.sizes.num_active / self.sizes.num_routed

    def chosen(self, *inputs: Tensor) -> Tensor:
        """Which sub-experts run (P, R), of each outer expert that a token is sent to.

        Without those that stay whole, where nothing is chosen.
        """
        x_TD, index_TO, _ = inputs
        x_PD = x_TD.repeat_interleave(index_TO.shape[1], dim=0)
        expert_P = index_TO.reshape(-1)
        whole_E = self._whole_marks(x_TD.device)
        if whole_E is not None:
            split_P = ~whole_E[expert_P]
            x_PD = x_PD[split_P]
            expert_P = expert_P[split_P]
        scores_PR = self.router.scores(x_PD, expert_P)
        return self.router.choose(scores_PR, expert_P)

    def units(self, *inputs: Tensor) -> tuple[Tensor, Tensor] | None:
        """Of all outer experts, one after the other; those a token is not sent to add 0."""
        if self.experts is None:
            return None
        x_TD, index_TO, weight_TO = inputs
        tokens, outer = index_TO.shape
        x_PD = x_TD.repeat_interleave(outer, dim=0)
        expert_P = index_TO.reshape(-1)
        scores_PR = self.router.scores(x_PD, expert_P)
        chosen_PR = self.router.choose(scores_PR, expert_P)
        whole_E = self._whole_marks(x_TD.device)
        if whole_E is not None:
            chosen_PR = chosen_PR | whole_E[expert_P, None]
        gate_PR = self.router.gates(scores_PR, expert_P).abs()
        gate_PR = gate_PR * weight_TO.reshape(-1, 1).float()
        place_PR = expert_P[:, None] * self.num_routed
        place_PR = place_PR + torch.arange(self.num_routed, device=x_TD.device)
        units = outer * self.num_routed
        place_TU = place_PR.view(tokens, units)
        norm_TU = self.experts.output_norms(x_TD)
        runs_TU = torch.zeros_like(norm_TU, dtype=torch.bool)
        runs_TU.scatter_(1, place_TU, chosen_PR.view(tokens, units))
        gate_TU = torch.zeros_like(norm_TU)
        gate_TU.scatter_(1, place_TU, gate_PR.view(tokens, units))
        return runs_TU, gate_TU * norm_TU

    def active_weights(self) -> float:
        """An expert that stays whole is taken to be chosen as often as any other."""
        neuron_weights = self.block.matrices * self.block.hidden_size
        whole_share = len(self.whole) / self.num_outer
        split_share = 1 - whole_share
        whole_neurons = whole_share * self.sizes.total
        split_neurons = split_share * self.sizes.active
        neurons = whole_neurons + split_neurons
        return float(self.outer_active * neuron_weights * neurons)

    def router_weights(self) -> float:
        if self.router is None:
            return 0.0
        weights = self.router.active_weights()
        return float(self.outer_active * weights)

    def router_modules(self) -> dict[str, nn.Module]:
        if self.router is None:
            return {}
        return {"router": self.router}
