"""vLLM's plug-in: what can be said of it without vLLM; tests/engines/ runs the real one."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moesaic
from moesaic import vllm_plugin
from moesaic.kernels.build import library
from moesaic.modeling import MoesaicReplacement, MoesaicThresholdedLinear
from moesaic.modeling.replacement_moesaic import own_kernels
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
    assert where == "moesaic.vllm_model:MoesaicForCausalLM"


def test_where_it_cannot_others_are_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM calls every plug-in for every model, and stops where one does."""
    monkeypatch.setitem(sys.modules, "moesaic.modeling", None)
    vllm_plugin.register()
    assert "vLLM cannot serve models of moesaic" in caplog.text


class Replaced(nn.Linear):
    """Stands for a linear layer of vLLM's."""


class Backend(nn.Module):
    """Stands for vLLM's Transformers backend: linear layers of its own, then weights."""

    device_config = SimpleNamespace(device=torch.device("cpu"))

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__()
        self.vllm_config = vllm_config
        self.model = vllm_config.model
        self.quant_config = vllm_config.quant_config
        self.recursive_replace()

    def load_weights(self, weights: Any) -> set[str]:
        return {name for name, _ in weights}

    def recursive_replace(self) -> None:
        for parent in list(self.model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, replaced(child))


def replaced(linear: nn.Linear) -> Replaced:
    with torch.device("meta"):
        other = Replaced(linear.in_features, linear.out_features, linear.bias is not None)
    other._parameters = linear._parameters
    return other


@pytest.fixture
def vllm_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that vLLM imports, with stand-ins for what it imports of vLLM."""
    for name in (
        "vllm",
        "vllm.model_executor",
        "vllm.model_executor.models",
        "vllm.model_executor.models.transformers",
        "vllm.platforms",
        "vllm.forward_context",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    transformers: Any = sys.modules["vllm.model_executor.models.transformers"]
    transformers.TransformersForCausalLM = Backend
    platforms: Any = sys.modules["vllm.platforms"]
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: True)
    context = SimpleNamespace(no_compile_layers={})
    contexts: Any = sys.modules["vllm.forward_context"]
    contexts.get_forward_context = lambda: context
    yield importlib.import_module("moesaic.vllm_model")
    del sys.modules["moesaic.vllm_model"]


def config_of(model: Any, vllm_model: Any, **changed: Any) -> Any:
    """What the model's class reads of vLLM's configuration."""
    layers = vllm_model.get_forward_context().no_compile_layers
    compilation = SimpleNamespace(static_forward_context=layers)
    given = {"model": model, "quant_config": None, "lora_config": None}
    return SimpleNamespace(compilation_config=compilation, **given | changed)


RECIPES = {
    "cmoe": {"layout": "S1A3E8"},
    "moesaic-dynamic": {"layout": "S1A3E8"},
    "moesaic-neurons": {"sparsity": 0.25},
    "moesaic-neurons-int8": {"sparsity": 0.25},
    "teal": {"sparsity": 0.25},
}
BY_KERNEL = ("cmoe", "moesaic-neurons", "moesaic-neurons-int8")  # looked at once


@pytest.mark.parametrize("recipe", RECIPES)
def test_in_vllm_our_parts_stay_as_they_are(vllm_model: Any, recipe: str) -> None:
    """Others' linear layers become vLLM's, ours do not, and a compiled graph says the same."""
    name, _, in_8_bits = recipe.partition("-int8")
    settings = {"weights": "int8"} if in_8_bits else None
    method = moesaic.load_method(name, settings)
    ids = tokens(8, CONTEXT)
    model, _ = moesaic.convert(tiny_model("qwen2"), method, calibration=ids, **RECIPES[recipe])
    model.eval()
    for module in model.modules():
        if isinstance(module, MoesaicThresholdedLinear):
            assert module.dense_start > 0
            module.dense_start = 0.0  # as it is to be there
    with torch.no_grad():
        expected = model(ids[:1]).logits
        for module in model.modules():
            if isinstance(module, MoesaicThresholdedLinear):
                module.dense_start = 0.01
    ours = [module for module in model.modules() if isinstance(module, MoesaicReplacement)]
    kept = [type(part) for module in ours for part in module.modules()]

    config = config_of(model, vllm_model)
    served = vllm_model.MoesaicForCausalLM(vllm_config=config)

    now = [type(part) for module in ours for part in module.modules()]
    assert now == kept
    assert isinstance(model.lm_head, Replaced)
    with torch.no_grad():
        assert torch.equal(model(ids[:1]).logits, expected)
        for module in ours:
            check_graph(module, model.config.hidden_size)
    has_kernels = own_kernels() is not None and library() is not None
    if recipe in BY_KERNEL and has_kernels:
        assert all(module in vllm_model._FEW_TOKENS for module in ours)
    served.load_weights([("a", torch.zeros(1))])
    assert not any(module in vllm_model._FEW_TOKENS for module in ours)


def check_graph(module: Any, hidden_size: int) -> None:
    """The module as one operation of a graph, whatever the number of tokens."""
    width = getattr(module, "in_features", hidden_size)
    torch._dynamo.reset()  # else it counts one module after the other as the same again
    graph = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
    for count in (1, 3, 70):
        x = torch.randn(1, count, width)
        expected: Tensor = type(module).forward(module, x)
        assert torch.equal(graph(x), expected)
        assert expected.shape[:2] == (1, count)


def test_a_graph_finds_the_modules_of_the_model_that_is_called(vllm_model: Any) -> None:
    """A cached graph may run for a second model: names are looked up in a call's context."""
    context = vllm_model.get_forward_context()
    blocks, layers = [], []
    for seed in (0, 1):
        context.no_compile_layers = {}
        dense = tiny_model("qwen2", seed)
        model, _ = moesaic.convert(dense, "cmoe", "S1A3E8", tokens(8, CONTEXT))
        config = config_of(model.eval(), vllm_model)
        vllm_model.MoesaicForCausalLM(vllm_config=config)
        blocks.append(model.model.layers[0].mlp)
        layers.append(context.no_compile_layers)
    x = torch.ones(1, 3, model.config.hidden_size)
    graph = torch.compile(blocks[0], backend="eager", fullgraph=True)
    with torch.no_grad():
        outputs = [type(block).forward(block, x) for block in blocks]
        assert not torch.equal(*outputs)
        for own_layers, expected in zip(layers, outputs, strict=True):
            context.no_compile_layers = own_layers
            assert torch.equal(graph(x), expected)


@pytest.mark.parametrize("why", ["quantised", "with adapters", "on a GPU"])
def test_in_vllm_other_layers_are_its_own(
    vllm_model: Any, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """vLLM reads and changes those; ours would not know."""
    changed: dict[str, Any] = {
        "quantised": {"quant_config": "any"},
        "with adapters": {"lora_config": "any"},
    }.get(why, {})
    if why == "on a GPU":
        monkeypatch.setattr(vllm_model.current_platform, "is_cpu", lambda: False)
    model, _ = moesaic.convert(tiny_model("llama"), "cmoe", "S1A3E8", tokens(8, CONTEXT))
    config = config_of(model, vllm_model, **changed)
    vllm_model.MoesaicForCausalLM(vllm_config=config)
    block = model.model.layers[0].mlp
    assert isinstance(block.shared_expert.up_proj, Replaced)
    assert "forward" not in vars(block)
