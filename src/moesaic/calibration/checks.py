"""Finds what is broken in a model before or while it is converted, and names it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from moesaic.calibration.hidden_states import Stream
from moesaic.errors import MoesaicError
from moesaic.families import FFNs


def check_weights(ffns: FFNs, model: Any) -> str:
    """A digest of all weights (two passes over them). Raises MoesaicError for NaN, by name."""
    layers = {
        id(p): i
        for i, layer in enumerate(ffns.layers)
        for p in layer.parameters()
    }
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if not torch.isfinite(values.sum(dtype=torch.float32)):
            where = (
                f"layer {layers[id(parameter)]}: "
                if id(parameter) in layers
                else ""
            )
            raise MoesaicError(
                f"{where}the weights {name!r} hold NaN or infinity"
            )
        bits = values.view(
            torch.int16 if values.element_size() == 2 else torch.int32
        )
        # Sums of whole numbers do not depend on the order in which threads add them.
        digest.update(
            f"{name} {tuple(values.shape)} {bits.sum(dtype=torch.int64)}".encode()
        )
    return digest.hexdigest()


def check_on(model: Any, device: torch.device, why: str) -> None:
    """Raises MoesaicError for a model that is not in whole on the device; `why` it has to be."""
    home = torch.empty(
        0, device=device
    ).device  # "cuda" is the GPU of some number
    if any(parameter.device != home for parameter in model.parameters()):
        raise MoesaicError(
            f"{why} the whole model, which is not on {device} in whole; take --device cpu, or "
            "another recipe or budget that needs no more than a layer there"
        )


def check_inputs(stream: Stream, layer: int) -> None:
    """Raises MoesaicError where what enters a layer is not finite; names where it comes from."""
    if not torch.isfinite(stream.hidden_NLD.sum(dtype=torch.float32)):
        where = (
            f"layer {layer - 1} puts out" if layer else "the embeddings put out"
        )
        raise MoesaicError(f"{where} NaN or infinity on the calibration text")


def blame_a_layer(stream: Stream) -> None:
    """Finds the first layer of a broken model whose output is not finite."""
    for layer in range(len(stream.ffns.layers)):
        check_inputs(stream, layer)
        stream.advance(layer)
    check_inputs(stream, len(stream.ffns.layers))


def check_vocabulary(model: Any, ids: Tensor) -> None:
    """Raises MoesaicError for token ids that the model does not know."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if int(ids.max()) >= vocabulary or int(ids.min()) < 0:
        raise MoesaicError(
            f"calibration token ids reach {int(ids.max())}, the model knows 0..{vocabulary - 1}: "
            "the tokenizer is not this model's"
        )
