"""Fits repairs on some tokens and chooses among them on others.

Shape suffixes: T tokens, D hidden_size, F neurons, N neurons that are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.statistics import SAMPLE_TOKENS
from moesaic.families import DenseFFN
from moesaic.parts.repair.least_squares import TOKENS_PER_NEURON, least_squares
from moesaic.parts.repair.mean import Candidate, mean_compensation
from moesaic.parts.repair.moments import Moments, Residual
from moesaic.parts.repair.up_rows import refit_up

NOTHING = Candidate("none")


@dataclass(frozen=True)
class Kept:
    """Neurons (N,) that are kept, and the mask (T, N) of those that run for inputs x."""

    neurons_N: Tensor
    mask: Callable[[Tensor], Tensor] | None = None  # None: all of them always

    def masked_(self, x_TD: Tensor, h_TN: Tensor) -> Tensor:
        """Hidden states of the neurons that are kept, masked in place."""
        return h_TN if self.mask is None else h_TN.mul_(self.mask(x_TD))


@dataclass(frozen=True)
class Repair:
    """The chosen candidate, and the relative held-out error without and with it.

    `up`: after rows of W_up were refitted.
    """

    candidate: Candidate
    error_before: float
    error_after: float
    note: str | None = None
    up: bool = False

    @property
    def name(self) -> str:
        return (
            f"W_up, then {self.candidate.name}"
            if self.up
            else self.candidate.name
        )

    def undone(self) -> Repair:
        """The same where nothing was repaired in the end."""
        return replace(self, candidate=NOTHING, up=False)

    def after_up_rows(self, first: Repair) -> Repair:
        """This repair, made after the rows of W_up were refitted, `first` before."""
        note = first.note if self.candidate is NOTHING else self.note
        return replace(
            self, up=True, error_before=first.error_before, note=note
        )

    def apply(self, ffn: DenseFFN, kept: Kept) -> DenseFFN:
        """The FFN with repaired output vectors and intercept."""
        changed = ffn
        if self.candidate.delta_ND is not None:
            down_DF = ffn.down_DF.float()
            down_DF = down_DF.index_add(
                1, kept.neurons_N, self.candidate.delta_ND.T
            )
            changed = replace(changed, down_DF=down_DF.to(ffn.down_DF.dtype))
        if (bias_D := self.candidate.intercept_D) is not None:
            if ffn.down_bias_D is not None:
                bias_D = bias_D + ffn.down_bias_D.float()
            changed = replace(changed, down_bias_D=bias_D.to(ffn.down_DF.dtype))
        return changed


@torch.no_grad()
def choose_repairs(
    inputs: FFNInputs,
    ffn: DenseFFN,
    kept: list[Kept],
    method: str,
    intercept: bool,
    target: DenseFFN | None = None,
) -> list[Repair]:
    """For each way of masking the FFN, the repair with the least error on held-out tokens.

    What is to be met is the output of `target`, the same FFN unless said.
    One pass over the tokens to fit on and one over those held out, for all of them together.
    A repair that does not lower the held-out error is not made. Least squares with fewer than
    TOKENS_PER_NEURON tokens per neuron falls back to mean compensation; the note says so.
    """
    ffn, columns = _in_order(ffn, kept)
    down_FD = ffn.down_DF.float().T.contiguous()
    hidden_size, device = down_FD.shape[1], down_FD.device
    moments = [Moments(len(k.neurons_N), hidden_size, device) for k in kept]

    def outputs(x_TD: Tensor) -> tuple[Tensor, Tensor]:
        h_TF = ffn.hidden(x_TD).float()
        if target is None:
            return h_TF, h_TF @ down_FD
        return h_TF, target.hidden(x_TD).float() @ target.down_DF.float().T

    for x_TD in inputs.fit():
        h_TF, dense_TD = outputs(x_TD)
        # The first comes last: it may mask h_TF itself.
        for one, own, sums in reversed(
            list(zip(kept, columns, moments, strict=True))
        ):
            sums.add(one.masked_(x_TD, h_TF[:, own]), dense_TD)
    downs = [down_FD[own] for own in columns]
    offers = [
        _candidates(sums.residual(down_ND), method, intercept)
        for sums, down_ND in zip(moments, downs, strict=True)
    ]
    errors = [
        torch.zeros(len(found), dtype=torch.float64) for found, _ in offers
    ]
    energy = 0.0
    for x_TD in inputs.heldout():
        h_TF, dense_TD = outputs(x_TD)
        energy += dense_TD.square().sum(dtype=torch.float64).item()
        all_kept = list(zip(kept, columns, downs, offers, errors, strict=True))
        for one, own, down_ND, (found, _), error in reversed(all_kept):
            h_TN = one.masked_(x_TD, h_TF[:, own])
            r_TD = dense_TD - h_TN @ down_ND
            for index, candidate in enumerate(found):
                error[index] += (
                    (r_TD - candidate.output(h_TN)).square().sum().item()
                )
    repairs = []
    for (found, note), error in zip(offers, errors, strict=True):
        error = torch.nan_to_num(error / max(energy, 1e-30), nan=torch.inf)
        best = int(error.argmin())
        if best == 0 and len(found) > 1:
            note = (
                "repair skipped: it does not lower the error on held-out tokens"
            )
        repairs.append(
            Repair(found[best], error[0].item(), error[best].item(), note)
        )
    return repairs


def _in_order(
    ffn: DenseFFN, kept: list[Kept]
) -> tuple[DenseFFN, list[slice | Tensor]]:
    """The FFN in the order of the first masking, if that keeps all, and the columns of each.

    Hidden states then are masked where they are, without a copy.
    """
    order_N = kept[0].neurons_N
    if len(order_N) < ffn.intermediate_size:
        return ffn, [k.neurons_N for k in kept]
    place_F = order_N.argsort()
    return ffn.subset(order_N), [
        slice(None),
        *(place_F[k.neurons_N] for k in kept[1:]),
    ]


@torch.no_grad()
def with_up_rows(
    inputs: FFNInputs, ffn: DenseFFN, repaired: DenseFFN, kept: Kept, steps: int
) -> DenseFFN:
    """The repaired FFN with rows of W_up refitted to the FFN's own output, on a sample of tokens.

    Without its intercept, which the next repair of the output vectors finds anew.
    """
    stride, seen, sample = -(-inputs.tokens // SAMPLE_TOKENS), 0, []
    for block_TD in inputs.fit():
        sample.append(block_TD[-seen % stride :: stride])
        seen += len(block_TD)
    x_TD = torch.cat(sample)
    index_N = kept.neurons_N
    down_ND = repaired.down_DF.float().T[index_N]
    gate_TN = kept.masked_(x_TD, repaired.gates(x_TD).float()[:, index_N])
    h_TN = kept.masked_(x_TD, repaired.hidden(x_TD).float()[:, index_N])
    dense_TD = ffn.output(ffn.hidden(x_TD)).float()
    own_TD = h_TN @ down_ND
    if repaired.down_bias_D is not None:
        own_TD = own_TD + repaired.down_bias_D.float()
    delta_ND = refit_up(
        x_TD.float(), gate_TN, dense_TD - own_TD, down_ND, steps
    )
    up_FD = repaired.up_FD.float().index_add(0, index_N, delta_ND)
    return replace(
        repaired, up_FD=up_FD.to(ffn.up_FD.dtype), down_bias_D=ffn.down_bias_D
    )


def _candidates(
    sums: Residual, method: str, intercept: bool
) -> tuple[list[Candidate], str | None]:
    """Nothing first, then what the method offers, and why it is not what was asked for."""
    note = None
    neurons = len(sums.mean_N)
    if method == "least-squares" and sums.tokens >= TOKENS_PER_NEURON * neurons:
        found = least_squares(sums, intercept)
        if not found:
            found = mean_compensation(sums, intercept)
            note = (
                "least squares has nothing to fit to: mean compensation instead"
                if found
                else "repair skipped: no neuron is ever active"
            )
    else:
        found = mean_compensation(sums, intercept)
        if method == "least-squares":
            note = (
                f"least squares needs {TOKENS_PER_NEURON * neurons} tokens to fit on, "
                f"{sums.tokens} are there: mean compensation instead"
            )
    return [NOTHING, *found], note
