"""An FFN each of whose neurons is an expert: the rows of those that run are read.

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: T tokens, D hidden_size, F neurons, P pairs of a token and a neuron that
runs for it.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from .moe_config_moesaic import BlockConfig, Sizes
from .neuron_routers_moesaic import new_neuron_router
from .projections_moesaic import ALONE
from .replacement_moesaic import (
    MoesaicReplacement,
    are_hooked,
    own_kernels,
)

FEW_TOKENS = 2  # up to which pairs are computed one by one on a CPU
MOST_CHOSEN = 4  # tokens at once; more of them read nearly all rows together
LOWEST_SCORE = -10.0  # nats, the threshold at 0: lower ones say no more


class MoesaicNeurons(MoesaicReplacement):
    """F(x) = W_down (runs * h) + b, h = act(W_gate x) * (W_up x).

    W_down is kept transposed: a row of it belongs to a neuron. With a router of copies
    h is theirs where a neuron runs and is not exact. Rows only matter where they are
    asked for: the package's kernels read no others, for a few tokens. Without them, in
    float32 on a CPU, FEW_TOKENS are multiplied with those only; elsewhere all rows are,
    and masked. With `all_in_prompts` more than MOST_CHOSEN tokens run all neurons
    exactly: that takes the dense FFN's time instead of that of five products.
    """

    unit = "neuron"

    def __init__(self, block: BlockConfig, sizes: Sizes):
        super().__init__()
        hidden = block.hidden_size
        neurons = sizes.num_routed
        bias = block.bias
        self.config = ALONE
        self.block = block
        self.sizes = sizes
        self._add_projections(hidden, neurons, bias)
        self.act_fn = ACT2FN[block.activation]
        self.router = new_neuron_router(block, sizes)

    def _add_projections(self, hidden: int, neurons: int, bias: bool) -> None:
        self.gate_proj = nn.Linear(hidden, neurons, bias=bias)
        self.up_proj = nn.Linear(hidden, neurons, bias=bias)
        # Its bias is the FFN's, or the repair's intercept.
        self.down_proj = Conv1D(hidden, neurons)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden = hidden_states.shape[-1]
        x_TD = hidden_states.reshape(-1, hidden)
        if self._all_run(x_TD):
            y_TD = self.down_proj(self.hidden(x_TD))
        else:
            y_TD = self._at_once(x_TD)
        if y_TD is None:
            y_TD = self._part_by_part(x_TD)
        return y_TD.view_as(hidden_states)

    def _all_run(self, x_TD: Tensor) -> bool:
        """Whether these tokens are read at once, as a prompt is, and nothing is trained.

        Not in a compiled graph, where the number of tokens would be decided on once.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if len(x_TD) <= MOST_CHOSEN:
            return False
        if self.for_each_token or self.view is not None:
            return False
        return self.block.all_run_in_prompts(self.sizes)

    def _at_once(self, x_TD: Tensor) -> Tensor | None:
        """By the package's kernel, where there is one for this on such a machine."""
        own = own_kernels(self.config)
        if self.view is not None or own is None:
            return None
        y_TD: Tensor | None = own.neurons(self, x_TD)
        return y_TD

    def _part_by_part(self, x_TD: Tensor) -> Tensor:
        told_TF = self._told(x_TD)
        score_TF = self.router(x_TD, told_TF)
        runs_TF = score_TF > 0
        if self.view is not None:
            h_TF = self._hidden(x_TD, told_TF, score_TF)
            mask_TF = self._mask(score_TF)
            y_TD: Tensor = self.down_proj(h_TF * mask_TF.to(h_TF.dtype))
        elif self._pairs_pay(x_TD):
            h_TF = self._hidden_of_pairs(x_TD, told_TF, score_TF)
            y_TD = self._output_of_pairs(h_TF, runs_TF)
        else:
            h_TF = self._hidden(x_TD, told_TF, score_TF)
            y_TD = self.down_proj(torch.where(runs_TF, h_TF, 0))
        return y_TD

    def _told(self, x_TD: Tensor) -> Tensor:
        """What the router chooses by (T, F): gates, or hidden states of copies."""
        if self.router.reads_gates:
            return self._gates(x_TD)
        return self.router.copied(x_TD)

    def _gates(self, x_TD: Tensor) -> Tensor:
        """act(W_gate x) of every neuron (T, F)."""
        gate_TF = self.gate_proj(x_TD)
        return self.act_fn(gate_TF)

    def _ups(self, x_TD: Tensor) -> Tensor:
        """W_up x of every neuron (T, F)."""
        return self.up_proj(x_TD)

    def _hidden(
        self, x_TD: Tensor, told_TF: Tensor, score_TF: Tensor
    ) -> Tensor:
        """h of all neurons (T, F): exact, or what their copies say."""
        if self.router.reads_gates:
            return told_TF * self._ups(x_TD)
        h_TF = self.hidden(x_TD)
        exact_TF = score_TF > self.router.exact_margin
        return torch.where(exact_TF, h_TF, told_TF)

    def _hidden_of_pairs(
        self, x_TD: Tensor, told_TF: Tensor, score_TF: Tensor
    ) -> Tensor:
        """The same, exact rows multiplied only where they matter."""
        if self.router.reads_gates:
            exact_TF = score_TF > 0
            gate_P = told_TF[exact_TF]
        else:
            exact_TF = score_TF > self.router.exact_margin
            gate_P = self.act_fn(_of_pairs(self.gate_proj, x_TD, exact_TF))
        h_P = gate_P * _of_pairs(self.up_proj, x_TD, exact_TF)
        return told_TF.masked_scatter(exact_TF, h_P)

    def _output_of_pairs(self, h_TF: Tensor, runs_TF: Tensor) -> Tensor:
        """W_down h + b, rows read where a neuron runs."""
        y_TD = nn.functional.embedding_bag(
            runs_TF.nonzero()[:, 1],
            self.down_proj.weight,
            _starts(runs_TF)[:-1],
            mode="sum",
            per_sample_weights=h_TF[runs_TF],
        )
        return y_TD + self.down_proj.bias

    def _mask(self, score_TF: Tensor) -> Tensor:
        """1 where a neuron runs (T, F), as the view sees it."""

        def values() -> Tensor:
            # Gates of exactly 0 score far below all others: they would decide the
            # scores' spread.
            return score_TF.clamp(min=LOWEST_SCORE)

        runs_TF = score_TF > 0
        mask_TF = runs_TF.to(score_TF.dtype)
        return self.view(self.router, values, mask_TF)

    def scores(self, x_TD: Tensor) -> Tensor:
        """The router's scores (T, F); a neuron runs where they are above zero."""
        told_TF = self._told(x_TD)
        return self.router(x_TD, told_TF)

    def planned_share(self) -> float | None:
        return self.sizes.num_active / self.sizes.num_routed

    def chosen(self, *inputs: Tensor) -> Tensor:
        """Which neurons run (T, F)."""
        x_TD = inputs[0].flatten(0, -2)
        return self.scores(x_TD) > 0

    def units(self, *inputs: Tensor) -> tuple[Tensor, Tensor] | None:
        x_TD = inputs[0].flatten(0, -2)
        norm_F = self.down_proj.weight.float().norm(dim=1)
        added_TF = self.hidden(x_TD).float().abs() * norm_F
        return self.chosen(x_TD), added_TF

    def hidden(self, x_TD: Tensor) -> Tensor:
        return self._gates(x_TD) * self._ups(x_TD)

    def active_weights(self) -> float:
        down_rows = self.sizes.num_active
        if self.router.reads_gates:
            gate_rows = self.sizes.num_routed
            up_rows = self.sizes.num_active
        else:
            gate_rows = self.router.num_exact
            up_rows = self.router.num_exact
        rows = gate_rows + up_rows + down_rows
        return float(self.block.hidden_size * rows)

    def router_weights(self) -> float:
        weights = self.router.active_weights()
        return float(weights)

    def weight_bytes(self) -> float:
        """Bytes of weights that one token reads on average, router included."""
        row_bytes = self.active_weights() * self.up_proj.weight.element_size()
        return row_bytes + self.router.weight_bytes()

    def router_modules(self) -> dict[str, nn.Module]:
        return {"router": self.router}

    def mask_pays(self) -> bool:
        return True

    def _pairs_pay(self, x_TD: Tensor) -> bool:
        """Whether pair by pair is faster and can be done.

        Never while training, compiling or exporting, under autocast, nor with modules
        that are wrapped, hooked, or whose weights are elsewhere until they are called.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if torch.jit.is_tracing():  # type: ignore[no-untyped-call]
            return False
        if torch.is_autocast_enabled(x_TD.device.type):
            return False
        if type(self.down_proj) is not Conv1D:
            return False
        if are_hooked(self.gate_proj, self.up_proj, self.down_proj):
            return False
        if x_TD.device.type != "cpu" or x_TD.dtype != torch.float32:
            return False
        for linear in (self.gate_proj, self.up_proj):
            if type(linear) is not nn.Linear:
                return False
        for linear in (self.gate_proj, self.up_proj, self.down_proj):
            weight = linear.weight
            if weight.device != x_TD.device or weight.dtype != torch.float32:
                return False
        return 0 < len(x_TD) <= FEW_TOKENS


def _of_pairs(linear: nn.Linear, x_TD: Tensor, runs_TF: Tensor) -> Tensor:
    """The layer's outputs for the pairs that run (P,)."""
    neuron_P = runs_TF.nonzero()[:, 1]
    with warnings.catch_warnings():  # that sparse matrices are new to torch
        warnings.filterwarnings("ignore", message="Sparse CSR")
        pattern_TF = torch.sparse_csr_tensor(
            _starts(runs_TF),
            neuron_P,
            x_TD.new_zeros(len(neuron_P)),
            runs_TF.shape,
            check_invariants=False,
        )
        y_TF = torch.sparse.sampled_addmm(
            pattern_TF, x_TD, linear.weight.T, beta=0.0
        )
    y_P = y_TF.values()
    if linear.bias is not None:
        y_P = y_P + linear.bias[neuron_P]
    return y_P


def _starts(runs_TF: Tensor) -> Tensor:
    """Where each token's pairs start, and where the last one's end (T + 1,)."""
    end_T = runs_TF.sum(1).cumsum(0)
    return nn.functional.pad(end_T, (1, 0))
