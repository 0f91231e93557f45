"""Cuts one dense FFN into the weights of a MoE block.

Shape suffixes: D hidden_size, F neurons, S shared neurons, R routed experts, M neurons of one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic.families import DenseFFN
from moesaic.modeling import MoesaicBlock
from moesaic.parts.partition import Partition


def neuron_rows(ffn: DenseFFN, index: NDArray[np.int64]) -> dict[str, torch.Tensor]:
    """Some neurons' input weights and biases, by the names that routers and experts use."""
    index_t = torch.from_numpy(index).to(ffn.up_FD.device)
    state = {}
    for part, weight, bias in (
        ("gate_proj", ffn.gate_FD, ffn.gate_bias_F),
        ("up_proj", ffn.up_FD, ffn.up_bias_F),
    ):
        if weight is not None:
            state[f"{part}.weight"] = weight[index_t]
        if bias is not None:
            state[f"{part}.bias"] = bias[index_t]
    return state


@torch.no_grad()
def carve(
    ffn: DenseFFN, parts: Partition, router: dict[str, torch.Tensor], config: Any
) -> MoesaicBlock:
    """The block whose weights are rows of `gate` and `up` and columns of `down`, copied.

    `router` is the state of its router. Costs one copy of the FFN's weights.
    """
    with torch.device("meta"):
        block = MoesaicBlock(config)
    if block.neurons is not None:
        return _carve_neurons(block, ffn, parts, router)
    state: dict[str, torch.Tensor] = {}

    if len(parts.shared_S):
        shared = neuron_rows(ffn, parts.shared_S)
        shared["down_proj.weight"] = ffn.down_DF[:, torch.from_numpy(parts.shared_S)]
        state |= {f"shared_expert.{name}": tensor for name, tensor in shared.items()}
    if len(parts.experts_RM):
        # In float32 whatever the model's dtype: their updates are smaller than bf16 resolves.
        zero_R = ffn.up_FD.new_zeros(len(parts.experts_RM), dtype=torch.float32)
        state |= {
            "router.expert_scale": zero_R,
            "router.selection_bias": zero_R.clone(),
        }
        state |= {f"router.{name}": tensor for name, tensor in router.items()}
        experts_RM = torch.from_numpy(parts.experts_RM).to(ffn.up_FD.device)
        padded = config.moesaic["padded_size"]

        def stack(*sources: torch.Tensor | None) -> torch.Tensor:
            """Rows of each expert (R, rows, ...), gate before up, each padded with zero rows."""
            given = [source for source in sources if source is not None]
            rows = len(given) * padded
            stacked = given[0].new_zeros(len(experts_RM), rows, *given[0].shape[1:])
            # Expert by expert: the copies in between stay small beside the weights.
            for expert, members_M in zip(stacked, experts_RM, strict=True):
                for start, source in zip(range(0, rows, padded), given, strict=True):
                    expert[start : start + len(members_M)] = source[members_M]
            return stacked

        name = "gate_up_proj" if ffn.gated else "up_proj"
        state[f"experts.{name}"] = stack(ffn.gate_FD, ffn.up_FD)
        if ffn.up_bias_F is not None:
            state[f"experts.{name}_bias"] = stack(ffn.gate_bias_F, ffn.up_bias_F)
        down_RDM = ffn.down_DF.new_zeros(len(experts_RM), len(ffn.down_DF), padded)
        for down_DM, members_M in zip(down_RDM, experts_RM, strict=True):
            down_DM[:, : len(members_M)] = ffn.down_DF[:, members_M]
        state["experts.down_proj"] = down_RDM
    if config.moesaic["output_bias"]:
        bias_D = ffn.down_bias_D
        zeros_D = ffn.down_DF.new_zeros(len(ffn.down_DF))
        state["output_bias"] = zeros_D if bias_D is None else bias_D.clone()
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    block.load_state_dict(state, assign=True)
    return block.eval()


def _carve_neurons(
    block: MoesaicBlock,
    ffn: DenseFFN,
    parts: Partition,
    router: dict[str, torch.Tensor],
) -> MoesaicBlock:
    """The same where every neuron is an expert: the FFN's weights, W_down transposed."""
    assert (
        parts.neurons_N == np.arange(ffn.intermediate_size)
    ).all()  # as the router has them
    index_F = torch.from_numpy(parts.neurons_N).to(ffn.up_FD.device)
    state = neuron_rows(ffn, parts.neurons_N)
    state["down_proj.weight"] = ffn.down_DF.T[index_F]
    bias_D = ffn.down_bias_D
    state["down_proj.bias"] = (
        ffn.down_DF.new_zeros(len(ffn.down_DF)) if bias_D is None else bias_D
    )
    state |= {f"router.{name}": tensor for name, tensor in router.items()}
    state = {
        f"neurons.{name}": tensor.contiguous().clone() for name, tensor in state.items()
    }
    block.load_state_dict(state, assign=True)
    return block.eval()
