"""MoEfication, G-MoEfication, LLaMA-MoE (1 and 2), MoEBERT and Read-ME: what each must show."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import moesaic
from moesaic import load_method
from moesaic.calibration.calibration_set import CalibrationSet, Split
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.hidden_states import Stream
from moesaic.cli import main as cli
from moesaic.conversion.prepare import in_turns
from moesaic.errors import MoesaicError
from moesaic.families import DenseFFN, find_ffns
from moesaic.finetune.lora import merge, wrap
from moesaic.memory import lent_to
from moesaic.methods import read_me
from moesaic.methods.base import shape_of
from moesaic.methods.g_moefication import expert_means
from moesaic.methods.llama_moe_v2 import cluster_centroids
from moesaic.methods.moebert import adapted_experts, core_size
from moesaic.methods.read_me import refactor
from moesaic.modeling import (
    MoesaicBlock,
    MoesaicEmbeddingRouter,
    MoesaicHashRouter,
    MoesaicReplacement,
    MoesaicUnitMLPRouter,
    Sizes,
    TokenIds,
    as_they_are,
    block_moesaic,
    new_router,
)
from moesaic.parts.domains import domain_experts, domain_sums, fit_token_router, overlap_targets
from moesaic.parts.gradient_split import greedy_split, residual_neurons
from moesaic.parts.gradients import visit_gradients
from moesaic.parts.importance import cluster_importance, weight_importance
from moesaic.parts.mlp_router import expert_masses, kept_share, start_router, train_mlp_router
from tests import reference
from tests.families import CONTEXT, tiny_model, tokens
from tests.mixtures import tiny_mixture
from tests.stock_models import tokenizer

CPU = torch.device("cpu")
WINDOWS = tokens(8, CONTEXT, seed=1)
IDS = tokens(2, 48, seed=2)
DOMAINS = {"even": WINDOWS[::2], "odd": WINDOWS[1::2]}


def inputs_of(x_TD: Tensor) -> FFNInputs:
    return FFNInputs([x_TD], Split.last_eighth(len(x_TD)), True, CPU, CPU)


def converted_ffn(name: str, ffn: DenseFFN, x_TD: Tensor, sizes: Sizes, **settings: Any) -> Any:
    method: Any = load_method(name, settings)
    return method.convert_ffn(ffn, inputs_of(x_TD), sizes, np.random.default_rng(0))


def random_ffn(neurons: int = 12, gated: bool = True, activation: str = "silu") -> DenseFFN:
    return DenseFFN(
        up_FD=torch.randn(neurons, 6),
        down_DF=torch.randn(6, neurons),
        activation=activation,
        gate_FD=torch.randn(neurons, 6) if gated else None,
    )


def converted(name: str, family: str = "qwen3", layout: str = "S1A3E5", **more: Any) -> Any:
    calibration: Any = DOMAINS if "domains" in load_method(name).needs else WINDOWS
    model, _ = moesaic.convert(tiny_model(family), name, layout, calibration, **more)
    return model


def blocks_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, MoesaicReplacement)]


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


# --- MoEfication -------------------------------------------------------------------------------


class ActiveRouter(nn.Module):
    """A perfect router: runs the K experts that hold most of what is active."""

    chooser = "topk"

    def __init__(self, ffn: DenseFFN, experts_RM: Tensor, num_active: int):
        super().__init__()
        self.ffn = ffn
        self.experts_RM = experts_RM
        self.num_active = num_active

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        mass_TR = self.ffn.hidden(x_TD)[:, self.experts_RM].sum(-1)
        index_TK = mass_TR.topk(self.num_active, dim=1).indices
        return index_TK, torch.ones_like(index_TK, dtype=torch.float32)

    def gates_of_all(self, x_TD: Tensor) -> Tensor:
        index_TK, gate_TK = self(x_TD)
        zeros_TR = torch.zeros(len(x_TD), len(self.experts_RM))
        return zeros_TR.scatter(1, index_TK, gate_TK)


@torch.no_grad()
def test_moefication_of_a_relu_ffn_with_a_perfect_router_is_exact() -> None:
    """Four directions of four neurons each; a token is active in one or two of them."""
    axes_RD = torch.eye(4, 8)
    up_FD = axes_RD.repeat_interleave(4, dim=0) * (1 + torch.rand(16, 1))
    ffn = DenseFFN(up_FD=up_FD[torch.randperm(16)], down_DF=torch.randn(8, 16), activation="relu")
    sign_T4 = torch.where(torch.rand(200, 4) < 0.5, 1.0, -1.0)
    sign_T4[:, 2:] = -sign_T4[:, :2]  # two of the four are active for every token
    x_TD = torch.cat([sign_T4 * torch.rand(200, 4), torch.randn(200, 4)], dim=1)
    block = converted_ffn("moefication", ffn, x_TD, Sizes(0, 4, 4, 2), epochs=2)
    experts_RM = torch.from_numpy(block.made.partition.experts_RM)
    groups = {frozenset(ffn.up_FD[members].argmax(1).tolist()) for members in experts_RM}
    assert groups == {frozenset([axis]) for axis in range(4)}
    dense_TD = ffn.output(ffn.hidden(x_TD))
    block.router = ActiveRouter(ffn, experts_RM, 2)
    torch.testing.assert_close(block(x_TD), dense_TD, rtol=1e-5, atol=1e-6)
    block.router.num_active = 1
    assert not torch.allclose(block(x_TD), dense_TD, rtol=0.1, atol=0.1)


def test_what_an_expert_holds_of_the_activation_is_a_sum() -> None:
    ffn, x_TD = random_ffn(), torch.randn(20, 6)
    experts_RM = np.random.default_rng(0).permutation(12).reshape(3, 4)
    found_TR = expert_masses(x_TD.split(7), ffn, experts_RM, Tensor.abs)
    expected_TR = reference.expert_masses(
        ffn.hidden(x_TD).abs().double().numpy(), experts_RM.tolist()
    )
    np.testing.assert_allclose(found_TR.numpy(), expected_TR, rtol=1e-5)


def unit_mlp(experts: int = 3, active: int = 1, hidden: int = 6) -> MoesaicUnitMLPRouter:
    method: Any = load_method("moefication")
    ffn = random_ffn()
    block = replace(method.block(shape_of(ffn)), hidden_size=hidden)
    router = new_router(block, Sizes(0, 4, experts, active))
    assert isinstance(router, MoesaicUnitMLPRouter)
    return router


def test_the_router_starts_from_mean_unit_rows_and_the_identity() -> None:
    router = unit_mlp(2)
    row_FD = torch.tensor([[3.0, 0, 0], [0, 2, 0], [0, 5, 0], [0, 0, 7]])
    start_router(router, row_FD, np.array([[0, 1], [2, 3]]))
    expected_RD = torch.tensor([[0.5, 0.5, 0], [0, 0.5, 0.5]])
    torch.testing.assert_close(router.hidden_proj.weight.data, expected_RD)
    assert torch.equal(router.score_proj.weight.data, torch.eye(2))
    x_TD = torch.tensor([[0.0, 4.0, 0.0]])
    expected_TR = torch.tensor([[0.5, 0.5]]).tanh()
    torch.testing.assert_close(router.scores(x_TD), expected_TR)
    torch.testing.assert_close(router.scores(100 * x_TD), expected_TR)


def test_training_finds_who_is_active_and_keeps_the_best_epoch() -> None:
    """Expert j holds all of the mass where input j is largest, and the start knows nothing."""
    x_TD = torch.randn(2000, 6)
    mass_TR = nn.functional.one_hot(x_TD[:, :3].argmax(1), 3).float()
    routers = []
    for _ in range(2):
        router = unit_mlp()
        nn.init.constant_(router.hidden_proj.weight, 0.1)
        nn.init.eye_(router.score_proj.weight)
        before = kept_share(router, x_TD[-200:], mass_TR[-200:])
        share = train_mlp_router(router, x_TD, mass_TR, epochs=10, rate=0.01, seed=3)
        assert share == kept_share(router, x_TD[-200:], mass_TR[-200:])
        assert share > 0.9 > 0.6 > before
        routers.append(router)
    for one, again in zip(routers[0].parameters(), routers[1].parameters(), strict=True):
        assert torch.equal(one, again)
        assert one.grad is None
    start = copy.deepcopy(routers[0])
    assert train_mlp_router(start, x_TD, mass_TR, epochs=0, rate=0.01, seed=3) == share
    assert torch.equal(start.hidden_proj.weight, routers[0].hidden_proj.weight)


def test_it_trains_also_within_inference_mode() -> None:
    x_TD = torch.randn(640, 6)
    mass_TR = nn.functional.one_hot(x_TD[:, :3].argmax(1), 3).float()
    shares = []
    for mode in (torch.inference_mode(), torch.inference_mode(False)):
        torch.manual_seed(0)
        with mode:
            router = unit_mlp()
            before = kept_share(router, x_TD[-64:], mass_TR[-64:])
            shares.append(train_mlp_router(router, x_TD, mass_TR, epochs=5, rate=0.01, seed=0))
    assert shares[0] == shares[1] > before


# --- G-MoEfication -----------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_what_does_not_run_puts_out_its_mean(masked: bool) -> None:
    ffn, x_TD = random_ffn(), torch.randn(160, 6)
    block = converted_ffn("g-moefication", ffn, x_TD, Sizes(0, 4, 3, 1), epochs=1)
    block.view = as_they_are if masked else None
    mean_F = ffn.hidden(x_TD[:140]).mean(0)  # the last eighth is held out
    runs_TR = block.chosen(x_TD)
    h_TF = ffn.hidden(x_TD)
    filled_TF = mean_F.repeat(len(x_TD), 1)
    for expert, members_M in enumerate(block.made.partition.experts_RM):
        for t in np.flatnonzero(runs_TR[:, expert].numpy()):
            filled_TF[t, members_M] = h_TF[t, members_M]
    torch.testing.assert_close(block(x_TD), ffn.output(filled_TF), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_with_all_experts_no_mean_is_left(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit what the same experts give without means, computed alike."""
    monkeypatch.setattr(block_moesaic, "SMALL_EXPERT", 0)
    ffn, x_TD = random_ffn(), torch.randn(80, 6)
    block = converted_ffn("g-moefication", ffn, x_TD, Sizes(0, 4, 3, 3))
    assert block.expert_means.abs().min() > 0
    plain = MoesaicBlock(replace(block.block, replacement="experts"), block.sizes)
    plain.load_state_dict(block.state_dict(), strict=False)
    for one in (block, plain):
        one.view = as_they_are if masked else None
    assert torch.equal(block(x_TD), plain(x_TD))
    torch.testing.assert_close(block(x_TD), ffn.output(ffn.hidden(x_TD)), rtol=1e-4, atol=1e-4)


