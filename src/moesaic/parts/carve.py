"""Cuts one dense FFN into the weights of a replacement.

Shape suffixes: D hidden_size, F neurons, N some of them, S shared neurons,
R routed experts, M neurons of one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.families import DenseFFN
from moesaic.modeling import (
    REPLACEMENTS,
    BlockConfig,
    MoesaicBlock,
    MoesaicInt8Neurons,
    MoesaicNeurons,
    MoesaicPromptNeurons,
    Sizes,
    packed,
)
from moesaic.parts.copies import nearest_bits
from moesaic.parts.partition import Partition

State = dict[str, Tensor]


def neuron_rows(ffn: DenseFFN, index: NDArray[np.int64]) -> State:
    """Some neurons' input weights and biases, by the names that routers use."""
    index_N = torch.from_numpy(index).to(ffn.up_FD.device)
    state = {"up_proj.weight": ffn.up_FD[index_N]}
    if ffn.gate_FD is not None:
        state["gate_proj.weight"] = ffn.gate_FD[index_N]
    if ffn.up_bias_F is not None:
        state["up_proj.bias"] = ffn.up_bias_F[index_N]
    if ffn.gate_bias_F is not None:
        state["gate_proj.bias"] = ffn.gate_bias_F[index_N]
    return state


@torch.no_grad()
def carve(
    ffn: DenseFFN,
    partition: Partition,
    router: Any,
    block: BlockConfig,
    sizes: Sizes,
    more: State | None = None,
) -> MoesaicBlock:
    """A block of rows of `gate` and `up` and columns of `down`, copied.

    `router` stands in it as it is; None without routed experts. `more` are the weights
    that a block of another kind has besides. Costs one copy of the FFN's weights.
    """
    kind = REPLACEMENTS[block.replacement]
    with torch.device("meta"):
        carved: MoesaicBlock = kind(block, sizes, router)

    state = dict(more or {})
    if len(partition.shared_S):
        state |= _shared_state(ffn, partition.shared_S)
    if len(partition.experts_RM):
        state |= _experts_state(ffn, partition.experts_RM, sizes.padded)
        state |= _prefixed("router", router.state_dict())
    if block.output_bias:
        state["output_bias"] = _output_bias(ffn)

    for name, tensor in state.items():
        state[name] = tensor.contiguous()
    carved.load_state_dict(state, assign=True)
    return carved.eval()


@torch.no_grad()
def carve_neurons(
    ffn: DenseFFN,
    router: Any,
    block: BlockConfig,
    sizes: Sizes,
) -> MoesaicNeurons:
    """The same where every neuron is an expert: W_down is transposed."""
    with torch.device("meta"):
        carved = MoesaicNeurons(block, sizes)

    all_neurons = np.arange(ffn.intermediate_size)
    state = neuron_rows(ffn, all_neurons)
    state["down_proj.weight"] = ffn.down_DF.T
    state["down_proj.bias"] = _output_bias(ffn)
    state |= _prefixed("router", router.state_dict())

    for name, tensor in state.items():
        state[name] = tensor.contiguous().clone()
    carved.load_state_dict(state, assign=True)
    carved.router.num_active = router.num_active
    return carved.eval()


@torch.no_grad()
def carve_int8_neurons(
    ffn: DenseFFN,
    router: Any,
    block: BlockConfig,
    sizes: Sizes,
) -> MoesaicInt8Neurons:
    """The same in 8 bits a weight: what the router's copies leave, and W_down rounded.

    Costs 60 simple steps a weight.
    """
    with torch.device("meta"):
        carved = MoesaicInt8Neurons(block, sizes)
    carved.router.load_state_dict(router.state_dict(), assign=True)
    assert ffn.gate_FD is not None
    _leave(carved.gate_proj, ffn.gate_FD, router.gate_copy)
    _leave(carved.up_proj, ffn.up_FD, router.up_copy)
    rows = nearest_bits(ffn.down_DF.T, 8, ffn.down_DF.dtype)
    down: Any = carved.down_proj
    down.codes = rows.code_RI
    down.scales = rows.scale_RG
    down.bias = _output_bias(ffn)
    carved.router.num_active = router.num_active
    return carved.eval()


