"""Widths of all layers from one budget: scores of neurons, made comparable.

Shape suffixes: F neurons of a layer, N neurons of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def standardised(score_F: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scores less their mean, over their standard deviation; 0 where all are equal."""
    centred_F = score_F - score_F.mean()
    deviation = float(score_F.std())
    scaled_F: NDArray[np.float64] = centred_F / max(deviation, 1e-300)
    return scaled_F


def global_widths(
    scores: Sequence[NDArray[np.float64]], total: int
) -> list[int]:
    """How many neurons each layer keeps, `total` in all: those of highest score.

    `scores` (F,) are a layer's each, standardised here before layers are compared; ties
    go to the first layer and the lowest index. A layer's best neuron always stays, so
    `total` is at least the number of layers. O(N log N).
    """
    comparable = []
    layers = []
    for layer, score_F in enumerate(scores):
        scaled_F = standardised(score_F)
        scaled_F[np.argmax(scaled_F)] = np.inf
        comparable.append(scaled_F)
        layers.append(np.full(len(score_F), layer))
    score_N = np.concatenate(comparable)
    layer_N = np.concatenate(layers)
    order_N = np.argsort(-score_N, kind="stable")
    kept_N = layer_N[order_N[:total]]
    counts = np.bincount(kept_N, minlength=len(scores))
    return [int(count) for count in counts]
