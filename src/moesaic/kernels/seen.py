"""What was seen of a module, and whether it is as it was.

Whether a kernel is fit for a module takes longer to see than a small module to run, and it
runs for every token. So that is seen once, and then only whether anything is different.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from moesaic.kernels.compiled_call import CompiledCall

_KNOWN = "_moesaic_known"  # an attribute of modules that were looked at
_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]
_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]


class Seen:
    """A module and a kind of input, as they were when they were looked at.

    `attributes` are those of parts on which the call depends too; they need not be there.
    It holds no tensor: what a module no longer has is freed.
    """

    def __init__(
        self,
        module: nn.Module,
        x_TD: Tensor,
        attributes: Iterable[tuple[nn.Module, str]] = (),
    ):
        everyone = list(module.modules())
        self._parts = everyone[1:]
        # Stock layers have nothing in most of these dicts, and never will.
        self._part_dicts: list[dict[str, Any]] = [
            part._modules
            for part in everyone
            if part._modules or part is module
        ]
        self._tensor_dicts: list[dict[str, Any]] = [
            held
            for part in everyone
            for held in (part._parameters, part._buffers)
            if held or part is module
        ]
        self._hooks = [
            hooks
            for part in self._parts
            for hooks in (part._forward_hooks, part._forward_pre_hooks)
        ]
        attributes = list(attributes)
        self._homes = [vars(part) for part, _ in attributes]
        self._names = [name for _, name in attributes]
        self._named = self._named_now()
        self._inside = _values(self._part_dicts)
        found = _values(self._tensor_dicts)
        self._classes = _classes(module, self._parts, found)
        self._are_tensors = [value is not None for value in found]
        self._memory = _memory_of(compress(found, self._are_tensors))
        self._width = x_TD.shape[1]
        self._dtype = x_TD.dtype

    def tensors_as_they_were(
        self, module: nn.Module, x_TD: Tensor
    ) -> list[Any] | None:
        """The module's tensors where nothing is different, and nobody has hooks on parts.

        Else None. While the caller keeps the list, no other thread frees a tensor. Caches
        are full of weights when this is asked, so it reads as little as it can: a tenth of
        a microsecond for each line of memory. Hence no loops of Python.
        """
        if x_TD.dtype is not self._dtype or x_TD.ndim != 2:
            return None
        found = _values(self._tensor_dicts)
        is_same = (
            x_TD.size(1) == self._width
            and _values(self._part_dicts) == self._inside
            and _classes(module, self._parts, found) == self._classes
            and self._named_now() == self._named
            and not any(self._hooks)
            and not _has_any_global_hook()
            and _memory_of(compress(found, self._are_tensors)) == self._memory
        )
        return found if is_same else None

    def _named_now(self) -> list[Any]:
        return [*map(dict.get, self._homes, self._names)]


@dataclass(frozen=True)
class Known:
    """A module that was looked at, and what runs it."""

    seen: Seen
    run: CompiledCall

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing is known of copies, which have memory of their own."""
        return type(None), ()


# Looks at a module and an input; None where no kernel is fit. What it is called with is to
# be read after what is seen.
Look = Callable[[Any, Tensor], Known | None]


def run_as_known(module: Any, x_TD: Tensor, look_at: Look) -> Tensor | None:
    """What its kernel puts out; None where there is none for it. Looked at where needed."""
    found = known_of(module)
    tensors = None
    if found is not None:
        tensors = found.seen.tensors_as_they_were(module, x_TD)
    if found is None or tensors is None:
        vars(module).pop(_KNOWN, None)
        found = look_at(module, x_TD)
        if found is None:
            return None
        tensors = found.seen.tensors_as_they_were(module, x_TD)
        if tensors is None:
            return None  # another thread has just put something else there
        vars(module)[_KNOWN] = found
    y_TN = found.run(x_TD)
    del tensors  # which the call has read
    return y_TN


def known_for_good(module: Any, x_TD: Tensor) -> CompiledCall | None:
    """What ran a module just now, as a function of inputs like this one, as few of them.

    It looks at nothing again, and keeps no weight in memory. So it is for modules that
    stay as they are, in an engine. None where no kernel runs it.
    """
    found = known_of(module)
    if found is None:
        return None
    is_same = found.seen.tensors_as_they_were(module, x_TD) is not None
    return found.run if is_same else None


def known_of(module: Any) -> Known | None:
    """What is known of it, whether that still holds or not."""
    found: Known | None = vars(module).get(_KNOWN)
    return found


def _values(dicts: list[dict[str, Any]]) -> list[Any]:
    return [*chain.from_iterable(map(dict.values, dicts))]


def _classes(
    module: nn.Module, parts: list[nn.Module], tensors: list[Any]
) -> list[Any]:
    return [type(module), *map(type, parts), *map(type, tensors)]


def _memory_of(tensors: Iterable[Tensor]) -> list[Any]:
    """Where they lie, and how."""
    given = list(tensors)
    return [
        *map(Tensor.data_ptr, given),
        *map(_SHAPE, given),
        *map(Tensor.stride, given),
        *map(_DTYPE, given),
    ]
