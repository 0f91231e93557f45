"""One layer of a model that is a mixture already: each of its experts is converted by itself.

Shape suffixes: T tokens, D hidden_size, O experts of a token, P = T O pairs of a token and one of
its experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from moesaic.calibration.expert_inputs import Routed
from moesaic.calibration.expert_statistics import BrokenExpertsError, profile_experts
from moesaic.calibration.ffn_inputs import Inputs
from moesaic.calibration.statistics import SAMPLE_TOKENS, Profile
from moesaic.conversion.layer_error import MOST_TOKENS, LayerReport, measure_layer
from moesaic.conversion.plan import Plan
from moesaic.errors import MoesaicError
from moesaic.families import Mixtures
from moesaic.layout import Sizes
from moesaic.methods.fit import fit_layer
from moesaic.methods.recipe import Recipe
from moesaic.modeling import MoesaicBlock, MoesaicHierarchy, beside_config
from moesaic.parts.masked import MaskedBlock, masked_view
from moesaic.parts.stack import State, stack_experts, unstack_expert, whole_state

TOGETHER = 4 * SAMPLE_TOKENS  # pairs of a token and an expert that are profiled at once


class MaskedMixture(nn.Module):
    """The converted layer with every expert as a masked dense FFN (see `masked.MaskedBlock`)."""

    def __init__(self, parts: list[MaskedBlock]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    @torch.no_grad()
    def forward(
        self, x_TD: torch.Tensor, index_TO: torch.Tensor, weight_TO: torch.Tensor
    ) -> torch.Tensor:
        expert_P, weight_P = index_TO.reshape(-1), weight_TO.reshape(-1)
        order_P = expert_P.argsort(stable=True)
        count_E = torch.bincount(expert_P, minlength=len(self.parts))
        y_TD = torch.zeros_like(x_TD)
        for part, pair in zip(self.parts, order_P.split(count_E.tolist()), strict=True):
            if len(pair):
                token = pair // index_TO.shape[1]
                y = part(x_TD[token]) * weight_P[pair, None]
                y_TD.index_add_(0, token, y.to(y_TD.dtype))
        return y_TD


@dataclass(frozen=True)
class FittedMixture:
    """A converted layer; blocks are None for the oracle, which only exists masked.

    `beside` is the shared expert's, None where the family has none or it stays as it is.
    """

    block: MoesaicHierarchy | None
    masked: MaskedMixture
    report: LayerReport
    beside: tuple[MoesaicBlock | None, MaskedBlock] | None = None


def stays_whole(routed: Routed, asked: dict[str, Any]) -> dict[int, str]:
    """Experts that are left as they are, and why."""
    why = {}
    for expert, token_P in enumerate(routed.tokens_of):
        if asked["experts"] is not None and expert not in asked["experts"]:
            why[expert] = "not asked for"
        elif not len(token_P):
            why[expert] = "the router never uses it"
        elif len(token_P) < (
            needed := max(asked["min_tokens"], 2)
        ):  # one to fit on, one to judge
            why[expert] = f"{len(token_P)} tokens of the {needed} it needs"
    return why


def fit_mixture(
    routed: Routed,
    ffns: Mixtures,
    layer: int,
    todo: Plan,
    seed: int,
    tick: Callable[[str], None],
) -> FittedMixture:
    """Fits every expert on the tokens that the router sends to it, and measures it on others.

    Writes which experts stay whole into the plan's configuration. A token's statistics enter an
    expert once, so fitting all experts costs O / E of a dense FFN of their total size, and what an
    expert costs by itself. Raises MoesaicError where activations are not finite.
    """
    moe = todo.config.moesaic
    whole = stays_whole(routed, moe["asked"])
    moe["whole"] = {
        key: kept for key, kept in moe["whole"].items() if key != str(layer)
    }
    if whole:
        moe["whole"][str(layer)] = sorted(whole)
    only_masked = todo.recipe.router == "oracle"
    most = max(128, 4 * MOST_TOKENS // ffns.num_outer)
    parts: list[MaskedBlock] = []
    states: list[State | None] = []
    reports: dict[int, LayerReport] = {}
    profiled = _profiled(routed, ffns, layer, whole, todo.recipe)
    for expert in range(ffns.num_outer):
        ffn = ffns.read(layer, expert)
        if expert in whole:
            parts.append(MaskedBlock(ffn, 0, 1, None))
            states.append(None if only_masked else whole_state(ffn, todo.config))
            continue
        inputs, profiles = next(profiled)
        generator = np.random.default_rng([seed, layer, expert])
        try:
            fitted = fit_layer(
                inputs,
                ffn,
                todo.recipe,
                todo.sizes,
                todo.config,
                generator,
                tick,
                profiles,
            )
        except MoesaicError as error:
            raise MoesaicError(f"expert {expert}: {error}") from error
        reports[expert] = measure_layer(
            layer, inputs, ffn, fitted, todo.sizes, seed, most=most
        )
        tick("measure")
        parts.append(fitted.masked)
        states.append(None if fitted.block is None else fitted.block.state_dict())
    block = None
    if not only_masked:
        block = stack_experts([s for s in states if s is not None], todo.config, layer)
    tick("stack")
    counts = [len(token_P) for token_P in routed.tokens_of]
    report, beside = merged(layer, reports, counts, whole), None
    if "beside" in moe and (shared := ffns.read_beside(layer)) is not None:
        inputs, own = routed.all_inputs(), beside_config(todo.config)
        sizes, generator = (
            _beside_sizes(own.moesaic),
            np.random.default_rng([seed, layer]),
        )
        try:
            fitted = fit_layer(inputs, shared, todo.recipe, sizes, own, generator, tick)
        except MoesaicError as error:
            raise MoesaicError(f"shared expert: {error}") from error
        measured = measure_layer(layer, inputs, shared, fitted, sizes, seed, most=most)
        tick("measure")
        report.experts.append(_row("shared", inputs.tokens, measured))
        report.notes += [f"shared expert: {note}" for note in measured.notes]
        beside = fitted.block, fitted.masked
        if fitted.block is not None and fitted.block.experts is not None:
            fitted.block.experts.config = (
                todo.config
            )  # the whole model's, as in `new_beside`
    return FittedMixture(block, MaskedMixture(parts), report, beside)


def _profiled(
    routed: Routed, ffns: Mixtures, layer: int, whole: Collection[int], recipe: Recipe
) -> Iterator[tuple[Inputs, tuple[Profile, Profile]]]:
    """Inputs and profiles of the experts that are converted, in order.

    As many at once as have TOGETHER pairs, and neurons, between them: their tokens, samples and
    matrices are held beside the layer. One pass over the pairs for all experts.
    """
    experts = [expert for expert in range(ffns.num_outer) if expert not in whole]
    while experts:
        sizes = np.cumsum([len(routed.tokens_of[expert]) for expert in experts])
        neurons = ffns.read(layer).intermediate_size
        count = max(1, min(int((sizes <= TOGETHER).sum()), TOGETHER // neurons))
        some, experts = experts[:count], experts[count:]
        inputs = [routed.inputs(expert) for expert in some]
        read = [ffns.read(layer, expert) for expert in some]
        try:
            profiles = profile_experts(
                inputs, read, **recipe.statistics, sample=recipe.samples_hidden
            )
            # Of the experts as they are, where the profile is of normalised ones.
            plain = profile_experts(inputs, read) if recipe.normalise else profiles
        except BrokenExpertsError as error:
            broken = ", ".join(str(some[place]) for place in error.experts)
            which = "expert" if len(error.experts) == 1 else "experts"
            raise MoesaicError(f"{which} {broken}: {error}") from error
        yield from zip(inputs, zip(profiles, plain, strict=True), strict=True)


def _beside_sizes(moe: dict[str, Any]) -> Sizes:
    """Of the shared expert, from its configuration; static pruning keeps a shared part alone."""
    size = moe["expert_size"]
    if moe["num_routed"]:
        return Sizes(moe["shared_size"], size, moe["num_routed"], moe["num_active"])
    return Sizes(moe["shared_size"], 1, moe["dropped"], 0)


def masked_mixture(
    block: MoesaicHierarchy, ffns: Mixtures, layer: int, config: Any
) -> MaskedMixture:
    """A finished block as masked experts: to the last bit what `fit_mixture` gave."""
    parts = []
    for expert in range(ffns.num_outer):
        ffn = ffns.read(layer, expert)
        if expert in block.whole:
            parts.append(MaskedBlock(ffn, 0, 1, None))
        else:
            parts.append(
                masked_view(unstack_expert(block, config, expert), ffn, config)
            )
    return MaskedMixture(parts)


def merged(
    layer: int,
    reports: dict[int, LayerReport],
    counts: list[int],
    whole: dict[int, str],
) -> LayerReport:
    """One report of a layer: means over the converted experts, weighted by tokens received."""
    total = max(sum(counts[expert] for expert in reports), 1)

    def mean(value: Callable[[LayerReport], float | None]) -> float | None:
        pairs = [(value(one), counts[expert]) for expert, one in reports.items()]
        if not pairs or any(v is None for v, _ in pairs):
            return None
        return sum(v * count for v, count in pairs if v is not None) / total

    names = list(next(iter(reports.values())).references) if reports else []
    report = LayerReport(
        layer=layer,
        seconds=None,
        tokens=sum(one.tokens for one in reports.values()),
        heldout=all(one.heldout for one in reports.values()),
        relative_error=mean(lambda one: one.relative_error) or 0.0,
        references={name: mean(partial(_reference, name)) or 0.0 for name in names},
        router_recall=mean(lambda one: one.router_recall),
        mass_kept=mean(lambda one: one.mass_kept),
        oracle_mass=mean(lambda one: one.oracle_mass),
        expert_load=[load for one in reports.values() for load in one.expert_load],
    )
    repairs = Counter(one.repair for one in reports.values())
    report.repair = repairs.most_common(1)[0][0] if repairs else None
    report.notes = _notes(reports, whole)
    for expert, count in enumerate(counts):
        row: dict[str, Any] = {"expert": expert, "tokens": count}
        if expert in whole:
            row["whole"] = whole[expert]
        else:
            row = _row(expert, count, reports[expert])
        report.experts.append(row)
    return report


def _reference(name: str, one: LayerReport) -> float | None:
    return one.references.get(name)


def _row(expert: int | str, tokens: int, one: LayerReport) -> dict[str, Any]:
    return {
        "expert": expert,
        "tokens": tokens,
        "relative_error": one.relative_error,
        "references": one.references,
        "router_recall": one.router_recall,
        "repair": one.repair,
    }


def _notes(reports: dict[int, LayerReport], whole: dict[int, str]) -> list[str]:
    """What is worth a line, each with the experts that it holds for."""
    lines: dict[str, list[int]] = {}
    for expert, reason in whole.items():
        lines.setdefault(f"stay whole ({reason})", []).append(expert)
    for expert, one in reports.items():
        for note in one.notes:
            lines.setdefault(note, []).append(expert)
    return [
        f"experts {', '.join(map(str, found))}: {note}" for note, found in lines.items()
    ]
