"""The router of a MoE block: which experts run for a token.

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: T tokens, D hidden_size, R routed experts, K routed experts run per token, C
directions, P pairs of a token and an expert that runs for it.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.utils.generic import maybe_autocast

from .configuration_moesaic import MoesaicConfig


class MoesaicProjection(nn.Module):
    """A linear layer that multiplies in float32, as stock routers do: bf16 reorders close experts.

    No nn.Linear: vLLM's Transformers backend puts its own in their place, which keep the model's
    dtype.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__()
        self.out_features = out_features
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features).normal_(std=0.02)
        )
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        with maybe_autocast(x.device.type, enabled=False):
            return nn.functional.linear(x.float(), self.weight.float(), bias)


class MoesaicRouter(nn.Module):
    """Scores the routed experts and picks some of them for each token.

    Kinds: `linear`, a matrix product with the input; `quadratic`, the same with the products of
    pairs of C directions of the input appended; and copies of one neuron per expert, which score
    an expert by that neuron's hidden activation, act(gate(x)) * up(x), or act(up(x)) in a family
    whose FFN has no gate (`representative`: paper, Section 4.2).

    Gating: `topk` runs the K experts of largest score + selection_bias (of largest probability +
    selection_bias where representatives score: Section 4.3); `threshold` runs every
    expert whose score + selection_bias is above zero, at least the first and at most `cap`. The
    gate of a chosen expert is 1 + softmax(scores) * expert_scale (Section 4.3), which is exactly
    1 until expert_scale is trained; selection_bias moves who is chosen and never the gate.
    """

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
                self.feature_proj = MoesaicProjection(hidden, directions, bias=True)
            width = hidden + directions * (directions + 1) // 2
            self.score_proj = MoesaicProjection(width, num_routed, bias=False)
        else:
            if ffn["gated"]:
                self.gate_proj = nn.Linear(hidden, num_routed, bias=ffn["bias"])
            self.up_proj = nn.Linear(hidden, num_routed, bias=ffn["bias"])
        self.act_fn = ACT2FN[ffn["activation"]]
        self.by_probability = self.score_proj is None and self.gating == "topk"
        # Both in float32 in a model of any dtype: training moves them by less than bf16 resolves.
        self.expert_scale = nn.Parameter(torch.zeros(num_routed, dtype=torch.float32))
        self.register_buffer(
            "selection_bias", torch.zeros(num_routed, dtype=torch.float32)
        )

    def features(self, x_TD: torch.Tensor) -> torch.Tensor:
        """What a linear or quadratic router multiplies: x, then the products of C directions."""
        x_TD = x_TD.float()
        if self.feature_proj is None:
            return x_TD
        z_TC = self.feature_proj(x_TD)
        i, j = torch.triu_indices(z_TC.shape[1], z_TC.shape[1], device=z_TC.device)
        return torch.cat([x_TD, z_TC[:, i] * z_TC[:, j]], dim=1)

    def scores(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Scores (T, R) in float32."""
        if self.score_proj is not None:
            return self.score_proj(self.features(x_TD))
        x_TD = x_TD.to(self.up_proj.weight.dtype)  # float32 while it is trained
        up_TR = self.up_proj(x_TD)
        if self.gate_proj is None:
            scores_TR = self.act_fn(up_TR)
        else:
            scores_TR = self.act_fn(self.gate_proj(x_TD)) * up_TR
        return (scores_TR.abs() if self.absolute else scores_TR).float()

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Top-k gating: chosen experts (T, K) and their gates (T, K), in float32; else `pairs`."""
        if self.gating == "threshold":
            return self.pairs(x_TD)
        scores_TR = self.scores(x_TD)
        index_TK = self.biased(scores_TR).topk(self.num_active, dim=-1).indices
        return index_TK, self._gates(scores_TR).gather(1, index_TK)

    def pairs(
        self, x_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Chosen (token, expert) pairs, in order of tokens, and the gate of each (P,)."""
        scores_TR = self.scores(x_TD)
        token_P, expert_P = self.choose(scores_TR).nonzero(as_tuple=True)
        return token_P, expert_P, self._gates(scores_TR)[token_P, expert_P]

    def biased(self, scores_TR: torch.Tensor) -> torch.Tensor:
        """What experts are chosen by (T, R)."""
        return (
            ranked(scores_TR, self.selection_bias, self.by_probability)
            + self.selection_bias
        )

    def choose(self, scores_TR: torch.Tensor) -> torch.Tensor:
        """Which experts run (T, R), under either gating."""
        biased_TR = self.biased(scores_TR)
        return choose_experts(biased_TR, self.gating, self.num_active, self.cap)

    def _gates(self, scores_TR: torch.Tensor) -> torch.Tensor:
        return 1 + scores_TR.softmax(dim=-1) * self.expert_scale


def ranked(
    scores_TR: torch.Tensor, selection_bias: torch.Tensor, by_probability: bool
) -> torch.Tensor:
    """What the bias is added to (T, R): scores, or probabilities where representatives score.

    Those keep the scores' order, but where they underflow they tie: without a bias the scores
    themselves rank, as they did before training.
    """
    if not by_probability:
        return scores_TR
    return torch.where(selection_bias.any(), scores_TR.softmax(dim=-1), scores_TR)


def choose_experts(
    biased_TR: torch.Tensor, gating: str, num_active: int, cap: int
) -> torch.Tensor:
    """Which experts run (T, R) by their scores, selection bias included, under either gating."""
    none_TR = torch.zeros_like(biased_TR, dtype=torch.bool)
    if gating == "topk":
        index_TK = biased_TR.topk(num_active, dim=-1, sorted=False).indices
        return none_TR.scatter_(1, index_TK, True)
    chosen_TR = (biased_TR > 0).scatter_(1, biased_TR.argmax(-1, keepdim=True), True)
    if cap < biased_TR.shape[1]:
        index_TK = biased_TR.topk(cap, dim=-1).indices
        chosen_TR &= none_TR.scatter_(1, index_TK, True)
    return chosen_TR
