"""Fits repairs on some tokens and chooses among them on others.

Shape suffixes: T tokens, D hidden_size, F neurons, N neurons that are kept,
C candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.families import DenseFFN
from moesaic.parts.products import products_of
from moesaic.parts.repair.least_squares import TOKENS_PER_NEURON, least_squares
from moesaic.parts.repair.mean import Candidate, mean_compensation
from moesaic.parts.repair.moments import Moments
from moesaic.parts.repair.up_rows import refit_up

NOTHING = Candidate("none")


@dataclass(frozen=True)
class Kept:
    """Neurons (N,) that are kept, and a mask (T, N) of those that run for x.

    `stand_in` gives hidden states (T, N) of neurons that run, but not on their own
    rows: the mask leaves these out.
    """

    neurons_N: Tensor
    mask: Callable[[Tensor], Tensor] | None = None  # None: all of them always
    stand_in: Callable[[Tensor], Tensor] | None = None

    def masked_(self, x_TD: Tensor, h_TN: Tensor) -> Tensor:
        """Gates or hidden states of the neurons that are kept, masked in place."""
        if self.mask is None:
            return h_TN
        return h_TN.mul_(self.mask(x_TD))

    def hidden_(self, x_TD: Tensor, h_TN: Tensor) -> Tensor:
        """Hidden states that run, in place of those of the neurons that are kept."""
        h_TN = self.masked_(x_TD, h_TN)
        if self.stand_in is None:
            return h_TN
        return h_TN.add_(self.stand_in(x_TD))


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
        if self.up:
            return f"W_up, then {self.candidate.name}"
        return self.candidate.name

    def undone(self) -> Repair:
        """The same where nothing was repaired in the end."""
        return replace(self, candidate=NOTHING, up=False)

    def after_up_rows(self, first: Repair) -> Repair:
        """This repair, made after the rows of W_up were refitted, `first` before."""
        note = first.note if self.candidate is NOTHING else self.note
        return replace(
            self,
            up=True,
            error_before=first.error_before,
            note=note,
        )

    def apply(self, ffn: DenseFFN, kept: Kept) -> DenseFFN:
        """The FFN with repaired output vectors and intercept."""
        changed = ffn
        delta_ND = self.candidate.delta_ND
        if delta_ND is not None:
            down_DF = ffn.down_DF.float()
            down_DF = down_DF.index_add(1, kept.neurons_N, delta_ND.T)
            down_DF = down_DF.to(ffn.down_DF.dtype)
            changed = replace(changed, down_DF=down_DF)
        bias_D = self.candidate.intercept_D
        if bias_D is not None:
            if ffn.down_bias_D is not None:
                bias_D = bias_D + ffn.down_bias_D.float()
            bias_D = bias_D.to(ffn.down_DF.dtype)
            changed = replace(changed, down_bias_D=bias_D)
        return changed


@dataclass
class _Trial:
    """One way of masking the FFN: its sums, candidates and held-out errors.

    `dtype` is the model's, which holds hidden states.
    """

    kept: Kept
    moments: Moments
    dtype: torch.dtype
    down_ND: Tensor = field(init=False)
    candidates: list[Candidate] = field(init=False)
    note: str | None = field(init=False)
    error_C: Tensor = field(init=False)

    def add_(self, x_TD: Tensor, h_TF: Tensor, dense_TD: Tensor) -> None:
        """Adds a block of the tokens to fit on."""
        h_TN = self._kept_hidden(x_TD, h_TF)
        with products_of(self.dtype):
            self.moments.add(h_TN, dense_TD)

    def fit(self, down_FD: Tensor, method: str, intercept: bool) -> None:
        """Finds the candidates once the sums are complete."""
        self.down_ND = down_FD[self.kept.neurons_N]
        self.candidates, self.note = _candidates(
            self.moments, self.down_ND, method, intercept
        )
        count = len(self.candidates)
        self.error_C = torch.zeros(count, dtype=torch.float64)

    def add_errors_(
        self,
        x_TD: Tensor,
        h_TF: Tensor,
        dense_TD: Tensor,
    ) -> None:
        """Adds each candidate's squared error on a block of held-out tokens."""
        h_TN = self._kept_hidden(x_TD, h_TF)
        with products_of(self.dtype):
            residual_TD = dense_TD - h_TN @ self.down_ND
        for index, candidate in enumerate(self.candidates):
            error_TD = residual_TD - candidate.output(h_TN)
            self.error_C[index] += error_TD.square().sum().item()

    def _kept_hidden(self, x_TD: Tensor, h_TF: Tensor) -> Tensor:
        """Hidden states (T, N) that run: a copy."""
        h_TN = h_TF.index_select(1, self.kept.neurons_N)
        return self.kept.hidden_(x_TD, h_TN)

    def best(self, energy: float) -> Repair:
        """The candidate of least error, relative to the output's energy."""
        error_C = self.error_C / max(energy, 1e-30)
        error_C = torch.nan_to_num(error_C, nan=torch.inf)
        best = int(error_C.argmin())
        note = self.note
        if best == 0 and len(self.candidates) > 1:
            note = (
                "repair skipped: it does not lower the error on held-out tokens"
            )
        return Repair(
            self.candidates[best],
            error_before=error_C[0].item(),
            error_after=error_C[best].item(),
            note=note,
        )


