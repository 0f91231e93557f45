"""Routers: which experts run for a token, by what the router computes.

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

A router belongs to one block, or, in a model that was a mixture before, to all outer
experts of a layer: its weights then have a leading E, and every row of its input comes
with the outer expert that it is for.

Shape suffixes: T tokens (or pairs of a token and an outer expert), D hidden_size,
R routed experts, K routed experts run per token, C directions, E outer experts,
P pairs of a token and an expert that runs for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .moe_config_moesaic import BlockConfig, Sizes
from .projections_moesaic import MoesaicPairProjection, MoesaicProjection
from .token_ids_moesaic import TokenIds


class MoesaicRouter(nn.Module):
    """Scores the routed experts and picks some of them for each token.

    Chooser: "topk" runs the K experts of largest selection value + selection_bias;
    "threshold" runs every expert where that sum is above zero, at least the first and
    at most `cap`. The gate of a chosen expert is 1 + softmax(scores) * expert_scale
    (paper, Section 4.3), which is exactly 1 until expert_scale is trained;
    selection_bias moves who is chosen and never the gate.
    """

    selection_bias: Tensor
    float32_names = ("expert_scale", "selection_bias")
    # Of a soft choice; None: by the scores' spread.
    choice_width: float | None = None
    counts_loads = True
    rate_share = 1.0  # of the learning rate of routers

    def __init__(
        self, block: BlockConfig, sizes: Sizes, outer: int | None = None
    ):
        super().__init__()
        router = block.router
        assert router is not None
        routed = sizes.num_routed
        self.num_active = sizes.num_active
        self.num_routed = routed
        self.chooser = router.chooser
        self.cap = min(router.cap or routed, routed)
        shape = (routed,) if outer is None else (outer, routed)
        # Both in float32 in a model of any dtype: training moves them by less than
        # bf16 resolves.
        scale = torch.zeros(shape, dtype=torch.float32)
        self.expert_scale = nn.Parameter(scale)
        bias = torch.zeros(shape, dtype=torch.float32)
        self.register_buffer("selection_bias", bias)

    def scores(self, x_TD: Tensor, expert_T: Tensor | None = None) -> Tensor:
        """Scores (T, R) in float32."""
        raise NotImplementedError(f"{type(self).__name__} scores nothing")

    def active_weights(self) -> int:
        """Weights of the products that score one token."""
        return sum(weights_of(module) for module in self.modules())

    def selection_values(self, scores_TR: Tensor) -> Tensor:
        """What the bias is added to (T, R)."""
        return scores_TR

    def biased(
        self, scores_TR: Tensor, expert_T: Tensor | None = None
    ) -> Tensor:
        """What experts are chosen by (T, R)."""
        bias = _rows(self.selection_bias, expert_T)
        return self.selection_values(scores_TR) + bias

    @property
    def ranks_by_probability(self) -> bool:
        """Whether the bias is added to probabilities, and not to scores."""
        return False

    def choose(
        self, scores_TR: Tensor, expert_T: Tensor | None = None
    ) -> Tensor:
        """Which experts run (T, R), by either chooser."""
        biased_TR = self.biased(scores_TR, expert_T)
        return choose_experts(
            biased_TR, self.chooser, self.num_active, self.cap
        )

    def gates(
        self, scores_TR: Tensor, expert_T: Tensor | None = None
    ) -> Tensor:
        """The gate of every expert (T, R), whether it runs or not."""
        scale = _rows(self.expert_scale, expert_T)
        probability_TR = scores_TR.softmax(dim=-1)
        return 1 + probability_TR * scale

    def forward(
        self,
        x_TD: Tensor,
        expert_T: Tensor | None = None,
        whole_E: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Chosen experts (T, K) and their gates (T, K), in float32, by top-k.

        By threshold, or where some outer experts stay `whole`: token, expert and gate
        (P,) of every pair that runs, in order of tokens.
        """
        if self.chooser == "threshold" or whole_E is not None:
            return self.pairs(x_TD, expert_T, whole_E)
        scores_TR = self.scores(x_TD, expert_T)
        biased_TR = self.biased(scores_TR, expert_T)
        index_TK = biased_TR.topk(self.num_active, dim=-1).indices
        gate_TR = self.gates(scores_TR, expert_T)
        return index_TK, gate_TR.gather(1, index_TK)

    def pairs(
        self,
        x_TD: Tensor,
        expert_T: Tensor | None = None,
        whole_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Token, expert and gate (P,) of all that run; all of a whole outer expert."""
        scores_TR = self.scores(x_TD, expert_T)
        chosen_TR = self.choose(scores_TR, expert_T)
        if whole_E is not None:
            whole_T1 = whole_E[expert_T, None]
            chosen_TR = chosen_TR | whole_T1
        token_P, expert_P = chosen_TR.nonzero(as_tuple=True)
        gate_TR = self.gates(scores_TR, expert_T)
        gate_P = gate_TR[token_P, expert_P]
        return token_P, expert_P, gate_P

    def gates_of_all(self, x_TD: Tensor) -> Tensor:
        """Gates (T, R), 0 for experts that do not run."""
        chosen = self(x_TD)
        gate_TR = chosen[-1].new_zeros(len(x_TD), self.num_routed)
        if len(chosen) == 2:
            index_TK, gate_TK = chosen
            return gate_TR.scatter(1, index_TK, gate_TK)
        token_P, expert_P, gate_P = chosen
        return gate_TR.index_put((token_P, expert_P), gate_P)


class MoesaicLinearRouter(MoesaicRouter):
    """Scores by a matrix product with the input."""

    def __init__(
        self, block: BlockConfig, sizes: Sizes, outer: int | None = None
    ):
        super().__init__(block, sizes, outer)
        width = block.hidden_size + self._products(block)
        self.score_proj = _projection(
            width, sizes.num_routed, False, True, outer
        )

    def _products(self, block: BlockConfig) -> int:
        return 0

    def features(self, x_TD: Tensor, expert_T: Tensor | None = None) -> Tensor:
        """What the matrix multiplies."""
        return x_TD.float()

    def scores(self, x_TD: Tensor, expert_T: Tensor | None = None) -> Tensor:
        features = self.features(x_TD, expert_T)
        return _apply(self.score_proj, features, expert_T)


class MoesaicQuadraticRouter(MoesaicLinearRouter):
    """The same with the products of pairs of C directions of the input appended."""

    # At the rate of LoRA its scores move too far in a step of Adam (docs/log.md,
    # 2026-11-21).
    rate_share = 0.1

    def __init__(
        self, block: BlockConfig, sizes: Sizes, outer: int | None = None
    ):
        super().__init__(block, sizes, outer)
        assert block.router is not None
        directions = block.router.directions
        self.feature_proj = _projection(
            block.hidden_size, directions, True, True, outer
        )

    def _products(self, block: BlockConfig) -> int:
        assert block.router is not None
        directions = block.router.directions
        return directions * (directions + 1) // 2

    def features(self, x_TD: Tensor, expert_T: Tensor | None = None) -> Tensor:
        """The input, then the products of directions."""
        z_TC = _apply(self.feature_proj, x_TD.float(), expert_T)
        directions = z_TC.shape[1]
        i, j = torch.triu_indices(directions, directions, device=z_TC.device)
        products = z_TC[:, i] * z_TC[:, j]
        return torch.cat([x_TD.float(), products], dim=1)


class MoesaicNeuronCopyRouter(MoesaicRouter):
    """Scores an expert by the hidden activation of one neuron, whose weights it copies.

    act(gate x) * (up x), or act(up x) in a family whose FFN has no gate (paper,
    Section 4.2). By top-k it ranks by probability + selection_bias (Section 4.3).
    """

    def __init__(
        self, block: BlockConfig, sizes: Sizes, outer: int | None = None
    ):
        super().__init__(block, sizes, outer)
        assert block.router is not None
        hidden = block.hidden_size
        routed = sizes.num_routed
        bias = block.bias
        self.absolute = block.router.absolute
        self.gate_proj = None
        if block.gated:
            self.gate_proj = _projection(hidden, routed, bias, False, outer)
        self.up_proj = _projection(hidden, routed, bias, False, outer)
        self.act_fn = ACT2FN[block.activation]

    def scores(self, x_TD: Tensor, expert_T: Tensor | None = None) -> Tensor:
        dtype = self.up_proj.weight.dtype  # float32 while it is trained
        # Quantised weights are stored in what inputs are not.
        if dtype.is_floating_point and dtype.itemsize > 1:
            x_TD = x_TD.to(dtype)
        up_TR = _apply(self.up_proj, x_TD, expert_T)
        if self.gate_proj is None:
            scores_TR = self.act_fn(up_TR)
        else:
            gate_TR = _apply(self.gate_proj, x_TD, expert_T)
            scores_TR = self.act_fn(gate_TR) * up_TR
        if self.absolute:
            scores_TR = scores_TR.abs()
        return scores_TR.float()

    @property
    def ranks_by_probability(self) -> bool:
        return self.chooser == "topk"

    def selection_values(self, scores_TR: Tensor) -> Tensor:
        """Probabilities, where top-k chooses.

        They keep the scores' order, but where they underflow they tie: without a bias
        the scores themselves rank, as they did before training.
        """
        if not self.ranks_by_probability:
            return scores_TR
        trained = self.selection_bias.any()
        probability_TR = scores_TR.softmax(dim=-1)
        return torch.where(trained, probability_TR, scores_TR)


class MoesaicMLPRouter(MoesaicRouter):
    """Scores by two matrices with tanh between them, the inner one R wide; no biases.

    The gate of LLaMA-MoE (Zhu et al., EMNLP 2024).
    """

    def __init__(
        self, block: BlockConfig, sizes: Sizes, outer: int | None = None
    ):
        super().__init__(block, sizes, outer)
        hidden = block.hidden_size
        routed = sizes.num_routed
        self.hidden_proj = _projection(hidden, routed, False, True, outer)
        self.score_proj = _projection(routed, routed, False, True, outer)

    def features(self, x_TD: Tensor) -> Tensor:
        """What the first matrix multiplies."""
        return x_TD.float()

    def scores(self, x_TD: Tensor, expert_T: Tensor | None = None) -> Tensor:
        features_TD = self.features(x_TD)
        hidden_TR = _apply(self.hidden_proj, features_TD, expert_T)
        return _apply(self.score_proj, hidden_TR.tanh(), expert_T)


class MoesaicUnitMLPRouter(MoesaicMLPRouter):
    """The same on inputs of unit length: MoEfication's (Zhang et al., 2022)."""

    def features(self, x_TD: Tensor) -> Tensor:
        return nn.functional.normalize(x_TD.float(), dim=-1)


class MoesaicHashRouter(MoesaicRouter):
    """One expert for each token of the vocabulary, by a hash; never looks at x.

    (Roller et al., Hash Layers, 2021, which MoEBERT takes.) `salt` says which of many
    hashes it is. Nothing is read to choose, and no bias moves it.
    """

    salt: Tensor
    counts_loads = False  # a hash is not moved

    def __init__(
        self, block: BlockConfig, sizes: Sizes, outer: int | None = None
    ):
        super().__init__(block, sizes, outer)
        self.token_ids = TokenIds()
        no_salt = torch.zeros((), dtype=torch.int64)
        self.register_buffer("salt", no_salt)

    def experts_of(self, ids_T: Tensor) -> Tensor:
        """The expert of every id (T,): the id, well mixed, as a share of 2^32."""
        mixed_T = (ids_T.long() + self.salt) * 0x9E3779B1 & 0xFFFFFFFF
        mixed_T = mixed_T ^ (mixed_T >> 15)
        mixed_T = mixed_T * 0x85EBCA77 & 0xFFFFFFFF
        mixed_T = mixed_T ^ (mixed_T >> 13)
        return mixed_T * self.num_routed >> 32

    def scores(self, x_TD: Tensor, expert_T: Tensor | None = None) -> Tensor:
        """1 for a token's own expert, 0 for the others."""
        ids_T = self.token_ids.of(x_TD)
        chosen_T = self.experts_of(ids_T)
        return nn.functional.one_hot(chosen_T, self.num_routed).float()

    def biased(
        self, scores_TR: Tensor, expert_T: Tensor | None = None
    ) -> Tensor:
        return scores_TR


class MoesaicEmbeddingRouter(MoesaicLinearRouter):
    """Scores by a matrix product with the token's embedding, whatever the layer.

    With one matrix for all layers a token runs the same experts everywhere, and they
    are known before the first layer runs (Read-ME, Cai et al., NeurIPS 2024).
    """

    def __init__(
        self, block: BlockConfig, sizes: Sizes, outer: int | None = None
    ):
        super().__init__(block, sizes, outer)
        self.token_ids = TokenIds()

    def features(self, x_TD: Tensor, expert_T: Tensor | None = None) -> Tensor:
        return self.token_ids.embedded(x_TD).float()


ROUTERS: dict[str, type[MoesaicRouter]] = {
    "linear": MoesaicLinearRouter,
    "quadratic": MoesaicQuadraticRouter,
    "neuron-copies": MoesaicNeuronCopyRouter,
    "mlp": MoesaicMLPRouter,
    "unit-mlp": MoesaicUnitMLPRouter,
    "hash": MoesaicHashRouter,
    "embedding": MoesaicEmbeddingRouter,
}


def new_router(
    block: BlockConfig, sizes: Sizes, outer: int | None = None
) -> MoesaicRouter:
    """The router that a configuration names; for all `outer` experts of a layer."""
    assert block.router is not None
    router_class = ROUTERS[block.router.kind]
    return router_class(block, sizes, outer)


def choose_experts(
    biased_TR: Tensor, chooser: str, num_active: int, cap: int
) -> Tensor:
    """Which experts run (T, R) by their selection values, bias included."""
    none_TR = torch.zeros_like(biased_TR, dtype=torch.bool)
    if chooser == "topk":
        index_TK = biased_TR.topk(num_active, dim=-1, sorted=False).indices
        return none_TR.scatter_(1, index_TK, True)
    chosen_TR = biased_TR > 0
    if cap < biased_TR.shape[1]:
        index_TK = biased_TR.topk(cap, dim=-1).indices
        within_cap_TR = none_TR.scatter_(1, index_TK, True)
        chosen_TR &= within_cap_TR
        first_T1 = index_TK[:, :1]
    else:
        first_T1 = biased_TR.argmax(-1, keepdim=True)
    return chosen_TR.scatter_(1, first_T1, True)


def weights_of(module: nn.Module) -> int:
    """Weights of one projection that a token meets; 0 for any other module."""
    if isinstance(module, MoesaicPairProjection):
        return module.inputs * module.outputs
    if isinstance(module, nn.Linear | MoesaicProjection):
        return module.weight.numel()
    return 0


def _projection(
    inputs: int, outputs: int, bias: bool, exact: bool, outer: int | None
) -> Any:
    """A linear layer, or one for each outer expert; `exact`: in float32."""
    if outer is not None:
        return MoesaicPairProjection(outer, inputs, outputs, bias, exact)
    if exact:
        return MoesaicProjection(inputs, outputs, bias)
    return nn.Linear(inputs, outputs, bias=bias)


def _apply(
    projection: nn.Module, x_TD: Tensor, expert_T: Tensor | None
) -> Tensor:
    if expert_T is None:
        return projection(x_TD)
    return projection(x_TD, expert_T)


def _rows(values: Tensor, expert_T: Tensor | None) -> Tensor:
    """What belongs to each row's own outer expert, where there are several."""
    return values if expert_T is None else values[expert_T]
