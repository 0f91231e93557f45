"""Two-level routing: the experts of an existing mixture, each cut into sub-experts of its own.

The family's outer router, gate normalisation and shared experts stay its own code; what stands
here replaces its fused experts and is called as they are (paper, Section 4.4).

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: T tokens, D hidden_size, O outer experts of a token, P = T O pairs of a token and an
outer expert, E outer experts, R routed sub-experts of one, K of them run for a pair, Q triples of
a token, an outer expert and a sub-expert, C directions, I inputs of a projection.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.activations import ACT2FN

from .configuration_moesaic import MoesaicConfig
from .experts_moesaic import make_experts, padded, random_parameter
from .routing_moesaic import choose_experts, ranked


def can_group(rows: torch.Tensor) -> bool:
    """Whether torch has a grouped product for these rows: of whole 16 bytes, on no old GPU."""
    if (
        not hasattr(nn.functional, "grouped_mm")
        or rows.shape[1] * rows.element_size() % 16
    ):
        return False
    return not rows.is_cuda or torch.cuda.get_device_capability(rows.device) >= (8, 0)


class MoesaicPairProjection(nn.Module):
    """A linear layer per outer expert, on pairs: y_P = W[expert_P] x_P, grouped by expert.

    `exact` multiplies in float32 whatever the dtype of the weights. Rows and columns are stored
    padded with zeros. transformers' kernels are for whole FFNs; this follows the same choice.
    """

    def __init__(
        self, config: MoesaicConfig, inputs: int, outputs: int, bias: bool, exact: bool
    ):
        super().__init__()
        self.config = config
        experts = config.moesaic["num_outer"]
        self.inputs, self.outputs, self.exact = inputs, outputs, exact
        self.weight = random_parameter(experts, padded(outputs), padded(inputs))
        self.bias = (
            nn.Parameter(torch.zeros(experts, padded(outputs))) if bias else None
        )

    def forward(self, x_PI: torch.Tensor, expert_P: torch.Tensor) -> torch.Tensor:
        """(P, outputs), in float32 where exact."""
        weight = self.weight.float() if self.exact else self.weight
        x_PI = nn.functional.pad(
            x_PI.to(weight.dtype), (0, padded(self.inputs) - self.inputs)
        )
        kind = self.config._experts_implementation
        if kind == "batched_mm" or torch.compiler.is_compiling():
            y_PR = torch.bmm(weight[expert_P], x_PI[:, :, None])[:, :, 0]
        else:
            order_P = expert_P.argsort(stable=True)
            # A bincount would make a GPU wait for the size of its result.
            count_E = expert_P.new_zeros(len(weight))
            count_E = count_E.scatter_add(0, expert_P, torch.ones_like(expert_P))
            sorted_PI = x_PI[order_P]
            if kind == "grouped_mm" and can_group(sorted_PI):
                ends_E = count_E.cumsum(0, dtype=torch.int32)
                y_PR = nn.functional.grouped_mm(sorted_PI, weight.mT, offs=ends_E)
            else:
                parts = zip(sorted_PI.split(count_E.tolist()), weight, strict=True)
                y_PR = torch.cat([nn.functional.linear(x, w) for x, w in parts])
            y_PR = y_PR[order_P.argsort()]
        if self.bias is not None:
            y_PR = y_PR + self.bias.to(y_PR.dtype)[expert_P]
        return y_PR[:, : self.outputs]


class MoesaicSubRouter(nn.Module):
    """One router per outer expert; a pair is scored by its own expert's only.

    Kinds, gatings, expert_scale and selection_bias as in `MoesaicRouter`, with a leading E.
    """

    selection_bias: torch.Tensor

    def __init__(self, config: MoesaicConfig):
        super().__init__()
        moe = config.moesaic
        ffn, router, num_routed = moe["ffn"], moe["router"], moe["num_routed"]
        self.num_active, self.absolute = moe["num_active"], router["absolute"]
        self.gating, self.cap = (
            router["gating"],
            min(router["cap"] or num_routed, num_routed),
        )
        self.gate_proj = self.up_proj = self.score_proj = self.feature_proj = None
        hidden, directions = config.hidden_size, router["features"]
        if router["kind"] in ("linear", "quadratic"):
            if directions:
                self.feature_proj = MoesaicPairProjection(
                    config, hidden, directions, bias=True, exact=True
                )
            width = hidden + directions * (directions + 1) // 2
            self.score_proj = MoesaicPairProjection(
                config, width, num_routed, bias=False, exact=True
            )
        else:
            if ffn["gated"]:
                self.gate_proj = MoesaicPairProjection(
                    config, hidden, num_routed, ffn["bias"], exact=False
                )
            self.up_proj = MoesaicPairProjection(
                config, hidden, num_routed, ffn["bias"], exact=False
            )
        self.act_fn = ACT2FN[ffn["activation"]]
        self.by_probability = self.score_proj is None and self.gating == "topk"
        shape = (moe["num_outer"], num_routed)
        self.expert_scale = nn.Parameter(torch.zeros(shape, dtype=torch.float32))
        self.register_buffer("selection_bias", torch.zeros(shape, dtype=torch.float32))

    def scores(self, x_PD: torch.Tensor, expert_P: torch.Tensor) -> torch.Tensor:
        """Scores (P, R) in float32 of each pair's own sub-experts."""
        if self.score_proj is not None:
            features = x_PD.float()
            if self.feature_proj is not None:
                z_PC = self.feature_proj(x_PD, expert_P)
                i, j = torch.triu_indices(
                    z_PC.shape[1], z_PC.shape[1], device=z_PC.device
                )
                features = torch.cat([features, z_PC[:, i] * z_PC[:, j]], dim=1)
            return self.score_proj(features, expert_P)
        up_PR = self.up_proj(x_PD, expert_P)
        if self.gate_proj is None:
            scores_PR = self.act_fn(up_PR)
        else:
            scores_PR = self.act_fn(self.gate_proj(x_PD, expert_P)) * up_PR
        return (scores_PR.abs() if self.absolute else scores_PR).float()

    def forward(
        self,
        x_PD: torch.Tensor,
        expert_P: torch.Tensor,
        whole_E: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Chosen sub-experts (P, K) and their gates (P, K), in float32; or `triples`.

        Those where thresholds choose, or some outer experts stay whole.
        """
        if self.gating == "threshold" or whole_E is not None:
            return self.triples(x_PD, expert_P, whole_E)
        scores_PR = self.scores(x_PD, expert_P)
        biased_PR = self.biased(scores_PR, expert_P)
        index_PK = biased_PR.topk(self.num_active, dim=-1).indices
        return index_PK, self._gates(scores_PR, expert_P).gather(1, index_PK)

    def biased(self, scores_PR: torch.Tensor, expert_P: torch.Tensor) -> torch.Tensor:
        """What sub-experts are chosen by (P, R)."""
        value_PR = ranked(scores_PR, self.selection_bias, self.by_probability)
        return value_PR + self.selection_bias[expert_P]

    def triples(
        self, x_PD: torch.Tensor, expert_P: torch.Tensor, whole_E: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pair, sub-expert and gate (Q,) of all that run; every one of a `whole` outer expert."""
        scores_PR = self.scores(x_PD, expert_P)
        biased_PR = self.biased(scores_PR, expert_P)
        chosen_PR = choose_experts(biased_PR, self.gating, self.num_active, self.cap)
        if whole_E is not None:
            chosen_PR = chosen_PR | whole_E[expert_P, None]
        pair_Q, sub_Q = chosen_PR.nonzero(as_tuple=True)
        return pair_Q, sub_Q, self._gates(scores_PR, expert_P)[pair_Q, sub_Q]

    def _gates(self, scores_PR: torch.Tensor, expert_P: torch.Tensor) -> torch.Tensor:
        return 1 + scores_PR.softmax(dim=-1) * self.expert_scale[expert_P]


class MoesaicHierarchy(nn.Module):
    """Replaces a family's fused experts: E_i(x) = shared_i(x) + sum of gate_ij * sub_ij(x).

    The outer gate weight multiplies the whole mixture of an outer expert. All outer experts have
    the same sizes; those in `whole` run all their sub-experts, which is the expert as it was.
    (Without routed sub-experts, which is what static pruning leaves, a layer with whole experts
    stores all shared parts as wide as theirs.)
    """

    def __init__(self, config: MoesaicConfig, layer: int):
        super().__init__()
        moe = config.moesaic
        outer, self.num_routed = moe["num_outer"], moe["num_routed"]
        self.whole: list[int] = moe["whole"].get(str(layer), [])
        shared = moe["shared_size"]
        if self.whole and not self.num_routed:
            shared += moe["dropped"]
        self.shared_experts = make_experts(config, outer, shared) if shared else None
        self.router = self.experts = None
        if self.num_routed:
            self.router = MoesaicSubRouter(config)
            self.experts = make_experts(
                config, outer * self.num_routed, moe["expert_size"]
            )
        self.output_bias = (
            nn.Parameter(torch.zeros(outer, config.hidden_size))
            if moe["output_bias"]
            else None
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        y_TD = torch.zeros_like(hidden_states)
        if self.shared_experts is not None:
            y_TD = self.shared_experts(hidden_states, top_k_index, top_k_weights)
        if self.experts is not None:
            y_TD = y_TD + self._routed(hidden_states, top_k_index, top_k_weights)
        if self.output_bias is not None:
            y_TD = y_TD + nn.functional.embedding_bag(
                top_k_index,
                self.output_bias,
                mode="sum",
                per_sample_weights=top_k_weights.to(self.output_bias.dtype),
            )
        return y_TD

    def _routed(
        self, x_TD: torch.Tensor, index_TO: torch.Tensor, weight_TO: torch.Tensor
    ) -> torch.Tensor:
        tokens, outer = index_TO.shape
        x_PD, expert_P = x_TD.repeat_interleave(outer, dim=0), index_TO.reshape(-1)
        weight_P = weight_TO.reshape(-1)
        if self.router.gating == "topk" and not self.whole:
            sub_PK, gate_PK = self.router(x_PD, expert_P)
            triple_PK = expert_P[:, None] * self.num_routed + sub_PK
            gate_PK = gate_PK * weight_P[:, None]
            return self.experts(
                x_TD, triple_PK.view(tokens, -1), gate_PK.view(tokens, -1)
            )
        whole_E = None
        if self.whole:
            whole_E = torch.zeros(
                len(self.router.expert_scale), dtype=torch.bool, device=x_TD.device
            )
            whole_E[self.whole] = True
        # Every triple as a token of its own with one expert: as much work as triples.
        pair_Q, sub_Q, gate_Q = self.router(x_PD, expert_P, whole_E)
        triple_Q, gate_Q = (
            expert_P[pair_Q] * self.num_routed + sub_Q,
            gate_Q * weight_P[pair_Q],
        )
        y_QD = self.experts(x_PD[pair_Q], triple_Q[:, None], gate_Q[:, None])
        return torch.zeros_like(x_TD).index_add_(0, pair_Q // outer, y_QD)
