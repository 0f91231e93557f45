"""Gradients of the dense model's loss, at the outputs of its FFNs.

Shape suffixes: N windows, L tokens of a window, T tokens, D hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.errors import MoesaicError
from moesaic.families import FFNs

# Called with a layer, its FFN's inputs x (T, D), and dL/dF (T, D) at its outputs.
Visit = Callable[[int, Tensor, Tensor], None]


def visit_gradients(
    model: Any, ffns: FFNs, windows_NL: Tensor, visit: Visit
) -> None:
    """Visits every converted layer's FFN, window by window.

    L is the mean loss of a window's next tokens. The weights get no gradients. Costs a
    forward and a backward pass; holds x of every layer for one window. On the way back L
    counts about as often as there are tokens, for float16 has no numbers as small as a
    gradient of their mean; a power of two, which changes no digits. Raises
    MoesaicError where a gradient is not finite, and under inference mode.
    """
    if torch.is_inference_mode_enabled():
        raise MoesaicError(
            "gradients are wanted, which torch.inference_mode has none of; convert "
            "outside of it"
        )
    scale = 2.0 ** windows_NL.shape[1].bit_length()
    inputs: dict[int, Tensor] = {}
    shifts: dict[int, Tensor] = {}
    handles = []
    for layer in ffns.converted:
        before = ffns.replaced(layer).register_forward_pre_hook(
            _keep_input(inputs, layer)
        )
        after = ffns.last_module(layer).register_forward_hook(
            _add_shift(shifts, layer)
        )
        handles += [before, after]
    try:
        with without_gradients(model), torch.enable_grad():
            for ids_NL in windows_NL.split(1):
                ids = ids_NL.to(model.device)
                output = model(input_ids=ids, labels=ids, use_cache=False)
                scaled_loss = output.loss.float() * scale
                scaled_loss.backward()
                for layer in ffns.converted:
                    gradient_TD = _gradient_of(shifts[layer]) / scale
                    visit(layer, inputs[layer], gradient_TD)
    finally:
        for handle in handles:
            handle.remove()


def _keep_input(inputs: dict[int, Tensor], layer: int) -> Callable[..., None]:
    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach()
        inputs[layer] = x.reshape(-1, x.shape[-1])

    return keep


def _add_shift(shifts: dict[int, Tensor], layer: int) -> Callable[..., Tensor]:
    """Adds a 0 to an output: its gradient is the output's."""

    def add(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        shift = torch.zeros_like(output, requires_grad=True)
        shifts[layer] = shift
        return output + shift

    return add


def _gradient_of(shift: Tensor) -> Tensor:
    assert shift.grad is not None
    gradient_TD = shift.grad.reshape(-1, shift.shape[-1]).float()
    if not torch.isfinite(gradient_TD).all():
        raise MoesaicError(
            "the gradient of the dense model's loss is not finite: weights or "
            "activations are broken"
        )
    return gradient_TD


@contextmanager
def without_gradients(model: Any) -> Iterator[None]:
    """No weight of a model gets a gradient for a while."""
    trainable = [
        parameter for parameter in model.parameters() if parameter.requires_grad
    ]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
