"""What every module that stands in for a part of the dense model can say of itself.

Leaf: this file is copied beside the weights, so it imports torch and transformers only.

Shape suffixes: T tokens, D hidden_size, F neurons, R routed experts, U units: what is
chosen for a token, be it experts, neurons or inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .token_ids_moesaic import token_ids_of

# By what transformers' experts interface knows the kernels of the moesaic package, which
# is not copied beside the weights.
OWN_KERNELS = "moesaic"


def own_kernels(config: Any = None) -> Any:
    """Those kernels, where the package is there and they pay on this machine; else None.

    With a configuration that asks for them, they need not pay.
    """
    own = ALL_EXPERTS_FUNCTIONS.get(OWN_KERNELS)
    if config is not None and config._experts_implementation == OWN_KERNELS:
        return own
    return own if getattr(own, "by_itself", False) else None


def are_hooked(*modules: nn.Module | None) -> bool:
    """Whether hooks wait for calls of these, which products with their weights leave out."""
    if _has_any_global_hook():
        return True
    return any(
        module._forward_hooks or module._forward_pre_hooks
        for module in modules
        if module is not None
    )


# Makes the gates that count (T, R) of a router, the selection values (T, R), which are
# computed when asked for, and the gates as they are, 0 for experts that do not run.
View = Callable[[Any, Callable[[], Tensor], Tensor], Tensor]


def as_they_are(
    router: Any, values: Callable[[], Tensor], gate_TR: Tensor
) -> Tensor:
    """The view of calibration: gates are what they are when the model runs."""
    return gate_TR


class MoesaicReplacement(nn.Module):
    """Stands in for an FFN, for the experts of a mixture, or for another module.

    `view` is None where the model runs. Calibration and training set it: all experts
    are computed then, under a mask, and the view says what the mask is. Outputs are
    the same up to rounding. With `for_each_token` every token runs what is chosen for
    it, also where many are read at once. `made` holds how it came about (index lists,
    notes); it is not saved.
    """

    # What many of these are stacked into, one for each expert of a mixture; None where
    # such a replacement cannot stand inside an expert.
    stacked: ClassVar[type[MoesaicReplacement] | None] = None
    # What it chooses for each token, in a word; None where it chooses nothing.
    unit: ClassVar[str | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.view: View | None = None
        self.for_each_token = False
        self.made: Any = None

    def active_weights(self) -> float:
        """Weights that one token is multiplied with, on average, routers left out."""
        raise NotImplementedError(f"{type(self).__name__} counts no weights")

    def router_weights(self) -> float:
        """Weights of its routers that one token is multiplied with."""
        return 0.0

    def weight_bytes(self) -> float:
        """Bytes of all these weights, as they are stored, routers included.

        An override where not all weights of a router, or not all others, have one
        dtype. Raises NotImplementedError where no parameter holds them.
        """
        routers = nn.ModuleList(self.router_modules().values())
        of_routers = list(routers.parameters())
        in_routers = {id(parameter) for parameter in of_routers}
        others = [
            parameter
            for parameter in self.parameters()
            if id(parameter) not in in_routers
        ]
        own = self._stored(self.active_weights(), others)
        return own + self._stored(self.router_weights(), of_routers)

    def _stored(self, weights: float, parameters: list[Tensor]) -> float:
        """Bytes of so many weights out of these parameters."""
        if not weights:
            return 0.0
        if not parameters:
            kind = type(self).__name__
            raise NotImplementedError(f"{kind} counts no bytes of its weights")
        # The largest is a matrix; scales beside it may be in float32.
        largest = max(parameters, key=lambda parameter: parameter.numel())
        return weights * largest.element_size()

    def router_modules(self) -> dict[str, nn.Module]:
        """Its routers, by the name each has within it."""
        return {}

    def units(self, *inputs: Tensor) -> tuple[Tensor, Tensor] | None:
        """Which units run for each token (T, U), and the norm of what each adds (T, U).

        Of those that do not run: what they would add. `inputs` are those of a call.
        None where nothing is chosen for a token. Costs about a call with every unit
        computed.
        """
        return None

    def planned_share(self) -> float | None:
        """The share of its units that thresholds are to run for a token, on average.

        None where no threshold decides.
        """
        return None

    def chosen(self, *inputs: Tensor) -> Tensor:
        """Which units run for each token (T, U). `inputs` are those of a call."""
        raise NotImplementedError(f"{type(self).__name__} chooses nothing")

    def hidden(self, x_TD: Tensor) -> Tensor | None:
        """Hidden states of all its neurons (T, F), run or not, shared ones first.

        None where it has no neurons of its own.
        """
        return None

    def mask_pays(self) -> bool:
        """Whether training is faster with all experts computed, under a mask."""
        return False

    def follow(self, base_model: nn.Module) -> None:
        """Tells routers that choose by token ids whose ids those are."""
        for router in self._by_token():
            router.token_ids = token_ids_of(base_model)

    def tell(self, ids_T: Tensor) -> None:
        """The ids of the tokens of the next call, where no model runs as a whole."""
        for router in self._by_token():
            router.token_ids.current = ids_T

    def _by_token(self) -> list[Any]:
        routers = self.router_modules().values()
        return [router for router in routers if hasattr(router, "token_ids")]

    def set_config(self, config: Any) -> None:
        """Takes the model's configuration, which names the experts' implementation."""
        for module in self.modules():
            if hasattr(module, "config"):
                module.config = config


@contextmanager
def chosen_for_each_token(model: nn.Module) -> Iterator[None]:
    """For a while a model runs on whole texts as it does when it writes them.

    Some replacements run all neurons where many tokens are read at once. What is
    measured of such a model is what it is when it answers, token by token.
    """
    found = [
        module
        for module in model.modules()
        if isinstance(module, MoesaicReplacement)
    ]
    before = [module.for_each_token for module in found]
    for module in found:
        module.for_each_token = True
    try:
        yield
    finally:
        for module, value in zip(found, before, strict=True):
            module.for_each_token = value
