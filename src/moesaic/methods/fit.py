"""One layer's conversion: profile, partition, router, repair, carve.

Shape suffixes: T tokens, D hidden_size, R routed experts, M neurons of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from moesaic.calibration.ffn_inputs import Inputs
from moesaic.calibration.statistics import SAMPLE_TOKENS, Profile, profile_ffn
from moesaic.errors import MoesaicError
from moesaic.families import DenseFFN
from moesaic.layout import Sizes
from moesaic.methods.recipe import Recipe
from moesaic.modeling import MoesaicBlock, MoesaicNeuronRouter, MoesaicRouter
from moesaic.parts.carve import carve, neuron_rows
from moesaic.parts.masked import Choose, MaskedBlock, masked_view
from moesaic.parts.partition import Partition, partition
from moesaic.parts.repair import (
    NOTHING,
    TOKENS_PER_NEURON,
    Kept,
    Repair,
    choose_repairs,
    with_up_rows,
)
from moesaic.parts.routers import (
    FITTED,
    REPRESENTATIVE,
    directions,
    expert_energies,
    expert_grams,
    linear,
    mean_of,
    oracle,
    sketch_up,
)
from moesaic.parts.thresholds import budget_thresholds, single_threshold

FLOAT32_MOST = 1e38


@dataclass(frozen=True)
class Fitted:
    """A converted layer, what it was made of, and the repair of a static FFN of the same budget.

    `block` is None for the oracle, which only exists as a masked dense FFN.
    """

    block: MoesaicBlock | None
    masked: MaskedBlock
    parts: Partition
    static_N: torch.Tensor  # neurons that static pruning keeps at this budget
    notes: list[str]  # what did not go as asked for
    repair: Repair | None = None
    static_repair: Repair | None = None  # by the recipe's method, else least squares


@torch.no_grad()
def fit_layer(
    inputs: Inputs,
    ffn: DenseFFN,
    recipe: Recipe,
    sizes: Sizes,
    config: Any,
    generator: np.random.Generator,
    tick: Callable[[str], None] = lambda step: None,
    profiles: tuple[Profile, Profile] | None = None,
) -> Fitted:
    """Converts one FFN on its calibration inputs; `tick` is told each step's name when it ends.

    `profiles`, where they are made already: what the recipe groups by, and that of the FFN as it
    is, which differs where the recipe normalises.

    Passes over the tokens that compute hidden states: one to profile, one for the experts'
    energies where the router is fitted, one for the repair; where the recipe has none, one over
    SAMPLE_TOKENS (or twice the neurons) to repair the static reference. Raises MoesaicError where
    hidden states are not finite.
    """
    if inputs.device.type == "mps":
        raise MoesaicError(
            "conversions solve in float64, which mps has not; take --device cpu"
        )
    if profiles is None:
        sample = inputs.tokens if recipe.samples_hidden else None
        profile = profile_ffn(inputs.fit(), ffn, **recipe.statistics, sample_of=sample)
        plain = profile_ffn(inputs.fit(), ffn) if recipe.normalise else profile
    else:
        profile, plain = profiles
    tick("profile")
    energy_F = plain.energy_F * ffn.down_DF.double().square().sum(0).cpu().numpy()
    if not energy_F.sum() * len(energy_F) < FLOAT32_MOST:
        raise MoesaicError(
            f"the FFN's outputs have an energy of {energy_F.sum():.2g}, beyond float32's range: "
            "its weights or activations are broken"
        )
    parts = partition(profile, ffn, recipe, sizes, generator)
    tick("partition")
    device = ffn.up_FD.device
    best_F = np.argsort(-energy_F, kind="stable")
    static_N = torch.from_numpy(np.sort(best_F[: sizes.active])).to(device)
    dead = int((energy_F == 0).sum())
    notes = (
        [f"{dead} neurons of {len(energy_F)} add nothing on any token"] if dead else []
    )
    router, choose = None, None
    if recipe.router == "oracle":
        choose = oracle(
            ffn, torch.from_numpy(parts.experts_RM).to(device), sizes.num_active
        )
    elif recipe.router == "gates":
        router = fit_neuron_router(inputs, ffn, sizes, config)
        choose = _neuron_choice(router, ffn)
    elif recipe.routed:
        router = fit_router(
            inputs, ffn, parts, profile, recipe, sizes, config, generator
        )
        choose = _choice(router)
    tick("router")
    repair = static_repair = None
    neurons_N = torch.from_numpy(parts.neurons_N).to(device)
    repaired = ffn
    if recipe.repair != "none":
        kept = Kept(neurons_N, choose and _mask(parts, choose))
        # Static pruning by contribution is its own reference.
        same = not recipe.routed and bool(torch.equal(neurons_N, static_N))
        both = [kept] if same else [kept, Kept(static_N)]
        repairs = choose_repairs(inputs, ffn, both, recipe.repair, recipe.intercept)
        repair, static_repair = repairs[0], repairs[-1]
        repaired = repair.apply(ffn, kept)
        if recipe.up_steps and ffn.gated:
            better = with_up_rows(inputs, ffn, repaired, kept, recipe.up_steps)
            (again,) = choose_repairs(
                inputs, better, [kept], recipe.repair, recipe.intercept, target=ffn
            )
            if again.error_after < repair.error_after:
                note = repair.note if again.candidate is NOTHING else again.note
                repaired = again.apply(better, kept)
                repair = replace(
                    again, up=True, error_before=repair.error_before, note=note
                )
            else:
                notes.append(
                    "rows of W_up kept: refitted, they lose more on held-out tokens"
                )
        notes += [repair.note] if repair.note else []
        if not all(
            torch.isfinite(tensor).all() for tensor in repaired.tensors().values()
        ):
            repaired, repair = ffn, replace(repair, candidate=NOTHING, up=False)
            notes.append(f"repair skipped: it exceeds the range of {ffn.up_FD.dtype}")
        tick("repair")
    else:
        some = inputs.apart(max(SAMPLE_TOKENS, TOKENS_PER_NEURON * sizes.active))
        (static_repair,) = choose_repairs(
            some, ffn, [Kept(static_N)], "least-squares", False
        )
        tick("reference")
    if recipe.router == "oracle":
        shared, size = len(parts.shared_S), parts.experts_RM.shape[1]
        masked, block = (
            MaskedBlock(repaired.subset(neurons_N), shared, size, choose),
            None,
        )
    else:
        block = carve(
            repaired, parts, {} if router is None else router.state_dict(), config
        )
        routed = block.router if block.neurons is None else block.neurons.router
        if routed is not None:
            routed.num_active = sizes.num_active
        masked = masked_view(block, ffn, config)
    tick("carve")
    return Fitted(block, masked, parts, static_N, notes, repair, static_repair)


def _choice(router: Any) -> Choose:
    return lambda x_TD: router.choose(router.scores(x_TD))


def _neuron_choice(router: MoesaicNeuronRouter, ffn: DenseFFN) -> Choose:
    return lambda x_TD: router(x_TD, ffn.gates(x_TD)) > 0


def _mask(parts: Partition, choose: Choose) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x_TD: parts.mask(choose(x_TD))


def fit_router(
    inputs: Inputs,
    ffn: DenseFFN,
    parts: Partition,
    profile: Profile,
    recipe: Recipe,
    sizes: Sizes,
    config: Any,
    generator: np.random.Generator,
) -> Any:
    """The MoesaicRouter of a partition: copied neurons, or fitted to the experts' energies.

    Its weights are rounded to the model's dtype before thresholds are taken from its scores.
    """
    dtype, device = ffn.up_FD.dtype, ffn.up_FD.device
    router: Any = MoesaicRouter(config).to(device)
    for weights in (
        router.gate_proj,
        router.up_proj,
        router.score_proj,
        router.feature_proj,
    ):
        if weights is not None:
            weights.to(dtype)
    if recipe.router in FITTED:

        def x_blocks() -> Iterator[torch.Tensor]:
            return (x_TD.float() for x_TD in inputs.fit())

        kept_phi: list[torch.Tensor] = []
        centred = recipe.gating == "threshold" and router.feature_proj is not None

        def phi_blocks() -> Iterator[torch.Tensor]:
            if kept_phi:
                return (phi_TP.to(device) for phi_TP in kept_phi)
            return (router.features(x_TD) for x_TD in inputs.fit())

        if router.feature_proj is not None:
            weight_CD, bias_C = directions(x_blocks, router.feature_proj.out_features)
            router.feature_proj.weight.data = weight_CD.to(dtype)
            router.feature_proj.bias.data = bias_C.to(dtype)
            # Read about ten times: kept, T P floats, rather than made anew.
            kept_phi = [phi_TP.to(inputs.storage) for phi_TP in phi_blocks()]
            if centred:
                mean_P = mean_of(lambda: iter(kept_phi))
                for phi_TP in kept_phi:
                    phi_TP -= mean_P
        experts_RM = torch.from_numpy(parts.experts_RM).to(device)
        gram_RMM = expert_grams(ffn, experts_RM)
        energy_TR = torch.cat(
            [
                expert_energies(ffn.hidden(x_TD), experts_RM, gram_RMM)
                for x_TD in inputs.fit()
            ]
        )
        weight_RP = linear(phi_blocks, energy_TR, recipe.gating == "threshold", centred)
        router.score_proj.weight.data = weight_RP.to(dtype)
    else:
        neurons_R = REPRESENTATIVE[recipe.router](profile, parts.experts_RM, generator)
        rows = neuron_rows(ffn.with_unit_rows() if recipe.normalise else ffn, neurons_R)
        router.load_state_dict(rows, strict=False)
    if recipe.gating == "threshold":
        score_TR = torch.cat([router.scores(x_TD) for x_TD in inputs.fit()])

        def count(threshold_R: torch.Tensor) -> int:
            router.selection_bias.copy_(-threshold_R)
            return int(router.choose(score_TR).sum())

        router.selection_bias.copy_(
            -budget_thresholds(score_TR, sizes.num_active, count)
        )
    return router


def fit_neuron_router(inputs: Inputs, ffn: DenseFFN, sizes: Sizes, config: Any) -> Any:
    """The MoesaicNeuronRouter of a layer, from about SAMPLE_TOKENS of the tokens to fit on.

    Its weights are rounded to the model's dtype before the threshold is taken from its scores.
    """
    router: Any = MoesaicNeuronRouter(config).to(ffn.up_FD.device)
    x_TD = torch.cat(list(inputs.apart(SAMPLE_TOKENS).fit()))
    sketch = sketch_up(x_TD, ffn, router.sketch_in.out_features)
    for part, tensor in (
        (router.sketch_in.weight, sketch.in_CD),
        (router.sketch_out.weight, sketch.out_FC),
        (router.sketch_out.bias, sketch.bias_F),
    ):
        assert part is not None
        part.data = tensor.to(ffn.up_FD.dtype)
    norm_F = ffn.down_DF.float().square().sum(0).clamp(min=1e-38)
    router.up_variance.copy_(sketch.variance_F)
    router.selection_bias.copy_(norm_F.log())
    score_TF = router(x_TD, ffn.gates(x_TD))
    router.selection_bias -= single_threshold(score_TF, sizes.num_active)
    return router
