"""The statistics of many experts, each on its own tokens, as grouped products in one pass.

Shape suffixes: E experts, T tokens of one, P pairs of a token and an expert, sorted by expert,
D hidden_size, M neurons of an expert, N outputs of a projection, K activation_top_k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from moesaic.calibration.ffn_inputs import Inputs
from moesaic.calibration.statistics import SAMPLE_TOKENS, Profile, binary
from moesaic.errors import MoesaicError
from moesaic.families import DenseFFN
from moesaic.modeling import can_group

BLOCK_PAIRS = 4096


@torch.no_grad()
def profile_experts(
    inputs: Sequence[Inputs],
    ffns: Sequence[DenseFFN],
    activation_top_k: int | None = None,
    normalise: bool = False,
    sample: bool = False,
    gram: bool = False,
) -> list[Profile]:
    """What `profile_ffn` finds for each expert on the tokens it is fitted on, up to rounding.

    Experts have gates, no biases and equal sizes. Beyond what it returns it holds a copy of the
    experts' first two matrices (two where normalised), a block of about BLOCK_PAIRS pairs, and
    with `gram` 4 E M^2 bytes. Raises BrokenExpertsError where hidden states are not finite.
    """
    ffns = [ffn.with_unit_rows() for ffn in ffns] if normalise else list(ffns)
    first, count = ffns[0], len(ffns)
    device, neurons = first.up_FD.device, first.intermediate_size
    top_k = min(activation_top_k or 0, neurons)
    gate_EMD = torch.stack([ffn.gate_FD for ffn in ffns if ffn.gate_FD is not None])
    up_EMD = torch.stack([ffn.up_FD for ffn in ffns])
    act: Any = ACT2FN[first.activation]

    energy_EM = torch.zeros(count, neurons, dtype=torch.float64, device=device)
    sum_EM = torch.zeros_like(energy_EM)
    gram_EMM = torch.zeros(count, neurons, neurons, device=device) if gram else None
    marks, sample_x, sample_h = [], [], []
    sampled_E = [0] * count
    for x_PD, starts, sizes in _packed(inputs):
        if normalise:
            x_PD = nn.functional.normalize(x_PD, dim=-1)
        size_E = torch.tensor(sizes, device=device)
        gate_PM = act(grouped_linear(x_PD, gate_EMD, size_E))
        h_PM = gate_PM.mul_(grouped_linear(x_PD, up_EMD, size_E)).float()
        energy_EM += _sums(h_PM.square(), size_E)
        sum_EM += _sums(h_PM, size_E)
        if gram_EMM is not None:
            gram_EMM += grouped_gram(h_PM, size_E)
        if sample:
            rows: list[int] = []
            place = 0
            for e, (start, size) in enumerate(zip(starts, sizes, strict=True)):
                stride = -(-inputs[e].tokens // SAMPLE_TOKENS)
                found = range(place + -start % stride, place + size, stride)
                sampled_E[e] += len(found)
                rows += found
                place += size
            sample_x.append(x_PD[rows].float())
            sample_h.append(h_PM[rows])
        if top_k:
            marks.append(
                h_PM.abs_().topk(top_k, dim=-1, sorted=False).indices.int().cpu()
            )
    broken = (~energy_EM.isfinite().all(dim=1)).nonzero()[:, 0].tolist()
    if broken:
        raise BrokenExpertsError(broken)
    tokens = [one.tokens for one in inputs]
    active_E = torch.cat(marks).split(tokens) if marks else [None] * count
    x_E = torch.cat(sample_x).split(sampled_E) if sample else [None] * count
    h_E = torch.cat(sample_h).split(sampled_E) if sample else [None] * count
    energy, total = energy_EM.cpu().numpy(), sum_EM.cpu().numpy()
    return [
        Profile(
            tokens[e],
            energy[e],
            total[e],
            None
            if (active_TK := active_E[e]) is None
            else binary(active_TK.numpy(), neurons),
            None if gram_EMM is None else gram_EMM[e],
            x_E[e],
            h_E[e],
        )
        for e in range(count)
    ]


class BrokenExpertsError(MoesaicError):
    """Experts, by their places in what was given, whose hidden states are not finite."""

    def __init__(self, experts: list[int]):
        super().__init__("the FFN's activations are not finite")
        self.experts = experts


def _packed(
    inputs: Sequence[Inputs],
) -> Iterator[tuple[torch.Tensor, list[int], list[int]]]:
    """Blocks of about BLOCK_PAIRS rows, expert by expert.

    With each, for every expert, how many of its rows came before and how many are in the block.
    """
    count, done = len(inputs), [0] * len(inputs)
    held: list[torch.Tensor] = []
    sizes = [0] * count
    for e, one in enumerate(inputs):
        for x_TD in one.fit():
            for part_TD in x_TD.split(BLOCK_PAIRS):
                held.append(part_TD)
                sizes[e] += len(part_TD)
                if sum(sizes) >= BLOCK_PAIRS:
                    yield torch.cat(held), done, sizes
                    done = [a + b for a, b in zip(done, sizes, strict=True)]
                    held, sizes = [], [0] * count
    if held:
        yield torch.cat(held), done, sizes


def _sums(values_PM: torch.Tensor, size_E: torch.Tensor) -> torch.Tensor:
    """Sums of each expert's rows (E, M); in the same order every time, which atomics are not."""
    return torch.segment_reduce(values_PM, "sum", lengths=size_E, axis=0)


def grouped_linear(
    x_PD: torch.Tensor, weight_END: torch.Tensor, size_E: torch.Tensor
) -> torch.Tensor:
    """x W_e^T (P, N) for rows sorted by expert, `size_E` rows of each; 2 P N D FLOPs."""
    if can_group(x_PD):
        ends_E = size_E.cumsum(0, dtype=torch.int32)
        return nn.functional.grouped_mm(x_PD, weight_END.mT, offs=ends_E)
    parts = zip(x_PD.split(size_E.tolist()), weight_END, strict=True)
    return torch.cat(
        [nn.functional.linear(x_TD, weight_ND) for x_TD, weight_ND in parts]
    )


def grouped_gram(h_PM: torch.Tensor, size_E: torch.Tensor) -> torch.Tensor:
    """h_e^T h_e (E, M, M) for rows sorted by expert; 2 P M^2 FLOPs."""
    if can_group(h_PM):
        return nn.functional.grouped_mm(
            h_PM.T, h_PM, offs=size_E.cumsum(0, dtype=torch.int32)
        )
    return torch.stack([h_TM.T @ h_TM for h_TM in h_PM.split(size_E.tolist())])
