"""What one converted layer loses, measured against the dense FFN.

Shape suffixes: T tokens, D hidden_size, F neurons, R routed experts, N neurons of a
reference.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from moesaic.calibration.calibration_set import CalibrationSet
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.statistics import PLAIN
from moesaic.families import DenseFFN
from moesaic.methods.expert_method import (
    Made,
    fit_static_reference,
    static_neurons,
)
from moesaic.modeling import MoesaicReplacement, Sizes
from moesaic.parts.energies import expert_energies, expert_grams
from moesaic.parts.importance import output_norms
from moesaic.parts.partition import Partition
from moesaic.parts.repair import TOKENS_PER_NEURON, Repair

# The oracle needs every expert's output, so a sample must do.
MOST_TOKENS = 1024
# To fit a static reference to, which no method fits: it is for the report alone.
REFERENCE_TOKENS = 4096


@dataclass
class LayerReport:
    """Quality of one converted layer on `tokens` calibration tokens.

    `heldout` says that nothing was fitted to them: nor to their windows, where there are
    eight or more.
    `relative_error` is the paper's objective (eq. 2) over the output's own energy,
    mean |F_MoE(x) - F(x)|^2 / mean |F(x)|^2, and `references` are the same for other ways
    to spend the budget: `static` and `static-repaired` (the best neurons; the latter with
    W_down refitted, on a sample of the first seven eighths of the tokens where the method
    itself repairs nothing), `unrepaired` (what this layer chooses, run by the dense
    weights), `random` (random neurons for each token), `oracle` (the same experts, each
    token runs its best) and `neuron-oracle` (each token runs its best neurons); none of the
    last three is repaired. The oracle runs the K experts of largest output norm for every
    token, also where thresholds let tokens differ: a layer may then lose less than its
    oracle. `router_recall` is the share of them that the router picks (chance is K / R),
    `mass_kept` the share of all experts' output energy in the experts that ran,
    `oracle_mass` the oracle's. `expert_load` is the share of tokens that each expert
    runs for. `kept_energy` holds the rounds of re-assignment, `shares` those of the
    weights of each linear layer that was replaced, where they differ. In a model that was a
    mixture before, figures are means over its converted experts, weighted by the tokens
    that the router sends them, and `experts` has each by itself.
    """

    layer: int
    seconds: float | None  # None: an earlier run made it
    tokens: int
    heldout: bool
    relative_error: float
    references: dict[str, float]
    router_recall: float | None = None
    mass_kept: float | None = None
    oracle_mass: float | None = None
    expert_load: list[float] = field(default_factory=list)
    repair: str | None = None
    notes: list[str] = field(default_factory=list)
    kept_energy: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    experts: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self, timing: bool = True) -> dict[str, Any]:
        """As plain data; without `timing` two equal runs give equal bytes."""
        values = asdict(self)
        if not timing:
            del values["seconds"]
        return values

    @property
    def whole_experts(self) -> list[int]:
        """The experts of a mixture that stay as they were."""
        return [row["expert"] for row in self.experts if "whole" in row]

    @property
    def better_static(self) -> str | None:
        """The static reference that loses less than this layer, if one does."""
        errors = {}
        for name in ("static", "static-repaired"):
            if name in self.references:
                errors[name] = self.references[name]
        if not errors or self.router_recall is None:
            return None
        best = min(errors, key=lambda name: errors[name])
        return best if errors[best] < self.relative_error else None


@dataclass(frozen=True)
class _Routing:
    """Experts that run, those that the oracle runs, and energies of all (T, R)."""

    chosen_TR: Tensor
    best_TR: Tensor
    energy_TR: Tensor


class _Yardstick:
    """The dense FFN's output on the measured tokens, and errors against it."""

    def __init__(self, ffn: DenseFFN, x_TD: Tensor):
        self.x_TD = x_TD
        self.h_TF = ffn.hidden(x_TD).float()
        self.down_FD = ffn.down_DF.float().T
        self.dense_TD = self.h_TF @ self.down_FD
        self.energy = max(_energy(self.dense_TD), 1e-30)

    def error(self, y_TD: Tensor) -> float:
        """Of an output without its bias, relative to the dense one's energy."""
        return _energy(y_TD - self.dense_TD) / self.energy

    def masked_error(self, mask_TF: Tensor) -> float:
        """Of the dense FFN without the neurons whose mask is 0."""
        h_TF = self.h_TF * mask_TF
        return self.error(h_TF @ self.down_FD)


def _output(ffn: DenseFFN, replacement: Any, x_TD: Tensor) -> Tensor:
    """What a replacement puts out, without the dense FFN's output bias."""
    output_TD: Tensor = replacement(x_TD).float()
    if ffn.down_bias_D is not None:
        output_TD = output_TD - ffn.down_bias_D.float()
    return output_TD


