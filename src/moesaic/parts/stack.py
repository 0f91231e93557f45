"""The replacements of a layer's experts, stacked into one two-level module, and back.

Shape suffixes: S shared neurons, R sub-experts of an expert, M neurons of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moesaic.families import DenseFFN
from moesaic.modeling import (
    BlockConfig,
    MoesaicBlock,
    MoesaicHierarchy,
    MoesaicRouter,
    OuterConfig,
    Sizes,
    new_router,
)
from moesaic.parts.carve import carve
from moesaic.parts.partition import Partition

State = Mapping[str, Tensor]


def whole_state(ffn: DenseFFN, block: BlockConfig, sizes: Sizes) -> State:
    """The state of an expert that stays as it was.

    Its neurons are in order, and its router is zero.
    """
    if not sizes.num_routed:
        return _unrouted_state(ffn, block)
    neurons = np.arange(ffn.intermediate_size)
    routed = neurons[sizes.shared :].reshape(sizes.num_routed, -1)
    partition = Partition(neurons[: sizes.shared], routed)
    router = new_router(block, sizes).to(ffn.up_FD.device)
    for name, tensor in [*router.named_parameters(), *router.named_buffers()]:
        tensor.data.zero_()
        if name not in MoesaicRouter.float32_names:
            tensor.data = tensor.data.to(ffn.up_FD.dtype)
    return carve(ffn, partition, router, block, sizes).state_dict()


def _unrouted_state(ffn: DenseFFN, block: BlockConfig) -> State:
    assert ffn.gate_FD is not None
    state = {
        "shared_expert.gate_proj.weight": ffn.gate_FD,
        "shared_expert.up_proj.weight": ffn.up_FD,
        "shared_expert.down_proj.weight": ffn.down_DF,
    }
    if block.output_bias:
        state["output_bias"] = ffn.down_DF.new_zeros(len(ffn.down_DF))
    return state


@torch.no_grad()
def stack_experts(
    states: Sequence[State],
    block: BlockConfig,
    sizes: Sizes,
    outer: OuterConfig,
    whole: list[int],
) -> MoesaicHierarchy:
    """One layer's module from the states of its experts'; copies every weight once."""
    with torch.device("meta"):
        stack = MoesaicHierarchy(block, sizes, outer, whole)
    first = states[0]
    stacked = {}
    for name, meant in stack.state_dict().items():
        like = first[_source(name)[0]]
        all_experts = like.new_zeros(meant.shape)
        for expert, state in enumerate(states):
            _put(all_experts, name, state, expert, len(states))
        stacked[name] = all_experts
    stack.load_state_dict(stacked, assign=True)
    return stack.eval()


def _source(name: str) -> tuple[str, ...]:
    """What the tensors of one expert's replacement are called that make up this one."""
    if name == "shared_experts.gate_up_proj":
        return "shared_expert.gate_proj.weight", "shared_expert.up_proj.weight"
    if name.startswith("shared_experts."):
        return (name.replace("shared_experts", "shared_expert") + ".weight",)
    return (name,)


def _put(
    all_experts: Tensor, name: str, state: State, expert: int, experts: int
) -> None:
    """Copies one expert's tensors to their place; what they leave empty is zero."""
    sources = [state[source] for source in _source(name)]
    if name.startswith("experts."):
        rows = len(all_experts) // experts
        all_experts[expert * rows : (expert + 1) * rows] = sources[0]
        return
    height = all_experts.shape[1] // len(sources)
    for place, source in enumerate(sources):
        start = place * height
        corner = all_experts[expert, start : start + len(source)]
        corner[..., : source.shape[-1]] = source


@torch.no_grad()
def unstack_expert(stack: MoesaicHierarchy, expert: int) -> MoesaicBlock:
    """The block of one expert as it was before `stack_experts`, copied."""
    with torch.device("meta"):
        block = MoesaicBlock(stack.block, stack.sizes)
    by_source: dict[str, Tensor] = {}
    for name, tensor in stack.state_dict().items():
        sources = _source(name)
        if name.startswith("experts."):
            by_source[name] = tensor.unflatten(0, (stack.num_outer, -1))[expert]
            continue
        parts = tensor[expert].chunk(len(sources))
        by_source |= dict(zip(sources, parts, strict=True))
    state = {}
    for name, meant in block.state_dict().items():
        without_padding = tuple(slice(size) for size in meant.shape)
        state[name] = by_source[name][without_padding].clone()
    block.load_state_dict(state, assign=True)
    return block.eval()
