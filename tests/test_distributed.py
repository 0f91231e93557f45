"""Two CPU processes against one: the same losses, biases and files."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.families.load import load_model
from tests.stock_models import converted_folder

pytestmark = pytest.mark.skipif(
    "MOESAIC_DISTRIBUTED" not in os.environ,
    reason="starts nine processes; make test-distributed runs it",
)
ROOT = Path(__file__).parents[1]


def launch(processes: int, *arguments: object) -> None:
    """Raises with the output of a run that fails."""
    execute(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         processes, *arguments]
    )  # fmt: skip


def execute(words: list[object]) -> None:
    """Raises with the output of a command that fails; one thread for each process."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
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


ZERO = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
mixed_precision: "no"
num_machines: 1
num_processes: 2
use_cpu: true
deepspeed_config: {zero_stage: 2, offload_optimizer_device: none, gradient_clipping: 1.0}
"""


def test_the_command_on_two_processes(tmp_path: Path) -> None:
    """As under `accelerate launch`, with DDP: every file written once, and the same model."""
    compare(tmp_path, ["-m", "moesaic"])


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make test-distributed")
def test_the_command_under_deepspeed(tmp_path: Path) -> None:
    """ZeRO-2 on CPUs: optimizer state and gradients in two parts, gathered into one model."""
    config = tmp_path / "zero.yaml"
    config.write_text(ZERO)
    compare(
        tmp_path, ["-m", "accelerate.commands.launch", "--config_file", config, "-m", "moesaic"]
    )


def compare(tmp_path: Path, two: list[object]) -> None:
    """Fine-tunes on one process and by `two`, the start of a command that takes two."""
    folder = converted_folder("llama", tmp_path / "moe")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat in a hat and the rat in a bin, the sun is hot. " * 200)
    options: list[object] = ["--data", text, "--samples", 64, "--batch-size", 8]
    options += ["--device", "cpu", "--distill", "none"]
    for processes, words in ((1, ["-m", "moesaic"]), (2, two)):
        run = [*words, "finetune", folder, "--output", tmp_path / str(processes), *options]
        if "accelerate.commands.launch" in words:
            execute([sys.executable, *run])
        else:
            launch(processes, *run)
    states = [load_model(tmp_path / str(processes)).state_dict() for processes in (1, 2)]
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    assert not list(tmp_path.glob("*.partial*"))
    curves = []
    for processes in (1, 2):
        with (tmp_path / str(processes) / "learning_curve.csv").open() as file:
            curves.append([list(map(float, row.values())) for row in csv.DictReader(file)])
    torch.testing.assert_close(
        torch.tensor(curves[1]), torch.tensor(curves[0]), rtol=1e-4, atol=1e-5
    )
