"""What a layer's report says, against a double loop over tokens and experts.

Shape suffixes: T tokens, D hidden_size, F neurons, R routed experts, M neurons of one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import moesaic
from moesaic.calibration.calibration_set import Split
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.conversion import layer_error
from moesaic.conversion.layer_error import LayerReport, measure_layer
from moesaic.families import DenseFFN, find_ffns
from moesaic.methods.base import block_config, shape_of
from moesaic.methods.expert_method import Made, fit_static_reference, mask_of
from moesaic.modeling import RouterConfig, Sizes, new_router
from moesaic.parts.carve import carve, neuron_rows
from moesaic.parts.partition import Partition
from moesaic.parts.repair import Kept, choose_repairs
from tests.families import CONTEXT, tiny_model, tokens

CPU = torch.device("cpu")
HELD, SEED = 24, 5
SHARED, R, K, M = 22, 5, 3, 6  # S3A3E8 of 52 neurons
SIZES = Sizes(SHARED, M, R, K)


@dataclass
class Layer:
    """A layer cut at random, whose router copies the first neuron of each expert."""

    ffn: DenseFFN
    parts: Partition
    inputs: FFNInputs
    x_TD: torch.Tensor  # held out
    static_N: torch.Tensor

    def fitted(self, intercept: bool | None) -> Any:
        """With a least-squares repair unless `intercept` is None."""
        made = Made(self.parts, static_N=self.static_N)
        repaired = self.ffn
        router_config = RouterConfig("neuron-copies", "topk")
        block = block_config(shape_of(self.ffn), router_config, bool(intercept))
        router = new_router(block, SIZES)
        router.load_state_dict(neuron_rows(self.ffn, self.parts.experts_RM[:, 0]), strict=False)
        if intercept is not None:
            neurons_N = torch.from_numpy(self.parts.neurons_N)
            kept = Kept(neurons_N, mask_of(self.parts, router))
            both = [kept, Kept(self.static_N)]
            repairs = choose_repairs(self.inputs, self.ffn, both, "least-squares", intercept)
            repair, static_repair = repairs
            made = Made(
                self.parts,
                static_N=self.static_N,
                repair=repair,
                static_repair=static_repair,
                notes=["said"],
            )
            repaired = repair.apply(self.ffn, kept)
        replacement = carve(repaired, self.parts, router, block, SIZES)
        replacement.made = made
        return replacement

    def report(self, replacement: Any, most: int | None = None) -> LayerReport:
        return measure_layer(2, self.inputs, self.ffn, replacement, SIZES, SEED, most)


def random_layer(family: str = "qwen3", hold_out: bool = True, count: int = 8 * HELD) -> Layer:
    ffn = find_ffns(tiny_model(family)).read(0)
    # Few directions and a mean, so that the neurons that run tell what the others would add.
    x_TD = torch.randn(count, 4) @ torch.randn(4, 32) / 2 + torch.randn(32)
    order = torch.randperm(52).numpy()
    return Layer(
        ffn,
        Partition(order[:SHARED], order[SHARED:].reshape(R, M)),
        FFNInputs(x_TD.split(7), Split.last_eighth(len(x_TD)), hold_out, CPU, CPU),
        x_TD[-HELD:],
        torch.randperm(52)[: SHARED + K * M],
    )


def lost(layer: Layer, runs: list[list[int]], base: DenseFFN | None = None) -> float:
    """Squared error of running these neurons of each token, over the output's own energy.

    Neither counts the dense FFN's output bias, nor that of `base`, whose output vectors run.
    """
    error = energy = 0.0
    for token, neurons in zip(layer.x_TD, runs, strict=True):
        h_F = layer.ffn.hidden(token[None])[0].double()
        dense_D = layer.ffn.down_DF.double() @ h_F
        down_DF = (base or layer.ffn).down_DF.double()
        output_D = down_DF[:, neurons] @ h_F[neurons]
        error += float((output_D - dense_D).square().sum())
        energy += float(dense_D.square().sum())
    return error / energy


def scores_and_norms(layer: Layer) -> tuple[list[list[float]], list[list[float]]]:
    """Of every expert and token: the first member's activation, and the output's norm."""
    scores, norms = [], []
    for token in layer.x_TD:
        h_F = layer.ffn.hidden(token[None])[0]
        outputs = [
            sum(h_F[i] * layer.ffn.down_DF[:, i] for i in members.tolist())
            for members in layer.parts.experts_RM
        ]
        norms.append([float(output.norm()) for output in outputs])
        scores.append([float(h_F[members[0]]) for members in layer.parts.experts_RM])
    return scores, norms


def best(values: list[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def neurons_of(layer: Layer, experts: list[int]) -> list[int]:
    return [*layer.parts.shared_S, *layer.parts.experts_RM[experts].reshape(-1)]


@pytest.mark.parametrize(
    ("least", "expected"),
    [(16, 84), (100, 84), (200, 168)],  # about so many are a sample, of 168
)
def test_the_static_reference_has_tokens_enough_for_least_squares(
    monkeypatch: pytest.MonkeyPatch, least: int, expected: int
) -> None:
    """80 are needed for its 40 neurons; every second of the tokens, or all."""
    monkeypatch.setattr(layer_error, "REFERENCE_TOKENS", least)
    layer = random_layer()
    assert static_tokens(layer, monkeypatch) == expected


def test_with_too_few_tokens_the_static_reference_takes_a_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its mean compensation needs no more, though least squares would."""
    monkeypatch.setattr(layer_error, "REFERENCE_TOKENS", 21)
    layer = random_layer(count=56)  # of which 49 are to fit on, fewer than 80
    assert static_tokens(layer, monkeypatch) == 17  # every third


