"""What only a GPU can show: kernels in Triton as compiled, and conversions made there.

python -m pytest tests/test_gpu.py
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import moesaic
from moesaic import load_method
from moesaic.evaluate.side_by_side import evaluate
from moesaic.kernels import gpu
from moesaic.kernels.experts import experts_forward
from moesaic.kernels.neurons import neurons_forward
from moesaic.methods.contents import METHODS
from moesaic.modeling import RouterConfig
from tests.random_neurons import inputs_of, neurons_of
from tests.test_kernels import block_of, thresholds_by_loop, thresholds_of

block_forward: Any = experts_forward.block  # type: ignore[attr-defined]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of NVIDIA's")

GPU = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# Of the shared expert, of an expert, experts, that run, hidden size.
BLOCKS = [
    (9, 12, 9, 4, 40),
    (0, 1, 3, 2, 8),
    (150, 34, 4, 4, 72),
    (384, 9, 128, 92, 576),
    (192, 192, 7, 5, 576),
    (1376, 688, 14, 9, 896),
]
# The first is under a mask, of the second each expert computes its own tokens (bfloat16).
MASKED = (192, 192, 7, 5, 576)
GATHERED = (64, 192, 9, 3, 576)


@pytest.fixture
def nothing_fails(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Every result is Triton's own: no other way was taken unseen."""
    monkeypatch.setattr(gpu, "_failed", set())
    with torch.no_grad(), caplog.at_level(logging.WARNING, "moesaic.kernels.gpu"):
        yield
    assert not gpu._failed
    assert not caplog.get_records("call")


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())


def inputs(block: Any, tokens: int) -> Tensor:
    """Tokens whose choice no rounding decides."""
    router = block.router
    weight = block.experts.down_proj
    x_TD = torch.randn(2 * tokens + 8, weight.shape[1]).to(GPU, weight.dtype)
    value_TR = router.biased(router.scores(x_TD)).sort(descending=True).values
    if router.num_active == router.num_routed:
        return x_TD[:tokens]
    gap_T = value_TR[:, router.num_active - 1] - value_TR[:, router.num_active]
    clear_TD = x_TD[gap_T > 1e-4]
    assert len(clear_TD) >= tokens
    return clear_TD[:tokens]


def slow(block: Any, x_TD: Tensor) -> Tensor:
    """In float64, part by part, on the CPU, by the choice that `block` itself makes."""
    chosen = block.router(x_TD)
    twin = copy.deepcopy(block).cpu().double()
    twin.experts.config = SimpleNamespace(_experts_implementation="eager")
    twin.router.forward = lambda x_TD: [part.cpu() for part in chosen]
    return twin(x_TD.cpu().double())


# --- kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 16, 64, 65, 700])
@pytest.mark.parametrize("shape", BLOCKS)
def test_blocks(shape: Any, tokens: int, dtype: torch.dtype, nothing_fails: None) -> None:
    block = block_of(shape, dtype).to(GPU)
    x_TD = inputs(block, tokens)
    found = block_forward(block, x_TD)
    assert found is not None
    assert relative(found, slow(block, x_TD)) < TOLERANCE[dtype]
    assert torch.equal(block_forward(block, x_TD), found)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [65, 700, 2048])
@pytest.mark.parametrize("shape", [*BLOCKS, GATHERED, (0, 12, 9, 2, 40)])
def test_each_expert_computes_its_own_tokens(
    shape: Any,
    tokens: int,
    dtype: torch.dtype,
    gated: bool,
    nothing_fails: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from moesaic.kernels import prompts_triton

    monkeypatch.setattr(prompts_triton, "gathering_pays", lambda *call: True)
    block = block_of(shape, dtype, gated=gated).to(GPU)
    x_TD = inputs(block, tokens)
    found = block_forward(block, x_TD)
    assert relative(found, slow(block, x_TD)) < TOLERANCE[dtype]
    assert torch.equal(block_forward(block, x_TD), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 3])
@pytest.mark.parametrize("kind", ["linear", "quadratic"])
@pytest.mark.parametrize("tokens", [1, 16, 64, 65, 700])
def test_experts_chosen_by_thresholds(
    tokens: int, kind: str, cap: int | None, dtype: torch.dtype, nothing_fails: None
) -> None:
    """The twin scores in float64; tokens with an expert next to its threshold are left out."""
    block = thresholds_of((150, 34, 9, 4, 72), kind, cap, dtype)
    twin = copy.deepcopy(block).double()
    x_TD = torch.randn(tokens, 72).to(dtype)
    value_TR = twin.router.scores(x_TD.double()) + twin.router.selection_bias
    is_clear_T = (value_TR.abs() > 1e-4).all(dim=1)
    if cap is not None:
        sorted_TR = value_TR.sort(descending=True).values
        is_clear_T &= sorted_TR[:, cap - 1] - sorted_TR[:, cap] > 1e-4
    assert is_clear_T.double().mean() > 0.9
    found_TD = block_forward(block.to(GPU), x_TD.to(GPU))
    assert found_TD is not None
    clear_TD = x_TD[is_clear_T].double()
    expected_TD = thresholds_by_loop(twin, clear_TD)
    assert relative(found_TD[is_clear_T], expected_TD) < TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [5, 100])