def test_an_expert_s_mean_by_hand() -> None:
    ffn = DenseFFN(torch.eye(4), torch.tensor([[1.0, 2, 3, 4], [0, 1, 0, 1]]), "linear")
    found_RD = expert_means(torch.tensor([1.0, 10, 100, 1000]), ffn, np.array([[0, 3], [1, 2]]))
    assert found_RD.tolist() == [[4001, 1000], [320, 10]]


def test_the_means_are_saved_and_cost_as_much_as_they_read() -> None:
    ffn, x_TD = random_ffn(), torch.randn(80, 6)
    block = converted_ffn("g-moefication", ffn, x_TD, Sizes(0, 4, 3, 1), epochs=0)
    assert block.active_weights() == 3 * 6 * 4 + 3 * 6
    assert "expert_means" in block.state_dict()


# --- LLaMA-MoE ---------------------------------------------------------------------------------


@torch.no_grad()
def test_llama_moe_scales_routed_outputs_by_n_over_k() -> None:
    ffn, x_TD = random_ffn(14), torch.randn(80, 6)
    block = converted_ffn("llama-moe", ffn, x_TD, Sizes(2, 3, 4, 2))
    partition = block.made.partition
    torch.testing.assert_close(
        block.shared_expert.down_proj.weight, ffn.down_DF[:, partition.shared_S]
    )
    for down_DM, members_M in zip(block.experts.down_proj, partition.experts_RM, strict=True):
        torch.testing.assert_close(down_DM[:, :3], ffn.down_DF[:, members_M] * 4 / 2)
    drawn = [converted_ffn("llama-moe", ffn, x_TD, Sizes(2, 3, 4, 2)) for _ in range(2)]
    assert torch.equal(drawn[0].router.hidden_proj.weight, drawn[1].router.hidden_proj.weight)
    bound = 6**-0.5
    weight = drawn[0].router.hidden_proj.weight
    assert 0.5 * bound < weight.abs().max() <= bound


