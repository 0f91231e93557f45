"""What was seen of a module: whatever may change about it is noticed."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from moesaic.kernels.seen import Known, Seen, known_of, run_as_known
from moesaic.modeling import MoesaicThresholdedLinear


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


def is_same(seen: Seen, module: nn.Module, x_TD: torch.Tensor) -> bool:
    return seen.tensors_as_they_were(module, x_TD) is not None


def test_nothing_is_different() -> None:
    module = module_of()
    seen = seen_of(module)
    assert is_same(seen, module, torch.zeros(3, 4))
    with torch.no_grad():
        linear_in(module).weight.mul_(2)  # where it was: it is read there again
    assert is_same(seen, module, torch.zeros(3, 4))


def test_an_input_of_another_kind() -> None:
    module = module_of()
    seen = seen_of(module)
    assert not is_same(seen, module, torch.zeros(2, 3, 4))
    assert not is_same(seen, module, torch.zeros(3, 5))
    assert not is_same(seen, module, torch.zeros(3, 4).bfloat16())


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
    class Louder(nn.Linear):
        pass

    module.inner.linear.__class__ = Louder


def another_class_of_the_whole(module: Any) -> None:
    class Louder(nn.Module):
        pass

    module.__class__ = Louder


def another_class_of_tensor(module: Any) -> None:
    class Mine(nn.Parameter):
        pass

    module.inner.linear.weight.__class__ = Mine


def other_numbers(module: Any) -> None:
    module.scale = module.scale.view(torch.int32)  # where it was


def one_row_again_and_again(module: Any) -> None:
    weight = module.inner.linear.weight
    weight.data = weight.data[:1].expand(4, 4)


def a_buffer_less(module: Any) -> None:
    del module.scale


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
    another_class_of_the_whole,
    another_class_of_tensor,
    other_numbers,
    one_row_again_and_again,
    a_buffer_less,
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
    assert is_same(seen, module, x_TD)
    change(module)
    assert not is_same(seen, module, x_TD)
    if "hook" not in change.__name__:
        assert is_same(seen_of(module), module, x_TD)


def test_hooks_on_all_modules_are_noticed_while_they_are_there() -> None:
    module = module_of()
    seen = seen_of(module)
    handle = register_module_forward_hook(lambda *_: None)
    assert not is_same(seen, module, torch.zeros(1, 4))
    handle.remove()
    assert is_same(seen, module, torch.zeros(1, 4))


def test_without_attributes_a_part_less_is_noticed() -> None:
    module = module_of()
    x_TD = torch.zeros(1, 4)
    seen = Seen(module, x_TD)
    del module.scale
    assert not is_same(seen, module, x_TD)


def test_a_bias_of_no_linear_layer_has_to_be_a_parameter() -> None:
    linear = MoesaicThresholdedLinear(4, 4, False, 0.5)
    with pytest.raises(TypeError, match="bias"):
        linear.bias = torch.zeros(4)


def run_of(found: Any) -> Any:
    return lambda module, x_TD: Known(seen_of(module), found)


def test_a_module_is_looked_at_once_and_its_copies_anew() -> None:
    module = module_of()
    x_TD = torch.zeros(1, 4)
    looks: list[int] = []

    def look_at(module: Any, x_TD: torch.Tensor) -> Any:
        looks.append(1)
        return Known(seen_of(module), torch.clone)  # type: ignore[arg-type]

    for _ in range(3):
        assert run_as_known(module, x_TD, look_at) is not None
    assert len(looks) == 1
    other = copy.deepcopy(module)
    assert known_of(other) is None
    again = pickle.loads(pickle.dumps(module))  # noqa: S301  (its own)
    assert known_of(again) is None
    assert run_as_known(other, x_TD, look_at) is not None
    assert len(looks) == 2


def test_what_is_not_fit_is_forgotten() -> None:
    module: Any = module_of()
    x_TD = torch.zeros(1, 4)
    assert run_as_known(module, x_TD, run_of(torch.clone)) is not None
    assert known_of(module) is not None
    module.inner.chooser = "threshold"
    assert run_as_known(module, x_TD, lambda module, x_TD: None) is None
    assert known_of(module) is None


def test_what_another_thread_changes_meanwhile_is_not_kept() -> None:
    module: Any = module_of()

    def look_at(module: Any, x_TD: torch.Tensor) -> Any:
        seen = seen_of(module)
        a_weight_elsewhere(module)
        return Known(seen, torch.clone)  # type: ignore[arg-type]

    assert run_as_known(module, torch.zeros(1, 4), look_at) is None
    assert known_of(module) is None


def test_tensors_that_a_module_no_longer_has_are_freed() -> None:
    module: Any = module_of()
    assert run_as_known(module, torch.zeros(1, 4), run_of(torch.clone)) is not None
    old = [weakref.ref(module.inner.linear.weight), weakref.ref(module.scale)]
    another_weight(module)
    another_buffer(module)
    assert [reference() for reference in old] == [None, None]


def test_a_hook_that_knows_its_module_does_not_keep_it() -> None:
    module: Any = module_of()
    assert run_as_known(module, torch.zeros(1, 4), run_of(torch.clone)) is not None
    module.inner.register_forward_hook(lambda *_, own=module: None)
    reference = weakref.ref(module)
    del module
    gc.collect()
    assert reference() is None


def test_it_does_not_hold_the_module() -> None:
    module = module_of()
    reference = weakref.ref(module)
    seen = seen_of(module)
    del module
    gc.collect()
    assert reference() is None
    assert seen is not None
