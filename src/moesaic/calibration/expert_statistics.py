"""Activation statistics of many experts, each on its own tokens, in grouped products.

Shape suffixes: E experts, T tokens of one, P pairs of a token and an expert, sorted by
expert, D hidden_size, M neurons of an expert, N outputs of a projection,
K activation_top_k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.statistics import (
    PLAIN,
    Statistics,
    StatisticsKind,
    binary,
    sample_stride,
)
from moesaic.errors import MoesaicError
from moesaic.families import DenseFFN
from moesaic.families.ffn import unit_rows
from moesaic.modeling import can_group

BLOCK_PAIRS = 4096


class BrokenExpertsError(MoesaicError):
    """Experts, by place, whose hidden states are not finite."""

    def __init__(self, experts: list[int]):
        super().__init__("the FFN's activations are not finite")
        self.experts = experts


@dataclass(frozen=True)
class _Block:
    """Rows sorted by expert; of each expert how many came before and how many now."""

    x_PD: Tensor
    seen_E: list[int]
    size_E: list[int]


@torch.no_grad()
def compute_expert_statistics(
    inputs: Sequence[FFNInputs],
    ffns: Sequence[DenseFFN],
    kind: StatisticsKind = PLAIN,
) -> list[Statistics]:
    """What `compute_statistics` gives for each expert on its tokens, up to rounding.

    Experts have gates, no biases and equal sizes. Beyond what it returns it holds a
    copy of the experts' first two matrices (two where normalised), a block of about
    BLOCK_PAIRS pairs, and with `gram` 4 E M^2 bytes. Raises BrokenExpertsError where
    hidden states are not finite.
    """
    experts = list(ffns)
    if kind.normalise:
        experts = [ffn.with_unit_rows() for ffn in ffns]
    first = experts[0]
    count = len(experts)
    device = first.up_FD.device
    neurons = first.intermediate_size
    top_k = min(kind.activation_top_k or 0, neurons)
    gates = [ffn.gate_FD for ffn in experts if ffn.gate_FD is not None]
    gate_EMD = torch.stack(gates)
    up_EMD = torch.stack([ffn.up_FD for ffn in experts])
    act: Any = ACT2FN[first.activation]

    energy_EM = torch.zeros(count, neurons, dtype=torch.float64, device=device)
    sum_EM = torch.zeros_like(energy_EM)
    gram_EMM = None
    if kind.gram:
        gram_EMM = torch.zeros(count, neurons, neurons, device=device)
    marks: list[Tensor] = []
    sample_x: list[Tensor] = []
    sample_h: list[Tensor] = []
    sampled_E = [0] * count
    for block in _packed(inputs):
        x_PD = block.x_PD
        if kind.normalise:
            x_PD = unit_rows(x_PD)
        size_E = torch.tensor(block.size_E, device=device)
        gate_PM = act(grouped_linear(x_PD, gate_EMD, size_E))
        h_PM = gate_PM.mul_(grouped_linear(x_PD, up_EMD, size_E)).float()
        energy_EM += _sums(h_PM.square(), size_E)
        sum_EM += _sums(h_PM, size_E)
        if gram_EMM is not None:
            gram_EMM += grouped_gram(h_PM, size_E)
        if kind.sample:
            rows = _sampled_rows(block, inputs, sampled_E)
            sample_x.append(x_PD[rows].float())
            sample_h.append(h_PM[rows])
        if top_k:
            largest_PK = h_PM.abs_().topk(top_k, dim=-1, sorted=False).indices
            marks.append(largest_PK.int().cpu())
    finite_E = energy_EM.isfinite().all(dim=1)
    if not finite_E.all():
        broken = (~finite_E).nonzero()[:, 0]
        raise BrokenExpertsError(broken.tolist())

    tokens_E = [expert_inputs.tokens for expert_inputs in inputs]
    energy = energy_EM.cpu().numpy()
    total = sum_EM.cpu().numpy()
    marks_E = _by_expert(marks, tokens_E)
    x_E = _by_expert(sample_x, sampled_E)
    h_E = _by_expert(sample_h, sampled_E)
    statistics = []
    for e, tokens in enumerate(tokens_E):
        active_TK = marks_E[e]
        active = None
        if active_TK is not None:
            active = binary(active_TK.numpy(), neurons)
        gram_MM = None
        if gram_EMM is not None:
            gram_MM = gram_EMM[e]
        expert_statistics = Statistics(
            tokens=tokens,
            energy_F=energy[e],
            sum_F=total[e],
            active=active,
            gram_FF=gram_MM,
            sample_x_SD=x_E[e],
            sample_h_SF=h_E[e],
        )
        statistics.append(expert_statistics)
    return statistics


def _by_expert(
    blocks: list[Tensor],
    size_E: list[int],
) -> Sequence[Tensor | None]:
    """Each expert's rows of blocks that are sorted by expert; None without any."""
    if not blocks:
        return [None] * len(size_E)
    rows_E: Sequence[Tensor] = torch.cat(blocks).split(size_E)
    return rows_E


