"""moesaic-neurons, ours: every neuron is an expert, chosen by low-bit copies of its rows.

A neuron runs where h^2 |w|^2 is above one threshold of the layer, h = act(gate x) (up
x) as copies of W_gate and W_up in a few bits a weight have it. The largest of those
that run read their exact rows, the others run on what their copies gave. With
choose_by=sketch the gates of all neurons are computed instead, and a product of low
rank stands in for W_up. It saves reading for one to four tokens at once, and only FFNs
with a gate have it. docs/method.md holds the equations, and what the work amounts to.

Shape suffixes: T tokens, D hidden_size, F neurons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.calibration.statistics import PLAIN, SAMPLE_TOKENS
from moesaic.errors import MoesaicError
from moesaic.families import DenseFFN
from moesaic.layout import Layout
from moesaic.methods.base import (
    LAYER_BUDGETS,
    REPAIRS,
    Budget,
    FFNShape,
    ModelShape,
    block_config,
    neuron_layout,
    setting,
)
from moesaic.methods.contents import METHODS
from moesaic.methods.expert_method import (
    ExpertMethod,
    LayerFit,
    active_words,
    fit_repair,
)
from moesaic.modeling import (
    COPY_BITS,
    REST_BITS,
    BlockConfig,
    MoEConfig,
    MoesaicCopy,
    MoesaicReplacement,
    RouterConfig,
    new_neuron_router,
    packed,
)
from moesaic.parts.carve import carve_int8_neurons, carve_neurons
from moesaic.parts.copies import low_bits
from moesaic.parts.partition import Partition
from moesaic.parts.sketches import sketch_up
from moesaic.parts.thresholds import set_neuron_thresholds

CHOOSE_BY = ("copies", "sketch")
WEIGHTS = ("own", "int8")
PROMPTS = ("all", "each")


@dataclass(frozen=True)
class MoesaicNeurons(ExpertMethod):
    """A budget of neurons per token, on average, spent where they add most."""

    description = METHODS["moesaic-neurons"]
    takes_grain = False
    fits_weights = True
    statistics_kind = PLAIN
    output_bias = True

    choose_by: str = setting(
        "copies",
        "What tells which neurons to run: low-bit copies of W_gate and W_up, or all "
        "gates and a sketch of W_up.",
        choices=CHOOSE_BY,
    )
    bits: int = setting(4, "Bits of a copied weight: 2, 3 or 4.", COPY_BITS[0])
    exact: float = setting(
        0.25,
        "Of the neurons that run, the share that reads exact rows of W_gate and W_up; "
        "the others run on their copies. It rises to 1 where more than two thirds run.",
        0,
    )
    weights: str = setting(
        "own",
        "What weights are kept in: the model's own number format, or about 8 bits each, "
        "half of which are the copies.",
        choices=WEIGHTS,
    )
    directions: int = setting(
        24, "With a sketch: rank of the stand-in for W_up.", 1
    )
    repair_by: str = setting(
        "least-squares", "How output weights are refitted.", choices=REPAIRS
    )
    intercept: bool = setting(
        True, "Whether the repair may add an output bias."
    )
    up_steps: int = setting(4, "Steps that refit the rows of W_up too.", 0)
    prompts: str = setting(
        "all",
        "Which neurons run where more than four tokens are read at once: all, in the "
        "dense model's time, if half of them run for a token; or those of each token.",
        choices=PROMPTS,
    )
    # Layers that run more also read a larger share of it exactly, so that layers which
    # share neurons read more bytes than was asked for: not by default.
    layer_budgets: str = setting(  # type: ignore[misc]
        "uniform",
        "How many neurons each layer runs: uniform, or as many as are worth most (three "
        "trial conversions; with copies up to a tenth of the FFNs' bytes more).",
        choices=LAYER_BUDGETS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in COPY_BITS:
            most = COPY_BITS[-1]
            raise self._bad_setting("bits", f"{most} is the most")
        if self.exact > 1:
            raise self._bad_setting("exact", "it is a share of at most 1")
        if self.weights == "int8" and self.choose_by != "copies":
            raise self._bad_setting("weights", "it needs choose_by=copies")
        if self.weights == "int8" and self.bits != REST_BITS:
            rule = f"with weights=int8 a copy has half of them, {REST_BITS}"
            raise self._bad_setting("bits", rule)

    def layouts(self, shape: ModelShape, budget: Budget) -> list[Layout]:
        """One neuron per expert, of the budget that a layout or a sparsity gives."""
        if shape.outer is not None or not shape.ffn.gated:
            what = "FFNs without a gate"
            if shape.outer is not None:
                what = "experts of a mixture"
            raise MoesaicError(
                f"method {self.name!r} chooses neurons by their gates in the FFNs of a "
                f"dense model; {shape.name} has {what}; take another method"
            )
        return [neuron_layout(budget, shape.ffn.intermediate_size)]

    def router_config(self, ffn: FFNShape) -> RouterConfig:
        if self.choose_by == "copies":
            exact = float(self.exact)
            return RouterConfig(
                "copies", "threshold", bits=self.bits, exact=exact
            )
        rank = min(self.directions, ffn.hidden_size)
        return RouterConfig("gates", "threshold", rank)

    def block(self, ffn: FFNShape) -> BlockConfig:
        replacement = "neurons" if self.weights == "own" else "int8-neurons"
        config = block_config(
            ffn,
            self.router_config(ffn),
            output_bias=True,
            replacement=replacement,
        )
        return replace(config, all_in_prompts=self.prompts == "all")

    def partition(self, fit: LayerFit) -> Partition:
        """Nothing is grouped: every neuron stands alone, in order."""
        neurons_F = np.arange(fit.ffn.intermediate_size)
        no_shared_S = neurons_F[:0]
        experts_F1 = neurons_F[:, None]
        return Partition(no_shared_S, experts_F1)

    def make_router(self, fit: LayerFit) -> Any:
        return fit_neuron_router(fit)

    def assemble(self, fit: LayerFit, repaired: DenseFFN) -> MoesaicReplacement:
        carve = carve_neurons if self.weights == "own" else carve_int8_neurons
        return carve(repaired, fit.router, fit.block, fit.sizes)

    def repair(self, fit: LayerFit) -> DenseFFN:
        if self.repair_by == "none":
            return fit.ffn
        running = Running(fit.router, fit.ffn)
        return fit_repair(
            fit,
            self.repair_by,
            self.intercept,
            self.up_steps,
            running.mask,
            running.stand_in,
        )

    def words(self, moe: MoEConfig) -> str:
        sizes = moe.first_sizes
        routed = sizes.num_routed
        told_by = "gates of all"
        if self.choose_by == "copies":
            told_by = f"copies of all in {self.bits} bits"
            assert moe.block.router is not None
            exact = moe.block.router.num_exact(sizes) / sizes.num_active
            if exact < 1:
                told_by += f", {exact:.0%} of those that run exact"
        if self.weights == "int8":
            told_by += ", weights in 8 bits"
        return f"on average {active_words(moe)} of {routed} neurons, {told_by}"


@dataclass(frozen=True)
class Running:
    """What a router lets run of an FFN, for inputs x (T, D)."""

    router: Any
    ffn: DenseFFN

    def told(self, x_TD: Tensor) -> Tensor:
        """What the router chooses by (T, F)."""
        if self.router.reads_gates:
            return self.ffn.gates(x_TD)
        copied_TF: Tensor = self.router.copied(x_TD)
        return copied_TF

    def scores(self, x_TD: Tensor) -> Tensor:
        """The router's scores of all neurons (T, F)."""
        score_TF: Tensor = self.router(x_TD, self.told(x_TD))
        return score_TF

    def mask(self, x_TD: Tensor) -> Tensor:
        """1.0 where a neuron runs on its exact rows (T, F)."""
        exact_TF = self.scores(x_TD) > self._margin
        return exact_TF.float()

    @property
    def stand_in(self) -> Callable[[Tensor], Tensor] | None:
        """Gives what copies say where a neuron runs on them, else 0 (T, F)."""
        if self._margin == 0:
            return None
        return self._copied

    def _copied(self, x_TD: Tensor) -> Tensor:
        told_TF = self.told(x_TD)
        score_TF: Tensor = self.router(x_TD, told_TF)
        on_copy_TF = (score_TF > 0) & (score_TF <= self._margin)
        return torch.where(on_copy_TF, told_TF.float(), 0.0)

    @property
    def _margin(self) -> float:
        if self.router.reads_gates:
            return 0.0
        return float(self.router.exact_margin)


