"""Figure 1: how the hidden states of an FFN are distributed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moesaic.experiments.profiles import ffn_inputs
from moesaic.experiments.study import Study
from moesaic.experiments.table import Column, Line, Panel, Row, Table, Value

COLUMNS = (
    Column("near_zero", "abs(h) below a tenth of its root mean square (%)", 1),
    Column("few", "energy in the largest tenth of a token's neurons (%)", 1),
)
BINS = 101
SPAN = 4.0  # root mean squares, on either side


def run(study: Study) -> Table:
    rows = []
    lines = []
    for layer, (ffn, inputs) in enumerate(ffn_inputs(study, "wiki")):
        # The first block of tokens is enough for a picture.
        h_TF = ffn.hidden(inputs[0]).float().numpy(force=True)
        scaled_TF = h_TF / np.sqrt(np.mean(h_TF**2))
        name = f"layer {layer}"
        rows.append(Row(name, _values(scaled_TF)))
        lines.append(_histogram(name, scaled_TF))
    middle = len(lines) // 2
    axes = ("h over its root mean square", "share of all values")
    panel = Panel(f"layer {middle}", *axes, [lines[middle]], log_y=True)
    notes = ["dense model, calibration windows of wiki"]
    return Table(COLUMNS, rows, notes, [panel])


def _values(scaled_TF: NDArray[np.float32]) -> dict[str, Value]:
    energy_TF = np.sort(scaled_TF**2, axis=1)
    tenth = energy_TF.shape[1] // 10
    largest = energy_TF[:, -tenth:].sum() / energy_TF.sum()
    near_zero = np.mean(np.abs(scaled_TF) < 0.1)
    return {"near_zero": float(100 * near_zero), "few": float(100 * largest)}


def _histogram(name: str, scaled_TF: NDArray[np.float32]) -> Line:
    edges = np.linspace(-SPAN, SPAN, BINS + 1)
    counts, _ = np.histogram(scaled_TF, edges)
    centres = (edges[:-1] + edges[1:]) / 2
    shares = counts / scaled_TF.size
    return Line(name, centres.tolist(), shares.tolist())
