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
    neurons_F = np.arange(ffn.intermediate_size)
    shared_S = neurons_F[: sizes.shared]
    routed = neurons_F[sizes.shared :]
    experts_RM = routed.reshape(sizes.num_routed, -1)
    partition = Partition(shared_S, experts_RM)

    router = new_router(block, sizes).to(ffn.up_FD.device)
    tensors = [*router.named_parameters(), *router.named_buffers()]
    for name, tensor in tensors:
        tensor.data.zero_()
        if name not in MoesaicRouter.float32_names:
            tensor.data = tensor.data.to(ffn.up_FD.dtype)

    replacement = carve(ffn, partition, router, block, sizes)
    return replacement.state_dict()


def _unrouted_state(ffn: DenseFFN, block: BlockConfig) -> State:
    assert ffn.gate_FD is not None
    state = {
        "shared_expert.gate_proj.weight": ffn.gate_FD,
        "shared_expert.up_proj.weight": ffn.up_FD,
        "shared_expert.down_proj.weight": ffn.down_DF,
    }
    if block.output_bias:
        hidden_size = len(ffn.down_DF)
        state["output_bias"] = ffn.down_DF.new_zeros(hidden_size)
    return state


@torch.no_grad()
def stack_experts(
    states: Sequence[State],
    block: BlockConfig,
    sizes: Sizes,
    outer: OuterConfig,
    whole: list[int],
) -> MoesaicHierarchy:
    """One layer's module from its experts' states; copies every weight once."""
    with torch.device("meta"):
        stack = MoesaicHierarchy(block, sizes, outer, whole)
    stacked = {}
    for name, placeholder in stack.state_dict().items():
        first_source = _source(name)[0]
        like = states[0][first_source]
        all_experts = like.new_zeros(placeholder.shape)
        for expert, state in enumerate(states):
            _put(all_experts, name, state, expert, len(states))
        stacked[name] = all_experts
    stack.load_state_dict(stacked, assign=True)
    return stack.eval()


def _source(name: str) -> tuple[str, ...]:
    """Which tensors of one expert's replacement make up this one, by name."""
    if name == "shared_experts.gate_up_proj":
        return "shared_expert.gate_proj.weight", "shared_expert.up_proj.weight"
    if name.startswith("shared_experts."):
        projection = name.removeprefix("shared_experts.")
        return (f"shared_expert.{projection}.weight",)
    return (name,)


def _put(
    all_experts: Tensor,
    name: str,
    state: State,
    expert: int,
    experts: int,
) -> None:
    """Copies one expert's tensors to their place; what they leave empty is zero."""
    sources = [state[source] for source in _source(name)]
    if name.startswith("experts."):
        rows = len(all_experts) // experts
        start = expert * rows
        end = start + rows
        all_experts[start:end] = sources[0]
        return
    height = all_experts.shape[1] // len(sources)
    for place, source in enumerate(sources):
        start = place * height
        end = start + len(source)
        width = source.shape[-1]
        place_of_source = all_experts[expert, start:end]
        place_of_source[..., :width] = source


@torch.no_grad()
def unstack_expert(stack: MoesaicHierarchy, expert: int) -> MoesaicBlock:
    """The block of one expert as it was before `stack_experts`, copied."""
    with torch.device("meta"):
        block = MoesaicBlock(stack.block, stack.sizes)
    padded_state: dict[str, Tensor] = {}
    for name, tensor in stack.state_dict().items():
        if name.startswith("experts."):
            by_expert = tensor.unflatten(0, (stack.num_outer, -1))
            padded_state[name] = by_expert[expert]
            continue
        sources = _source(name)
        parts = tensor[expert].chunk(len(sources))
        padded_state |= dict(zip(sources, parts, strict=True))

    state = {}
    for name, placeholder in block.state_dict().items():
        without_padding = tuple(slice(size) for size in placeholder.shape)
        state[name] = padded_state[name][without_padding].clone()
    block.load_state_dict(state, assign=True)
    return block.eval()
