"""Section 5.3: whether other domains would choose the same shared neurons."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from moesaic.experiments.profiles import rates
from moesaic.experiments.study import LAYOUT, Study
from moesaic.experiments.table import Column, Row, Table, Value
from moesaic.layout import Layout
from moesaic.parts.importance import split_shared

DOMAINS = ("wiki", "code", "maths", "science")
TOP_K = 10  # the paper's K_a
COLUMNS = (
    Column("overlap", "overlap (%), mean of layers", 1),
    Column("least", "least of a layer (%)", 1),
)

# Percent, Llama-2 7B. Which share of the neurons is shared there is not said.
PAPER = {
    "maths / science": {"overlap": 84},
    "code / maths": {"overlap": 86},
    "code / science": {"overlap": 80},
}


def run(study: Study) -> Table:
    shared = {domain: _shared(study, domain) for domain in DOMAINS}
    rows = []
    for first, second in combinations(sorted(DOMAINS), 2):
        name = f"{first} / {second}"
        values = _overlap(shared[first], shared[second])
        rows.append(Row(name, values, PAPER.get(name, {})))
    again = _overlap(shared["wiki"], _shared(study, "wiki", seed=1))
    rows.append(Row("wiki / other windows of it", again, is_reference=True))
    layout = Layout.parse(LAYOUT)
    chance = 100 * layout.num_shared / layout.num_total
    by_chance: dict[str, Value] = {"overlap": chance, "least": None}
    rows.append(Row("by chance", by_chance, is_reference=True))
    notes = [
        f"the neurons that cmoe shares at {LAYOUT} (largest rate of the top {TOP_K}), "
        "profiled on the dense model, a domain each",
        "other windows of the same text: as much as so few tokens let agree",
    ]
    return Table(COLUMNS, rows, notes)


def _overlap(
    shared: list[NDArray[np.int64]], others: list[NDArray[np.int64]]
) -> dict[str, Value]:
    """Percent of the neurons that are in both, over the layers."""
    overlaps = [
        100 * len(np.intersect1d(one, other)) / len(one)
        for one, other in zip(shared, others, strict=True)
    ]
    return {"overlap": float(np.mean(overlaps)), "least": min(overlaps)}


def _shared(
    study: Study, domain: str, seed: int = 0
) -> list[NDArray[np.int64]]:
    """The shared neurons of every layer."""
    found = []
    for rate_F in rates(study, domain, TOP_K, seed):
        sizes = Layout.parse(LAYOUT).sizes(len(rate_F))
        shared_S, _ = split_shared(rate_F, sizes.shared)
        found.append(shared_S)
    return found