# --- gradients of the dense model --------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2", "opt", "phi3"])
def test_the_gradient_at_an_ffn_s_output_is_that_of_its_weights(family: str) -> None:
    """dL/dW_down = g^T h; nothing is left in the model."""
    model = tiny_model(family)
    ffns = find_ffns(model)
    found: dict[int, Tensor] = {}

    def visit(layer: int, x_TD: Tensor, gradient_TD: Tensor) -> None:
        h_TF = ffns.read(layer).hidden(x_TD)
        found[layer] = gradient_TD.T @ h_TF

    visit_gradients(model, ffns, WINDOWS[:1], visit)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    products = reference.window_gradients(model, WINDOWS[0])
    for layer in ffns.converted:
        down_DF = ffns.read(layer).down_DF
        name = next(
            name
            for name, parameter in model.named_parameters()
            if parameter.data_ptr() == down_DF.data_ptr()
        )
        product_DF = products[name]
        if product_DF.shape != down_DF.shape or family == "gpt2":
            product_DF = product_DF.T
        torch.testing.assert_close(found[layer] * down_DF, product_DF, rtol=1e-4, atol=1e-7)


def test_gradients_in_float16_are_not_too_small_for_it() -> None:
    """As small as those of long windows are."""
    model = tiny_model("llama")
    model.lm_head.weight.data *= 1e-4
    found: dict[torch.dtype, Tensor] = {}
    for dtype in (torch.float32, torch.float16):
        model.to(dtype)
        gradients: list[Tensor] = []

        def visit(layer: int, x_TD: Tensor, gradient_TD: Tensor) -> None:
            gradients.append(gradient_TD)  # noqa: B023

        visit_gradients(model, find_ffns(model), WINDOWS[:1], visit)
        found[dtype] = torch.cat(gradients)
    error = (found[torch.float16] - found[torch.float32]).norm()
    assert error < 0.01 * found[torch.float32].norm()


def test_gradients_are_not_there_in_inference_mode() -> None:
    model = tiny_model("qwen3")
    with (
        torch.inference_mode(),
        pytest.raises(MoesaicError, match="outside of it"),
    ):
        visit_gradients(model, find_ffns(model), WINDOWS[:1], lambda *call: None)


