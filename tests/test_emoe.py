"""EMoE: experts of neurons with like keys, and a router that is the mean of keys."""

from __future__ import annotations

import numpy as np
import torch

import moesaic
from moesaic.families import find_ffns
from moesaic.layout import Layout
from moesaic.methods.load import load_method
from moesaic.modeling import MoesaicReplacement
from moesaic.parts.clustering import rows_kmeans
from tests.families import CONTEXT, tiny_model, tokens

WINDOWS = tokens(6, CONTEXT, seed=1)


def test_rows_that_point_the_same_way_make_up_an_expert() -> None:
    """Hand-made: three directions, four rows of each, in mixed order."""
    axes = torch.eye(3, 8) * 5
    place = np.array([0, 1, 2] * 4)
    noise = 0.1 * torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    rows = axes[torch.from_numpy(place)] + noise
    candidates = np.arange(100, 112)
    found = []
    for seed in range(20):
        generator = np.random.default_rng(seed)
        experts = rows_kmeans(rows, candidates, 3, 20, generator)
        assert sorted(experts.reshape(-1)) == list(candidates)
        groups = {frozenset(place[expert - 100]) for expert in experts}
        found.append(groups == {frozenset([0]), frozenset([1]), frozenset([2])})
    # Two seeds of one direction may end in a worse grouping, as with any k-means.
    assert sum(found) >= 10


def test_the_router_is_the_mean_gate_of_its_expert() -> None:
    """So is its bias; llama's tiny model has biases on every matrix."""
    dense = find_ffns(tiny_model("llama")).read(0)
    model, _ = moesaic.convert(tiny_model("llama"), "emoe", "S0A3E4", WINDOWS)
    block = next(m for m in model.modules() if isinstance(m, MoesaicReplacement))
    x_TD = torch.randn(5, dense.up_FD.shape[1], generator=torch.Generator().manual_seed(0))
    partition = partition_of(block, dense)
    gate_TF = x_TD @ dense.gate_FD.T + dense.gate_bias_F
    expected_TR = torch.stack([gate_TF[:, expert].mean(1) for expert in partition], 1)
    ours_TR = block.router.scores(x_TD) + block.router.selection_bias
    torch.testing.assert_close(ours_TR, expected_TR, rtol=1e-4, atol=1e-5)


def partition_of(block: MoesaicReplacement, dense: object) -> list[list[int]]:
    """Which neurons each expert holds, by the weights themselves."""
    up_FD = dense.up_FD
    size = block.sizes.expert
    experts = []
    for gate_up in block.experts.gate_up_proj:
        rows = gate_up[gate_up.shape[0] // 2 :][:size]
        distance = torch.cdist(rows.float(), up_FD.float())
        experts.append(distance.argmin(1).tolist())
    return experts


def test_it_has_no_shared_expert_unless_asked() -> None:
    method = load_method("emoe")
    model, _ = moesaic.convert(tiny_model("qwen3"), "emoe", calibration=WINDOWS, sparsity=0.5)
    layout = Layout.parse(model.config.moesaic.layout)
    assert (layout.num_shared, layout.num_total) == (0, 8)
    assert method.name == "emoe"