def _leave(rest: Any, weight_FD: Tensor, copy: Any) -> None:
    """What a copy leaves of a matrix, in place."""
    dtype = weight_FD.dtype
    left_FD = weight_FD.float() - copy.weight().float()
    few = nearest_bits(left_FD, rest.bits, dtype)
    planes_BFP = packed(few.code_RI, rest.bits)
    rest.planes = planes_BFP.transpose(0, 1).contiguous()
    rest.scales = few.scale_RG


@torch.no_grad()
def carve_prompt_neurons(
    ffn: DenseFFN, block: BlockConfig, sizes: Sizes
) -> MoesaicPromptNeurons:
    """The FFN as it is, of which a prompt is to choose neurons. Copies the weights."""
    with torch.device("meta"):
        carved = MoesaicPromptNeurons(block, sizes)
    all_neurons = np.arange(ffn.intermediate_size)
    state = neuron_rows(ffn, all_neurons)
    state["down_proj.weight"] = ffn.down_DF.clone()
    if block.output_bias:
        state["down_proj.bias"] = _output_bias(ffn)
    for name, tensor in state.items():
        state[name] = tensor.contiguous()
    carved.load_state_dict(state, assign=True)
    return carved.eval()


def _shared_state(ffn: DenseFFN, shared_S: NDArray[np.int64]) -> State:
    """Weights of the shared expert."""
    index_S = torch.from_numpy(shared_S)
    state = neuron_rows(ffn, shared_S)
    state["down_proj.weight"] = ffn.down_DF[:, index_S]
    return _prefixed("shared_expert", state)


def _experts_state(
    ffn: DenseFFN,
    experts_RM: NDArray[np.int64],
    padded: int,
) -> State:
    """Fused weights of the routed experts, each filled up with neurons of zero."""
    index_RM = torch.from_numpy(experts_RM).to(ffn.up_FD.device)
    name = "gate_up_proj" if ffn.gated else "up_proj"
    weights = _stacked(index_RM, padded, ffn.gate_FD, ffn.up_FD)
    state = {f"experts.{name}": weights}
    if ffn.up_bias_F is not None:
        biases = _stacked(index_RM, padded, ffn.gate_bias_F, ffn.up_bias_F)
        state[f"experts.{name}_bias"] = biases

    experts, size = index_RM.shape
    hidden_size = len(ffn.down_DF)
    down_RDM = ffn.down_DF.new_zeros(experts, hidden_size, padded)
    for down_DM, members_M in zip(down_RDM, index_RM, strict=True):
        down_DM[:, :size] = ffn.down_DF[:, members_M]
    state["experts.down_proj"] = down_RDM
    return state


def _stacked(index_RM: Tensor, padded: int, *sources: Tensor | None) -> Tensor:
    """Rows of each expert (R, rows, ...), gate before up, filled up with zeros."""
    projections = [source for source in sources if source is not None]
    experts, size = index_RM.shape
    rows = len(projections) * padded
    row_shape = projections[0].shape[1:]
    stacked = projections[0].new_zeros(experts, rows, *row_shape)
    # Expert by expert: the copies in between stay small beside the weights.
    for expert, members_M in zip(stacked, index_RM, strict=True):
        for place, projection in enumerate(projections):
            start = place * padded
            end = start + size
            expert[start:end] = projection[members_M]
    return stacked


def _output_bias(ffn: DenseFFN) -> Tensor:
    if ffn.down_bias_D is not None:
        return ffn.down_bias_D.clone()
    hidden_size = len(ffn.down_DF)
    return ffn.down_DF.new_zeros(hidden_size)


def _prefixed(module: str, state: State) -> State:
    """A module's state by the names that its parent has for it."""
    prefixed = {}
    for name, tensor in state.items():
        prefixed[f"{module}.{name}"] = tensor
    return prefixed