def test_experts_chosen_by_copies_of_neurons(tokens: int, nothing_fails: None) -> None:
    """In float32: near ties may fall otherwise where torch rounds scores to bfloat16."""
    dtype = torch.float32
    router = RouterConfig("neuron-copies", "topk")
    block = block_of((192, 192, 7, 5, 576), dtype, router=router).to(GPU)
    x_TD = inputs(block, tokens)
    found = block_forward(block, x_TD)
    assert found is not None
    assert relative(found, slow(block, x_TD)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 16, 65, 700])
@pytest.mark.parametrize("shape", BLOCKS[1:])
def test_experts(shape: Any, tokens: int, dtype: torch.dtype, nothing_fails: None) -> None:
    block = block_of(shape, dtype).to(GPU)
    x_TD = torch.randn(tokens, shape[-1]).to(GPU, dtype)
    block.shared_expert = None
    index_TK, gate_TK = block.router(x_TD)
    found = experts_forward(block.experts, x_TD, index_TK, gate_TK)
    assert relative(found, slow(block, x_TD)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["copies", "gates-alone"])
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("shape", [(72, 45), (576, 1536)])
def test_neurons(
    shape: Any, tokens: int, kind: str, dtype: torch.dtype, nothing_fails: None
) -> None:
    neurons: Any = neurons_of(*shape, kind, bias=True, dtype=dtype)
    x_TD = inputs_of(neurons, 32)[:tokens]
    expected = copy.deepcopy(neurons).double()._part_by_part(x_TD.double())
    found = neurons_forward(neurons.to(GPU), x_TD.to(GPU))
    assert found is not None
    assert relative(found, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("shape", [MASKED, GATHERED])
@pytest.mark.parametrize("tokens", [1, 16, 100])
def test_a_graph_holds_a_block(shape: Any, tokens: int, nothing_fails: None) -> None:
    block = block_of(shape, torch.bfloat16).to(GPU)
    x_TD = torch.randn(tokens, 576, device=GPU, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            block(x_TD)
    torch.cuda.synchronize()
    place = block.experts.down_proj.data_ptr()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_TD = block(x_TD)
    block(torch.randn(2000, 576, device=GPU, dtype=torch.bfloat16))
    assert block.experts.down_proj.data_ptr() == place
    for _ in range(3):
        x_TD.normal_()
        graph.replay()
        assert torch.equal(y_TD, block(x_TD))


@pytest.mark.parametrize("tokens", [1, 100])
def test_what_a_graph_reads_stays_where_it_is(tokens: int, nothing_fails: None) -> None:
    """Also where the block was never called before."""
    block = block_of(MASKED, torch.bfloat16).to(GPU)
    twin = copy.deepcopy(block)
    x_TD = torch.randn(tokens, 576, device=GPU, dtype=torch.bfloat16)
    twin(x_TD)  # compiles the kernels
    torch.cuda.synchronize()
    place = block.experts.down_proj.data_ptr()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_TD = block(x_TD)
    block(x_TD)
    assert block.experts.down_proj.data_ptr() == place
    torch.cuda.empty_cache()
    graph.replay()
    assert torch.equal(y_TD, block(x_TD))


@pytest.mark.parametrize("shape", [MASKED, GATHERED])
@pytest.mark.parametrize("tokens", [2, 100])
def test_torch_compiles_a_block_in_one_graph(shape: Any, tokens: int, nothing_fails: None) -> None:
    block = block_of(shape, torch.bfloat16).to(GPU)
    x_TD = torch.randn(tokens, 576, device=GPU, dtype=torch.bfloat16)
    expected = block(x_TD)
    assert torch.equal(torch.compile(block, fullgraph=True)(x_TD), expected)


# --- conversions -------------------------------------------------------------------------------

CONVERTIBLE = [name for name, row in METHODS.items() if row.runs is not None]


@pytest.mark.parametrize("method", CONVERTIBLE)
def test_a_conversion_is_that_of_a_cpu(method: str, tmp_path: Path) -> None:
    """Up to rounding, which may choose otherwise between equals."""
    perplexity = {}
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        moesaic.convert(
            "demo",
            method,
            sparsity=0.25,
            # Of several domains, which some methods want.
            calibration={"first": "demo", "second": "demo"},
            samples=8,
            sequence_length=256,
            device=device,
            output=folder,
        )
        found = evaluate(str(folder), max_tokens=4096, device=device)
        (perplexity[device],) = found["perplexity"].values()
    assert perplexity["cuda"] == pytest.approx(perplexity["cpu"], rel=0.03)


def test_recovery_on_a_gpu(tmp_path: Path) -> None:
    method = load_method("moesaic").name
    losses = {}
    for device in ("cpu", "cuda"):
        model = tmp_path / device
        moesaic.convert("demo", method, calibration="demo", samples=8, device=device, output=model)
        tuned = tmp_path / f"{device}-tuned"
        moesaic.finetune(model, tuned, "demo", samples=16, distill="demo", device=device)
        found = evaluate(str(tuned), max_tokens=4096, device=device)
        (losses[device],) = found["perplexity"].values()
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=0.01)