def fit_neuron_router(fit: LayerFit) -> Any:
    """The router of a layer, from about SAMPLE_TOKENS of the tokens to fit on.

    Its weights are rounded to the model's dtype before thresholds are taken from its
    scores.
    """
    ffn = fit.ffn
    router: Any = new_neuron_router(fit.block, fit.sizes)
    router.to(fit.device)
    sample = fit.inputs.apart(SAMPLE_TOKENS)
    x_TD = torch.cat(list(sample.fit()))
    if router.reads_gates:
        _fit_sketch(router, ffn, x_TD)
    else:
        _copy_rows(router, ffn, x_TD)

    # log |w|^2; the threshold is taken off it.
    norm_F = ffn.down_DF.float().square().sum(0)
    log_norm_F = norm_F.clamp(min=1e-38).log()
    router.selection_bias.copy_(log_norm_F)
    score_TF = Running(router, ffn).scores(x_TD)
    set_neuron_thresholds(router, score_TF)
    return router


def _fit_sketch(router: Any, ffn: DenseFFN, x_TD: Tensor) -> None:
    """B A of low rank, which stands in for W_up."""
    dtype = ffn.up_FD.dtype
    rank = router.sketch_in.out_features
    sketch = sketch_up(x_TD, ffn, rank)
    router.sketch_in.weight.data = sketch.in_CD.to(dtype)
    router.sketch_out.weight.data = sketch.out_FC.to(dtype)
    router.sketch_out.bias.data = sketch.bias_F.to(dtype)
    router.up_variance.copy_(sketch.variance_F)


def _copy_rows(router: Any, ffn: DenseFFN, x_TD: Tensor) -> None:
    """Copies of W_gate and W_up."""
    assert ffn.gate_FD is not None
    x_TD = x_TD.float()
    gram_DD = x_TD.T @ x_TD / len(x_TD)
    _copy(router.gate_copy, ffn.gate_FD, ffn.gate_bias_F, gram_DD)
    _copy(router.up_copy, ffn.up_FD, ffn.up_bias_F, gram_DD)


def _copy(
    copy: MoesaicCopy,
    weight_FD: Tensor,
    bias_F: Tensor | None,
    gram_DD: Tensor,
) -> None:
    dtype = weight_FD.dtype
    few = low_bits(weight_FD, gram_DD, copy.bits, dtype)
    copy.planes = packed(few.code_RI, copy.bits)
    copy.scales = few.scale_RG
    if bias_F is not None:
        copy.bias = bias_F.clone()