def static_tokens(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> int:
    """On how many tokens the static reference of a layer is fitted."""
    found = []

    def fit(inputs: FFNInputs, ffn: DenseFFN, static_N: torch.Tensor) -> Any:
        found.append(inputs.tokens)
        return fit_static_reference(inputs, ffn, static_N)

    monkeypatch.setattr(layer_error, "fit_static_reference", fit)
    replacement = layer.fitted(intercept=None)
    layer.report(replacement)
    return found[0]


@pytest.mark.parametrize("family", ["qwen3", "llama"])  # without and with biases
def test_routing_equals_a_double_loop(family: str) -> None:
    layer = random_layer(family)
    report = layer.report(layer.fitted(intercept=None))
    assert (report.layer, report.seconds, report.tokens) == (2, None, HELD)
    hits = kept = most = mass = 0.0
    load = [0] * R
    chosen = []
    for scores, norms in zip(*scores_and_norms(layer), strict=True):
        runs, oracle = best(scores, K), best(norms, K)
        chosen.append(neurons_of(layer, runs))
        hits += len(set(oracle) & set(runs))
        kept += sum(norms[j] ** 2 for j in runs)
        most += sum(norms[j] ** 2 for j in oracle)
        mass += sum(norm**2 for norm in norms)
        for j in runs:
            load[j] += 1
    assert report.router_recall == pytest.approx(hits / (HELD * K))
    assert report.mass_kept == pytest.approx(kept / mass, rel=1e-4)
    assert report.oracle_mass == pytest.approx(most / mass, rel=1e-4)
    assert report.expert_load == pytest.approx([count / HELD for count in load], abs=1e-5)
    assert report.relative_error == pytest.approx(lost(layer, chosen), rel=1e-4)
    assert report.references["unrepaired"] == pytest.approx(report.relative_error, rel=1e-4)
    assert report.repair is None
    said = ["some experts run for none of the measured tokens"] if 0 in load else []
    assert report.notes == said


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("intercept", [True, False, None])
def test_references_equal_a_double_loop(family: str, intercept: bool | None) -> None:
    layer = random_layer(family)
    fitted = layer.fitted(intercept)
    report = layer.report(fitted)
    scores, norms = scores_and_norms(layer)
    active = SHARED + K * M
    contributions = [
        [
            abs(float(layer.ffn.hidden(token[None])[0, i])) * float(layer.ffn.down_DF[:, i].norm())
            for i in range(52)
        ]
        for token in layer.x_TD
    ]
    noise = torch.rand(HELD, 52, generator=torch.Generator().manual_seed(SEED)).tolist()
    static = [layer.static_N.tolist()] * HELD
    expected = {
        "static": lost(layer, static),
        "unrepaired": lost(layer, [neurons_of(layer, best(row, K)) for row in scores]),
        "oracle": lost(layer, [neurons_of(layer, best(row, K)) for row in norms]),
        "random": lost(layer, [best(row, active) for row in noise]),
        "neuron-oracle": lost(layer, [best(row, active) for row in contributions]),
    }
    if intercept is None:  # fitted to be measured, on a sample that holds all tokens here
        kept = [Kept(layer.static_N)]
        (repair,) = choose_repairs(layer.inputs, layer.ffn, kept, "least-squares", False)
    else:
        assert report.repair.startswith("least squares")
        repair = fitted.made.static_repair
    expected["static-repaired"] = repair.error_after
    assert report.references == pytest.approx(expected, rel=1e-3)
    assert report.references["neuron-oracle"] < report.references["random"]
    assert report.references["oracle"] <= report.references["unrepaired"]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("intercept", [True, False])
def test_the_repaired_layer_has_the_error_that_the_choice_saw(family: str, intercept: bool) -> None:
    layer = random_layer(family)
    fitted = layer.fitted(intercept)
    report, made = layer.report(fitted), fitted.made
    assert report.relative_error == pytest.approx(made.repair.error_after, rel=1e-3)
    assert report.references["unrepaired"] == pytest.approx(made.repair.error_before, rel=1e-3)
    assert report.references["static"] == pytest.approx(made.static_repair.error_before, rel=1e-3)
    assert report.relative_error < report.references["unrepaired"]
    assert report.repair == made.repair.candidate.name
    assert report.notes[0] == "said"


def test_a_replacement_of_which_nothing_is_known_has_the_references_that_it_can_have() -> None:
    """Static pruning keeps the neurons of largest contribution on the tokens to fit on."""
    layer = random_layer("llama")
    dense = layer.ffn
    x_TD = torch.cat(list(layer.inputs.fit()))
    norm2_F = dense.down_DF.square().sum(0)
    contribution_F = (dense.hidden(x_TD).square().sum(0) * norm2_F).tolist()
    chosen = best(contribution_F, SHARED + K * M)
    report = layer.report(lambda x_TD: dense.output(dense.hidden(x_TD)))
    assert report.relative_error == pytest.approx(0, abs=1e-10)
    assert set(report.references) == {"static", "static-repaired", "random", "neuron-oracle"}
    assert report.references["static"] == pytest.approx(lost(layer, [chosen] * HELD), rel=1e-4)
    assert report.references["static-repaired"] < report.references["static"]
    assert (report.repair, report.router_recall, report.kept_energy) == (None, None, [])


@pytest.mark.parametrize("most", [None, 10])
def test_at_most_so_many_tokens_evenly_spaced(
    most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.conversion.layer_error.MOST_TOKENS", 99 if most else 10)
    layer = random_layer()
    report = layer.report(layer.fitted(intercept=None), most)
    layer.x_TD = layer.x_TD[::3]
    assert report.tokens == 8
    runs = [neurons_of(layer, best(row, K)) for row in scores_and_norms(layer)[0]]
    assert report.relative_error == pytest.approx(lost(layer, runs), rel=1e-4)


@pytest.mark.parametrize("hold_out", [True, False])
def test_the_report_says_whether_the_tokens_were_held_out(hold_out: bool) -> None:
    layer = random_layer(hold_out=hold_out)
    report = layer.report(layer.fitted(intercept=None))
    assert report.heldout == hold_out
    assert report.tokens == HELD


def test_an_ffn_that_puts_out_nothing() -> None:
    layer = random_layer()
    layer.ffn = replace(layer.ffn, down_DF=torch.zeros_like(layer.ffn.down_DF))
    report = layer.report(layer.fitted(intercept=None))
    numbers = [report.relative_error, report.mass_kept, report.oracle_mass]
    assert [*numbers, *report.references.values()] == [0.0] * (len(report.references) + 3)
    assert np.isfinite(report.router_recall)


def report_with(error: float, references: dict[str, float], routed: bool = True) -> LayerReport:
    recall = 0.5 if routed else None
    return LayerReport(0, None, 8, True, error, references, recall)


@pytest.mark.parametrize(
    ("error", "references", "better"),
    [
        (0.1, {"static": 0.2, "static-repaired": 0.15}, None),
        (0.1, {"static": 0.05, "static-repaired": 0.01}, "static-repaired"),
        (0.1, {"static": 0.05, "static-repaired": 0.2}, "static"),
        (0.1, {"static": 0.05}, "static"),
        (0.1, {"static": 0.1}, None),
        (0.1, {"random": 0.01, "oracle": 0.01}, None),
        (0.1, {}, None),
    ],
)
def test_static_that_loses_less_is_named(
    error: float, references: dict[str, float], better: str | None
) -> None:
    assert report_with(error, references).better_static == better
    assert report_with(error, references, routed=False).better_static is None


def test_reports_survive_json(tmp_path: Any) -> None:
    """A resumed run reads them back."""
    import json

    _, report = moesaic.convert(
        tiny_model("llama"), "moesaic", "S3A3E8", tokens(4, CONTEXT, seed=1)
    )
    for layer in report.layers:
        again = LayerReport(seconds=None, **json.loads(json.dumps(layer.to_dict(timing=False))))
        assert again == replace(layer, seconds=None)
