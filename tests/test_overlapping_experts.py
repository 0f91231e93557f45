"""Methods whose experts share neurons: a neuron is held, and refitted, once for each of them.

Shape suffixes: T tokens, D hidden_size, F neurons, N neurons that are held, R routed experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import moesaic
from moesaic.calibration.calibration_set import Split
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.statistics import StatisticsKind, compute_statistics
from moesaic.conversion.layer_error import LayerReport, measure_layer
from moesaic.families import DenseFFN
from moesaic.families.load import load_model
from moesaic.layout import Layout
from moesaic.methods.base import FFNShape, setting
from moesaic.methods.cmoe import CMoE, copied_neurons
from moesaic.methods.contents import Description
from moesaic.methods.expert_method import ExpertMethod, LayerFit, fit_repair, mask_of
from moesaic.methods.moesaic import fit_router
from moesaic.modeling import RouterConfig, Sizes, as_they_are
from moesaic.parts.partition import Partition
from tests.families import CONTEXT, tiny_model, tokens

CPU = torch.device("cpu")
# Of 8 neurons: 0 is shared, and a member of two experts; 5 is in all three; 7 is nowhere.
SHARED, EXPERTS = [0, 1], [[0, 2, 5], [3, 5, 4], [6, 5, 0]]
COPIES = [3, 1, 1, 1, 1, 3, 1, 0]


@dataclass(frozen=True)
class Overlapping(ExpertMethod):
    """The experts above, for an FFN of 8 neurons."""

    description = Description("overlapping", "tests:Overlapping", "Experts that overlap.", None)
    fits_weights = True

    active: int = setting(2, "Experts that run for a token.", 1)
    repair_by: str = setting("none", "The repair.", choices=("none", "mean", "least-squares"))
    intercept: bool = setting(False, "Whether it may add an output bias.")
    up_steps: int = setting(0, "Steps that refit the rows of W_up.", 0)
    linear: bool = setting(False, "Whether the router is fitted.")

    @property
    def output_bias(self) -> bool:  # type: ignore[override]
        return self.intercept

    def sizes(self, layout: Layout, intermediate_size: int) -> Sizes:
        return Sizes(2, 3, 3, self.active, intermediate_size)

    def router_config(self, ffn: FFNShape) -> RouterConfig:
        return RouterConfig("linear" if self.linear else "neuron-copies", "topk")

    def partition(self, fit: LayerFit) -> Partition:
        return Partition(np.array(SHARED), np.array(EXPERTS))

    def make_router(self, fit: LayerFit) -> Any:
        return (
            fit_router(fit) if self.linear else copied_neurons(fit, fit.partition.experts_RM[:, 0])
        )

    def repair(self, fit: LayerFit) -> DenseFFN:
        if self.repair_by == "none":
            return fit.ffn
        mask = mask_of(fit.partition, fit.router)
        return fit_repair(fit, self.repair_by, self.intercept, self.up_steps, mask)


def random_ffn(bias: bool = False) -> DenseFFN:
    return DenseFFN(
        up_FD=torch.randn(8, 5),
        down_DF=torch.randn(5, 8),
        activation="silu",
        gate_FD=torch.randn(8, 5),
        up_bias_F=torch.randn(8) if bias else None,
        gate_bias_F=torch.randn(8) if bias else None,
        down_bias_D=torch.randn(5) if bias else None,
    )


def inputs_of(x_TD: torch.Tensor) -> FFNInputs:
    return FFNInputs(x_TD.split(64), Split.last_eighth(len(x_TD)), True, CPU, CPU)


def converted(method: ExpertMethod, ffn: DenseFFN, inputs: FFNInputs) -> Any:
    sizes = method.sizes(Layout(0, 1, 1), ffn.intermediate_size)
    return method.convert_ffn(ffn, inputs, sizes, np.random.default_rng(0))


def output_of(ffn: DenseFFN, copies_TF: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
    """The sum over the copies of each neuron that run for each token."""
    return ffn.output(ffn.hidden(x_TD) * copies_TF)


def copies_of(experts: NDArray[np.bool_]) -> list[int]:
    """Of each neuron, how many run: those of the shared expert and of these."""
    running = [*SHARED, *(i for j in np.flatnonzero(experts) for i in EXPERTS[j])]
    return [running.count(i) for i in range(8)]


def measured(method: Overlapping, ffn: DenseFFN, inputs: FFNInputs) -> tuple[LayerReport, Any]:
    replacement = converted(method, ffn, inputs)
    return measure_layer(0, inputs, ffn, replacement, replacement.sizes, seed=0), replacement


# --- what is held ------------------------------------------------------------------------------


@torch.no_grad()
def test_copies_add_up_by_hand() -> None:
    """Neuron i puts out x_i: 0 and 5 run three times, 7 never, the others once."""
    ffn = DenseFFN(up_FD=torch.eye(8), down_DF=torch.eye(8), activation="linear")
    block = converted(Overlapping(active=3), ffn, inputs_of(torch.randn(80, 8)))
    x_TD = torch.tensor([[1.0, 2, 3, 4, 5, 6, 7, 8]])
    assert block(x_TD).tolist() == [[3, 2, 3, 4, 5, 18, 7, 0]]
    # One expert: of its first neurons, 0, 3 and 6, the last has the largest activation.
    block = converted(Overlapping(active=1), ffn, inputs_of(torch.randn(80, 8)))
    assert block(x_TD).tolist() == [[2, 2, 0, 0, 0, 6, 7, 0]]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_with_all_experts_active_every_copy_counts(bias: bool, masked: bool) -> None:
    ffn, x_TD = random_ffn(bias), torch.randn(200, 5)
    block = converted(Overlapping(active=3), ffn, inputs_of(x_TD))
    block.view = as_they_are if masked else None
    assert (block.sizes.stored, block.sizes.total) == (11, 8)
    expected_TD = output_of(ffn, torch.tensor(COPIES), x_TD)
    torch.testing.assert_close(block(x_TD), expected_TD, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected_TD, ffn.output(ffn.hidden(x_TD)), rtol=0.1, atol=0.1)


@torch.no_grad()
def test_of_some_experts_the_copies_of_those_that_run_count() -> None:
    ffn, x_TD = random_ffn(), torch.randn(200, 5)
    block = converted(Overlapping(), ffn, inputs_of(x_TD))
    chosen_TR = block.chosen(x_TD).numpy()
    assert chosen_TR.sum(1).tolist() == [2] * 200
    assert len({tuple(row) for row in chosen_TR.tolist()}) == 3
    copies_TF = torch.tensor([copies_of(chosen_R) for chosen_R in chosen_TR])
    torch.testing.assert_close(block(x_TD), output_of(ffn, copies_TF, x_TD), rtol=1e-5, atol=1e-5)


def test_what_was_made_names_neurons_of_the_dense_ffn() -> None:
    ffn, x_TD = random_ffn(), torch.randn(200, 5)
    made = converted(Overlapping(), ffn, inputs_of(x_TD)).made
    assert made.partition.shared_S.tolist() == SHARED
    assert made.partition.experts_RM.tolist() == EXPERTS
    assert len(made.static_N) == 8
    assert made.static_repair is None


@pytest.mark.parametrize("seed", range(4))
def test_routers_read_the_statistics_of_the_neurons_that_were_copied(seed: int) -> None:
    """The paper's representatives, of experts that overlap: found by hand in the dense FFN."""

    class Twice(CMoE):
        def sizes(self, layout: Layout, intermediate_size: int) -> Sizes:
            return Sizes(2, 3, 3, 2, intermediate_size)

        def partition(self, fit: LayerFit) -> Partition:
            return Partition(np.array(SHARED), np.array(EXPERTS))

    torch.manual_seed(seed)
    ffn, x_TD = random_ffn(), torch.randn(200, 5)
    router = converted(Twice(activation_top_k=3), ffn, inputs_of(x_TD)).router
    a_TF = compute_statistics([x_TD[:175]], ffn, StatisticsKind(3)).active.toarray()  # type: ignore[union-attr]
    for members, up_D, gate_D in zip(
        EXPERTS, router.up_proj.weight, router.gate_proj.weight, strict=True
    ):
        centroid_T = a_TF[:, members].mean(axis=1)
        distances = [((a_TF[:, i] - centroid_T) ** 2).sum() for i in members]
        chosen = members[int(np.argmin(distances))]
        assert torch.equal(up_D, ffn.up_FD[chosen])
        assert torch.equal(gate_D, ffn.gate_FD[chosen])  # type: ignore[index]


