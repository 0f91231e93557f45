"""What was seen of a module: whatever may change about it is noticed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from moesaic.kernels.seen import Seen


def linear_in(module: nn.Module) -> Any:
    return module.get_submodule("inner.linear")


def module_of() -> nn.Module:
    inner = nn.Module()
    inner.linear = nn.Linear(4, 4, bias=False)
    module = nn.Module()
    module.inner = inner
    module.register_buffer("scale", torch.ones(4))
    inner.chooser = "topk"
    return module


def seen_of(module: Any) -> Seen:
    return Seen(module, torch.ones(1, 4), [(module.inner, "chooser"), (module.inner, "absent")])


def test_nothing_is_different() -> None:
    module = module_of()
    seen = seen_of(module)
    assert seen.is_as_it_was(torch.zeros(3, 4))
    with torch.no_grad():
        linear_in(module).weight.mul_(2)  # where it was: it is read there again
    assert seen.is_as_it_was(torch.zeros(3, 4))


def test_an_input_of_another_kind() -> None:
    seen = seen_of(module_of())
    assert not seen.is_as_it_was(torch.zeros(3, 5))
    assert not seen.is_as_it_was(torch.zeros(3, 4).bfloat16())


def another_weight(module: Any) -> None:
    module.inner.linear.weight = nn.Parameter(module.inner.linear.weight.detach().clone())


def a_weight_elsewhere(module: Any) -> None:
    weight = module.inner.linear.weight
    weight.data = weight.data.clone()


def fewer_rows(module: Any) -> None:
    weight = module.inner.linear.weight
    weight.data = weight.data[:2]


def turned(module: Any) -> None:
    weight = module.inner.linear.weight
    weight.data = weight.data.T


def another_buffer(module: Any) -> None:
    module.scale = module.scale.clone()


def a_bias(module: Any) -> None:
    module.inner.linear.bias = nn.Parameter(torch.zeros(4))


def another_part(module: Any) -> None:
    module.inner.linear = nn.Linear(4, 4, bias=False)


def one_more_part(module: Any) -> None:
    module.other = nn.Identity()


def a_part_less(module: Any) -> None:
    del module.inner.linear


def another_class(module: Any) -> None:
    nn.utils.parametrizations.weight_norm(module.inner.linear)


def an_attribute(module: Any) -> None:
    module.inner.chooser = "threshold"


def an_attribute_that_was_not_there(module: Any) -> None:
    module.inner.absent = True


def a_hook(module: Any) -> None:
    module.inner.linear.register_forward_hook(lambda *_: None)


def a_hook_before(module: Any) -> None:
    module.inner.register_forward_pre_hook(lambda *_: None)


CHANGES = [
    another_weight,
    a_weight_elsewhere,
    fewer_rows,
    turned,
    another_buffer,
    a_bias,
    another_part,
    one_more_part,
    a_part_less,
    another_class,
    an_attribute,
    an_attribute_that_was_not_there,
    a_hook,
    a_hook_before,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_different_is_noticed(change: Callable[[Any], None]) -> None:
    module = module_of()
    seen = seen_of(module)
    x_TD = torch.zeros(1, 4)
    assert seen.is_as_it_was(x_TD)
    change(module)
    assert not seen.is_as_it_was(x_TD)
    if "hook" not in change.__name__:
        assert seen_of(module).is_as_it_was(x_TD)


def test_hooks_on_all_modules_are_noticed_while_they_are_there() -> None:
    module = module_of()
    seen = seen_of(module)
    handle = register_module_forward_hook(lambda *_: None)
    assert not seen.is_as_it_was(torch.zeros(1, 4))
    handle.remove()
    assert seen.is_as_it_was(torch.zeros(1, 4))


def test_it_does_not_hold_the_module() -> None:
    module = module_of()
    reference = weakref.ref(module)
    seen = seen_of(module)
    del module
    gc.collect()
    assert reference() is None
    assert seen is not None