def test_moebert_s_importance_is_weights_times_their_gradients() -> None:
    """Summed over a neuron's rows of gate and up and its column of down; biases are not."""
    model = tiny_model("llama")  # with biases
    ffns = find_ffns(model)
    found: dict[int, Tensor] = {}

    def visit(layer: int, x_TD: Tensor, gradient_TD: Tensor) -> None:
        found[layer] = weight_importance(ffns.read(layer), x_TD, gradient_TD)

    visit_gradients(model, ffns, WINDOWS[:1], visit)
    products = reference.window_gradients(model, WINDOWS[0])
    for layer, found_F in found.items():
        prefix = f"model.layers.{layer}.mlp"
        expected_F = products[f"{prefix}.down_proj.weight"].sum(0)
        for part in ("gate", "up"):
            expected_F = expected_F + products[f"{prefix}.{part}_proj.weight"].sum(1)
        torch.testing.assert_close(found_F, expected_F, rtol=1e-3, atol=1e-6)


def test_v2_s_importance_is_activation_times_gradient_by_cluster() -> None:
    ffn, x_TD, gradient_TD = random_ffn(5), torch.randn(4, 6), torch.randn(4, 6)
    cluster_T = torch.tensor([1, 0, 1, 1])
    found_RF = cluster_importance(ffn, x_TD, gradient_TD, cluster_T, 3)
    h_TF = ffn.hidden(x_TD).requires_grad_()
    (ffn.output(h_TF) * gradient_TD).sum().backward()
    assert h_TF.grad is not None
    expected_RF = torch.zeros(3, 5)
    for t, cluster in enumerate(cluster_T.tolist()):
        expected_RF[cluster] += (h_TF[t] * h_TF.grad[t]).abs().detach()
    torch.testing.assert_close(found_RF, expected_RF)


# --- LLaMA-MoE v2 ------------------------------------------------------------------------------


def test_the_residual_expert_holds_what_most_clusters_name() -> None:
    importance_RF = np.array([[9.0, 8, 1, 0, 0, 3], [9, 0, 8, 1, 0, 3], [0, 9, 8, 0, 1, 3]])
    # First round, two names each: 0 and 1, 0 and 2, 1 and 2: twice each, the lowest first.
    assert residual_neurons(importance_RF, 2, 2).tolist() == [0, 1]
    # All three go; then 5 stands first with everyone.
    assert residual_neurons(importance_RF, 4, 2).tolist() == [0, 1, 2, 5]
    assert residual_neurons(importance_RF, 6, 2).tolist() == [0, 1, 2, 3, 4, 5]
    assert residual_neurons(importance_RF, 0, 2).tolist() == []


@pytest.mark.parametrize("seed", range(5))
def test_the_others_are_split_greedily(seed: int) -> None:
    importance_RF = np.random.default_rng(seed).random((3, 14))
    others_N = np.array([0, 1, 2, 4, 5, 7, 8, 11, 13])
    found_RM = greedy_split(importance_RF, others_N)
    assert found_RM.tolist() == reference.greedy_split(importance_RF, others_N.tolist())
    assert sorted(found_RM.reshape(-1).tolist()) == others_N.tolist()


def test_centroids_are_means_of_balanced_clusters() -> None:
    """Three clouds of ten, in mixed order; a token that is left over counts nowhere."""
    middle_RD = 10 * torch.eye(3, 6)
    x_TD = middle_RD.repeat(10, 1) + 0.1 * torch.randn(30, 6)
    far_1D = torch.full((1, 6), 1e6)
    found = []
    for seed in range(10):
        centroid_RD = cluster_centroids(
            torch.cat([x_TD, far_1D]), 3, 20, np.random.default_rng(seed)
        )
        torch.testing.assert_close(centroid_RD.mean(0), x_TD.mean(0), rtol=1e-4, atol=1e-5)
        distance_RR = torch.cdist(centroid_RD, middle_RD).min(0).values
        found.append(bool((distance_RR < 0.2).all()))
    assert sum(found) >= 5


def test_the_rows_of_its_router_are_centroids_of_ffn_inputs() -> None:
    """Of the dense model's; their mean is that of the clustered tokens, as clusters are equal."""
    dense = tiny_model("qwen3")
    stream = Stream(find_ffns(dense), WINDOWS, CPU)
    model = converted("llama-moe-v2")
    for layer, block in enumerate(blocks_of(model)):
        inputs = list(stream.ffn_inputs(layer))
        x_TD = torch.cat(inputs)
        weight_RD = block.router.score_proj.weight
        clustered = len(x_TD) // 4 * 4
        torch.testing.assert_close(
            weight_RD.mean(0), x_TD[:clustered].mean(0), rtol=1e-3, atol=1e-4
        )
        assert torch.equal(block.router.scores(x_TD), x_TD @ weight_RD.T)
        nearest_T = torch.cdist(x_TD, weight_RD).argmin(1)
        assert len(nearest_T.unique()) == 4
        stream.advance(layer, inputs)


# --- MoEBERT -----------------------------------------------------------------------------------