# --- what is repaired and measured -------------------------------------------------------------


@pytest.mark.parametrize("linear", [False, True])
def test_without_a_repair_the_report_says_what_the_copies_lose(linear: bool) -> None:
    """A neuron whose copies run twice counts twice, and one of them that does not run, nothing."""
    ffn, x_TD = random_ffn(), torch.randn(400, 5)
    inputs = inputs_of(x_TD)
    report, block = measured(Overlapping(linear=linear), ffn, inputs)
    held_TD = x_TD[350:]
    dense_TD = ffn.output(ffn.hidden(held_TD))

    def lost(chosen_TR: NDArray[np.bool_]) -> float:
        copies_TF = torch.tensor([copies_of(chosen_R) for chosen_R in chosen_TR])
        error_TD = output_of(ffn, copies_TF, held_TD) - dense_TD
        return float(error_TD.square().sum() / dense_TD.square().sum())

    h_TF = ffn.hidden(held_TD)
    norms = [(h_TF[:, m] @ ffn.down_DF[:, m].T).norm(dim=1) for m in EXPERTS]
    best_TR = np.ones((50, 3), dtype=bool)
    best_TR[np.arange(50), torch.stack(norms, dim=1).argmin(1).numpy()] = False
    chosen_TR = block.chosen(held_TD).numpy()
    assert report.relative_error == pytest.approx(lost(chosen_TR), rel=1e-4)
    assert report.references["unrepaired"] == pytest.approx(report.relative_error, rel=1e-4)
    assert report.references["oracle"] == pytest.approx(lost(best_TR), rel=1e-4)
    assert report.router_recall == pytest.approx((chosen_TR & best_TR).sum() / 100)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("up_steps", [0, 4])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("repair_by", ["mean", "least-squares"])
