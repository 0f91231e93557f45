"""Random neurons chosen one by one, and inputs whose choice no rounding decides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moesaic.modeling import (
    BlockConfig,
    MoesaicCopy,
    MoesaicInt8Neurons,
    MoesaicNeurons,
    RouterConfig,
    Sizes,
    packed,
)


def neurons_of(
    hidden: int,
    count: int,
    kind: str = "copies",
    *,
    bits: int = 4,
    exact: float = 0.4,
    bias: bool = False,
    activation: str = "silu",
    dtype: torch.dtype = torch.float32,
    runs: float = 0.5,
    int8: bool = False,
) -> MoesaicNeurons:
    """Random neurons; half of them run for `inputs_of`, some of these exactly."""
    router = RouterConfig(kind, "threshold")
    if kind == "copies":
        router = RouterConfig(kind, "threshold", bits=bits, exact=exact)
    block = BlockConfig("neurons", hidden, True, bias, activation, True, router)
    active = max(1, int(count * runs))
    made_of = MoesaicInt8Neurons if int8 else MoesaicNeurons
    neurons = made_of(block, Sizes(shared=0, expert=1, num_routed=count, num_active=active))
    generator = torch.Generator().manual_seed(hidden + count)
    for parameter in neurons.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / hidden**0.5
    neurons.to(dtype)
    chooser: Any = neurons.router
    for copy in neurons.modules():
        if isinstance(copy, MoesaicCopy):
            fill(copy, generator, dtype)
    if int8:
        fill_rows(neurons.down_proj, generator, dtype)
    chooser.selection_bias = torch.randn(count, generator=generator) / 4
    if not chooser.reads_gates:
        chooser.exact_margin = chooser.exact_margin.float()
    set_thresholds(neurons, active)
    return neurons.eval()


def fill(copy: MoesaicCopy, generator: torch.Generator, dtype: torch.dtype) -> None:
    half = 2 ** (copy.bits - 1)
    shape = (copy.out_features, copy.in_features)
    code_RI = torch.randint(-half, half, shape, generator=generator, dtype=torch.int8)
    planes_BRP = packed(code_RI, copy.bits)
    if copy.planes.shape != planes_BRP.shape:  # what a copy leaves, row by row
        planes_BRP = planes_BRP.transpose(0, 1).contiguous()
    copy.planes = planes_BRP
    scales = torch.rand(copy.scales.shape, generator=generator) / copy.in_features**0.5
    copy.scales = scales.to(dtype)
    if copy.bias is not None:
        copy.bias = torch.randn(copy.out_features, generator=generator).to(dtype)


def fill_rows(rows: Any, generator: torch.Generator, dtype: torch.dtype) -> None:
    rows.codes = torch.randint(-128, 128, rows.codes.shape, generator=generator, dtype=torch.int8)
    scales = torch.rand(rows.scales.shape, generator=generator) / 100
    rows.scales = scales.to(dtype)
    rows.bias = torch.randn(rows.bias.shape, generator=generator).to(dtype)


def set_thresholds(neurons: Any, active: int) -> None:
    """Into the widest gaps between scores, so that rounding decides nothing."""
    x_TD = inputs_of(neurons, 32)
    score = neurons.scores(x_TD).flatten().sort().values
    places = len(score) * (1 - active / neurons.sizes.num_routed)
    neurons.router.selection_bias -= gap_near(score, int(places))
    if not neurons.router.reads_gates:
        score = neurons.scores(x_TD).flatten().sort().values
        positive = score[score > 0]
        neurons.router.exact_margin.fill_(gap_near(positive, len(positive) // 2))


def gap_near(ordered: Tensor, place: int) -> float:
    first = max(place - 20, 0)
    near = ordered[first : place + 20]
    if len(near) < 2:
        return float(near[0]) - 0.1
    widest = int((near[1:] - near[:-1]).argmax())
    return float(near[widest] + near[widest + 1]) / 2


def inputs_of(neurons: Any, tokens: int) -> Tensor:
    hidden = neurons.block.hidden_size
    generator = torch.Generator().manual_seed(tokens)
    x_TD = torch.randn(tokens, hidden, generator=generator)
    return x_TD.to(neurons.down_proj.bias.dtype)
