"""Our architecture in vLLM: its Transformers backend, with our parts left as they are.

The backend puts its own linear layers into a model and compiles it. Our kernels for a CPU
read rows and columns of plain layers, and are no part of a compiled graph. So on a CPU our
parts keep their layers, and the graph calls each of them as one operation, which runs as
it does in transformers: prompts too. On a GPU all is the backend's.

vllm_plugin.py names this file to vLLM. It imports vLLM, and so nothing else imports it.

Shape suffixes: T tokens (or B sequences of L tokens), D hidden_size, N outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.platforms import current_platform

from moesaic.kernels.blocks import block_for_good
from moesaic.kernels.neurons import FEW_TOKENS, neurons_for_good
from moesaic.modeling import (
    MoesaicBlock,
    MoesaicInt8Neurons,
    MoesaicNeurons,
    MoesaicReplacement,
    MoesaicThresholdedLinear,
)
from moesaic.modeling.replacement_moesaic import own_kernels

# What the package's kernels run.
WITH_KERNELS = (
    MoesaicBlock,
    MoesaicInt8Neurons,
    MoesaicNeurons,
    MoesaicThresholdedLinear,
)

# A graph names a module by its number here: an operation takes no modules. The same model
# gets the same numbers in every process, so that what was compiled is found again.
_NUMBERS = itertools.count()
_MODULES: WeakValueDictionary[int, MoesaicReplacement] = WeakValueDictionary()
Runs = Callable[[Tensor], Tensor]
# What runs a module for few tokens; None where none of our kernels does.
_FEW_TOKENS: WeakKeyDictionary[Any, Runs | None] = WeakKeyDictionary()


class MoesaicForCausalLM(TransformersForCausalLM):  # type: ignore[misc]
    """A converted model whose replacements are ours and whose other layers are vLLM's."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if current_platform.is_cpu():
            for module in _with_kernels(self.model):
                _call_as_one(module)

    def recursive_replace(self) -> None:
        """As the backend does it, but on a CPU for our parts; quantised, for them too."""
        if self.quant_config is not None or not current_platform.is_cpu():
            super().recursive_replace()
            return
        with _out_of_sight(self.model):
            super().recursive_replace()
        for module in _with_kernels(self.model):
            _give_buffers(module, self.device_config.device)


def _with_kernels(model: nn.Module) -> list[MoesaicReplacement]:
    """Those that choose by their input alone, and not by the ids of tokens."""
    found = []
    for module in model.modules():
        if type(module) not in WITH_KERNELS:
            continue
        assert isinstance(module, MoesaicReplacement)
        routers = module.router_modules().values()
        if not any(hasattr(router, "token_ids") for router in routers):
            found.append(module)
    return found


@contextmanager
def _out_of_sight(model: nn.Module) -> Iterator[None]:
    """An empty module in the place of each of ours for a while."""
    ours = {id(module) for module in _with_kernels(model)}
    places = []
    for parent in model.modules():
        for name, child in parent.named_children():
            if id(child) in ours:
                places.append((parent, name, child))
    for parent, name, _ in places:
        setattr(parent, name, nn.Identity())
    try:
        yield
    finally:
        for parent, name, child in places:
            setattr(parent, name, child)


def _give_buffers(module: nn.Module, device: torch.device) -> None:
    """Memory for buffers that have none: the backend gives it to parameters alone."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device=device)


def _call_as_one(module: MoesaicReplacement) -> None:
    """Makes a graph call this module as one operation."""
    number = next(_NUMBERS)
    _MODULES[number] = module
    outputs = getattr(module, "out_features", 0)

    def forward(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.moesaic.as_in_transformers(x, number, outputs)
        return y

    module.forward = forward


@torch.library.custom_op("moesaic::as_in_transformers", mutates_args=())
def _as_in_transformers(x: Tensor, number: int, outputs: int) -> Tensor:
    """What module `number` puts out for x (..., D): (..., outputs), or (..., D) for 0."""
    module = _MODULES[number]
    x_TD = x.reshape(-1, x.shape[-1])
    if 0 < len(x_TD) <= FEW_TOKENS:
        run = _few_tokens(module, x_TD)
        if run is not None:
            return run(x_TD).view_as(x)
    y: Tensor = type(module).forward(module, x)
    return y


def _few_tokens(module: Any, x_TD: Tensor) -> Runs | None:
    """Our kernel for it. It looks at a module once: vLLM leaves weights where they are."""
    if module not in _FEW_TOKENS:
        _FEW_TOKENS[module] = _look_at(module, x_TD)
    return _FEW_TOKENS[module]


def _look_at(module: Any, x_TD: Tensor) -> Runs | None:
    if own_kernels() is None:
        return None  # or they are slower on this machine
    if isinstance(module, MoesaicNeurons):
        return neurons_for_good(module, x_TD)
    if isinstance(module, MoesaicBlock) and module.output_bias is None:
        return block_for_good(module, x_TD)
    return None


@_as_in_transformers.register_fake
def _(x: Tensor, number: int, outputs: int) -> Tensor:
    width = outputs or x.shape[-1]
    return x.new_empty((*x.shape[:-1], width))