def _sampled_rows(
    block: _Block,
    inputs: Sequence[FFNInputs],
    sampled_E: list[int],
) -> list[int]:
    """The block's rows that belong to samples; adds to how many each expert has."""
    rows: list[int] = []
    start = 0
    for e, size in enumerate(block.size_E):
        end = start + size
        stride = sample_stride(inputs[e].tokens)
        offset = -block.seen_E[e] % stride
        expert_rows = range(start + offset, end, stride)
        sampled_E[e] += len(expert_rows)
        rows += expert_rows
        start = end
    return rows


def _packed(inputs: Sequence[FFNInputs]) -> Iterator[_Block]:
    """Blocks of about BLOCK_PAIRS rows, expert by expert."""
    count = len(inputs)
    seen_E = [0] * count
    size_E = [0] * count
    parts: list[Tensor] = []
    for e, expert_inputs in enumerate(inputs):
        for x_TD in expert_inputs.fit():
            for part_TD in x_TD.split(BLOCK_PAIRS):
                parts.append(part_TD)
                size_E[e] += len(part_TD)
                if sum(size_E) >= BLOCK_PAIRS:
                    yield _Block(torch.cat(parts), seen_E, size_E)
                    seen_E = list(map(add, seen_E, size_E))
                    size_E = [0] * count
                    parts = []
    if parts:
        yield _Block(torch.cat(parts), seen_E, size_E)


def _sums(values_PM: Tensor, size_E: Tensor) -> Tensor:
    """Sums of each expert's rows (E, M), in the same order every time.

    Atomic additions are not.
    """
    return torch.segment_reduce(values_PM, "sum", lengths=size_E, axis=0)


def grouped_linear(x_PD: Tensor, weight_END: Tensor, size_E: Tensor) -> Tensor:
    """x W_e^T (P, N) for rows sorted by expert, `size_E` of each; 2 P N D FLOPs."""
    if can_group(x_PD):
        ends_E = size_E.cumsum(0, dtype=torch.int32)
        return nn.functional.grouped_mm(x_PD, weight_END.mT, offs=ends_E)
    inputs_E = x_PD.split(size_E.tolist())
    outputs_E = map(nn.functional.linear, inputs_E, weight_END)
    return torch.cat(list(outputs_E))


def grouped_gram(h_PM: Tensor, size_E: Tensor) -> Tensor:
    """h_e^T h_e (E, M, M) for rows sorted by expert; 2 P M^2 FLOPs."""
    if can_group(h_PM):
        ends_E = size_E.cumsum(0, dtype=torch.int32)
        return nn.functional.grouped_mm(h_PM.T, h_PM, offs=ends_E)
    hidden_E = h_PM.split(size_E.tolist())
    grams_E = [h_TM.T @ h_TM for h_TM in hidden_E]
    return torch.stack(grams_E)
