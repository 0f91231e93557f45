"""The loop over layers.

Calibration is sequential: a layer is fitted on inputs that have passed through the converted
layers before it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from moesaic.calibration.checks import check_inputs
from moesaic.calibration.expert_inputs import Routed
from moesaic.calibration.ffn_inputs import Inputs
from moesaic.calibration.hidden_states import Stream
from moesaic.conversion.layer_error import LayerReport, measure_layer
from moesaic.conversion.mixtures import fit_mixture, masked_mixture
from moesaic.conversion.plan import Plan
from moesaic.conversion.saved_layers import load_blocks, save_blocks
from moesaic.errors import MoesaicError
from moesaic.families import Mixtures
from moesaic.methods.fit import fit_layer
from moesaic.modeling import beside_config, install_beside, install_block
from moesaic.parts.masked import masked_view
from moesaic.progress import track


def convert_layers(
    stream: Stream,
    todo: Plan,
    seed: int,
    steps: dict[str, float],
    draft: Path | None = None,
    progress: bool = False,
    trial: bool = False,
) -> list[LayerReport]:
    """Converts every layer in turn and reports on each; adds the seconds of each step to `steps`.

    Layers that the draft holds are put in place and passed through. A `trial` leaves masked dense
    FFNs in the place of the blocks: the same outputs, and the faster to evaluate.
    """
    clock, reports = _Clock(steps), []
    layers = stream.ffns.layers
    for layer in track(range(len(layers)), "converting layers", enabled=progress):
        home = next(layers[layer].parameters()).device
        layers[layer].to(stream.device)
        check_inputs(stream, layer)
        clock("check")
        if (
            layer not in stream.ffns.converted
        ):  # a dense layer among others with experts
            stream.advance(layer)
            clock("advance")
        else:
            convert = (
                _convert_mixture
                if isinstance(stream.ffns, Mixtures)
                else _convert_layer
            )
            reports.append(convert(stream, todo, layer, seed, draft, clock, trial))
        layers[layer].to(home)
    return reports


def _convert_layer(
    stream: Stream,
    todo: Plan,
    layer: int,
    seed: int,
    draft: Path | None,
    clock: _Clock,
    trial: bool,
) -> LayerReport:
    """Fit, measure, pass on. What it holds of the dense FFN goes when it returns."""
    ffns, recipe, config = stream.ffns, todo.recipe, todo.config
    prefixes = [ffns.state_prefix(layer)]
    begun = time.perf_counter()
    inputs = stream_inputs(stream, layer, recipe.fits)
    clock("inputs")
    ffn = ffns.read(layer)
    if draft and (done := load_blocks(draft, layer, prefixes, config)):
        block: Any = done[0][0].to(stream.device)
        masked = masked_view(block, ffn, config)
        _advance(stream, config, layer, block, masked, inputs.all())
        return done[1]
    generator, sizes = np.random.default_rng([seed, layer]), todo.sizes_of(layer)
    try:
        fitted = fit_layer(inputs, ffn, recipe, sizes, config, generator, clock)
    except MoesaicError as error:
        raise MoesaicError(f"layer {layer} of {todo.model}: {error}") from error
    report = measure_layer(layer, inputs, ffn, fitted, sizes, seed)
    clock("measure")
    _advance(
        stream,
        config,
        layer,
        None if trial else fitted.block,
        fitted.masked,
        inputs.all(),
    )
    clock("advance")
    report.seconds = time.perf_counter() - begun
    if draft is not None and fitted.block is not None:
        save_blocks(draft, layer, prefixes, [fitted.block], report)
        clock("write")
    return report


def _convert_mixture(
    stream: Stream,
    todo: Plan,
    layer: int,
    seed: int,
    draft: Path | None,
    clock: _Clock,
    trial: bool,
) -> LayerReport:
    """The same for a layer that has experts already: each of them is fitted by itself."""
    ffns, config = stream.ffns, todo.config
    assert isinstance(ffns, Mixtures)
    begun = time.perf_counter()
    routed = Routed(
        stream.ffn_calls(layer),
        ffns.num_outer,
        todo.recipe.fits,
        stream.storage,
        stream.device,
        window=stream.hidden_NLD.shape[1],
    )
    clock("inputs")
    if draft and (done := load_blocks(draft, layer, ffns.prefixes(layer), config)):
        block: Any = done[0][0].to(stream.device)
        masked: nn.Module = masked_mixture(block, ffns, layer, config)
        if len(done[0]) > 1:
            whole: Any = done[0][1].to(stream.device)
            ffn = ffns.read_beside(layer)
            assert ffn is not None
            own = beside_config(config)
            _advance_both(
                stream,
                config,
                layer,
                (block, whole),
                (masked, masked_view(whole, ffn, own)),
            )
        else:
            _advance(stream, config, layer, block, masked, routed.all())
        return done[1]
    try:
        fitted = fit_mixture(routed, ffns, layer, todo, seed, clock)
    except MoesaicError as error:
        raise MoesaicError(f"layer {layer} of {todo.model}: {error}") from error
    kept = None if trial else fitted.block
    blocks: list[nn.Module | None] = [fitted.block]
    if fitted.beside is None:
        _advance(stream, config, layer, kept, fitted.masked, routed.all())
    else:
        beside, beside_masked = fitted.beside
        blocks.append(beside)
        both = (kept, None if trial else beside)
        _advance_both(stream, config, layer, both, (fitted.masked, beside_masked))
    clock("advance")
    fitted.report.seconds = time.perf_counter() - begun
    found = [block for block in blocks if block is not None]
    if draft is not None and found:
        save_blocks(draft, layer, ffns.prefixes(layer), found, fitted.report)
        clock("write")
    return fitted.report


def stream_inputs(stream: Stream, layer: int, hold_out: bool) -> Inputs:
    """The inputs of one layer's FFN, which the stream is to `advance` with."""
    return Inputs(
        stream.ffn_inputs(layer),
        stream.tokens,
        hold_out,
        stream.storage,
        stream.device,
        window=stream.hidden_NLD.shape[1],
    )


def _advance(
    stream: Stream,
    config: Any,
    layer: int,
    block: nn.Module | None,
    masked: nn.Module,
    calls: Iterable[Any],
) -> None:
    """Passes all tokens through the converted layer, masked, and leaves the block in its place."""
    install_block(stream.ffns.base, config, layer, masked)
    if layer + 1 < len(stream.ffns.layers):  # nothing reads what the last one puts out
        stream.advance(layer, calls)
    if block is not None:
        install_block(stream.ffns.base, config, layer, block)


def _advance_both(
    stream: Stream,
    config: Any,
    layer: int,
    blocks: tuple[nn.Module | None, nn.Module | None],
    masked: tuple[nn.Module, nn.Module],
) -> None:
    """The same where a shared expert has been converted too: the layer runs again in whole."""
    base = stream.ffns.base
    for experts, beside in (masked, blocks):
        if experts is not None:
            install_block(base, config, layer, experts)
        if beside is not None:
            install_beside(base, config, layer, beside)
        if experts is masked[0] and layer + 1 < len(stream.ffns.layers):
            stream.advance(layer)


class _Clock:
    """Adds the time since the last call to a named step."""

    def __init__(self, steps: dict[str, float]):
        self.steps, self.last = steps, time.perf_counter()

    def __call__(self, step: str) -> None:
        now = time.perf_counter()
        self.steps[step] = self.steps.get(step, 0.0) + now - self.last
        self.last = now
