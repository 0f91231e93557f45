"""Our architecture in vLLM: its Transformers backend, with our parts left as they are.

The backend puts its own linear layers into a model and compiles it. Our kernels for a CPU
read rows and columns of plain layers, and are no part of a compiled graph. So on a CPU our
parts keep their layers, and the graph calls each of them as one operation, which runs as
it does in transformers: prompts too. On a GPU all is the backend's.

vllm_plugin.py names this file to vLLM. It imports vLLM, and so nothing else imports it.

Shape suffixes: T tokens, D inputs of a module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.platforms import current_platform

from moesaic.kernels.compiled_call import CompiledCall
from moesaic.kernels.inputs import FEW_TOKENS
from moesaic.kernels.seen import known_for_good
from moesaic.modeling import (
    MoesaicBlock,
    MoesaicInt8Neurons,
    MoesaicNeurons,
    MoesaicThresholdedLinear,
)

# What the package's kernels run.
WITH_KERNELS = (
    MoesaicBlock,
    MoesaicInt8Neurons,
    MoesaicNeurons,
    MoesaicThresholdedLinear,
)

# What runs a module for few tokens, where one of our kernels does.
_FEW_TOKENS: WeakKeyDictionary[Any, CompiledCall] = WeakKeyDictionary()


class MoesaicForCausalLM(TransformersForCausalLM):  # type: ignore[misc]
    """A converted model whose replacements are ours and whose other layers are vLLM's."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.model.modules():
            if isinstance(module, MoesaicThresholdedLinear):
                # Tokens of all requests stand side by side: the first begin no prompt.
                module.dense_start = 0.0
        if not self._ours_run():
            return
        # Where an operation of a graph finds modules, as it does vLLM's attention.
        found_by_name = vllm_config.compilation_config.static_forward_context
        for path, module in self.model.named_modules(prefix=prefix):
            if _is_ours(module):
                found_by_name[path] = module
                _call_as_one(module, path)

    def recursive_replace(self) -> None:
        """As the backend does it, but for our parts."""
        if self._ours_run():
            with _out_of_sight(self.model):
                super().recursive_replace()
        else:
            super().recursive_replace()
        for module in self.model.modules():
            if _is_ours(module):
                _give_buffers(module, self.device_config.device)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As the backend does it. What was seen of modules may no longer hold."""
        loaded: set[str] = super().load_weights(weights)
        for module in self.model.modules():
            _FEW_TOKENS.pop(module, None)
        return loaded

    def _ours_run(self) -> bool:
        """On a CPU, where vLLM puts nothing into our layers: other numbers, or adapters."""
        if not current_platform.is_cpu():
            return False
        has_adapters = self.vllm_config.lora_config is not None
        return self.quant_config is None and not has_adapters


def _is_ours(module: Any) -> bool:
    """Whether kernels run it, and it chooses by its input alone, not by tokens' ids."""
    if type(module) not in WITH_KERNELS:
        return False
    routers = module.router_modules().values()
    return not any(hasattr(router, "token_ids") for router in routers)


@contextmanager
def _out_of_sight(model: nn.Module) -> Iterator[None]:
    """An empty module in the place of each of ours for a while."""
    places = []
    for parent in model.modules():
        for name, child in parent.named_children():
            if _is_ours(child):
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


def _call_as_one(module: Any, name: str) -> None:
    """Makes a graph call this module as one operation."""
    outputs = getattr(module, "out_features", 0)

    def forward(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.moesaic.as_in_transformers(x, name, outputs)
        return y

    module.forward = forward


@torch.library.custom_op("moesaic::as_in_transformers", mutates_args=())
def _as_in_transformers(x: Tensor, name: str, outputs: int) -> Tensor:
    """What a module puts out for x (..., D): (..., outputs), or (..., D) for 0."""
    module = get_forward_context().no_compile_layers[name]
    x_TD = x.reshape(-1, x.shape[-1])
    are_few = 0 < len(x_TD) <= FEW_TOKENS
    run = _FEW_TOKENS.get(module) if are_few else None
    if run is not None:
        return run(x_TD).view(*x.shape[:-1], -1)
    y: Tensor = type(module).forward(module, x)
    if are_few:
        _remember(module, x_TD)
    return y


def _remember(module: Any, x_TD: Tensor) -> None:
    """Looks at a module once: weights stay until they are loaded anew."""
    if getattr(module, "output_bias", None) is not None:
        return  # which a block adds to what the kernel puts out
    run = known_for_good(module, x_TD)
    if run is not None:
        _FEW_TOKENS[module] = run


@_as_in_transformers.register_fake
def _(x: Tensor, name: str, outputs: int) -> Tensor:
    width = outputs or x.shape[-1]
    return x.new_empty((*x.shape[:-1], width))
