"""What one converted layer loses: measured against the dense FFN on calibration tokens.

Shape suffixes: T tokens, D hidden_size, F neurons, R routed experts, K active ones, M neurons,
N neurons of a reference.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from moesaic.calibration.ffn_inputs import Inputs
from moesaic.families import DenseFFN
from moesaic.layout import Sizes
from moesaic.methods.fit import Fitted
from moesaic.parts.routers import expert_energies, expert_grams

MOST_TOKENS = 1024  # the oracle needs every expert's output, so a sample must do


@dataclass
class LayerReport:
    """Quality of one converted layer on `tokens` calibration tokens.

    `heldout` says that they lie in windows that nothing was fitted to. `relative_error` is the
    paper's objective (eq. 2) over the output's own energy, mean |F_MoE(x) - F(x)|^2 / mean
    |F(x)|^2, and `references` are the same for other ways to spend the budget: `static` and
    `static-repaired` (the best neurons; the latter with W_down refitted, on a sample of the first
    seven eighths of the tokens where the recipe itself repairs nothing), `unrepaired` (this layer
    without its repair), `random` (random neurons for each token), `oracle` (the same experts, each
    token runs its best) and `neuron-oracle` (each token runs its best neurons); none of the last
    three is repaired. The oracle runs the K experts of largest output norm; `router_recall` is the
    share of them that the router picks (chance is K / R), `mass_kept` the share of all experts'
    output energy in the experts that ran, `oracle_mass` the oracle's. `expert_load` is the share of
    tokens that each expert runs for. `kept_energy` holds the rounds of re-assignment. In a model
    that was a mixture before, figures are means over its converted experts, weighted by the tokens
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
    experts: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self, timing: bool = True) -> dict[str, Any]:
        """As plain data; without `timing` two equal runs give equal bytes."""
        values = asdict(self)
        return values if timing else {k: v for k, v in values.items() if k != "seconds"}

    @property
    def better_static(self) -> str | None:
        """The static reference that loses less than this layer, if one does."""
        names = [n for n in ("static", "static-repaired") if n in self.references]
        best = min(names, key=lambda name: self.references[name], default=None)
        routed = self.router_recall is not None
        if best is None or not routed or self.references[best] >= self.relative_error:
            return None
        return best


@torch.no_grad()
def measure_layer(
    layer: int,
    inputs: Inputs,
    ffn: DenseFFN,
    fitted: Fitted,
    sizes: Sizes,
    seed: int,
    seconds: float | None = None,
    most: int | None = None,
) -> LayerReport:
    """Measures a converted layer and its references on at most `most` tokens of the last eighth.

    MOST_TOKENS unless said. Costs about eight passes of those tokens through the FFN.
    """
    x_TD = torch.cat(list(inputs.held()))
    x_TD = x_TD[:: -(-len(x_TD) // (most or MOST_TOKENS))]
    h_TF = ffn.hidden(x_TD).float()
    down_FD = ffn.down_DF.float().T
    dense_TD = h_TF @ down_FD
    energy = max(dense_TD.square().sum(dtype=torch.float64).item(), 1e-30)
    block_TD = fitted.masked(x_TD).float()
    if ffn.down_bias_D is not None:
        block_TD = block_TD - ffn.down_bias_D.float()

    def error(y_TD: torch.Tensor) -> float:
        return (y_TD - dense_TD).square().sum(dtype=torch.float64).item() / energy

    def masked(mask_TF: torch.Tensor) -> float:
        return error((h_TF * mask_TF) @ down_FD)

    h_TN = h_TF[:, fitted.static_N]
    static_TD = h_TN @ down_FD[fitted.static_N]
    references = {"static": error(static_TD)}
    if fitted.static_repair is not None:
        added_TD = fitted.static_repair.candidate.output(h_TN)
        references["static-repaired"] = error(static_TD + added_TD)
    generator = torch.Generator().manual_seed(seed)
    noise_TF = torch.rand(h_TF.shape, generator=generator).to(h_TF.device)
    contribution_TF = h_TF.abs() * torch.linalg.vector_norm(down_FD, dim=1)
    routing = _routing(x_TD, h_TF, ffn, fitted, sizes)
    if routing is not None:
        chosen_TR, best_TR, energy_TR = routing
        neurons_N = torch.from_numpy(fitted.parts.neurons_N).to(h_TF.device)
        for name, runs_TR in (("unrepaired", chosen_TR), ("oracle", best_TR)):
            mask_TF = torch.zeros_like(h_TF)
            mask_TF[:, neurons_N] = fitted.parts.mask(runs_TR)
            references[name] = masked(mask_TF)
    references["random"] = masked(_largest(noise_TF, sizes.active))
    references["neuron-oracle"] = masked(_largest(contribution_TF, sizes.active))
    report = LayerReport(
        layer=layer,
        seconds=seconds,
        tokens=len(x_TD),
        heldout=inputs.hold_out,
        relative_error=error(block_TD),
        references=references,
        repair=None if fitted.repair is None else fitted.repair.name,
        notes=list(fitted.notes),
        kept_energy=fitted.parts.kept_energy,
    )
    if routing is not None:
        mass = max(energy_TR.sum().item(), 1e-30)
        report.router_recall = float((chosen_TR & best_TR).sum() / best_TR.sum())
        report.mass_kept = (chosen_TR * energy_TR).sum().item() / mass
        report.oracle_mass = (best_TR * energy_TR).sum().item() / mass
        if (
            fitted.parts.experts_RM.shape[1] == 1
        ):  # as many as neurons: too many to list
            return report
        report.expert_load = [round(v, 6) for v in chosen_TR.float().mean(0).tolist()]
        if idle := sum(load == 0 for load in report.expert_load):
            experts = len(report.expert_load)
            report.notes.append(
                f"{idle} experts of {experts} run for none of the measured tokens"
            )
    return report


def _largest(values_TF: torch.Tensor, count: int) -> torch.Tensor:
    """1 where a value is among the `count` largest of its row, 0 elsewhere."""
    smallest = (
        values_TF.shape[1] - count
    )  # of the fewer, since topk sorts what it finds
    few = min(count, smallest)
    index = values_TF.topk(few, dim=1, largest=few == count, sorted=False).indices
    marks_TF = torch.full_like(values_TF, float(few != count))
    return marks_TF.scatter_(1, index, float(few == count))


def _routing(
    x_TD: torch.Tensor, h_TF: torch.Tensor, ffn: DenseFFN, fitted: Fitted, sizes: Sizes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Experts that run, experts that the oracle runs (T, R), and all experts' energies."""
    if not fitted.parts.experts_RM.size:
        return None
    experts_RM = torch.from_numpy(fitted.parts.experts_RM).to(h_TF.device)
    energy_TR = expert_energies(h_TF, experts_RM, expert_grams(ffn, experts_RM))
    best_TR = _largest(energy_TR, sizes.num_active).bool()
    assert fitted.masked.choose is not None
    return fitted.masked.choose(x_TD), best_TR, energy_TR
