"""One layer of a model that is a mixture already: each expert is converted by itself.

Shape suffixes: T tokens, D hidden_size, O experts of a token, P = T O pairs of a token
and one of its experts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.calibration.expert_inputs import ExpertInputs
from moesaic.calibration.expert_statistics import (
    BrokenExpertsError,
    compute_expert_statistics,
)
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.statistics import SAMPLE_TOKENS
from moesaic.conversion.layer_error import (
    MOST_TOKENS,
    LayerReport,
    measure_layer,
)
from moesaic.conversion.masks import set_view
from moesaic.errors import MoesaicError
from moesaic.families import DenseFFN, Mixtures
from moesaic.methods.base import FFNMethod
from moesaic.modeling import (
    MoEConfig,
    MoesaicHierarchy,
    OuterConfig,
)
from moesaic.parts.stack import (
    State,
    stack_experts,
    unstack_expert,
    whole_state,
)

# Pairs of a token and an expert whose statistics are computed at once.
TOGETHER = 4 * SAMPLE_TOKENS


class WholeFFN(nn.Module):
    """An expert that stays as it was."""

    def __init__(self, ffn: DenseFFN):
        super().__init__()
        self.ffn = ffn

    def forward(self, x_TD: Tensor) -> Tensor:
        h_TF = self.ffn.hidden(x_TD)
        return self.ffn.output(h_TF)


class MixtureParts(nn.Module):
    """The converted experts of a layer side by side, called as the family's own are."""

    def __init__(self, parts: list[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    @torch.no_grad()
    def forward(
        self, x_TD: Tensor, index_TO: Tensor, weight_TO: Tensor
    ) -> Tensor:
        expert_P = index_TO.reshape(-1)
        weight_P = weight_TO.reshape(-1)
        order_P = expert_P.argsort(stable=True)
        count_E = torch.bincount(expert_P, minlength=len(self.parts))
        y_TD = torch.zeros_like(x_TD)
        pairs = order_P.split(count_E.tolist())
        experts_of_token = index_TO.shape[1]
        for part, pair in zip(self.parts, pairs, strict=True):
            if not len(pair):
                continue
            token = pair // experts_of_token
            y = part(x_TD[token]) * weight_P[pair, None]
            y_TD.index_add_(0, token, y.to(y_TD.dtype))
        return y_TD


@dataclass(frozen=True)
class ConvertedMixture:
    """A converted layer: side by side for calibration, and stacked as it is saved.

    `stack` is None for what no model can hold; `shared` is what stands in for the
    family's own shared expert, None where it has none or it stays.
    """

    parts: MixtureParts
    stack: MoesaicHierarchy | None
    report: LayerReport
    shared: Any = None

    @property
    def modules(self) -> list[Any]:
        """What is saved."""
        modules: list[Any] = []
        if self.stack is not None:
            modules.append(self.stack)
        if self.shared is not None:
            modules.append(self.shared)
        return modules


@dataclass(frozen=True)
class MixtureLayer:
    """One layer to convert, expert by expert."""

    ffns: Mixtures
    layer: int
    moe: MoEConfig
    seed: int
    clock: Callable[[str], None]

    @property
    def outer(self) -> OuterConfig:
        assert self.moe.outer is not None
        return self.moe.outer

    @property
    def most(self) -> int:
        """Tokens that an expert is measured on."""
        share = 4 * MOST_TOKENS // self.ffns.num_outer
        return max(128, share)

    def convert(
        self, method: FFNMethod, inputs: ExpertInputs
    ) -> ConvertedMixture:
        """Converts every expert on its own tokens, and measures it on others.

        A token's statistics enter an expert once, so converting all experts costs
        O / E of a dense FFN of their total size, and what an expert costs by itself.
        Raises MoesaicError where activations are not finite.
        """
        whole = stays_whole(inputs, self.outer)
        sizes = self.moe.sizes_of(self.layer)
        parts: list[nn.Module] = []
        reports: dict[int, LayerReport] = {}
        inputs_of_converted = self._with_statistics(method, inputs, whole)
        for expert in range(self.ffns.num_outer):
            ffn = self.ffns.read(self.layer, expert)
            if expert in whole:
                parts.append(WholeFFN(ffn))
                continue
            expert_inputs = next(inputs_of_converted)
            generator = np.random.default_rng([self.seed, self.layer, expert])
            try:
                part: Any = method.convert_ffn(
                    ffn, expert_inputs, sizes, generator
                )
            except MoesaicError as error:
                raise MoesaicError(f"expert {expert}: {error}") from error
            self.clock("convert")
            set_view(part, masked=True)
            reports[expert] = measure_layer(
                self.layer,
                expert_inputs,
                ffn,
                part,
                sizes,
                self.seed,
                self.most,
            )
            part.made = None  # its repairs are as large as the expert
            self.clock("measure")
            parts.append(part)
        stack = None
        if method.saves:
            stack = self._stack(parts, sorted(whole))
        self.clock("stack")
        counts = [len(token_P) for token_P in inputs.tokens_of]
        report = merged(self.layer, reports, counts, whole)
        shared = self._convert_shared(method, inputs, report)
        mixture = MixtureParts(parts)
        return ConvertedMixture(mixture, stack, report, shared)

    def unstacked(
        self, replacements: list[Any], report: LayerReport
    ) -> ConvertedMixture:
        """A finished layer side by side again: to the last bit what `convert` gave."""
        stack = replacements[0]
        parts: list[nn.Module] = []
        for expert in range(self.ffns.num_outer):
            if expert in stack.whole:
                ffn = self.ffns.read(self.layer, expert)
                parts.append(WholeFFN(ffn))
            else:
                part = unstack_expert(stack, expert)
                set_view(part, masked=True)
                parts.append(part)
        shared = None
        if len(replacements) > 1:
            shared = replacements[1]
        mixture = MixtureParts(parts)
        return ConvertedMixture(mixture, stack, report, shared)

    def _stack(
        self, parts: list[nn.Module], whole: list[int]
    ) -> MoesaicHierarchy:
        sizes = self.moe.sizes_of(self.layer)
        block = self.moe.block
        states: list[State] = []
        for part in parts:
            if isinstance(part, WholeFFN):
                state = whole_state(part.ffn, block, sizes)
            else:
                state = part.state_dict()
            states.append(state)
        return stack_experts(states, block, sizes, self.outer, whole)

    def _convert_shared(
        self, method: FFNMethod, inputs: ExpertInputs, report: LayerReport
    ) -> Any:
        """The family's own shared expert, converted as one more FFN; adds its row."""
        sizes = self.outer.shared_sizes
        ffn = self.ffns.read_shared_expert(self.layer)
        if sizes is None or ffn is None:
            return None
        all_inputs = inputs.all_inputs()
        generator = np.random.default_rng([self.seed, self.layer])
        try:
            shared: Any = method.convert_ffn(ffn, all_inputs, sizes, generator)
        except MoesaicError as error:
            raise MoesaicError(f"shared expert: {error}") from error
        set_view(shared, masked=True)
        measured = measure_layer(
            self.layer, all_inputs, ffn, shared, sizes, self.seed, self.most
        )
        shared.made = None
        self.clock("measure")
        row = _row("shared", all_inputs.tokens, measured)
        report.experts.append(row)
        report.notes += [f"shared expert: {note}" for note in measured.notes]
        return shared

    def _with_statistics(
        self, method: FFNMethod, inputs: ExpertInputs, whole: Collection[int]
    ) -> Iterator[FFNInputs]:
        """Inputs of the experts that are converted, in order, with their statistics.

        These are computed for as many at once as have TOGETHER pairs, and neurons,
        between them: their tokens, samples and matrices are held beside the layer.
        """
        experts = range(self.ffns.num_outer)
        waiting = [expert for expert in experts if expert not in whole]
        neurons = self.ffns.read(self.layer).intermediate_size
        by_neurons = TOGETHER // neurons
        while waiting:
            counts = [len(inputs.tokens_of[expert]) for expert in waiting]
            pairs = np.cumsum(counts)
            by_pairs = int((pairs <= TOGETHER).sum())
            count = max(1, min(by_pairs, by_neurons))
            batch = waiting[:count]
            waiting = waiting[count:]
            batch_inputs = [inputs.inputs(expert) for expert in batch]
            ffns = [self.ffns.read(self.layer, expert) for expert in batch]
            for kind in method.statistics_kinds():
                try:
                    computed = compute_expert_statistics(
                        batch_inputs, ffns, kind
                    )
                except BrokenExpertsError as error:
                    broken = [batch[place] for place in error.experts]
                    names = ", ".join(map(str, broken))
                    noun = "expert" if len(broken) == 1 else "experts"
                    raise MoesaicError(f"{noun} {names}: {error}") from error
                for expert_inputs, statistics in zip(
                    batch_inputs, computed, strict=True
                ):
                    expert_inputs.keep_statistics(kind, statistics)
            yield from batch_inputs


def stays_whole(inputs: ExpertInputs, outer: OuterConfig) -> dict[int, str]:
    """Experts that are left as they are, and why."""
    needed = max(outer.min_tokens, 2)  # one to fit on, one to judge
    reasons = {}
    for expert, token_P in enumerate(inputs.tokens_of):
        count = len(token_P)
        if outer.chosen is not None and expert not in outer.chosen:
            reasons[expert] = "not asked for"
        elif not count:
            reasons[expert] = "the router never uses it"
        elif count < needed:
            reasons[expert] = f"{count} tokens of the {needed} it needs"
    return reasons


def merged(
    layer: int,
    reports: dict[int, LayerReport],
    counts: list[int],
    whole: dict[int, str],
) -> LayerReport:
    """One report of a layer: means over converted experts, weighted by tokens."""
    converted = list(reports.values())
    total = max(sum(counts[expert] for expert in reports), 1)

    def mean(figure: Callable[[LayerReport], float | None]) -> float | None:
        """None where there are no experts, or one lacks the figure."""
        weighted = 0.0
        for expert, report in reports.items():
            value = figure(report)
            if value is None:
                return None
            weighted += value * counts[expert]
        return weighted / total if reports else None

    references = {}
    names = converted[0].references if converted else {}
    for name in names:
        references[name] = mean(partial(_reference, name)) or 0.0
    loads = []
    for expert_report in converted:
        loads += expert_report.expert_load
    report = LayerReport(
        layer=layer,
        seconds=None,
        tokens=sum(row.tokens for row in converted),
        heldout=all(row.heldout for row in converted),
        relative_error=mean(lambda row: row.relative_error) or 0.0,
        references=references,
        router_recall=mean(lambda row: row.router_recall),
        mass_kept=mean(lambda row: row.mass_kept),
        oracle_mass=mean(lambda row: row.oracle_mass),
        expert_load=loads,
        notes=_notes(reports, whole),
    )
    if converted:
        repairs = Counter(row.repair for row in converted)
        report.repair = max(repairs, key=lambda repair: repairs[repair])
    for expert, count in enumerate(counts):
        if expert in whole:
            row = {"expert": expert, "tokens": count, "whole": whole[expert]}
        else:
            row = _row(expert, count, reports[expert])
        report.experts.append(row)
    return report


def _reference(name: str, report: LayerReport) -> float | None:
    return report.references.get(name)


def _row(expert: int | str, tokens: int, report: LayerReport) -> dict[str, Any]:
    return {
        "expert": expert,
        "tokens": tokens,
        "relative_error": report.relative_error,
        "references": report.references,
        "router_recall": report.router_recall,
        "repair": report.repair,
    }


def _notes(reports: dict[int, LayerReport], whole: dict[int, str]) -> list[str]:
    """What is worth a line, each with the experts that it holds for."""
    experts_of: dict[str, list[int]] = defaultdict(list)
    for expert, reason in whole.items():
        experts_of[f"stay whole ({reason})"].append(expert)
    for expert, report in reports.items():
        for note in report.notes:
            experts_of[note].append(expert)
    lines = []
    for note, experts in experts_of.items():
        names = ", ".join(map(str, experts))
        lines.append(f"experts {names}: {note}")
    return lines
