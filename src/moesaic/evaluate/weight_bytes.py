"""Bytes of weights read for one token: what decoding at batch 1 waits for.

The weights that evaluate/work.py counts, each with the bytes it is stored in: every
matrix once, the head among them, of experts those that run. Embeddings, of which one row
is read, and the cache of keys and values are left out. What a replacement reads it says
itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from moesaic.evaluate.work import is_converted
from moesaic.families import Mixtures, find_ffns
from moesaic.modeling import (
    MoEConfig,
    MoesaicReplacement,
    MoesaicThresholdedLinear,
)


@dataclass(frozen=True)
class WeightBytes:
    """Bytes read for one token: in FFNs, their routers included, and elsewhere."""

    ffn: float
    rest: float

    @property
    def total(self) -> float:
        return self.ffn + self.rest


def count_bytes(model: Any) -> WeightBytes:
    """Counts a dense or converted model, with or without weights.

    Raises MoesaicError for a family whose FFNs are not recognised.
    """
    paths, running = _ffn_paths(model)
    base = getattr(model, model.base_model_prefix, model)
    ffns = []
    for path in paths:
        try:
            ffn = base.get_submodule(path)
        except AttributeError:  # a layer without an FFN, as hybrids have
            continue
        ffns.append(ffn)
    in_ffns = sum(_read(ffn, running) for ffn in ffns)
    rest = _read(model, 1.0, {id(ffn) for ffn in ffns})
    return WeightBytes(in_ffns, rest)


def oracle_bytes(
    dense: WeightBytes, dense_model: Any, saved_weights: float
) -> WeightBytes:
    """Of a reference that no model can hold: as if to know were free."""
    ffns = find_ffns(dense_model)
    weight = ffns.read(ffns.converted[0]).up_FD
    saved = saved_weights * weight.element_size()
    return WeightBytes(dense.ffn - saved, dense.rest)


def _ffn_paths(model: Any) -> tuple[list[str], float]:
    """All modules that FFNs are made of, and the share of a mixture's experts that run."""
    config = model.config
    running = None
    if is_converted(config):
        moe: MoEConfig = config.moesaic
        patterns = [moe.path, *moe.identities]
        if moe.outer is not None:
            running = moe.outer.num_active / moe.outer.num_experts
    else:
        ffns = find_ffns(model)
        names = [ffns.ffn_path, *ffns.identities]
        patterns = [f"{ffns.layers_path}.{{}}.{name}" for name in names]
        if isinstance(ffns, Mixtures):
            running = ffns.outer_active / ffns.num_outer
    if running is None:
        running = 1.0
    else:
        # Around the experts stand the outer router and shared experts.
        patterns = [pattern.rpartition(".")[0] for pattern in patterns]
    depth = config.get_text_config().num_hidden_layers
    paths = []
    for layer in range(depth):
        paths += [pattern.format(layer) for pattern in patterns]
    return paths, running


def _skipped_inside(replacement: MoesaicReplacement) -> float:
    """Bytes that its linear layers leave out, where they were replaced too."""
    skipped = 0.0
    for module in replacement.modules():
        if module is replacement:
            continue
        if isinstance(module, MoesaicThresholdedLinear):
            skipped += module.weight.nbytes - module.weight_bytes()
    return skipped


def _read(
    module: nn.Module,
    running: float,
    without: frozenset[int] | set[int] = frozenset(),
) -> float:
    """Bytes that one token reads in a module, but for parts that are counted apart."""
    if id(module) in without or isinstance(module, nn.Embedding):
        return 0.0
    if isinstance(module, MoesaicReplacement):
        return module.weight_bytes() - _skipped_inside(module)
    read = 0.0
    for parameter in module.parameters(recurse=False):
        if parameter.ndim == 2:
            read += parameter.nbytes
        elif parameter.ndim == 3:  # a matrix for each expert
            read += parameter.nbytes * running
    return read + sum(
        _read(child, running, without) for child in module.children()
    )
