"""Finds what is broken in a model before or while it is converted, and names it."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from moesaic.calibration.hidden_states import Stream
from moesaic.errors import MoesaicError
from moesaic.families import FFNs

ELSEWHERE = "--device cpu, or another method"  # a model need not fit on a GPU
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_weights(ffns: FFNs, model: Any) -> str:
    """A digest of all weights; two passes over them.

    Raises MoesaicError for NaN, by name.
    """
    layer_of: dict[int, int] = {}
    for index, layer in enumerate(ffns.layers):
        for parameter in layer.parameters():
            layer_of[id(parameter)] = index

    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        total = values.sum(dtype=torch.float32)
        if not torch.isfinite(total):
            where = ""
            if id(parameter) in layer_of:
                where = f"layer {layer_of[id(parameter)]}: "
            raise MoesaicError(
                f"{where}the weights {name!r} hold NaN or infinity"
            )
        line = f"{name} {tuple(values.shape)} {checksum(values)}"
        digest.update(line.encode())
    return digest.hexdigest()


def digest_of_tokens(ids: Tensor) -> str:
    """Of ids and of how they are cut: other windows are other contexts."""
    shape = str(tuple(ids.shape))
    digest = hashlib.sha256(shape.encode())
    digest.update(ids.numpy().tobytes())
    return digest.hexdigest()


def checksum(values: Tensor) -> int:
    """The sum of the numbers that its bytes are, read as whole ones.

    That does not depend on the order in which threads, or a GPU, add them.
    """
    integers = _INTEGERS[values.element_size()]
    return int(values.view(integers).sum(dtype=torch.int64))


def check_on(
    model: Any, device: torch.device, why: str, instead: str = ELSEWHERE
) -> None:
    """Raises MoesaicError for a model that is not in whole on the device.

    `why` says what needs it there, and `instead` what does not.
    """
    # "cuda" is the GPU of some number.
    numbered = torch.empty(0, device=device).device
    elsewhere = (p.device != numbered for p in model.parameters())
    if any(elsewhere):
        raise MoesaicError(
            f"{why} the whole model, which is not on {device} in whole; take {instead}"
        )


def check_inputs(stream: Stream, layer: int) -> None:
    """Raises MoesaicError where what enters a layer is not finite.

    It names where it comes from.
    """
    total = float(stream.hidden_NLD.sum(dtype=torch.float32))
    if math.isfinite(stream.share.total(total)):
        return
    where = "the embeddings put out"
    if layer > 0:
        where = f"layer {layer - 1} puts out"
    raise MoesaicError(f"{where} NaN or infinity on the calibration text")


def blame_a_layer(stream: Stream) -> None:
    """Finds the first layer of a broken model whose output is not finite."""
    layers = len(stream.ffns.layers)
    for layer in range(layers):
        check_inputs(stream, layer)
        stream.advance(layer)
    check_inputs(stream, layers)


def check_vocabulary(model: Any, ids: Tensor) -> None:
    """Raises MoesaicError for token ids that the model does not know."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    largest = int(ids.max())
    if largest >= vocabulary or int(ids.min()) < 0:
        raise MoesaicError(
            f"calibration token ids reach {largest}, the model knows "
            f"0..{vocabulary - 1}: the tokenizer is not this model's"
        )
