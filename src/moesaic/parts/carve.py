"""Cuts one dense FFN into the weights of a replacement.

Shape suffixes: D hidden_size, F neurons, S shared neurons, R routed experts, M neurons
of one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.families import DenseFFN
from moesaic.modeling import BlockConfig, MoesaicBlock, MoesaicNeurons, Sizes
from moesaic.parts.partition import Partition

State = dict[str, Tensor]


def neuron_rows(ffn: DenseFFN, index: NDArray[np.int64]) -> State:
    """Some neurons' input weights and biases, by the names that routers use."""
    index_t = torch.from_numpy(index).to(ffn.up_FD.device)
    state = {"up_proj.weight": ffn.up_FD[index_t]}
    if ffn.gate_FD is not None:
        state["gate_proj.weight"] = ffn.gate_FD[index_t]
    if ffn.up_bias_F is not None:
        state["up_proj.bias"] = ffn.up_bias_F[index_t]
    if ffn.gate_bias_F is not None:
        state["gate_proj.bias"] = ffn.gate_bias_F[index_t]
    return state


@torch.no_grad()
def carve(
    ffn: DenseFFN,
    partition: Partition,
    router: Any,
    block: BlockConfig,
    sizes: Sizes,
) -> MoesaicBlock:
    """A block of rows of `gate` and `up` and columns of `down`, copied.

    `router` stands in it as it is; None without routed experts. Costs one copy of the
    FFN's weights.
    """
    with torch.device("meta"):
        carved = MoesaicBlock(block, sizes, router)
    state: State = {}
    if len(partition.shared_S):
        state |= _shared_state(ffn, partition.shared_S)
    if len(partition.experts_RM):
        state |= _experts_state(ffn, partition.experts_RM, sizes.padded)
        router_state = router.state_dict()
        state |= {
            f"router.{name}": tensor for name, tensor in router_state.items()
        }
    if block.output_bias:
        state["output_bias"] = _output_bias(ffn)
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    carved.load_state_dict(state, assign=True)
    return carved.eval()


@torch.no_grad()
def carve_neurons(
    ffn: DenseFFN, router: Any, block: BlockConfig, sizes: Sizes
) -> MoesaicNeurons:
    """The same where every neuron is an expert: the FFN's weights, W_down transposed."""
    with torch.device("meta"):
        carved = MoesaicNeurons(block, sizes)
    state = neuron_rows(ffn, np.arange(ffn.intermediate_size))
    state["down_proj.weight"] = ffn.down_DF.T
    state["down_proj.bias"] = _output_bias(ffn)
    router_state = router.state_dict()
    state |= {f"router.{name}": tensor for name, tensor in router_state.items()}
    state = {
        name: tensor.contiguous().clone() for name, tensor in state.items()
    }
    carved.load_state_dict(state, assign=True)
    carved.router.num_active = router.num_active
    return carved.eval()


def _shared_state(ffn: DenseFFN, shared_S: NDArray[np.int64]) -> State:
    state = neuron_rows(ffn, shared_S)
    state["down_proj.weight"] = ffn.down_DF[:, torch.from_numpy(shared_S)]
    return {f"shared_expert.{name}": tensor for name, tensor in state.items()}


def _experts_state(
    ffn: DenseFFN, experts_RM: NDArray[np.int64], padded: int
) -> State:
    """Fused weights of the routed experts, each filled up with neurons of zero."""
    index_RM = torch.from_numpy(experts_RM).to(ffn.up_FD.device)
    name = "gate_up_proj" if ffn.gated else "up_proj"
    state = {
        f"experts.{name}": _stacked(index_RM, padded, ffn.gate_FD, ffn.up_FD)
    }
    if ffn.up_bias_F is not None:
        biases = _stacked(index_RM, padded, ffn.gate_bias_F, ffn.up_bias_F)
        state[f"experts.{name}_bias"] = biases
    down_RDM = ffn.down_DF.new_zeros(len(index_RM), len(ffn.down_DF), padded)
    for down_DM, members_M in zip(down_RDM, index_RM, strict=True):
        down_DM[:, : len(members_M)] = ffn.down_DF[:, members_M]
    state["experts.down_proj"] = down_RDM
    return state


def _stacked(index_RM: Tensor, padded: int, *sources: Tensor | None) -> Tensor:
    """Rows of each expert (R, rows, ...), gate before up, each filled up with zeros."""
    given = [source for source in sources if source is not None]
    rows = len(given) * padded
    stacked = given[0].new_zeros(len(index_RM), rows, *given[0].shape[1:])
    # Expert by expert: the copies in between stay small beside the weights.
    for expert, members_M in zip(stacked, index_RM, strict=True):
        for place, source in enumerate(given):
            start = place * padded
            expert[start : start + len(members_M)] = source[members_M]
    return stacked


def _output_bias(ffn: DenseFFN) -> Tensor:
    if ffn.down_bias_D is None:
        return ffn.down_DF.new_zeros(len(ffn.down_DF))
    return ffn.down_bias_D.clone()
