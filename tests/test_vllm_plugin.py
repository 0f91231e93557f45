"""vLLM's plug-in: what can be said of it without vLLM; tests/engines/ runs the real one."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import moesaic
from moesaic import vllm_plugin
from tests.families import CONTEXT, tiny_model, tokens


def test_vllm_finds_it() -> None:
    [found] = entry_points(group="vllm.general_plugins", name="moesaic")
    assert found.load() is vllm_plugin.register


def test_it_registers_the_class_that_converted_models_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once, in however many processes and calls."""
    known: list[tuple[str, str]] = []
    registry = SimpleNamespace(
        get_supported_archs=lambda: [name for name, _ in known],
        register_model=lambda name, where: known.append((name, where)),
    )
    stand_in: Any = ModuleType("vllm")
    stand_in.ModelRegistry = registry
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    vllm_plugin.register()
    vllm_plugin.register()
    model, _ = moesaic.convert(tiny_model("llama"), "cmoe", "S1A3E8", tokens(8, CONTEXT))
    [(name, where)] = known
    assert name == type(model).__name__
    assert where.endswith(":TransformersForCausalLM")
