"""Shared fixtures: tiny random models of every supported family, and the small real ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.calibration import text

os.environ.pop("COLUMNS", None)  # what tests print must not depend on a terminal
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the hub
# Models this small gain nothing from threads, which wait for each other where cores are shared.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

SHARED = Path(__file__).parents[2] / "shared"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What reads kernels line by line takes minutes, and begins first: nobody waits for it."""
    items.sort(key=lambda item: "test_in_a_process_of_its_own" not in item.name)


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _each_text_encoded_once() -> Iterator[None]:
    """A text's ids are kept for the next test: many take the demo's 800 KB for a few windows."""
    encode = text.encode
    known: dict[tuple[str, str], torch.Tensor] = {}

    def remembered(tokenizer: Any, documents: list[str]) -> torch.Tensor:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            return encode(tokenizer, documents)
        key = (backend.to_str(), "\0".join(documents))
        if key not in known:
            known[key] = encode(tokenizer, documents)
        return known[key].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "encode", remembered)
        yield


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts run on the tokens gathered for them, on a CPU too: what a GPU does.

    Small ones are else computed all at once there, and no kernel of transformers runs.
    """
    monkeypatch.setattr("moesaic.modeling.block_moesaic.SMALL_EXPERT", 0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of small real models and texts; absent on most machines."""
    if not (SHARED / "models").is_dir():
        pytest.skip(f"needs the small real models, which lie in {SHARED}; that folder is absent")
    return SHARED


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16."""
    from benchmarks.smollm2_model import smollm2_folder

    folder = smollm2_folder()
    if folder is None:
        pytest.skip("needs the real model of the benchmarks; run make smollm2")
    return folder


@pytest.fixture
def unasked_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted models take moesaic's kernel unasked, as on processors where it pays."""
    monkeypatch.setattr("moesaic.kernels.experts.experts_forward.by_itself", True)