def test_the_core_is_the_paper_s_at_its_budget_and_grows_with_it() -> None:
    assert core_size(3072, 768, 4, 2 / 3) == 512  # BERT-base, Section 4
    # 0.75 of 120 neurons: 80 in all experts, and the other 40 ten to an expert.
    assert core_size(120, 90, 4, 2 / 3) == 80
    assert core_size(120, 120, 4, 2 / 3) == 120
    assert core_size(120, 90, 4, 1.0) == 90


def test_experts_are_the_core_and_every_nth_of_the_rest() -> None:
    importance_F = np.array([5.0, 9, 1, 8, 2, 7, 3, 6])  # order 1 3 5 7 0 6 4 2
    found_RM = adapted_experts(importance_F, experts=2, size=4, core=2)
    assert found_RM.tolist() == [[0, 1, 3, 5], [1, 3, 6, 7]]


def test_llama_moe_v2_wants_a_token_for_every_cluster() -> None:
    model = tiny_model("qwen3")
    with pytest.raises(MoesaicError, match=r"8 calibration tokens cannot be cut into 13 clusters"):
        moesaic.convert(model, "llama-moe-v2", "S0A3E13", WINDOWS[:1, :8])


def hash_router(experts: int = 4, salt: int = 7) -> MoesaicHashRouter:
    method: Any = load_method("moebert", {"num_experts": experts})
    router = new_router(method.block(shape_of(random_ffn())), Sizes(0, 6, experts, 1, 12))
    assert isinstance(router, MoesaicHashRouter)
    router.salt.fill_(salt)
    return router


def test_a_hash_router_never_looks_at_x() -> None:
    router = hash_router()
    ids_T = torch.arange(500)
    router.token_ids.current = ids_T
    x_TD = torch.randn(500, 6, requires_grad=True)
    chosen = [
        router.choose(router.scores(x)) for x in (x_TD, -x_TD, torch.full((500, 6), torch.nan))
    ]
    assert torch.equal(chosen[0], chosen[1])
    assert torch.equal(chosen[0], chosen[2])
    assert not router.scores(x_TD).requires_grad
    assert (chosen[0].sum(1) == 1).all()
    assert torch.equal(chosen[0].int().argmax(1), router.experts_of(ids_T))
    router.token_ids.current = ids_T + 1
    assert not torch.equal(chosen[0], router.choose(router.scores(x_TD)))
    router.selection_bias.copy_(torch.tensor([9.0, 0, 0, 0]))
    router.token_ids.current = ids_T
    assert torch.equal(chosen[0], router.choose(router.scores(x_TD)))


@pytest.mark.parametrize("salt", [0, 7, 2**31 - 1])
@pytest.mark.parametrize("experts", [2, 3, 4, 7])
def test_a_hash_spreads_a_vocabulary_evenly(experts: int, salt: int) -> None:
    count_R = hash_router(experts, salt).experts_of(torch.arange(20_000)).bincount()
    expected = 20_000 / experts
    assert len(count_R) == experts
    assert (count_R - expected).abs().max() < 4 * expected**0.5
    assert not torch.equal(
        hash_router(experts, salt).experts_of(torch.arange(100)),
        hash_router(experts, salt + 1).experts_of(torch.arange(100)),
    )


def test_an_embedding_may_lie_on_another_device_than_the_layer() -> None:
    """As in a model that several devices hold, or whose layers visit the GPU one by one."""
    table = nn.Embedding(9, 3)
    ids = TokenIds(table)
    ids.current = torch.tensor([4, 7])
    assert ids.embedded(torch.empty(2, 6, device="meta")).device.type == "meta"
    assert torch.equal(ids.embedded(torch.empty(2, 6)), table.weight[ids.current])


