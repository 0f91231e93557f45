"""Numbers of small real runs, kept. `make golden` writes them anew, only on purpose.

Perplexities may move by a per cent or so between processors: an activation that nearly ties
another changes a count, and with it the partition.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

import moesaic
from moesaic.families.load import load_model
from tests.families import CONTEXT, tiny_model, tokens

GOLDEN = Path(__file__).with_suffix(".json")
LAYOUTS = {"stories260K": "S3A3E8", "babyllama-105": "S2A2E8"}
METHODS = ("cmoe", "cmoe-code", "static", "random")


def run(shared: Path, model: str, layout: str, method: str) -> dict[str, Any]:
    """Converts, saves, reloads and evaluates, as a user would."""
    folder, text = shared / "models" / model, shared / "data" / "tinystories.txt"
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "out"
        _, report = moesaic.convert(folder, method, layout, str(text), output=output, samples=16)
        loaded = load_model(output)
    assert type(loaded).__name__ == "MoesaicForCausalLM"
    return {
        "dense_perplexity": report.dense_perplexity,
        "perplexity": report.perplexity,
        "active_ffn_fraction": report.active_ffn_fraction,
        "relative_error": [layer.relative_error for layer in report.layers],
    }


def run_tiny(method: str) -> dict[str, Any]:
    """The same on a random model, which every machine has."""
    _, report = moesaic.convert(
        tiny_model("llama"), method, "S3A3E8", tokens(8, CONTEXT, seed=1), seed=1
    )
    return {"relative_error": [layer.relative_error for layer in report.layers]}


@pytest.mark.parametrize("method", METHODS)
def test_golden_tiny(method: str) -> None:
    kept = json.loads(GOLDEN.read_text())[f"tiny {method}"]
    assert run_tiny(method)["relative_error"] == pytest.approx(kept["relative_error"], rel=0.05)


@pytest.mark.parametrize(("model", "layout"), LAYOUTS.items())
@pytest.mark.parametrize("method", METHODS)
def test_golden(shared: Path, model: str, layout: str, method: str) -> None:
    kept = json.loads(GOLDEN.read_text())[f"{model} {layout} {method}"]
    now = run(shared, model, layout, method)
    assert now["active_ffn_fraction"] == pytest.approx(kept["active_ffn_fraction"], rel=1e-12)
    assert now["dense_perplexity"] == pytest.approx(kept["dense_perplexity"], rel=1e-4)
    assert now["perplexity"] == pytest.approx(kept["perplexity"], rel=0.03)
    assert now["relative_error"] == pytest.approx(kept["relative_error"], rel=0.1, abs=0.01)


if __name__ == "__main__":
    from tests.conftest import SHARED

    numbers = {
        f"{model} {layout} {method}": run(SHARED, model, layout, method)
        for model, layout in LAYOUTS.items()
        for method in METHODS
    }
    numbers |= {f"tiny {method}": run_tiny(method) for method in METHODS}
    GOLDEN.write_text(json.dumps(numbers, indent=1) + "\n")
