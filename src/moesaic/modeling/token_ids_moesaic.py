"""The ids of the tokens that a model runs on, for routers that choose by them.

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: T tokens, D hidden_size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import embedding


class TokenIds:
    """`current` are the ids (T,) of the tokens in hand; None where none are known.

    A forward pre-hook of the base model: whatever the model is called with is in hand
    until it is called again, so one thread at a time may run it. Calibration, which runs
    layers one by one, sets them. `table` is the embedding of the model that was called.
    """

    def __init__(self, table: nn.Module | None = None):
        self.current: Tensor | None = None
        self.table = table

    def __call__(self, model: Any, args: Any, kwargs: Any) -> None:
        ids = args[0] if args else kwargs.get("input_ids")
        self.current = None if ids is None else ids.reshape(-1)
        # Resized, or in a copy of the model, it is another one than at the start.
        self.table = model.get_input_embeddings()

    def __deepcopy__(self, memo: Any) -> TokenIds:
        # A router's trained copy reads what the model writes.
        return self

    def of(self, x_TD: Tensor) -> Tensor:
        """The ids of these tokens (T,).

        Raises ValueError where the model was called without ids.
        """
        return self._checked(x_TD).to(x_TD.device)

    def embedded(self, x_TD: Tensor) -> Tensor:
        """Rows of the model's embedding for these tokens (T, D).

        The embedding may lie on another device than the layer that asks.
        """
        assert self.table is not None
        weight = self.table.weight
        ids_T = self._checked(x_TD).to(weight.device)
        return embedding(ids_T, weight).to(x_TD.device)

    def _checked(self, x_TD: Tensor) -> Tensor:
        if self.current is None or len(self.current) != len(x_TD):
            raise ValueError(
                "this model routes by token ids; call it with input_ids, and not with "
                "inputs_embeds"
            )
        return self.current


def token_ids_of(base_model: nn.Module) -> TokenIds:
    """The ids that a model was last called with; hooks in once."""
    # OPT's causal language model calls the decoder inside its base model.
    called = getattr(base_model, "decoder", base_model)
    hooked = hooked_token_ids(called)
    if hooked is not None:
        return hooked
    ids = TokenIds(base_model.get_input_embeddings())
    called.register_forward_pre_hook(ids, with_kwargs=True)
    return ids


def hooked_token_ids(called: nn.Module) -> TokenIds | None:
    """The ids that a module hands on when it is called; None where no router asks."""
    for hook in called._forward_pre_hooks.values():
        if isinstance(hook, TokenIds):
            return hook
    return None
