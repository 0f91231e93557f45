"""Kernels in Triton, compiled for a GPU that is not there: test_triton_kernels.py runs this.

Triton's compiler refuses much that reading line by line lets pass.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from moesaic.kernels import gpu, prompts_triton
from moesaic.kernels.experts import experts_forward
from moesaic.kernels.neurons import neurons_forward
from moesaic.modeling import RouterConfig
from tests.random_neurons import inputs_of, neurons_of
from tests.test_kernels import block_of

block_forward: Any = experts_forward.block  # type: ignore[attr-defined]

# Of an A100; an H100's is 90. Triton compiles for one GPU in a process.
CAPABILITY = int(os.environ.get("CAPABILITY", "80"))
NEURONS = {"_choose", "_run", "_add"}
EXPERTS = {"_list", "_hidden", "_output"}
PROMPTS = {"_gates", "_masked"}
GATHERED = {"_sort", "_gathered"}
BLOCKS = {"_route", "_hidden", "_output"}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def code() -> dict[str, str]:
    """Of each kernel, as compiled last."""
    return {}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, code: dict[str, str]) -> set[str]:
    """Names of the kernels that were compiled for that GPU; none is launched."""
    target = GPUTarget("cuda", CAPABILITY, 32)
    no_gpu = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    names = set()
    run = JITFunction.run

    def compile_only(kernel: Any, *given: Any, **named: Any) -> Any:
        made = run(kernel, *given, **(named | {"warmup": True}))
        assert f".target sm_{CAPABILITY}" in made.asm["ptx"]
        assert made.asm["cubin"]
        names.add(kernel.__name__)
        code[kernel.__name__] = made.asm["ptx"]
        return made

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", no_gpu)
    monkeypatch.setattr(gpu, "takes", lambda x_TD: True)
    return names


@pytest.mark.parametrize(
    ("kind", "tokens", "dtype"),
    [
        ("copies", 1, torch.bfloat16),
        ("copies", 3, torch.float32),
        ("gates-alone", 1, torch.float32),
        ("gates-alone", 3, torch.bfloat16),
    ],
)
def test_neurons(kind: str, tokens: int, dtype: torch.dtype, compiled: set[str]) -> None:
    has_bias = tokens > 1
    activation = "silu" if has_bias else "gelu_pytorch_tanh"
    neurons = neurons_of(64, 40, kind, bias=has_bias, activation=activation, dtype=dtype)
    neurons_forward(neurons, inputs_of(neurons, tokens))
    assert compiled == NEURONS
    assert not gpu._failed


@pytest.mark.parametrize("tokens", [65, 2048])
@pytest.mark.parametrize(("gated", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_gathered(
    gated: bool,
    dtype: torch.dtype,
    tokens: int,
    compiled: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompts_triton, "gathering_pays", lambda *call: True)
    block = block_of((0, 64, 4, 2, 128), dtype, "silu", gated)
    x_TD = torch.randn(tokens, 128, dtype=dtype)
    index_TK, gate_TK = block.router(x_TD)
    experts_forward(block.experts, x_TD, index_TK, gate_TK)
    assert compiled == GATHERED
    assert not gpu._failed


@pytest.mark.parametrize(("gated", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_experts(gated: bool, dtype: torch.dtype, compiled: set[str]) -> None:
    block = block_of((1, 12, 9, 4, 40), dtype, "relu", gated)
    x_TD = torch.randn(1, 40, dtype=dtype)
    index_TK, gate_TK = block.router(x_TD)
    experts_forward(block.experts, x_TD, index_TK, gate_TK)
    assert compiled == EXPERTS
    assert not gpu._failed


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [
        (1, "linear"),
        (40, "linear"),
        (65, "linear"),
        (3, "neuron-copies"),
        (65, "neuron-copies"),
        (3, "quadratic"),
        (65, "quadratic"),
    ],
)
def test_blocks(tokens: int, kind: str, compiled: set[str]) -> None:
    directions = 8 if kind == "quadratic" else 0
    router = RouterConfig(kind, "topk", directions=directions)
    block = block_of((9, 12, 20, 8, 40), torch.bfloat16, router=router)
    assert block_forward(block, torch.randn(tokens, 40).bfloat16()) is not None
    assert compiled == (PROMPTS if tokens > 64 else BLOCKS)
    assert not gpu._failed


@pytest.mark.parametrize("neurons", [24, 32])
def test_w_down_is_read_16_bytes_at_a_time(
    neurons: int, compiled: set[str], code: dict[str, str]
) -> None:
    """Whatever multiple of 8 its experts have, and though all are one matrix."""
    block = block_of((16, neurons, 5, 2, 64), torch.bfloat16)
    assert block_forward(block, torch.randn(1, 64).bfloat16()) is not None
    assert block.experts.down_proj.transpose(0, 1).is_contiguous()
    assert compiled == BLOCKS
    assert "ld.global.b16" not in code["_output"]
    # The list of experts comes in fours, nothing else.
    assert code["_output"].count("cp.async.cg") > 4 * code["_output"].count("cp.async.ca")