def test_read_me_brings_every_layer_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that does not fit there stays on the CPU, and its layers come one by one."""
    model = tiny_model("qwen3")
    ffns = find_ffns(model)
    calibration = CalibrationSet.joined([CalibrationSet(WINDOWS[:2]), CalibrationSet(WINDOWS[2:4])])
    lent: list[Any] = []

    def noted(device: torch.device, module: nn.Module) -> Any:
        lent.append(module)
        return lent_to(device, module)

    monkeypatch.setattr(read_me, "lent_to", noted)
    refactor(Stream(ffns, calibration.windows_NL, CPU), calibration, 6)
    assert lent == list(ffns.layers)


@pytest.mark.parametrize("name", ["moebert", "read-me"])
def test_a_model_that_routes_by_token_knows_its_ids(name: str, tmp_path: Path) -> None:
    """Whatever text it is called with, with a cache, loaded again; and says so where not."""
    model = converted(name, output=tmp_path / "out")
    loaded = moesaic.families.load.load_model(tmp_path / "out")
    torch.testing.assert_close(logits(loaded), logits(model))
    for one in (model, loaded):
        chosen = []
        for ids in (IDS[:1, :8], IDS[:1, 8:16], IDS[:1, :8]):
            logits(one, ids)
            router = blocks_of(one)[0].router
            assert torch.equal(router.token_ids.current, ids.flatten())
            chosen.append(router.choose(router.scores(torch.zeros(8, 32))))
        assert torch.equal(chosen[0], chosen[2])
        prompt = IDS[:1, :8]
        by_cache = one.generate(prompt, max_new_tokens=6, do_sample=False)
        anew = one.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=False)
        assert torch.equal(by_cache, anew)
        with pytest.raises(ValueError, match="call it with input_ids"):
            one(inputs_embeds=one.get_input_embeddings()(prompt))


def test_a_copy_and_a_resized_model_read_their_own_embedding() -> None:
    model = converted("read-me")
    expected = logits(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(-1)
    torch.testing.assert_close(logits(other), expected)
    other.resize_token_embeddings(100)
    assert torch.equal(logits(other)[..., :96], expected)
    logits(other, torch.tensor([[99, 98, 97]]))


def test_a_decoder_inside_the_base_model_tells_its_ids(tmp_path: Path) -> None:
    model = converted("moebert", "opt", output=tmp_path / "out")
    found = logits(model, IDS[:1, :8])
    router = blocks_of(model)[0].router
    assert torch.equal(router.token_ids.current, IDS[0, :8])
    loaded = moesaic.families.load.load_model(tmp_path / "out")
    torch.testing.assert_close(logits(loaded, IDS[:1, :8]), found)


@pytest.mark.parametrize("name", ["moebert", "read-me"])
def test_a_layer_s_report_is_that_of_the_tokens_it_measured(name: str) -> None:
    """A router that was told other tokens' ids would lose something else."""
    calibration: Any = DOMAINS if name == "read-me" else WINDOWS
    _, report = moesaic.convert(tiny_model("qwen3"), name, "S1A3E5", calibration)
    model = converted(name)
    measured = CalibrationSet(WINDOWS)
    if name == "read-me":
        sets = [CalibrationSet(one) for one in DOMAINS.values()]
        measured = CalibrationSet.joined(sets)
    dense = find_ffns(tiny_model("qwen3"))
    first = blocks_of(model)[0]
    seen: list[Tensor] = []
    hook = first.register_forward_hook(lambda m, args, output: seen.extend([args[0], output]))
    logits(model, measured.heldout(9))
    hook.remove()
    x_TD, y_TD = (one.reshape(-1, 32) for one in seen)
    ffn = dense.read(0)
    dense_TD = ffn.output(ffn.hidden(x_TD))
    lost = float((y_TD - dense_TD).square().sum() / dense_TD.square().sum())
    assert report.layers[0].relative_error == pytest.approx(lost, rel=1e-3)


# --- Read-ME -----------------------------------------------------------------------------------


def test_a_domain_s_expert_holds_what_is_most_active_on_it() -> None:
    h_TF = torch.tensor([[1.0, -5, 0, 2], [3, 1, 0, -6], [0, 0, 7, 1]])
    sum_RF = domain_sums(h_TF, torch.tensor([0, 0, 1]), 2)
    assert sum_RF.tolist() == [[4, 6, 0, 8], [0, 0, 7, 1]]
    assert domain_experts(sum_RF.numpy(), 2).tolist() == [[1, 3], [2, 3]]


def test_targets_say_how_well_experts_fit_a_token() -> None:
    h_TF = torch.randn(9, 12)
    experts_RM = np.array([[0, 1, 2, 3], [2, 3, 4, 5], [8, 9, 10, 11]])
    found_TR = overlap_targets(h_TF, experts_RM)
    torch.testing.assert_close(found_TR, reference.overlap_targets(h_TF, experts_RM.tolist()))


@pytest.mark.parametrize("size", [1.0, 0.01])  # of the embedding's rows
def test_the_token_router_finds_what_made_its_targets(size: float) -> None:
    e_TD = torch.randn(600, 5) * size
    weight_RD = torch.randn(3, 5) / size
    target_TR = (e_TD @ weight_RD.T + torch.tensor([1.0, 0, -1])).softmax(-1)
    found_RD, bias_R = fit_token_router(e_TD, target_TR)
    chosen_T = (e_TD @ found_RD.T + bias_R).argmax(1)
    agree = (chosen_T == target_TR.argmax(1)).float().mean()
    assert agree > 0.97


def test_one_router_chooses_for_all_layers() -> None:
    model = converted("read-me")
    logits(model)
    blocks = blocks_of(model)
    assert len(blocks) == 3
    weight_RD = blocks[0].router.score_proj.weight
    runs_TR = [block.chosen(torch.randn(IDS.numel(), 32)) for block in blocks]
    for block, runs in zip(blocks, runs_TR, strict=True):
        assert isinstance(block.router, MoesaicEmbeddingRouter)
        assert torch.equal(block.router.score_proj.weight, weight_RD)
        assert torch.equal(runs, runs_TR[0])
        assert (block.sizes.num_routed, block.sizes.num_active) == (2, 1)
    assert len(runs_TR[0].unique(dim=0)) == 2


