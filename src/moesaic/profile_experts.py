"""The statistics of many experts, each on its own tokens, as grouped products in one pass.

Shape suffixes: E experts, T tokens of one, P pairs of a token and an expert, sorted by expert,
D hidden_size, M neurons of an expert, N outputs of a projection, K activation_top_k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from moesaic.adapters import DenseFFN
from moesaic.errors import MoesaicError
from moesaic.inputs import Inputs
from moesaic.profile import SAMPLE_TOKENS, Profile, binary

BLOCK_PAIRS = 4096
_ROW_BYTES = 16  # torch's grouped product wants rows of a multiple of these


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

    Experts have gates, no biases and equal sizes. Beyond what it returns it copies the experts'
    first two matrices and their tokens. Raises MoesaicError, with the places of the experts,
    where hidden states are not finite.
    """
    ffns = [ffn.with_unit_rows() for ffn in ffns] if normalise else list(ffns)
    first, count = ffns[0], len(ffns)
    device, neurons = first.up_FD.device, first.intermediate_size
    top_k = min(activation_top_k or 0, neurons)
    gate_EMD = torch.stack([ffn.gate_FD for ffn in ffns if ffn.gate_FD is not None])
    up_EMD = torch.stack([ffn.up_FD for ffn in ffns])
    act: Any = ACT2FN[first.activation]

    tokens_E = torch.tensor([one.tokens for one in inputs], device=device)
    x_PD = torch.cat([x_TD for one in inputs for x_TD in one.fit()])
    if normalise:
        x_PD = nn.functional.normalize(x_PD, dim=-1)
    expert_P = torch.arange(count, device=device).repeat_interleave(tokens_E)
    place_P = torch.arange(len(x_PD), device=device) - (tokens_E.cumsum(0) - tokens_E)[expert_P]
    stride_E = (tokens_E + SAMPLE_TOKENS - 1) // SAMPLE_TOKENS
    sampled_P = (place_P % stride_E[expert_P] == 0) & sample

    energy_EM = torch.zeros(count, neurons, dtype=torch.float64, device=device)
    sum_EM = torch.zeros_like(energy_EM)
    gram_EMM = torch.zeros(count, neurons, neurons, device=device) if gram else None
    marks, sample_x, sample_h = [], [], []
    blocks = zip(*(t.split(BLOCK_PAIRS) for t in (x_PD, expert_P, sampled_P)), strict=True)
    for x, expert, sampled in blocks:
        size_E = torch.bincount(expert, minlength=count)
        h = act(grouped_linear(x, gate_EMD, size_E)).mul_(grouped_linear(x, up_EMD, size_E))
        h = h.float()
        none_EM = torch.zeros(count, neurons, device=device)
        energy_EM += none_EM.index_add(0, expert, h.square())
        sum_EM += none_EM.index_add(0, expert, h)
        if gram_EMM is not None:
            gram_EMM += grouped_gram(h, size_E)
        if sample:
            sample_x.append(x[sampled].float())
            sample_h.append(h[sampled])
        if top_k:
            marks.append(h.abs_().topk(top_k, dim=-1, sorted=False).indices.int().cpu())
    broken = (~energy_EM.isfinite().all(dim=1)).nonzero()[:, 0].tolist()
    if broken:
        raise BrokenExpertsError(broken)
    tokens: list[int] = tokens_E.tolist()
    active_E = torch.cat(marks).split(tokens) if marks else [None] * count
    sizes = ((tokens_E + stride_E - 1) // stride_E.clamp(min=1)).tolist()
    x_E = torch.cat(sample_x).split(sizes) if sample else [None] * count
    h_E = torch.cat(sample_h).split(sizes) if sample else [None] * count
    energy, total = energy_EM.cpu().numpy(), sum_EM.cpu().numpy()
    return [
        Profile(
            tokens[e],
            energy[e],
            total[e],
            None if (active_TK := active_E[e]) is None else binary(active_TK.numpy(), neurons),
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


def grouped_linear(
    x_PD: torch.Tensor, weight_END: torch.Tensor, size_E: torch.Tensor
) -> torch.Tensor:
    """x W_e^T (P, N) for rows sorted by expert, `size_E` rows of each; 2 P N D FLOPs."""
    if _aligned(x_PD):
        ends_E = size_E.cumsum(0, dtype=torch.int32)
        return nn.functional.grouped_mm(x_PD, weight_END.mT, offs=ends_E)
    parts = zip(x_PD.split(size_E.tolist()), weight_END, strict=True)
    return torch.cat([nn.functional.linear(x_TD, weight_ND) for x_TD, weight_ND in parts])


def grouped_gram(h_PM: torch.Tensor, size_E: torch.Tensor) -> torch.Tensor:
    """h_e^T h_e (E, M, M) for rows sorted by expert; 2 P M^2 FLOPs."""
    if _aligned(h_PM):
        return nn.functional.grouped_mm(h_PM.T, h_PM, offs=size_E.cumsum(0, dtype=torch.int32))
    return torch.stack([h_TM.T @ h_TM for h_TM in h_PM.split(size_E.tolist())])


def _aligned(rows: torch.Tensor) -> bool:
    """Whether torch has a grouped product for such rows."""
    whole = rows.shape[1] * rows.element_size() % _ROW_BYTES == 0
    return whole and hasattr(nn.functional, "grouped_mm")
