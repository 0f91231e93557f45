"""Figure 2: how often neurons are among the K_a most active of a token, by K_a."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moesaic.experiments.profiles import rates
from moesaic.experiments.study import Study
from moesaic.experiments.table import Column, Line, Panel, Row, Table, Value

COLUMNS = (
    Column("mean", "mean rate", 4),
    Column("peak", "most frequent rate", 3),
    Column("rare", "neurons below the mean (%)", 1),
    Column("often", "neurons above 0.5 (%)", 2),
    Column("most", "largest rate", 3),
)
BINS = 40
# K_a as shares of the neurons: the paper shows 1,000 of 11,008 and calibrates with 10.
SHARES = (1000 / 11_008, 0.02)
CALIBRATES_WITH = 10
# What the paper's text reads from its figure, at K_a = 1,000.
PAPER: dict[str, Value] = {"peak": 0.07, "most": "near 1"}


def run(study: Study) -> Table:
    by_ten = rates(study, "wiki", CALIBRATES_WITH)
    middle = len(by_ten) // 2
    neurons = len(by_ten[middle])
    of_middle = {CALIBRATES_WITH: by_ten[middle]}
    for share in SHARES:
        top_k = round(share * neurons)
        of_middle[top_k] = rates(study, "wiki", top_k)[middle]
    rows = []
    lines = []
    for top_k, rate_F in sorted(of_middle.items()):
        name = f"K_a = {top_k}"
        is_the_paper_s = top_k == round(SHARES[0] * neurons)
        paper = PAPER if is_the_paper_s else {}
        rows.append(Row(name, _values(rate_F), paper))
        lines.append(_histogram(name, rate_F))
    notes = [
        f"layer {middle} of the dense model, calibration windows of wiki; the largest K_a "
        "is the paper's 1,000 of 11,008 neurons"
    ]
    axes = ("activation rate", "share of the neurons")
    panel = Panel(f"layer {middle}", *axes, lines, log_y=True)
    return Table(COLUMNS, rows, notes, [panel])


def _values(rate_F: NDArray[np.float64]) -> dict[str, Value]:
    counts, edges = np.histogram(rate_F, BINS, (0, 1))
    peak = int(counts.argmax())
    return {
        "mean": float(rate_F.mean()),
        "peak": float(edges[peak] + edges[peak + 1]) / 2,
        "rare": float(100 * np.mean(rate_F < rate_F.mean())),
        "often": float(100 * np.mean(rate_F > 0.5)),
        "most": float(rate_F.max()),
    }


def _histogram(name: str, rate_F: NDArray[np.float64]) -> Line:
    counts, edges = np.histogram(rate_F, BINS, (0, 1))
    centres = (edges[:-1] + edges[1:]) / 2
    shares = counts / len(rate_F)
    return Line(name, centres.tolist(), shares.tolist())
