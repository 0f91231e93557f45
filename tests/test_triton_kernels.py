"""Kernels for GPUs, on a machine without: read line by line, compiled, and done without.

Whether Triton reads or compiles is settled when it is imported, so each has a process.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.kernels import gpu
from moesaic.kernels.experts import experts_forward
from moesaic.kernels.neurons import neurons_forward
from tests.random_neurons import inputs_of, neurons_of
from tests.test_kernels import block_of

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs Triton, which comes with .[dev] on Linux with x86-64 processors",
)


@needs_triton
@pytest.mark.parametrize(
    ("cases", "own"),
    [
        ("triton_cases.py", {"TRITON_INTERPRET": "1"}),
        ("triton_compiled.py", {"TRITON_INTERPRET": "0", "CAPABILITY": "80"}),
        ("triton_compiled.py", {"TRITON_INTERPRET": "0", "CAPABILITY": "90"}),
    ],
)
def test_in_a_process_of_its_own(cases: str, own: dict[str, str], tmp_path: Path) -> None:
    own = own | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(HERE / cases)],
        env=os.environ | own,
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
    assert "skipped" not in done.stdout


@torch.no_grad()
def test_tensors_on_a_cpu_do_not_go_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    assert not gpu.takes(torch.zeros(1))
    assert not gpu.takes(torch.zeros(1, device="meta"))
    monkeypatch.setattr(gpu, "call", lambda *given: pytest.fail("went there"))
    neurons = neurons_of(40, 9)
    neurons_forward(neurons, inputs_of(neurons, 1))


@torch.no_grad()
def test_without_triton_it_says_so_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "moesaic.kernels.neurons_triton", raising=False)
    monkeypatch.setattr(gpu, "takes", lambda x_TD: True)
    monkeypatch.setattr(gpu, "_failed", set())
    neurons: Any = neurons_of(40, 9)
    x_TD = inputs_of(neurons, 2)
    expected = neurons(x_TD)
    neurons.set_config(block_of((1, 5, 3, 2, 40)).experts.config)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            torch.testing.assert_close(neurons(x_TD), expected)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("neurons run without moesaic's kernel for GPUs: ")
    assert "triton" in line


def test_what_does_not_fit_once_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton says so of some sizes; others may fit."""

    class OutOfResources(Exception):
        pass

    monkeypatch.setattr(gpu, "_failed", set())
    monkeypatch.setattr(gpu, "_too_large", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            gpu._give_up("blocks", OutOfResources("out of resource: shared memory"))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("out of resource: shared memory")
    assert not gpu._failed


@needs_triton
@torch.no_grad()
def test_what_cannot_be_compiled_goes_the_other_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton finds no GPU here, or tensors that do not lie on it."""
    block = block_of((1, 5, 3, 2, 40))
    x_TD = torch.randn(2, 40)
    index_TK, gate_TK = block.router(x_TD)
    expected = experts_forward(block.experts, x_TD, index_TK, gate_TK)
    monkeypatch.setattr(gpu, "takes", lambda x_TD: True)
    monkeypatch.setattr(gpu, "_failed", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = experts_forward(block.experts, x_TD, index_TK, gate_TK)
            assert torch.equal(found, expected)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("experts run without moesaic's kernel for GPUs: ")
