"""The linear layers of one decoder layer, to be tried with others in their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from moesaic.calibration.ffn_inputs import FFNInputs


@dataclass(frozen=True)
class LinearTrial:
    """The layers, what enters each, and what replacements of them lose.

    `error(samples)` gives a function of replacements: the norm of what the decoder
    layer's output loses on that many samples, over the output's. Samples have `length`
    tokens.
    """

    linears: Sequence[nn.Linear]
    inputs: Sequence[FFNInputs]
    length: int
    error: Callable[[int], Callable[[Sequence[nn.Module]], float]]