def test_windows_of_several_texts_keep_their_domains_and_what_is_held_out() -> None:
    first, second = tokens(8, 4, seed=1), tokens(16, 4, seed=2)
    joined = CalibrationSet.joined([CalibrationSet(first), CalibrationSet(second)])
    assert joined.domain_N is not None
    fitted, held = joined.domain_N[:21].tolist(), joined.domain_N[21:].tolist()
    assert fitted == [1, 0, 1] * 7  # in turns, so that any part is of both
    assert held == [1, 0, 1]
    for domain, text in enumerate((first, second)):
        assert torch.equal(joined.windows_NL[joined.domain_N == domain], text)
    fewer = joined.fewer(8)
    assert fewer.domain_N is not None
    assert fewer.domain_N.tolist() == [1, 0, 1, 1, 0, 1, 0, 1]  # one of each held out
    with pytest.raises(MoesaicError, match="4 and 5 tokens"):
        CalibrationSet.joined([CalibrationSet(first), CalibrationSet(tokens(2, 5))])


def test_what_is_held_out_of_several_texts_is_what_each_held_out() -> None:
    """Three texts of twelve windows hold one out each; an eighth of all would be four."""
    texts = [tokens(12, 4, seed=seed) for seed in range(3)]
    joined = CalibrationSet.joined([CalibrationSet(text) for text in texts])
    assert joined.split.first_heldout == 33 * 4
    last = {tuple(text[-1].tolist()) for text in texts}
    assert {tuple(window.tolist()) for window in joined.heldout(9)} == last
    fewer = joined.fewer(35)
    assert fewer.split.first_heldout == 32 * 4
    assert {tuple(window.tolist()) for window in fewer.heldout(9)} == last


def test_a_window_that_was_held_out_is_never_fitted_on() -> None:
    """Four texts of two windows hold out half of them."""
    texts = [tokens(2, 4, seed=seed) for seed in range(4)]
    joined = CalibrationSet.joined([CalibrationSet(text) for text in texts])
    assert joined.heldout_samples == 4
    held = {tuple(text[1].tolist()) for text in texts}
    for samples in range(2, 9):
        fewer = joined.fewer(samples)
        fitted = fewer.windows_NL[: fewer.samples - fewer.heldout_samples]
        assert len(fitted) == min(samples - samples // 2, 4)
        assert not held & {tuple(window.tolist()) for window in fitted}


def test_read_me_wants_texts_of_two_domains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = tmp_path / "dense"
    tiny_model("qwen3").save_pretrained(dense)
    tokenizer().save_pretrained(dense)
    texts = []
    for name, text in (("a", "the cat sat in a hat. "), ("b", "a dog ran on the mat. ")):
        path = tmp_path / f"{name}.txt"
        path.write_text(text * 400)
        texts.append(str(path))

    def convert(*given: str) -> tuple[int, str]:
        words = ["moesaic", "convert", str(dense), "--method", "read-me", "--samples", "4"]
        words += ["--output", str(tmp_path / "out")]
        for path in given:
            words += ["--calibration", path]
        monkeypatch.setattr("sys.argv", words)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), capsys.readouterr().err.strip()

    code, said = convert(texts[0])
    assert code == 2
    assert said.endswith(
        "read-me wants texts of at least two domains; give --calibration once for each"
    )
    code, said = convert(texts[0], texts[0])
    assert code == 2
    assert "name each text once" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt", "dense"]
    code, said = convert(*texts)
    assert code == 0, said
    assert "a.txt + b.txt" in (tmp_path / "out/README.md").read_text()
    with pytest.raises(MoesaicError, match="mapping of calibration texts is empty"):
        moesaic.convert(tiny_model("qwen3"), "cmoe", "S1A3E5", {})


def test_held_out_texts_take_turns() -> None:
    first, second = torch.arange(7), torch.arange(100, 120)
    assert in_turns([first, second], 3).tolist() == [0, 1, 2, 100, 101, 102, 3, 4, 5, 103, 104, 105]
    assert in_turns([first, second], 50).tolist() == [*range(7), *range(100, 107)]


def test_any_method_takes_several_texts() -> None:
    """As many windows of each."""
    _, report = moesaic.convert(tiny_model("qwen3"), "cmoe", "S1A3E5", DOMAINS)
    assert report.calibration == "even + odd"
    assert report.tokens == WINDOWS.numel()


# --- all of them -------------------------------------------------------------------------------

WITH_ROUTER = {
    "moefication": "unit-mlp", "g-moefication": "unit-mlp", "llama-moe": "mlp",
    "llama-moe-v2": "linear", "emoe": "linear", "read-me": "embedding",
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_ROUTER)
def test_experts_of_any_method_under_the_analytical_router(name: str) -> None:
    """The grid of the paper's ablation: another router, the same experts."""
    settings = {"router": "analytical"}
    own, other = converted(name), converted(name, settings=settings)
    assert own.config.moesaic.router.kind == WITH_ROUTER[name]
    assert other.config.moesaic.router.kind == "neuron-copies"
    one, two = blocks_of(own)[0], blocks_of(other)[0]
    assert torch.equal(one.experts.gate_up_proj, two.experts.gate_up_proj)
    assert torch.equal(one.experts.down_proj, two.experts.down_proj)
    up_RD = two.router.up_proj.weight
    size = two.sizes.expert
    for row_D, gate_up in zip(up_RD, two.experts.gate_up_proj, strict=True):
        up_MD = gate_up.chunk(2)[1][:size]
        assert (up_MD == row_D).all(1).any()
    with pytest.raises(MoesaicError, match="router"):
        load_method(name, {"router": "best"})