@pytest.mark.parametrize("active", [1, 2])
def test_a_repair_aims_at_the_dense_output_and_never_loses_more(
    active: int, repair_by: str, intercept: bool, up_steps: int, bias: bool
) -> None:
    ffn, x_TD = random_ffn(bias), torch.randn(400, 5) + 0.5
    inputs = inputs_of(x_TD)
    plain, _ = measured(Overlapping(active), ffn, inputs)
    method = Overlapping(active, repair_by, intercept, up_steps)
    report, block = measured(method, ffn, inputs)
    repair = block.made.repair
    assert report.references == pytest.approx(plain.references, rel=1e-4)
    assert repair.error_before == pytest.approx(plain.relative_error, rel=1e-4)
    assert repair.error_after == pytest.approx(report.relative_error, rel=1e-3)
    assert report.relative_error <= plain.relative_error * (1 + 1e-5)
    if repair_by == "least-squares":
        assert report.relative_error < plain.relative_error
        assert report.repair not in (None, "none")


def test_copies_are_refitted_each_by_itself() -> None:
    """Neuron 5 stands in all three experts, with an output vector of its own in each."""
    ffn, x_TD = random_ffn(), torch.randn(400, 5)
    method = Overlapping(repair_by="least-squares", up_steps=4)
    block = converted(method, ffn, inputs_of(x_TD))
    down_RD = [block.experts.down_proj[j, :, EXPERTS[j].index(5)] for j in range(3)]
    up_RD = [block.experts.gate_up_proj[j, 8 + EXPERTS[j].index(5)] for j in range(3)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not torch.allclose(down_RD[one], down_RD[other], rtol=1e-2, atol=1e-2)
        if block.made.repair.up:
            assert not torch.allclose(up_RD[one], up_RD[other], rtol=1e-2, atol=1e-2)
    assert torch.equal(block.experts.gate_up_proj[0, 2], block.experts.gate_up_proj[1, 1])


@torch.no_grad()
def test_with_all_experts_active_a_repair_makes_the_dense_ffn_again() -> None:
    """But for neuron 7, which is held nowhere: copies that add up too often are scaled down."""
    ffn, x_TD = random_ffn(), torch.randn(400, 5)
    ffn = replace(ffn, down_DF=ffn.down_DF * torch.tensor([1.0] * 7 + [0.0]))
    method = Overlapping(active=3, repair_by="least-squares")
    block = converted(method, ffn, inputs_of(x_TD))
    assert block.made.repair.error_before > 0.1
    assert block.made.repair.error_after < 1e-3
    held_TD = x_TD[350:]
    dense_TD = ffn.output(ffn.hidden(held_TD))
    error = (block(held_TD) - dense_TD).square().sum() / dense_TD.square().sum()
    assert float(error) == pytest.approx(block.made.repair.error_after, rel=1e-2)


# --- a whole model -----------------------------------------------------------------------------


@dataclass(frozen=True)
class InEvery(Overlapping):
    """52 neurons: 10 shared, and 3 experts of 20 of which 6 are in every one."""

    def sizes(self, layout: Layout, intermediate_size: int) -> Sizes:
        return Sizes(10, 20, 3, self.active, intermediate_size)

    def partition(self, fit: LayerFit) -> Partition:
        everyone_M = np.arange(10, 16)
        experts = [np.r_[everyone_M, 12 + 14 * j - 6 + np.arange(10, 24)] for j in range(3)]
        return Partition(np.arange(10), np.array(experts) % 52)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_a_model_is_converted_saved_and_loaded(family: str, tmp_path: Path) -> None:
    method = InEvery(repair_by="least-squares", active=1)
    windows, ids = tokens(8, CONTEXT, seed=1), tokens(2, 32, seed=2)
    output = tmp_path / "out"
    model, report = moesaic.convert(tiny_model(family), method, "S0A1E1", windows, output=output)
    (sizes,) = set(model.config.moesaic.sizes)
    assert (sizes.stored, sizes.active, sizes.total) == (70, 30, 52)
    for layer in report.layers:
        assert layer.relative_error <= layer.references["unrepaired"] * (1 + 1e-5)
    with torch.no_grad():
        again = load_model(output)(input_ids=ids).logits
        torch.testing.assert_close(again, model(input_ids=ids).logits)