@torch.no_grad()
def relative_error(inputs: FFNInputs, ffn: DenseFFN, replacement: Any) -> float:
    """That of a replacement alone, as `measure_layer` has it."""
    x_TD = inputs.heldout_sample(MOST_TOKENS)
    _tell_ids(replacement, inputs, MOST_TOKENS)
    yardstick = _Yardstick(ffn, x_TD)
    return yardstick.error(_output(ffn, replacement, x_TD))


def _energy(y_TD: Tensor) -> float:
    return float(y_TD.square().sum(dtype=torch.float64))


def _tell_ids(replacement: Any, inputs: FFNInputs, most: int) -> None:
    """Which tokens these are, for routers that choose by that."""
    ids_T = inputs.heldout_ids_T
    if ids_T is None or not isinstance(replacement, MoesaicReplacement):
        return
    stride = -(-len(ids_T) // most)
    replacement.tell(ids_T[::stride].to(inputs.device))


@torch.no_grad()
def measure_layer(
    layer: int,
    inputs: FFNInputs,
    ffn: DenseFFN,
    replacement: Any,
    sizes: Sizes,
    seed: int,
    most: int | None = None,
) -> LayerReport:
    """Measures a replacement and its references on tokens that are held out.

    At most `most` of them, MOST_TOKENS unless said. Costs about eight passes of those
    tokens through the FFN; where the method itself fitted no static reference, that is
    fitted to a sample here.
    """
    made: Made = getattr(replacement, "made", None) or Made()
    partition = made.partition
    x_TD = inputs.heldout_sample(most or MOST_TOKENS)
    _tell_ids(replacement, inputs, most or MOST_TOKENS)
    yardstick = _Yardstick(ffn, x_TD)
    output_TD = _output(ffn, replacement, x_TD)
    static_N = _static_neurons(made, inputs, ffn, sizes)
    static_repair = _static_repair(made, inputs, ffn, static_N, sizes)
    references = _static_references(yardstick, static_N, static_repair)
    routing = _routing(yardstick, ffn, replacement, partition, sizes)
    if routing is not None and partition is not None:
        references |= _expert_references(yardstick, partition, routing)
    references |= _token_references(yardstick, sizes.active, seed)
    report = LayerReport(
        layer=layer,
        seconds=None,
        tokens=len(x_TD),
        heldout=inputs.hold_out,
        relative_error=yardstick.error(output_TD),
        references=references,
        repair=None if made.repair is None else made.repair.name,
        notes=list(made.notes),
        kept_energy=[] if partition is None else partition.kept_energy,
    )
    if routing is not None:
        _add_routing(report, routing, sizes)
    return report


def _static_neurons(
    made: Made, inputs: FFNInputs, ffn: DenseFFN, sizes: Sizes
) -> Tensor:
    if made.static_N is not None:
        return made.static_N
    statistics = inputs.statistics(ffn, PLAIN)
    energy_F = statistics.energy_F * output_norms(ffn)
    return static_neurons(energy_F, sizes, ffn.up_FD.device)


def _static_repair(
    made: Made, inputs: FFNInputs, ffn: DenseFFN, static_N: Tensor, sizes: Sizes
) -> Repair:
    if made.static_repair is not None:
        return made.static_repair
    sample = inputs.apart(REFERENCE_TOKENS, heldout=MOST_TOKENS)
    needed = TOKENS_PER_NEURON * sizes.active
    if sample.tokens < needed:
        # A sample of about twice as many is one of no fewer, where there are so many.
        larger = inputs.apart(2 * needed, heldout=MOST_TOKENS)
        if larger.tokens >= needed:
            sample = larger
    return fit_static_reference(sample, ffn, static_N)


def _static_references(
    yardstick: _Yardstick, static_N: Tensor, repair: Repair
) -> dict[str, float]:
    """Errors of the best neurons alone, without and with their repair."""
    h_TN = yardstick.h_TF[:, static_N]
    static_TD = h_TN @ yardstick.down_FD[static_N]
    repaired_TD = static_TD + repair.candidate.output(h_TN)
    return {
        "static": yardstick.error(static_TD),
        "static-repaired": yardstick.error(repaired_TD),
    }


def _expert_references(
    yardstick: _Yardstick, partition: Partition, routing: _Routing
) -> dict[str, float]:
    """Errors of the experts that run, and of the best ones, none of them repaired."""
    h_TF = yardstick.h_TF
    chosen_TF = _neuron_mask(partition, routing.chosen_TR, h_TF)
    unrepaired = yardstick.masked_error(chosen_TF)
    best_TF = _neuron_mask(partition, routing.best_TR, h_TF)
    oracle = yardstick.masked_error(best_TF)
    return {"unrepaired": unrepaired, "oracle": oracle}


def _token_references(
    yardstick: _Yardstick, active: int, seed: int
) -> dict[str, float]:
    """Errors of random and of the best neurons for each token."""
    h_TF = yardstick.h_TF
    generator = torch.Generator().manual_seed(seed)
    noise_TF = torch.rand(h_TF.shape, generator=generator)
    noise_TF = noise_TF.to(h_TF.device)
    norm_F = torch.linalg.vector_norm(yardstick.down_FD, dim=1)
    contribution_TF = h_TF.abs() * norm_F
    random_TF = largest(noise_TF, active)
    best_TF = largest(contribution_TF, active)
    return {
        "random": yardstick.masked_error(random_TF),
        "neuron-oracle": yardstick.masked_error(best_TF),
    }


def _neuron_mask(
    partition: Partition, runs_TR: Tensor, like_TF: Tensor
) -> Tensor:
    """How often each of the dense FFN's neurons runs for a token.

    Once or not at all, unless experts share neurons: every copy that runs counts.
    """
    neurons_N = torch.from_numpy(partition.neurons_N).to(like_TF.device)
    mask_TN = partition.mask(runs_TR)
    mask_TF = torch.zeros_like(like_TF)
    return mask_TF.index_add_(1, neurons_N, mask_TN)


def _routing(
    yardstick: _Yardstick,
    ffn: DenseFFN,
    replacement: Any,
    partition: Partition | None,
    sizes: Sizes,
) -> _Routing | None:
    """None for a replacement without routed experts."""
    if partition is None or not partition.experts_RM.size:
        return None
    h_TF = yardstick.h_TF
    experts_RM = torch.from_numpy(partition.experts_RM).to(h_TF.device)
    grams_RMM = expert_grams(ffn, experts_RM)
    energy_TR = expert_energies(h_TF, experts_RM, grams_RMM)
    best_TR = largest(energy_TR, sizes.num_active).bool()
    chosen_TR = replacement.chosen(yardstick.x_TD)
    return _Routing(chosen_TR, best_TR, energy_TR)


def _add_routing(report: LayerReport, routing: _Routing, sizes: Sizes) -> None:
    """How well the router chooses, and how evenly."""
    chosen_TR = routing.chosen_TR
    best_TR = routing.best_TR
    energy_TR = routing.energy_TR
    hits = (chosen_TR & best_TR).sum()
    mass = max(float(energy_TR.sum()), 1e-30)
    chosen_mass = float((chosen_TR * energy_TR).sum())
    best_mass = float((best_TR * energy_TR).sum())
    report.router_recall = float(hits / best_TR.sum())
    report.mass_kept = chosen_mass / mass
    report.oracle_mass = best_mass / mass
    if sizes.expert == 1:  # as many as neurons: too many to list
        return
    load_R = chosen_TR.float().mean(0).tolist()
    report.expert_load = [round(load, 6) for load in load_R]
    if 0 in report.expert_load:
        # Without their number, which differs by layer: one line for all layers.
        report.notes.append("some experts run for none of the measured tokens")


def largest(values_TF: Tensor, count: int) -> Tensor:
    """1 where a value is among the `count` largest of its row, 0 elsewhere."""
    others = values_TF.shape[1] - count
    # The fewer of the two are sought, since topk sorts what it finds.
    seek_largest = count <= others
    sought = min(count, others)
    extremes = values_TF.topk(sought, dim=1, largest=seek_largest, sorted=False)
    mark_of_extremes = float(seek_largest)
    mark_of_others = float(not seek_largest)
    marks_TF = torch.full_like(values_TF, mark_of_others)
    return marks_TF.scatter_(1, extremes.indices, mark_of_extremes)


@torch.no_grad()
def linear_error(linear: Any, replacement: Any, inputs: FFNInputs) -> float:
    """Squared error of a linear layer's replacement over its output's energy."""
    x_TD = inputs.heldout_sample(MOST_TOKENS)
    dense_TD = linear(x_TD).float()
    output_TD = replacement(x_TD).float()
    lost = _energy(output_TD - dense_TD)
    return lost / max(_energy(dense_TD), 1e-30)


def linears_report(
    layer: int, errors: list[float], calibration: CalibrationSet, fitted: bool
) -> LayerReport:
    """One report of a layer's linear layers: the mean of their errors."""
    split = calibration.split
    heldout = split.tokens - split.first_heldout
    stride = -(-heldout // MOST_TOKENS)
    mean_error = sum(errors) / len(errors)
    return LayerReport(
        layer=layer,
        seconds=None,
        tokens=-(-heldout // stride),
        heldout=fitted,
        relative_error=mean_error,
        references={},
    )