@pytest.mark.parametrize("name", [*WITH_ROUTER, "moebert"])
def test_what_runs_says_is_what_exports_hold(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    converted(name, output=folder)
    tokenizer().save_pretrained(folder)
    reasons = moesaic.explain(folder)["glm4_moe"]
    everywhere = "llama.cpp" in str(load_method(name).description.runs)
    assert everywhere == (not reasons)
    assert all("\n" not in reason for reason in reasons)
    assert everywhere == (name in ("llama-moe-v2", "emoe"))


@pytest.mark.parametrize("name", [*WITH_ROUTER, "moebert"])
def test_training_moves_what_a_router_has(name: str) -> None:
    """And its choices stay what they were until it does."""
    model = converted(name)
    before = logits(model)
    router = blocks_of(model)[0].router
    names = [key for key, _ in router.named_parameters() if key != "expert_scale"]
    assert bool(names) == (name != "moebert")
    start = {key: value.clone() for key, value in router.state_dict().items()}
    wrapped = wrap(model, 4, 8, freeze_router=False)
    torch.testing.assert_close(logits(wrapped), before, rtol=1e-5, atol=1e-5)
    from moesaic.finetune.masked import straight_through

    for block in blocks_of(wrapped):
        block.view = straight_through
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    adam = torch.optim.Adam(trained, lr=1e-2)
    losses = []
    for _ in range(3):
        loss = wrapped(input_ids=IDS, labels=IDS, use_cache=False).loss
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for block in blocks_of(wrapped):
        block.view = None
    merged = merge(wrapped)
    after = blocks_of(merged)[0].router.state_dict()
    for key in names:
        assert not torch.equal(after[key], start[key]), key
    logits(merged)


@pytest.mark.parametrize(
    ("name", "again"),
    [("moebert", False), ("moefication", False), ("moebert", True), ("read-me", True)],
)
def test_it_is_fine_tuned_saved_and_loaded(name: str, again: bool, tmp_path: Path) -> None:
    """Also where layers are computed again: routers then ask for the same tokens' ids again."""
    folder = tmp_path / "out"
    converted(name, output=folder)
    tokenizer().save_pretrained(folder)
    moesaic.finetune(
        folder, tmp_path / "tuned", WINDOWS, samples=4, epochs=1, distill="none",
        gradient_checkpointing=again,
    )  # fmt: skip
    loaded = moesaic.families.load.load_model(tmp_path / "tuned")
    assert torch.isfinite(logits(loaded)).all()
    assert not torch.equal(logits(loaded), logits(moesaic.families.load.load_model(folder)))


@pytest.mark.parametrize("name", ["g-moefication", "llama-moe-v2", "moebert", "read-me"])
def test_what_is_for_dense_models_is_refused_for_mixtures_in_one_line(name: str) -> None:
    calibration: Any = DOMAINS if name == "read-me" else WINDOWS
    with pytest.raises(MoesaicError, match="is a mixture of experts") as refusal:
        moesaic.convert(tiny_mixture("mixtral"), name, "S1A3E5", calibration)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["moefication", "llama-moe"])
def test_others_convert_the_experts_of_a_mixture(name: str) -> None:
    settings = {"epochs": 1} if name == "moefication" else {}
    model, report = moesaic.convert(
        tiny_mixture("mixtral"), name, "S1A3E5", WINDOWS, settings=settings, min_tokens=8
    )
    assert torch.isfinite(logits(model)).all()
    assert all(0 < layer.relative_error < 2 for layer in report.layers)


@pytest.mark.parametrize("name", ["llama-moe-v2", "moebert", "read-me"])
def test_one_ffn_alone_is_not_enough_for_what_reads_the_whole_model(name: str) -> None:
    with pytest.raises(MoesaicError, match="convert the model"):
        converted_ffn(name, random_ffn(), torch.randn(80, 6), Sizes(0, 4, 3, 1, 12))


def test_settings_out_of_range_are_refused() -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("moefication", {"epochs": -1}),
        ("moefication", {"rate": "fast"}),
        ("moebert", {"num_experts": 1}),
        ("moebert", {"core": 1.5}),
        ("llama-moe-v2", {"kmeans_rounds": 0}),
    ]
    for name, settings in wrong:
        (key,) = settings
        with pytest.raises(MoesaicError, match=key):
            load_method(name, settings)


def test_texts_as_rows_and_as_windows_are_not_mixed() -> None:
    mixed: Any = {"even": DOMAINS["even"], "odd": DOMAINS["odd"].flatten()}
    with pytest.raises(MoesaicError, match="give all as rows, or all as windows"):
        moesaic.convert(tiny_model("qwen3"), "read-me", "S1A3E5", mixed, sequence_length=CONTEXT)
