"""Rows of W_up refitted: against plain least squares in all unknowns, and within a conversion."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import moesaic
from moesaic.errors import MoesaicError
from moesaic.families import DenseFFN
from moesaic.methods.base import FFNShape, setting
from moesaic.methods.cmoe import copied_neurons
from moesaic.methods.expert_method import LayerFit, fit_repair
from moesaic.methods.moesaic import Moesaic, MoesaicDynamic
from moesaic.methods.static import StaticRepaired
from moesaic.modeling import RouterConfig
from moesaic.parts.repair.up_rows import refit_up
from tests.families import tiny_model, tokens

module = importlib.import_module("moesaic.parts.repair.up_rows")


def problem(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Inputs with a mean and unequal directions, gates that are often zero."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x_TD = random(200, 4) * torch.tensor([3.0, 1.0, 0.5, 0.2]) + random(4)
    gate_TN = random(200, 5).relu()
    return x_TD, gate_TN, random(200, 4), random(5, 4)


@pytest.mark.parametrize("seed", range(3))
def test_many_steps_reach_the_least_squares_solution(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One column per unknown u_nd: gate_n x_d w_n, for every token and output."""
    monkeypatch.setattr(module, "RIDGE", 1e-7)
    x_TD, gate_TN, r_TD, down_ND = problem(seed)
    design = np.einsum("tn,td,no->tond", gate_TN, x_TD, down_ND).reshape(200 * 4, 20)
    expected = np.linalg.lstsq(design, r_TD.numpy().reshape(-1), rcond=None)[0].reshape(5, 4)
    found = refit_up(x_TD, gate_TN, r_TD, down_ND, steps=60)
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-2, atol=2e-3)


def test_every_step_lowers_the_error() -> None:
    x_TD, gate_TN, r_TD, down_ND = problem()
    errors = [
        float((r_TD - (gate_TN * (x_TD @ refit_up(x_TD, gate_TN, r_TD, down_ND, steps).T))
               @ down_ND).square().sum())
        for steps in range(6)
    ]  # fmt: skip
    assert errors == sorted(errors, reverse=True)
    assert errors[0] == pytest.approx(float(r_TD.square().sum()))


def test_neurons_without_energy_and_silence_stay_as_they_are() -> None:
    x_TD, gate_TN, r_TD, down_ND = problem()
    gate_TN[:, 2] = 0
    found = refit_up(x_TD, gate_TN, r_TD, down_ND, 5)
    assert torch.isfinite(found).all()
    assert not found[2].any()
    assert not refit_up(x_TD, torch.zeros_like(gate_TN), r_TD, down_ND, 5).any()


@dataclass(frozen=True)
class StaticUp(StaticRepaired):
    """Static pruning that refits the rows of W_up as well."""

    up_steps: int = setting(0, "Steps that refit the rows of W_up too.", 0)

    def repair(self, fit: LayerFit) -> DenseFFN:
        return fit_repair(fit, "least-squares", False, self.up_steps, undo_drift=self.undo_drift)


@dataclass(frozen=True)
class Spoken(Moesaic):
    """Each expert is scored by its first neuron."""

    def router_config(self, ffn: FFNShape) -> RouterConfig:
        return RouterConfig("neuron-copies", "topk")

    def make_router(self, fit: LayerFit) -> Any:
        return copied_neurons(fit, fit.partition.experts_RM[:, 0])


METHODS: dict[str, Any] = {
    "moesaic": lambda steps: Moesaic(up_steps=steps),
    "moesaic-dynamic": lambda steps: MoesaicDynamic(up_steps=steps, layer_budgets="uniform"),
    "static-repaired": lambda steps: StaticUp(up_steps=steps),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_conversion_with_it_loses_no_more_on_held_out_tokens(name: str) -> None:
    """The same layers up to the first; there the repair is better, or said not to be."""
    errors = []
    for steps in (0, 8):
        method = METHODS[name](steps)
        _, report = moesaic.convert(tiny_model("qwen3"), method, "S2A3E8", tokens(64, 64, seed=1))
        errors.append(report.layers[0].relative_error)
        said = [layer.repair or "" for layer in report.layers]
        notes = " ".join(note for layer in report.layers for note in layer.notes)
        assert steps == 0 or any("W_up" in text for text in said) or "W_up kept" in notes
    assert errors[1] <= errors[0] * (1 + 1e-5)


@pytest.mark.parametrize(
    "method",
    [Moesaic(up_steps=2), Moesaic(up_steps=2, directions=5), Spoken(up_steps=2)],
    ids=["linear", "quadratic", "neuron-copies"],
)
def test_it_runs_in_bf16_with_any_router(method: Moesaic) -> None:
    model = tiny_model("qwen3").bfloat16()
    _, report = moesaic.convert(model, method, "S2A3E8", tokens(64, 64, seed=1))
    assert all(layer.relative_error < 1 for layer in report.layers)


def test_an_ffn_without_a_gate_is_left_alone() -> None:
    models = [
        moesaic.convert(
            tiny_model("gpt2"),
            "moesaic",
            "S2A3E8",
            tokens(16, 64, seed=1),
            settings={"up_steps": steps},
        )[0]
        for steps in (0, 4)
    ]
    plain, same = (model.state_dict() for model in models)
    for name, tensor in plain.items():
        assert torch.equal(tensor, same[name])


def test_it_needs_a_repair() -> None:
    with pytest.raises(MoesaicError, match="refitted between two repairs"):
        Moesaic(repair_by="none", up_steps=1)
