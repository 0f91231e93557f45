"""The loop over layers: what every method shares.

Calibration is sequential: a layer is converted on inputs that have passed through the
converted layers before it. All tokens pass through a replacement with every expert
computed under a mask: the same outputs, and faster than many small experts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from moesaic.calibration.calibration_set import CalibrationSet
from moesaic.calibration.checks import check_inputs
from moesaic.calibration.expert_inputs import ExpertInputs
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.hidden_states import Stream
from moesaic.calibration.linear_trial import LinearTrial
from moesaic.conversion.layer_error import (
    LayerReport,
    linear_error,
    linears_report,
    measure_layer,
)
from moesaic.conversion.masks import set_view
from moesaic.conversion.mixtures import ConvertedMixture, MixtureLayer
from moesaic.conversion.plan import Plan
from moesaic.conversion.saved_layers import (
    SavedLayer,
    load_layer,
    load_linears,
    read_from_draft,
    save_layer,
    unfilled_layer,
)
from moesaic.errors import MoesaicError
from moesaic.families import Mixtures
from moesaic.memory import lent_to
from moesaic.methods.base import FFNMethod, LinearMethod
from moesaic.modeling import (
    install,
    install_linear,
    install_outer_shared,
)
from moesaic.output.draft import remembered
from moesaic.progress import track


class Clock:
    """Adds the time since the last call to a named step."""

    def __init__(self, seconds: dict[str, float]):
        self.seconds = seconds
        self.last = time.perf_counter()

    def __call__(self, step: str) -> None:
        now = time.perf_counter()
        earlier = self.seconds.get(step, 0.0)
        self.seconds[step] = earlier + now - self.last
        self.last = now


@dataclass
class Run:
    """One conversion's pass over all layers.

    `draft` is the folder that finished layers are written to, and read from where an
    earlier run wrote them; of several processes the first has it. A `trial` leaves
    replacements as they are evaluated fastest, under a mask. Where no FFN is `reported`
    on, nothing is measured, nor fitted for it. Without `undo_drift` no drift is taken
    back, whatever the method says. `dense` is the stream through the dense model, where
    one is followed. `seconds` collects the time of each step.
    """

    stream: Stream
    plan: Plan
    calibration: CalibrationSet
    seed: int
    seconds: dict[str, float] = field(default_factory=dict)
    draft: Path | None = None
    progress: bool = False
    trial: bool = False
    reported: bool = True
    undo_drift: bool = True
    dense: Stream | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.clock = Clock(self.seconds)

    def replace_ffns(self, method: FFNMethod) -> list[LayerReport]:
        """Converts every layer in turn and reports on each.

        Layers that the draft holds are put in place and passed through.
        """
        ffns = self.stream.ffns
        reports = []
        is_mixture = isinstance(ffns, Mixtures)
        undo_drift = self.undo_drift and method.undoes_drift and not is_mixture
        for layer in self._layers_in_order():
            if undo_drift:
                self._follow_dense(layer)
            if layer not in self.plan.moe.layers:
                self.stream.advance(layer)
                self.clock("advance")
            elif isinstance(ffns, Mixtures):
                report = self._replace_experts(method, layer)
                reports.append(report)
            elif not self.reported:
                self._try_ffn(method, layer)
            else:
                report = self._replace_ffn(method, layer)
                reports.append(report)
        return reports

    def _follow_dense(self, layer: int) -> None:
        """Passes all tokens through the dense layer, from the first replaced to the last.

        Up to that both streams are the same, and after it nothing is fitted.
        """
        layers = self.plan.moe.layers
        if layer == min(layers) and self.stream.adds_ffn(layer):
            self.dense = self.stream.twin()
        if self.dense is not None and layer <= max(layers):
            self.dense.advance(layer)
            self.clock("follow the dense model")

    def _ffn_inputs(self, method: FFNMethod, layer: int) -> FFNInputs:
        """With goals where something can have drifted before this layer."""
        dense = self.dense
        is_first = layer == min(self.plan.moe.layers)
        if is_first or not self.stream.adds_ffn(layer):
            dense = None
        return ffn_inputs(
            self.stream, layer, self.calibration, method.fits_weights, dense
        )

    def replace_linears(self, method: LinearMethod) -> list[LayerReport]:
        """The same for a method that replaces linear layers, wherever they stand."""
        reports = []
        for layer in self._layers_in_order():
            report = self._replace_linears_of(method, layer)
            reports.append(report)
        return reports

    def remembered(self, name: str, compute: Callable[[], Any]) -> Any:
        """What `compute` gives, as JSON; on --resume, what it gave before.

        For choices that take long. Names must differ within a conversion.
        """
        return remembered(self.draft, f"remembered-{name}", compute)

    def _layers_in_order(self) -> Iterator[int]:
        """Every layer's number, while the layer is on the device; checks its inputs."""
        layers = self.stream.ffns.layers
        numbers = track(
            range(len(layers)), "converting layers", enabled=self.progress
        )
        for layer in numbers:
            with lent_to(self.stream.device, layers[layer]):
                check_inputs(self.stream, layer)
                self.clock("check")
                yield layer

    def _replace_linears_of(
        self, method: LinearMethod, layer: int
    ) -> LayerReport:
        """Converts one decoder layer's linear layers on the inputs that they get."""
        started = time.perf_counter()
        assert self.plan.moe.linears is not None
        paths = [path.format(layer) for path in self.plan.moe.linears.paths]
        prefixes = [self._prefixed(path) for path in paths]
        saved = self._finished_linears(layer, paths, prefixes)
        if saved is not None:
            device = self.stream.device
            modules = [module.to(device) for module in saved.replacements]
            self._pass_on_linears(layer, paths, modules)
            self._map(layer, prefixes, modules, saved.report)
            return saved.report
        all_inputs = self._linear_inputs(method, layer, paths)
        self.clock("inputs")
        linears: list[Any] = []
        for path in paths:
            linear = self._base.get_submodule(path)
            linears.append(linear)
        trial = LinearTrial(
            linears,
            all_inputs,
            self.calibration.length,
            partial(self._error_of, layer, paths),
        )
        shares = method.shares_of_layer(trial, self.plan.moe.linears.share)
        self.clock("shares")
        replacements = self._converted_linears(method, layer, trial, shares)
        errors = []
        for linear, replacement, inputs in zip(
            linears, replacements, all_inputs, strict=True
        ):
            lost = linear_error(linear, replacement, inputs)
            errors.append(lost)
        self.clock("convert")
        self._pass_on_linears(layer, paths, replacements)
        report = linears_report(
            layer, errors, self.calibration, method.fits_weights
        )
        report.shares = shares
        report.seconds = time.perf_counter() - started
        self._save(layer, prefixes, replacements, report)
        return report

    def _finished_linears(
        self, layer: int, paths: list[str], prefixes: list[str]
    ) -> SavedLayer | None:
        """What an earlier run wrote of them."""
        if self.draft is None:
            return None
        dense = [self._base.get_submodule(path) for path in paths]
        return load_linears(self.draft, layer, prefixes, self.plan.moe, dense)

    def _linear_inputs(
        self, method: LinearMethod, layer: int, paths: list[str]
    ) -> list[FFNInputs]:
        """The inputs of each, from one pass through the layer."""
        blocks = self.stream.module_inputs(layer, paths)
        all_inputs = []
        for path in paths:
            if not blocks[path]:
                error = MoesaicError(f"{path} is never called as a module")
                raise self._blame(layer, error)
            inputs = FFNInputs(
                blocks.pop(path),
                self.calibration.split,
                method.fits_weights,
                self.stream.storage,
                self.stream.device,
            )
            all_inputs.append(inputs)
        return all_inputs

    def _converted_linears(
        self,
        method: LinearMethod,
        layer: int,
        trial: LinearTrial,
        shares: list[float],
    ) -> list[Any]:
        """Their replacements, each by its own share or the plan's."""
        assert self.plan.moe.linears is not None
        replacements = []
        for place, linear in enumerate(trial.linears):
            share = shares[place] if shares else self.plan.moe.linears.share
            generator = np.random.default_rng([self.seed, layer, place])
            try:
                replacement = method.convert_linear(
                    linear, trial.inputs[place], share, generator
                )
            except MoesaicError as error:
                raise self._blame(layer, error) from error
            replacements.append(replacement)
        return replacements

    def _error_of(
        self, layer: int, paths: list[str], samples: int
    ) -> Callable[[Sequence[Any]], float]:
        """What a decoder layer loses with replacements of its linear layers.

        The norm of the outputs' difference over that of the dense output, for the first
        so many samples. The dense linear layers are put back each time.
        """
        dense = [self._base.get_submodule(path) for path in paths]
        dense_NLD = self.stream.outputs(layer, samples).float()
        norm = dense_NLD.norm().clamp(min=1e-20)

        def error(replacements: Sequence[Any]) -> float:
            self._install_linears(paths, replacements)
            try:
                output_NLD = self.stream.outputs(layer, samples)
            finally:
                self._install_linears(paths, dense)
            return float((output_NLD.float() - dense_NLD).norm() / norm)

        return error

    def _pass_on_linears(
        self, layer: int, paths: list[str], replacements: Sequence[Any]
    ) -> None:
        """Passes all tokens through the layer with them, which then stay in place."""
        self._install_linears(paths, replacements)
        if not self._is_last(layer):
            self.stream.advance(layer)
        self.clock("advance")

    def _install_linears(
        self, paths: list[str], replacements: Sequence[Any]
    ) -> None:
        config = self.plan.config
        for path, replacement in zip(paths, replacements, strict=True):
            replacement.eval()
            install_linear(self._base, config, path, replacement)

    def _prefixed(self, path: str) -> str:
        """A path from the base model as the whole model's state names it."""
        prefix = self.stream.ffns.base_prefix
        return f"{prefix}.{path}" if prefix else path

    def _try_ffn(self, method: FFNMethod, layer: int) -> None:
        """Convert and pass on."""
        inputs = self._ffn_inputs(method, layer)
        inputs.reported = False
        replacement = self._converted_ffn(method, layer, inputs)
        if replacement.made is not None:
            replacement.made.forget_repairs()
        self._pass_on(layer, replacement, inputs.own())

    def _converted_ffn(
        self, method: FFNMethod, layer: int, inputs: FFNInputs
    ) -> Any:
        """The replacement of a layer's FFN, the same on all processes."""
        ffn = self.stream.ffns.read(layer)
        sizes = self.plan.moe.sizes_of(layer)
        generator = np.random.default_rng([self.seed, layer])
        try:
            replacement = method.convert_ffn(ffn, inputs, sizes, generator)
        except MoesaicError as error:
            raise self._blame(layer, error) from error
        self.stream.share.same_(replacement)
        return replacement

    def _replace_ffn(self, method: FFNMethod, layer: int) -> LayerReport:
        """Convert, measure, pass on, save."""
        started = time.perf_counter()
        ffns = self.stream.ffns
        prefixes = [ffns.state_prefix(layer)]
        inputs = self._ffn_inputs(method, layer)
        self.clock("inputs")
        saved = self._finished(layer, prefixes)
        if saved is not None:
            replacement: Any = saved.replacements[0].to(self.stream.device)
            self._pass_on(layer, replacement, inputs.own())
            self._map(layer, prefixes, [replacement], saved.report)
            return saved.report
        replacement = self._converted_ffn(method, layer, inputs)
        self.clock("convert")
        set_view(replacement, masked=True)
        report = measure_layer(
            layer,
            inputs,
            ffns.read(layer),
            replacement,
            self.plan.moe.sizes_of(layer),
            self.seed,
        )
        replacement.made = None  # its repairs are as large as the layer
        if not math.isfinite(report.relative_error):
            raise MoesaicError(
                f"layer {layer} of {self.plan.model}: what replaces its FFN puts out NaN or "
                "infinity on the calibration text"
            )
        wants_goals = self.undo_drift and method.undoes_drift
        if wants_goals and not self.stream.adds_ffn(layer):
            report.notes.append(
                "drift is not taken back: the layer does more than to add what its FFN "
                "gives"
            )
        self.clock("measure")
        self._pass_on(layer, replacement, inputs.own())
        self.clock("advance")
        report.seconds = time.perf_counter() - started
        self._save(layer, prefixes, [replacement], report)
        return report

    def _finished(
        self, layer: int, prefixes: Sequence[str]
    ) -> SavedLayer | None:
        """What an earlier run wrote of a layer, on all processes; None if it did not."""
        share = self.stream.share
        saved = None
        if self.draft is not None:
            saved = load_layer(self.draft, layer, prefixes, self.plan.moe)
        report = share.agreed(None if saved is None else saved.report)
        if report is None:
            return None
        if saved is None:  # the first process has it
            device = self.stream.device
            saved = unfilled_layer(layer, report, self.plan.moe, device)
        for replacement in saved.replacements:
            share.same_(replacement)
        return saved

    def _replace_experts(self, method: FFNMethod, layer: int) -> LayerReport:
        """The same for a layer of experts: each of them is converted by itself."""
        started = time.perf_counter()
        ffns = self.stream.ffns
        assert isinstance(ffns, Mixtures)
        inputs = ExpertInputs(
            self.stream.ffn_calls(layer),
            ffns.num_outer,
            self.calibration.split,
            method.fits_weights,
            self.stream.storage,
            self.stream.device,
        )
        self.clock("inputs")
        mixture = MixtureLayer(
            ffns, layer, self.plan.moe, self.seed, self.clock
        )
        prefixes = ffns.prefixes(layer)
        saved = self._finished(layer, prefixes)
        if saved is not None:
            device = self.stream.device
            modules = [module.to(device) for module in saved.replacements]
            converted = mixture.unstacked(modules, saved.report)
            self._pass_on_mixture(layer, converted, inputs)
            self._map(layer, prefixes, converted.modules, saved.report)
            return saved.report
        try:
            converted = mixture.convert(method, inputs)
        except MoesaicError as error:
            raise self._blame(layer, error) from error
        self._pass_on_mixture(layer, converted, inputs)
        self.clock("advance")
        converted.report.seconds = time.perf_counter() - started
        self._save(layer, prefixes, converted.modules, converted.report)
        return converted.report

    def _pass_on(
        self, layer: int, replacement: Any, calls: Iterable[Any]
    ) -> None:
        """Passes all tokens through the replacement, which then stays in its place."""
        set_view(replacement, masked=True)
        self._install(layer, replacement)
        try:
            if not self._is_last(layer):
                self.stream.advance(layer, calls)
        finally:
            set_view(replacement, masked=self.trial)

    def _pass_on_mixture(
        self, layer: int, converted: ConvertedMixture, inputs: ExpertInputs
    ) -> None:
        """The same; the stack of experts takes its place afterwards.

        Where a shared expert has been converted too, the layer runs again in whole.
        """
        shared = converted.shared
        self._install(layer, converted.parts)
        if shared is not None:
            set_view(shared, masked=True)
            install_outer_shared(self._base, self.plan.config, layer, shared)
        if not self._is_last(layer):
            calls = inputs.all() if shared is None else None
            self.stream.advance(layer, calls)
        if shared is not None:
            set_view(shared, masked=self.trial)
        if converted.stack is not None and not self.trial:
            self._install(layer, converted.stack)

    def _save(
        self,
        layer: int,
        prefixes: Sequence[str],
        replacements: Sequence[Any],
        report: LayerReport,
    ) -> None:
        """Into the draft, if there is one, and from there."""
        if self.draft is not None:
            save_layer(self.draft, layer, prefixes, replacements, report)
        found = self._map(layer, prefixes, replacements, report)
        if self.draft is not None and not found:
            raise MoesaicError(
                f"layer {layer} was written to {self.draft}, and is gone"
            )
        self.clock("write")

    def _map(
        self,
        layer: int,
        prefixes: Sequence[str],
        replacements: Sequence[Any],
        report: LayerReport,
    ) -> bool:
        """A model on the CPU has what is in the draft from the file, not in memory.

        So do other processes that see the file. False where it is gone.
        """
        draft, report = self.stream.share.agreed((self.draft, report))
        home = next(self._base.parameters()).device
        if draft is None or home.type != "cpu":
            return True
        return read_from_draft(draft, layer, prefixes, replacements, report)

    def _install(self, layer: int, module: nn.Module) -> None:
        install(self._base, self.plan.config, layer, module)

    @property
    def _base(self) -> nn.Module:
        return self.stream.ffns.base

    def _is_last(self, layer: int) -> bool:
        """Nothing reads what the last layer puts out."""
        return layer + 1 == len(self.stream.ffns.layers)

    def _blame(self, layer: int, error: MoesaicError) -> MoesaicError:
        return MoesaicError(f"layer {layer} of {self.plan.model}: {error}")


def ffn_inputs(
    stream: Stream,
    layer: int,
    calibration: CalibrationSet,
    hold_out: bool,
    dense: Stream | None = None,
) -> FFNInputs:
    """The inputs of one layer's FFN, which the stream is to `advance` with.

    With the goals of a `dense` stream that has passed the layer, if there is one.
    """
    goals = None if dense is None else stream.goals(dense)
    return FFNInputs(
        stream.ffn_inputs(layer),
        calibration.split,
        hold_out,
        stream.storage,
        stream.device,
        layer,
        stream.ids_NL.flatten(),
        stream.part,
        goals,
    )
