"""What was seen of a module, and whether it is as it was.

Whether a kernel is fit for a module takes longer to see than a small module to run, and it
runs for every token. So that is seen once, and then only whether anything is different.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from moesaic.kernels.compiled_call import CompiledCall


class Seen:
    """A module and a kind of input, as they were when they were looked at.

    `attributes` are those of parts on which the call depends too; they need not be there.
    Nothing of this holds the module itself, which would never be freed.
    """

    def __init__(
        self,
        module: nn.Module,
        x_TD: Tensor,
        attributes: Iterable[tuple[nn.Module, str]] = (),
    ):
        everyone = list(module.modules())
        self._parts = everyone[1:]
        self._classes = [*map(type, self._parts)]
        self._hooks = [
            hooks
            for part in self._parts
            for hooks in (part._forward_hooks, part._forward_pre_hooks)
        ]
        # Stock layers have nothing in most of these dicts, and never will.
        self._dicts: list[dict[str, Any]] = [
            held
            for part in everyone
            for held in (part._modules, part._parameters, part._buffers)
            if held or part is module
        ]
        attributes = list(attributes)
        self._homes = [vars(part) for part, _ in attributes]
        self._names = [name for _, name in attributes]
        self._values = self._found()
        self._tensors = [
            value for value in self._values if isinstance(value, Tensor)
        ]
        self._memory = _memory_of(self._tensors)
        self._width = x_TD.size(1)
        self._dtype = x_TD.dtype

    def is_as_it_was(self, x_TD: Tensor) -> bool:
        """Whether nothing is different, and nobody has hooks on the parts.

        Caches are full of weights when this is asked, so it reads as little as it can:
        a tenth of a microsecond for each line of memory. Hence no loops of Python.
        """
        found = self._found()
        return (
            x_TD.dtype is self._dtype
            and x_TD.size(1) == self._width
            and len(found) == len(self._values)
            and all(map(is_, found, self._values))
            and [*map(type, self._parts)] == self._classes
            and _memory_of(self._tensors) == self._memory
            and not any(self._hooks)
            and not _has_any_global_hook()
        )

    def _found(self) -> list[Any]:
        """What all these are now, in order."""
        of_parts = chain.from_iterable(map(dict.values, self._dicts))
        return [*of_parts, *map(dict.get, self._homes, self._names)]


class Known(NamedTuple):
    """A module that was looked at, and what runs it."""

    seen: Seen
    run: CompiledCall


def _memory_of(tensors: list[Tensor]) -> list[Any]:
    """Where they lie, and how; what has another dtype lies elsewhere."""
    return [
        *map(Tensor.data_ptr, tensors),
        *map(Tensor.numel, tensors),
        *map(Tensor.is_contiguous, tensors),
    ]