@torch.no_grad()
def choose_repairs(
    inputs: FFNInputs,
    ffn: DenseFFN,
    kept: list[Kept],
    method: str,
    intercept: bool,
    target: DenseFFN | None = None,
    undo_drift: float = 0.0,
) -> list[Repair]:
    """For each way of masking the FFN, the repair of least held-out error.

    What is to be met is the output of `target`, the same FFN unless said, or what lies
    `undo_drift` of the way from there to the goals of `inputs`, if it has any. One pass
    over the tokens to fit on and one over those held out, for all of them together;
    several processes share it. A repair that does not lower the held-out error is not
    made. Least squares with fewer than TOKENS_PER_NEURON tokens per neuron falls back to
    mean compensation; the note says so.
    """
    dtype = ffn.down_DF.dtype
    bias_D = ffn.down_bias_D
    down_FD = ffn.down_DF.float().T.contiguous()
    hidden_size = down_FD.shape[1]
    trials = []
    for masking in kept:
        neurons = len(masking.neurons_N)
        moments = Moments(neurons, hidden_size, down_FD.device)
        trials.append(_Trial(masking, moments, dtype))

    def goal_of(x_TD: Tensor, h_TF: Tensor, goal_TD: Tensor | None) -> Tensor:
        with products_of(dtype):
            if target is None:
                dense_TD = h_TF @ down_FD
            else:
                target_h_TF = target.hidden(x_TD).float()
                dense_TD = target_h_TF @ target.down_DF.float().T
        if goal_TD is not None and bias_D is not None:
            goal_TD = goal_TD - bias_D.float()  # which stays as it is
        return _towards(goal_TD, dense_TD, undo_drift)

    fit_blocks = inputs.own_fit_hidden(ffn)
    for (x_TD, h_TF), goal_TD in zip(
        fit_blocks, inputs.own_fit_goals(), strict=True
    ):
        h_TF = h_TF.float()
        wanted_TD = goal_of(x_TD, h_TF, goal_TD)
        for trial in trials:
            trial.add_(x_TD, h_TF, wanted_TD)
    for trial in trials:
        trial.moments.total_(inputs.share)
        trial.fit(down_FD, method, intercept)

    energy = 0.0
    heldout_blocks = inputs.own_heldout_hidden(ffn)
    for (x_TD, h_TF), goal_TD in zip(
        heldout_blocks, inputs.own_heldout_goals(), strict=True
    ):
        h_TF = h_TF.float()
        wanted_TD = goal_of(x_TD, h_TF, goal_TD)
        energy += wanted_TD.square().sum(dtype=torch.float64).item()
        for trial in trials:
            trial.add_errors_(x_TD, h_TF, wanted_TD)
    energy = inputs.share.total(energy)
    for trial in trials:
        inputs.share.total_(trial.error_C)
    return [trial.best(energy) for trial in trials]


def _towards(
    goal_TD: Tensor | None, output_TD: Tensor, undo_drift: float
) -> Tensor:
    """What a repair is to meet: y + undo_drift (goal - y)."""
    if goal_TD is None or not undo_drift:
        return output_TD
    return output_TD.lerp(goal_TD, undo_drift)


@torch.no_grad()
def with_up_rows(
    inputs: FFNInputs,
    ffn: DenseFFN,
    repaired: DenseFFN,
    kept: Kept,
    steps: int,
    undo_drift: float = 0.0,
) -> DenseFFN:
    """The repaired FFN with rows of W_up refitted to what the repair was to meet.

    On a sample of tokens. Without its intercept, which the next repair of the output
    vectors finds anew.
    """
    x_TD = inputs.sample()
    index_N = kept.neurons_N
    down_ND = repaired.down_DF.float().T[index_N]
    gate_TN = repaired.gates(x_TD).float()[:, index_N]
    gate_TN = kept.masked_(x_TD, gate_TN)
    h_TN = repaired.hidden(x_TD).float()[:, index_N]
    h_TN = kept.hidden_(x_TD, h_TN)

    dense_TD = ffn.output(ffn.hidden(x_TD)).float()
    dense_TD = _towards(inputs.sample_goals(), dense_TD, undo_drift)
    output_TD = h_TN @ down_ND
    if repaired.down_bias_D is not None:
        output_TD = output_TD + repaired.down_bias_D.float()
    residual_TD = dense_TD - output_TD

    delta_ND = refit_up(x_TD.float(), gate_TN, residual_TD, down_ND, steps)
    up_FD = repaired.up_FD.float().index_add(0, index_N, delta_ND)
    up_FD = up_FD.to(ffn.up_FD.dtype)
    return replace(repaired, up_FD=up_FD, down_bias_D=ffn.down_bias_D)


def _candidates(
    moments: Moments,
    down_ND: Tensor,
    method: str,
    intercept: bool,
) -> tuple[list[Candidate], str | None]:
    """Nothing first, then what the method offers.

    And a note where that is not what was asked for.
    """
    if method != "least-squares":
        return [NOTHING, *mean_compensation(moments, down_ND, intercept)], None
    tokens_needed = TOKENS_PER_NEURON * moments.neurons
    if moments.tokens < tokens_needed:
        note = (
            f"least squares needs {tokens_needed} tokens to fit on, "
            f"{moments.tokens} are there: mean compensation instead"
        )
        candidates = mean_compensation(moments, down_ND, intercept)
        return [NOTHING, *candidates], note
    candidates = least_squares(moments, down_ND, intercept)
    if candidates:
        return [NOTHING, *candidates], None
    candidates = mean_compensation(moments, down_ND, intercept)
    if candidates:
        note = "least squares has nothing to fit to: mean compensation instead"
    else:
        note = "repair skipped: no neuron is ever active"
    return [NOTHING, *candidates], note
