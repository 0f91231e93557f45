"""What the methods reach on the real model, kept: `make bench` runs this, about an hour.

AIMS holds perplexities over the dense model's that are met today by few calibration tokens, with
room for another processor and other windows. Tighten a number when a method has improved, never
loosen it silently. BEST holds the aims themselves, and what meets them: as many experts and tokens
take hours, so they run only with MOESAIC_AIMS=1 in the environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import moesaic
from moesaic.calibration.text import to_ids
from moesaic.evaluate import perplexity
from moesaic.families.load import load_model, load_tokenizer

pytestmark = pytest.mark.slow

# Equal layers: trials for budgets by layer take as long again, and gain little here.
DYNAMIC = "moesaic-dynamic layer_budgets=uniform"
# (method, share of neurons skipped): perplexity over dense, at most.
AIMS = {
    (DYNAMIC, 0.25): 1.065,
    (DYNAMIC, 0.5): 1.25,
    ("moesaic", 0.25): 1.15,
    ("moesaic", 0.5): 1.44,
    ("static-repaired", 0.25): 1.22,
    ("static-repaired", 0.5): 1.64,
}
# (share of the dense FFNs' bytes): perplexity over dense of moesaic-neurons, at most.
AIMS_BY_BYTES = {0.5: 1.02, 0.667: 1.012, 0.75: 1.006}


@dataclass(frozen=True)
class Best:
    """A conversion that meets an aim."""

    aim: float
    method: str
    layout: str
    samples: int
    dense_layers: int = 0


BEST = {
    # As docs/which_method.md quotes them: 1.078, 1.229, 1.034 and 1.163. They take some 50, 90, 25
    # and 25 processor minutes.
    "stock 25": Best(1.08, "moesaic", "S8A168E256", 256, dense_layers=6),
    "stock 50": Best(1.25, "moesaic", "S8A106E256", 512, dense_layers=3),
    "own 25": Best(1.06, "moesaic-dynamic", "S1A95E128", 64),
    "own 50": Best(1.18, "moesaic-dynamic", "S1A63E128", 64),
}
LENGTH = 1024
SAMPLES = 16
TEST_TOKENS = 8192
ALL_TEST_TOKENS = 65_536

Ratios = dict[tuple[str, float], float]


def compared(smollm2: Path, shared: Path, methods: list[Any], **budgets: Any) -> Ratios:
    """By method and budget: WikiText-2, calibrated on train, measured on the start of test."""
    folder = shared / "data" / "wikitext-2"
    text = str(folder / "wiki.test.tokens.zip")
    result = moesaic.compare(
        str(smollm2),
        methods,
        **budgets,
        calibration=str(folder / "wiki.train.tokens.zip"),
        text=[text],
        references=(),
        seeds=1,
        samples=SAMPLES,
        sequence_length=LENGTH,
        max_tokens=TEST_TOKENS,
        progress=print,
    )
    return {(row["method"], row["at"]): row["ratio"][text] for row in result["rows"]}


@pytest.fixture(scope="module")
def ratios(smollm2: Path, shared: Path) -> Ratios:
    dynamic = moesaic.load_method("moesaic-dynamic", {"layer_budgets": "uniform"})
    sparsities = dict.fromkeys(sparsity for _, sparsity in AIMS)
    methods = [dynamic, "moesaic", "static-repaired"]
    return compared(smollm2, shared, methods, sparsity=list(sparsities))


@pytest.mark.parametrize(("method", "sparsity"), AIMS)
def test_what_was_reached_is_kept(ratios: Ratios, method: str, sparsity: float) -> None:
    assert 1 < ratios[method, sparsity] <= AIMS[method, sparsity]


@pytest.mark.parametrize("sparsity", [0.25, 0.5])
def test_routing_beats_static_pruning(ratios: Ratios, sparsity: float) -> None:
    """And a budget that tokens share beats one that each of them has."""
    assert ratios[DYNAMIC, sparsity] < ratios["moesaic", sparsity]
    assert ratios["moesaic", sparsity] < ratios["static-repaired", sparsity]


def test_neurons_keep_what_they_reached_at_equal_bytes(smollm2: Path, shared: Path) -> None:
    """Ahead of TEAL, which reads the same bytes, too."""
    neurons = moesaic.load_method("moesaic-neurons")
    teal = moesaic.load_method("teal", {"where": "ffn"})
    found = compared(smollm2, shared, [neurons, teal], ffn_bytes=list(AIMS_BY_BYTES))
    by_method: dict[bool, dict[float, float]] = {True: {}, False: {}}
    for (method, share), ratio in found.items():
        by_method[method.startswith("moesaic-neurons")][share] = ratio
    for share, most in AIMS_BY_BYTES.items():
        assert by_method[True][share] <= most
        assert by_method[True][share] < by_method[False][share]


@pytest.mark.skipif("MOESAIC_AIMS" not in os.environ, reason="set MOESAIC_AIMS=1: takes hours")
@pytest.mark.parametrize("name", BEST)
def test_the_aims_are_met(name: str, smollm2: Path, shared: Path) -> None:
    """Untrained, on 65,536 tokens of WikiText-2's test text."""
    best = BEST[name]
    folder = shared / "data" / "wikitext-2"
    model, _ = moesaic.convert(
        str(smollm2),
        best.method,
        best.layout,
        str(folder / "wiki.train.tokens.zip"),
        samples=best.samples,
        sequence_length=LENGTH,
        dense_layers=range(best.dense_layers),
    )
    text = str(folder / "wiki.test.tokens.zip")
    ids = to_ids(text, load_tokenizer(str(smollm2)))
    ours, _ = perplexity(model, ids, LENGTH, ALL_TEST_TOKENS)
    dense, _ = perplexity(load_model(str(smollm2), "auto"), ids, LENGTH, ALL_TEST_TOKENS)
    print(name, ours / dense)
    assert 1 < ours / dense <= best.aim
