"""Two CPU processes against one: the same losses, biases and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.load import load_model
from tests.stock_models import converted_folder

pytestmark = pytest.mark.skipif(
    "MOESAIC_DISTRIBUTED" not in os.environ,
    reason="starts six processes; make test-distributed runs it",
)
ROOT = Path(__file__).parents[1]


def launch(processes: int, *arguments: object) -> None:
    """Raises with the output of a run that fails."""
    words = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(processes), *map(str, arguments),
    ]  # fmt: skip
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_sharded_weights_train_like_whole_ones(tmp_path: Path) -> None:
    """FSDP2 over gloo: six steps with LoRA, routers, gates and balance."""
    found: list[dict[str, Any]] = []
    for processes in (1, 2):
        path = tmp_path / f"{processes}.json"
        launch(processes, "-m", "tests.two_processes", path)
        found.append(json.loads(path.read_text()))
    one, two = found
    assert two["sharded"] > 100
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    for bias_one, bias_two in zip(one["bias"], two["bias"], strict=True):
        assert bias_two == pytest.approx(bias_one, abs=1e-6)


def test_the_command_on_two_processes(tmp_path: Path) -> None:
    """As under `accelerate launch`, with DDP: every file written once, and the same model."""
    folder = converted_folder("llama", tmp_path / "moe")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat in a hat and the rat in a bin, the sun is hot. " * 200)
    for processes in (1, 2):
        launch(
            processes, "-m", "moesaic", "finetune", folder, "--output", tmp_path / str(processes),
            "--data", text, "--samples", 64, "--batch-size", 8, "--device", "cpu",
        )  # fmt: skip
    states = [load_model(tmp_path / str(processes)).state_dict() for processes in (1, 2)]
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    assert not list(tmp_path.glob("*.partial*"))
