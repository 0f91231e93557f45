"""A causal language model in two parts: its layers, and its head.

The head is what the model's own forward computes after its layers: the output layer,
and what some families do to its logits (softcapping, a scale). Logits are by far the
largest thing that a forward pass makes, so that the head is run on some tokens at a
time where memory counts.

Shape suffixes: B windows, L tokens of one, C tokens of a chunk, D hidden_size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moesaic.errors import MoesaicError, first_line
from moesaic.modeling import hooked_token_ids

PROBE_TOKENS = 16
TOLERANCE = 0.05  # of rounding in bfloat16; another head is further off


class Head:
    """The head of a model, apart from the layers before it."""

    def __init__(self, model: Any):
        self.model = model
        self.decoder = model.get_decoder()
        # What the layers return, which the family's code may read more of.
        self.output_class: Any = None

    @property
    def vocabulary(self) -> int:
        """How many logits a token has."""
        return len(self.model.get_output_embeddings().weight)

    def hidden_states(self, ids_BL: Tensor) -> Tensor:
        """What enters the head (B, L, D). One forward pass without the head."""
        outputs = self.decoder(input_ids=ids_BL, use_cache=False)
        self.output_class = type(outputs)
        hidden_BLD: Tensor = outputs.last_hidden_state
        return hidden_BLD

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """The logits (C, V) of some of the tokens, after `hidden_states` was called.

        The family's own forward, in which the layers return what they are told to.
        """
        outputs = self.output_class(last_hidden_state=hidden_CD[None])
        unread_ids = torch.zeros(
            (1, len(hidden_CD)), dtype=torch.long, device=hidden_CD.device
        )
        with (
            _same_token_ids(self.decoder),
            replaced_forward(self.decoder, lambda *_, **__: outputs),
        ):
            # Not the model's forward attribute, which may be replaced itself.
            forward = type(self.model).forward
            result = forward(self.model, input_ids=unread_ids, use_cache=False)
        logits_CV: Tensor = result.logits[0]
        return logits_CV


@contextmanager
def replaced_forward(
    module: Any, forward: Callable[..., Any]
) -> Iterator[None]:
    """For a while a module computes something else when it is called."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


@contextmanager
def _same_token_ids(decoder: Any) -> Iterator[None]:
    """Routers that choose by token ids go by those of the layers' own call.

    They may ask again: layers are computed once more where activations are not kept.
    """
    token_ids = hooked_token_ids(decoder)
    known = None if token_ids is None else token_ids.current
    try:
        yield
    finally:
        if token_ids is not None:
            token_ids.current = known


@torch.no_grad()
def check_head(model: Any, ids_L: Tensor) -> None:
    """Makes sure that layers and head in two parts are what the model does.

    Tries a few tokens. Raises MoesaicError for a family whose forward does not allow
    that.
    """
    device = model.get_input_embeddings().weight.device
    probe_1L = ids_L[None, :PROBE_TOKENS].to(device)
    expected_LV = model(input_ids=probe_1L, use_cache=False).logits[0]
    if not expected_LV.isfinite().all():
        raise MoesaicError(
            "the model's logits are not finite numbers: its weights are damaged; convert "
            "or fetch it again"
        )
    head = Head(model)
    try:
        hidden_1LD = head.hidden_states(probe_1L)
        found_LV = head.logits(hidden_1LD[0])
        difference_LV = found_LV.float() - expected_LV.float()
        relative = float(difference_LV.norm() / expected_LV.float().norm())
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise _no_head(model, first_line(error)) from error
    if not relative < TOLERANCE:
        raise _no_head(model, f"relative difference {relative:.2g}")


def _no_head(model: Any, reason: str) -> MoesaicError:
    name = type(model).__name__
    return MoesaicError(
        f"the head of {name} cannot be run apart from its layers ({reason}), and "
        "training does that to save memory; take a model of another family"
    )
