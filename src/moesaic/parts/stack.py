"""The converted experts of one layer, stacked into the weights of a two-level block, and back.

Shape suffixes: D hidden_size, S shared neurons, M neurons, E outer experts, R sub-experts of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from moesaic.families import DenseFFN
from moesaic.modeling import MoesaicBlock, MoesaicHierarchy, MoesaicRouter
from moesaic.parts.carve import carve
from moesaic.parts.partition import Partition

State = Mapping[str, torch.Tensor]
_FLOAT32 = ("expert_scale", "selection_bias")


def whole_state(ffn: DenseFFN, config: Any) -> State:
    """The state of an expert that stays as it was: its neurons in order, a router of zeros."""
    moe = config.moesaic
    if not moe["num_routed"]:
        assert ffn.gate_FD is not None
        state = {
            "shared_expert.gate_proj.weight": ffn.gate_FD,
            "shared_expert.up_proj.weight": ffn.up_FD,
            "shared_expert.down_proj.weight": ffn.down_DF,
        }
        bias = {"output_bias": ffn.down_DF.new_zeros(len(ffn.down_DF))}
        return state | (bias if moe["output_bias"] else {})
    neurons = np.arange(ffn.intermediate_size)
    shared_S, rest = neurons[: moe["shared_size"]], neurons[moe["shared_size"] :]
    parts = Partition(shared_S, rest.reshape(moe["num_routed"], -1))
    router = {
        name: torch.zeros_like(
            tensor, dtype=None if name in _FLOAT32 else ffn.up_FD.dtype
        )
        for name, tensor in MoesaicRouter(config).state_dict().items()
    }
    return carve(ffn, parts, router, config).state_dict()


@torch.no_grad()
def stack_experts(states: Sequence[State], config: Any, layer: int) -> MoesaicHierarchy:
    """One layer's block from the states of its experts' blocks; copies every weight once."""
    with torch.device("meta"):
        block = MoesaicHierarchy(config, layer)
    shapes, first = block.state_dict(), states[0]
    stacked = {}
    for name, meant in shapes.items():
        like = first[_source(name)[0]]
        whole = like.new_zeros(meant.shape)
        for expert, state in enumerate(states):
            _put(whole, name, state, expert, len(states))
        stacked[name] = whole
    block.load_state_dict(stacked, assign=True)
    return block.eval()


def _source(name: str) -> tuple[str, ...]:
    """What the tensors of an expert's own block are called that make up one of the stack's."""
    if name == "shared_experts.gate_up_proj":
        return "shared_expert.gate_proj.weight", "shared_expert.up_proj.weight"
    if name.startswith("shared_experts."):
        return (name.replace("shared_experts", "shared_expert") + ".weight",)
    return (name,)


def _put(
    whole: torch.Tensor, name: str, state: State, expert: int, experts: int
) -> None:
    """Copies one expert's tensors to their place; what they leave empty is zero."""
    sources = [state[source] for source in _source(name)]
    if name.startswith("experts."):
        rows = len(whole) // experts
        whole[expert * rows : (expert + 1) * rows] = sources[0]
        return
    height = whole.shape[1] // len(sources)
    for place, source in enumerate(sources):
        corner = whole[expert, place * height : place * height + len(source)]
        corner[..., : source.shape[-1]] = source


@torch.no_grad()
def unstack_expert(block: MoesaicHierarchy, config: Any, expert: int) -> MoesaicBlock:
    """The block of one expert as it was before `stack_experts`, copied."""
    with torch.device("meta"):
        one = MoesaicBlock(config)
    experts = config.moesaic["num_outer"]
    own: dict[str, torch.Tensor] = {}
    for name, tensor in block.state_dict().items():
        sources = _source(name)
        if name.startswith("experts."):
            own[name] = tensor.unflatten(0, (experts, -1))[expert]
            continue
        own |= dict(zip(sources, tensor[expert].chunk(len(sources)), strict=True))
    state = {}
    for name, meant in one.state_dict().items():
        index = tuple(slice(size) for size in meant.shape)
        state[name] = own[name][index].clone()
    one.load_state_dict(state, assign=True)
    return one.eval()
