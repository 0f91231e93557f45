"""The tokens that a trial converts on: few, but enough for what it is a trial of."""

from __future__ import annotations

import math

from moesaic.calibration.calibration_set import CalibrationSet
from moesaic.parts.repair import TOKENS_PER_NEURON


def trial_set(
    calibration: CalibrationSet, tokens: int, neurons: int
) -> CalibrationSet:
    """The windows of at least `tokens` tokens, or all there are.

    More where least squares over so many held neurons wants more: else the trial is
    repaired in another way than the model will be. 0 neurons where nothing is fitted.
    """
    to_fit = TOKENS_PER_NEURON * neurons
    windows = math.ceil(max(tokens, to_fit) / calibration.length)
    chosen = calibration.fewer(windows)
    while chosen.split.first_heldout < to_fit and windows < calibration.samples:
        windows += 1
        chosen = calibration.fewer(windows)
    return chosen
