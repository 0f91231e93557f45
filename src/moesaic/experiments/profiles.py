"""What the dense FFNs' neurons do on a text: for the overlap of domains and the figures.

Shape suffixes: T tokens, D hidden_size, F neurons, N windows, L tokens of a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.calibration.calibration_set import CalibrationSet
from moesaic.calibration.first_token import first_token
from moesaic.calibration.hidden_states import Stream
from moesaic.calibration.statistics import StatisticsKind, compute_statistics
from moesaic.calibration.text import to_ids
from moesaic.errors import MoesaicError
from moesaic.experiments.study import Study
from moesaic.families import DenseFFN, Mixtures, find_ffns
from moesaic.families.load import choose_device, load_model, load_tokenizer
from moesaic.parts.products import widened_products


def ffn_inputs(
    study: Study, domain: str, seed: int = 0
) -> Iterator[tuple[DenseFFN, list[Tensor]]]:
    """Every layer's FFN, and its inputs (T, D) on calibration windows of a domain.

    Costs a forward pass over the windows. Raises MoesaicError for a mixture.
    """
    trust = study.trust_remote_code
    device = choose_device(study.device)
    model = load_model(study.model, study.dtype, trust, device)
    ffns = find_ffns(model)
    if isinstance(ffns, Mixtures):
        raise MoesaicError(
            f"{study.model} is a mixture; this table is of dense FFNs"
        )
    ids = to_ids(
        study.texts[domain].calibration, load_tokenizer(study.model, trust)
    )
    windows = CalibrationSet.sample(
        ids,
        study.scale.samples,
        study.scale.length,
        seed,
        first_token(model.config),
    )
    # Left before each yield: who asks for the next layer has modes of its own.
    widened = partial(widened_products, model.dtype, device)
    with torch.no_grad():
        stream = Stream(ffns, windows.windows_NL, device)
        for layer in ffns.converted:
            with widened():
                inputs = list(stream.ffn_inputs(layer))
            yield ffns.read(layer), inputs
            with widened():
                stream.advance(layer, inputs)


def rates(
    study: Study, domain: str, top_k: int, seed: int = 0
) -> list[NDArray[np.float64]]:
    """The paper's mu of every neuron (F,), a layer each: how often it is in the top K_a."""
    found = []
    for ffn, inputs in ffn_inputs(study, domain, seed):
        kind = StatisticsKind(activation_top_k=top_k)
        statistics = compute_statistics(inputs, ffn, kind)
        found.append(statistics.count_F / statistics.tokens)
    return found
