"""From calibration tokens to experts: marks, importance, clustering, representatives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch.nn.functional import normalize

from moesaic.calibration.calibration_set import Split
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.statistics import Statistics, StatisticsKind, compute_statistics
from moesaic.errors import MoesaicError
from moesaic.families import DenseFFN
from moesaic.layout import Layout
from moesaic.methods.base import FFNMethod
from moesaic.methods.contents import METHODS
from moesaic.methods.expert_method import ExpertMethod, LayerFit
from moesaic.methods.load import load_method
from moesaic.parts.clustering import balanced_kmeans
from moesaic.parts.importance import activation_rate, contribution
from moesaic.parts.partition import Partition
from moesaic.parts.representatives import own_members, random_members, representative
from tests import reference

CPU = torch.device("cpu")
Columns = NDArray[np.int64]


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def random_ffn(hidden: int = 8, neurons: int = 24, gated: bool = True) -> DenseFFN:
    return DenseFFN(
        up_FD=torch.randn(neurons, hidden),
        down_DF=torch.randn(hidden, neurons),
        activation="silu",
        gate_FD=torch.randn(neurons, hidden) if gated else None,
    )


def identity_ffn(size: int) -> DenseFFN:
    """h is x itself, so that a test can write the hidden states down."""
    return DenseFFN(up_FD=torch.eye(size), down_DF=torch.eye(size), activation="linear")


def statistics_of(a_TF: Columns) -> Statistics:
    sum_F = a_TF.sum(axis=0).astype(np.float64)
    return Statistics(len(a_TF), sum_F, sum_F, csr_array(a_TF.astype(np.int32)))


def random_marks(tokens: int, neurons: int, top_k: int, seed: int) -> Columns:
    """Marks of random activations; neurons differ in how active they are."""
    random = generator(seed)
    scale_F = random.uniform(0.5, 2.0, neurons)
    return reference.marks(random.normal(size=(tokens, neurons)) * scale_F, top_k)


def topical_marks(tokens: int, noise: float, seed: int) -> Columns:
    """Marks of 72 neurons that follow four topics, so that clustering takes several rounds."""
    random = generator(seed)
    h_TF = random.normal(size=(tokens, 4)) @ random.normal(size=(4, 72))
    return reference.marks(h_TF + noise * random.normal(size=(tokens, 72)), 24)


def experts_of(
    expert_N: NDArray[np.int64], candidates_N: NDArray[np.int64], r: int
) -> list[list[int]]:
    return [candidates_N[expert_N == j].tolist() for j in range(r)]


def assignment_of(
    experts_RM: NDArray[np.int64], candidates_N: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The expert of each candidate, from the members of each expert."""
    where = {neuron: j for j, members_M in enumerate(experts_RM) for neuron in members_M}
    return np.array([where[neuron] for neuron in candidates_N])


# --- statistics --------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("normalise", [True, False])
def test_marks_equal_the_loop_over_tokens(gated: bool, normalise: bool) -> None:
    ffn, x_TD = random_ffn(gated=gated), torch.randn(50, 8)
    statistics = compute_statistics([x_TD], ffn, StatisticsKind(5, normalise))
    gate_FD, up_FD = ffn.gate_FD, ffn.up_FD
    if normalise:
        x_TD, up_FD = normalize(x_TD, dim=1), normalize(up_FD, dim=1)
        gate_FD = None if gate_FD is None else normalize(gate_FD, dim=1)
    h_TF = reference.hidden(x_TD, gate_FD, up_FD)
    assert np.array_equal(statistics.active.toarray(), reference.marks(h_TF, 5))
    assert np.allclose(statistics.energy_F, (h_TF**2).sum(axis=0), rtol=1e-5)


def test_normalising_changes_who_is_marked() -> None:
    """Else the test above could not tell the two apart."""
    ffn, x_TD = random_ffn(), torch.randn(50, 8)
    plain, unit = (
        compute_statistics([x_TD], ffn, StatisticsKind(5, normalise)).active
        for normalise in (False, True)
    )
    assert (plain != unit).nnz > 0


@pytest.mark.parametrize("block", [1, 7, 49, 50, 64])
def test_marks_do_not_depend_on_the_block_size(block: int) -> None:
    ffn, x_TD = random_ffn(), torch.randn(50, 8)
    whole = compute_statistics([x_TD], ffn, StatisticsKind(5))
    parts = compute_statistics(iter(x_TD.split(block)), ffn, StatisticsKind(5))
    assert np.array_equal(parts.active.toarray(), whole.active.toarray())
    assert np.allclose(parts.energy_F, whole.energy_F, rtol=1e-5)


def test_activation_rates_by_hand() -> None:
    """Three tokens, the two largest magnitudes of each: the sign does not count."""
    x_TD = torch.tensor([[1.0, -3.0, 2.0, 0.0], [-4.0, 1.0, 2.0, 0.5], [0.0, 5.0, -1.0, -6.0]])
    statistics = compute_statistics([x_TD], identity_ffn(4), StatisticsKind(2))
    assert statistics.active.toarray().tolist() == [[0, 1, 1, 0], [1, 0, 1, 0], [0, 1, 0, 1]]
    assert statistics.tokens == 3
    assert (statistics.count_F / statistics.tokens).tolist() == [1 / 3, 2 / 3, 2 / 3, 1 / 3]
    assert activation_rate(statistics).tolist() == [1, 2, 2, 1]
    assert statistics.energy_F == pytest.approx([17, 35, 9, 36.25])


@pytest.mark.parametrize("top_k", [1, 10, 24, 30])
def test_counts_sum_to_tokens_times_marks(top_k: int) -> None:
    """No more marks a token than it has neurons."""
    statistics = compute_statistics([torch.randn(40, 8)], random_ffn(), StatisticsKind(top_k))
    assert statistics.count_F.sum() == 40 * min(top_k, 24)
    assert statistics.count_F.max() <= 40


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_activations_that_are_not_finite_are_refused(bad: float) -> None:
    x_TD = torch.randn(10, 8)
    x_TD[3, 2] = bad
    with pytest.raises(MoesaicError, match="not finite"):
        compute_statistics(x_TD.split(4), random_ffn(), StatisticsKind(5))


def test_contribution_is_the_mean_square_of_what_a_neuron_adds() -> None:
    ffn, x_TD = random_ffn(), torch.randn(30, 8)
    h_TF = reference.hidden(x_TD, ffn.gate_FD, ffn.up_FD)
    expected = [
        np.mean([np.linalg.norm(h_TF[t, i] * ffn.down_DF[:, i].numpy()) ** 2 for t in range(30)])
        for i in range(24)
    ]
    statistics = compute_statistics([x_TD], ffn, StatisticsKind(5))
    assert np.allclose(contribution(statistics, ffn), expected, rtol=1e-5)


# --- balanced k-means --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("r", [2, 4, 8])
def test_every_round_reaches_the_optimum_of_the_reference(r: int, seed: int) -> None:
    """Equal objective whatever the ties, since each round starts from our own last one.

    64 candidates: experts are powers of two, so the reference's float64 is exact.
    """
    a_TF = topical_marks(100, 0.5, seed)
    candidates_N = np.setdiff1d(np.arange(72), reference.seeds(a_TF, 8))
    a_TN, statistics = a_TF[:, candidates_N], statistics_of(a_TF)
    centroid_TR = a_TN[:, reference.seeds(a_TN, r)].astype(np.float64)
    for rounds in range(1, 6):
        experts_RM = balanced_kmeans(statistics, candidates_N, r, rounds)
        expert_N = assignment_of(experts_RM, candidates_N)
        cost_NR = reference.squared_distances(a_TN, centroid_TR)
        best_N = reference.balanced_assignment(cost_NR)
        assert reference.cost_of(cost_NR, expert_N) == reference.cost_of(cost_NR, best_N)
        centroid_TR = reference.centroids(a_TN, expert_N, r)


@pytest.mark.parametrize(
    ("r", "tokens", "noise", "seed", "settled"),
    [(2, 500, 0.5, 4, 8), (2, 500, 0.5, 3, 7), (4, 800, 1.0, 6, 4), (4, 800, 1.0, 7, 4)],
)
def test_same_experts_as_the_reference_where_every_optimum_is_unique(
    r: int, tokens: int, noise: float, seed: int, settled: int
) -> None:
    """After each round, up to the first one that repeats, and after more than that."""
    a_TF = topical_marks(tokens, noise, seed)
    candidates_N = np.setdiff1d(np.arange(72), reference.seeds(a_TF, 8))
    history = reference.balanced_kmeans(a_TF[:, candidates_N], r, 20)
    assert all(reference.is_only_optimum(*step) for step in history), "choose other data"
    assert len(history) == settled, "choose other data"
    results = []
    for rounds in range(1, settled + 3):
        experts_RM = balanced_kmeans(statistics_of(a_TF), candidates_N, r, rounds)
        _, expected_N = history[min(rounds, settled) - 1]
        assert experts_RM.tolist() == experts_of(expected_N, candidates_N, r)
        results.append(experts_RM.tolist())
    different = [results[i] != results[i + 1] for i in range(len(results) - 1)]
    assert different == [True] * (settled - 2) + [False] * 3


@pytest.mark.parametrize("seed", range(4))
def test_token_order_does_not_matter(seed: int) -> None:
    """Few tokens and few marks: most optima are tied, and still the result is the same."""
    a_TF = random_marks(25, 24, 3, seed)
    neurons = np.arange(24)
    expected = balanced_kmeans(statistics_of(a_TF), neurons, 4, 20)
    shuffled = statistics_of(generator(seed).permutation(a_TF))
    given = balanced_kmeans(shuffled, neurons, 4, 20)
    assert np.array_equal(given, expected)
    chosen = representative(statistics_of(a_TF), expected)
    assert np.array_equal(representative(shuffled, expected), chosen)


def test_equally_active_seeds_are_those_of_lowest_index() -> None:
    """Expert j grows around seed j, so the order of the experts shows the order of the seeds."""
    a_TF = np.array([[1, 0, 0, 1], [1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 1, 0]])
    experts_RM = balanced_kmeans(statistics_of(a_TF), np.arange(4), 2, 1)
    assert experts_RM.tolist() == [[0, 3], [1, 2]]


def test_the_most_active_candidate_is_the_first_seed() -> None:
    a_TF = np.array([[1, 0, 0, 1], [1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 1, 0]])
    experts_RM = balanced_kmeans(statistics_of(a_TF), np.arange(4), 2, 1)
    assert experts_RM.tolist() == [[1, 2], [0, 3]]


def test_a_shared_neuron_is_never_a_seed_nor_a_member() -> None:
    """Neuron 0 is the most active of all and no candidate."""
    a_TF = random_marks(80, 13, 4, seed=3)
    a_TF[:, 0] = 1
    candidates_N = np.arange(1, 13)
    with_it = balanced_kmeans(statistics_of(a_TF), candidates_N, 3, 20)
    without = balanced_kmeans(statistics_of(a_TF[:, 1:]), np.arange(12), 3, 20)
    assert np.array_equal(with_it, without + 1)


@pytest.mark.parametrize("r", [1, 2, 3, 6, 18])
def test_experts_partition_the_candidates(r: int) -> None:
    a_TF = random_marks(70, 24, 5, seed=r)
    candidates_N = np.setdiff1d(np.arange(24), reference.seeds(a_TF, 6))
    experts_RM = balanced_kmeans(statistics_of(a_TF), candidates_N, r, 20)
    assert experts_RM.shape == (r, 18 // r)
    assert sorted(experts_RM.reshape(-1)) == candidates_N.tolist()
    assert (np.diff(experts_RM, axis=1) > 0).all()


# --- representatives ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("tokens", [6, 200])
def test_representative_is_the_member_nearest_its_centroid(tokens: int, seed: int) -> None:
    """Experts of 8, so that the reference's float64 is exact; 6 tokens make many ties."""
    a_TF = random_marks(tokens, 24, 5, seed)
    experts_RM = np.sort(generator(seed).permutation(24).reshape(3, 8), axis=1)
    expected = [reference.representative(a_TF, members_M) for members_M in experts_RM]
    assert representative(statistics_of(a_TF), experts_RM).tolist() == expected


def test_representative_by_hand() -> None:
    """Centroid (2/3, 2/3, 1/3): neuron 4 at squared distance 1/3 is the nearest."""
    a_TF = np.zeros((3, 5), dtype=np.int64)
    a_TF[:, 1], a_TF[:, 3], a_TF[:, 4] = (1, 0, 0), (0, 1, 1), (1, 1, 0)
    assert representative(statistics_of(a_TF), np.array([[1, 3, 4]])).tolist() == [4]


def test_a_member_of_several_experts_speaks_for_none() -> None:
    """Unless the expert has no other, as the last one. Neuron 4 is nearest the centroid."""
    experts_RM = np.array([[1, 3, 4], [0, 2, 4], [0, 1, 2]])
    own_RM = own_members(experts_RM)
    assert own_RM.tolist() == [[False, True, False], [True, True, True], [True, True, True]]
    a_TF = np.zeros((3, 5), dtype=np.int64)
    a_TF[:, 1], a_TF[:, 3], a_TF[:, 4] = (1, 0, 0), (0, 1, 1), (1, 1, 0)
    assert representative(statistics_of(a_TF), experts_RM[:1], own_RM[:1]).tolist() == [3]


@pytest.mark.parametrize("seed", range(5))
def test_l1_and_squared_l2_differ_by_a_constant_of_the_centroid(seed: int) -> None:
    """Why cmoe-code's L1 needs no code of its own.

    For c of zeros and ones and s between them, L1 is |c| - 2 c.s + sum(s) and squared L2 is
    |c| - 2 c.s + |s|^2. Hence the same representative, the same ranking of members, and the same
    balanced assignments, which a constant per expert does not move. Experts of 8: exact.
    """
    a_TF = random_marks(40, 24, 5, seed)
    experts_RM = balanced_kmeans(statistics_of(a_TF), np.arange(24), 3, 1)
    centroid_TR = reference.centroids(a_TF, assignment_of(experts_RM, np.arange(24)), 3)
    l1_NR = reference.absolute_distances(a_TF, centroid_TR)
    l2_NR = reference.squared_distances(a_TF, centroid_TR)
    constant_R = centroid_TR.sum(axis=0) - (centroid_TR**2).sum(axis=0)
    assert constant_R.min() > 0
    assert np.array_equal(l1_NR - l2_NR, np.tile(constant_R, (24, 1)))
    chosen_R = representative(statistics_of(a_TF), experts_RM)
    for j, members_M in enumerate(experts_RM):
        by_l1, by_l2 = (np.argsort(d_NR[members_M, j], kind="stable") for d_NR in (l1_NR, l2_NR))
        assert np.array_equal(by_l1, by_l2)
        assert chosen_R[j] == members_M[by_l1[0]]
    by_l2_N = reference.balanced_assignment(l2_NR)
    assert reference.cost_of(l1_NR, by_l2_N) == reference.cost_of(
        l1_NR, reference.balanced_assignment(l1_NR)
    )


def test_one_round_is_the_optimal_l1_assignment_to_the_seeds() -> None:
    """What the released code computes: L1 to the seed columns, one assignment."""
    a_TF = random_marks(100, 24, 5, seed=7)
    seed_TR = a_TF[:, reference.seeds(a_TF, 3)].astype(np.float64)
    l1_NR = reference.absolute_distances(a_TF, seed_TR)
    experts_RM = balanced_kmeans(statistics_of(a_TF), np.arange(24), 3, 1)
    best = reference.cost_of(l1_NR, reference.balanced_assignment(l1_NR))
    assert reference.cost_of(l1_NR, assignment_of(experts_RM, np.arange(24))) == best


# --- the whole partition -----------------------------------------------------------------------

CUTTING = [name for name in METHODS if isinstance(load_method(name), ExpertMethod)]
# What reads the whole model first is cut there (test_foreign_experts).
CUTTING = [name for name in CUTTING if not load_method(name).needs]
ROUTED = [name for name in CUTTING if name not in ("static", "static-repaired", "flap")]
# The same budget in experts of one neuron.
NEURONS = dict.fromkeys(("moesaic-neurons", "cats", "griffin"), "S0A33E{}")


def inputs_of(x_TD: torch.Tensor) -> FFNInputs:
    return FFNInputs([x_TD], Split.last_eighth(len(x_TD)), False, CPU, CPU)


def begun(
    method: Any, ffn: DenseFFN, x_TD: torch.Tensor, layout: str, draws: np.random.Generator
) -> LayerFit:
    """One FFN, profiled and cut."""
    sizes = method.sizes(Layout.parse(layout), ffn.intermediate_size)
    fit: LayerFit = method.begin(ffn, inputs_of(x_TD), sizes, draws)
    fit.partition = method.partition(fit)
    return fit


def fit_of(name: str, layout: str = "S3A3E8", neurons: int = 43) -> LayerFit:
    """43 neurons at E8: experts of 5, and 3 left over; 60 tokens."""
    layout = NEURONS.get(name, layout).format(neurons)
    ffn, x_TD = random_ffn(neurons=neurons), torch.randn(60, 8)
    return begun(load_method(name), ffn, x_TD, layout, generator())


def spokesmen(fit: LayerFit, router: Any) -> list[int]:
    """Which neurons' weights a router copies; its rows may be scaled to unit length."""
    rows, own = (normalize(m.double(), dim=1) for m in (fit.ffn.up_FD, router.up_proj.weight))
    found_RF = (own @ rows.T - 1).abs() < 1e-6
    assert found_RF.sum(1).tolist() == [1] * len(found_RF)
    return found_RF.int().argmax(1).tolist()


@pytest.mark.parametrize("layout", ["S3A3E8", "S0A1E1", "S0A2E3", "S1A1E2", "S40A1E43"])
@pytest.mark.parametrize("name", ROUTED)
def test_shared_and_routed_neurons_are_a_permutation(name: str, layout: str) -> None:
    fit = fit_of(name, layout)
    parts, sizes = fit.partition, fit.sizes
    assert parts.shared_S.shape == (sizes.shared,)
    assert parts.experts_RM.shape == (sizes.num_routed, sizes.expert)
    everyone = np.concatenate([parts.shared_S, parts.experts_RM.reshape(-1)])
    assert sorted(everyone.tolist()) == list(range(43))
    assert parts.neurons_N.tolist() == everyone.tolist()
    if fit.block.router is not None and fit.block.router.kind == "neuron-copies":
        method: Any = load_method(name)
        chosen = spokesmen(fit, method.make_router(fit))
        for neuron, members_M in zip(chosen, parts.experts_RM, strict=True):
            assert neuron in members_M


@pytest.mark.parametrize("name", ROUTED)
def test_all_experts_together_are_the_dense_ffn(name: str) -> None:
    fit = fit_of(name)
    parts, ffn = fit.partition, fit.ffn
    x_TD = torch.randn(7, 8)

    def cut(neurons: NDArray[np.int64]) -> reference.Matrices:
        assert ffn.gate_FD is not None
        return ffn.gate_FD[neurons], ffn.up_FD[neurons], ffn.down_DF[:, neurons]

    experts = [cut(members_M) for members_M in parts.experts_RM]
    r = len(experts)
    index_TK = torch.arange(r).repeat(7, 1)
    together = reference.moe_forward(x_TD, cut(parts.shared_S), experts, index_TK, torch.ones(7, r))
    torch.testing.assert_close(together, ffn.output(ffn.hidden(x_TD)), rtol=1e-4, atol=1e-4)
    fewer = reference.moe_forward(
        x_TD, cut(parts.shared_S), experts, index_TK[:, :-1], torch.ones(7, r - 1)
    )
    assert not torch.allclose(fewer, together, rtol=1e-2, atol=1e-2)


def hand_partition(name: str, layout: str, x_TD: torch.Tensor, top_k: int) -> Partition:
    method = load_method(name, {"activation_top_k": top_k})
    return begun(method, identity_ffn(x_TD.shape[1]), x_TD, layout, generator()).partition


def test_shared_are_the_most_active_and_ties_go_to_the_lowest_index() -> None:
    """Neuron 4 is marked twice, neurons 1, 2 and 5 once, the others never."""
    x_TD = torch.tensor([[0, 3, 0, 0, 2, 1], [0, 0, 3, 0, 2, 1], [0, 1, 2, 0, 0, 9.0]])
    parts = hand_partition("cmoe", "S2A1E3", x_TD[:2], 2)
    assert parts.shared_S.tolist() == [0, 1, 2, 4]
    assert parts.experts_RM.tolist() == [[3, 5]]
    parts = hand_partition("cmoe", "S1A1E3", x_TD, 2)
    assert parts.shared_S.tolist() == [2, 4]


@pytest.mark.parametrize("name", ["static", "static-repaired"])
def test_static_keeps_the_best_active_neurons(name: str) -> None:
    """By contribution, not by rate; as many as a routed method computes for a token."""
    fit = fit_of(name)
    active = Layout.parse("S3A3E8").sizes(43).active
    assert active == fit.sizes.active == 33
    assert fit.sizes.total == 43
    assert fit.partition.experts_RM.size == 0
    score_F = contribution(fit.statistics, fit.ffn)
    best = sorted(range(43), key=lambda i: -score_F[i])[:active]
    assert fit.partition.shared_S.tolist() == sorted(best)
    assert fit.made.static_N is not None
    assert fit.made.static_N.tolist() == sorted(best)


def test_the_mask_says_which_neurons_run() -> None:
    """The shared ones always, then expert by expert."""
    parts = Partition(np.array([4, 1]), np.array([[0, 2], [5, 3]]))
    mask_TN = parts.mask(torch.tensor([[True, False], [False, False], [True, True]]))
    assert mask_TN.tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]


def three_draws(name: str) -> Iterator[tuple[Any, ...]]:
    """What a method makes of one FFN with two seeds, the first of them twice."""
    method: Any = load_method(name)
    ffn, x_TD, probe_TD = random_ffn(neurons=40), torch.randn(60, 8), torch.randn(9, 8)
    sizes = method.sizes(Layout.parse(NEURONS.get(name, "S3A3E8").format(40)), 40)
    for seed in (0, 0, 1):
        made = method.convert_ffn(ffn, inputs_of(x_TD), sizes, generator(seed))
        output = [[made(probe_TD).detach().tolist()]]
        if name == "random":
            fit = begun(method, ffn, x_TD, "S3A3E8", generator(seed))
            assert np.array_equal(fit.partition.neurons_N, made.made.partition.neurons_N)
            parts = fit.partition
            output += [parts.shared_S.tolist(), parts.experts_RM.tolist()]
            output += [spokesmen(fit, made.router)]
        yield tuple(output)


def test_random_depends_on_the_seed_and_on_nothing_else() -> None:
    first, again, other = three_draws("random")
    assert first == again
    assert all(mine != theirs for mine, theirs in zip(first, other, strict=True))


# All but the first and the last for the seeds of their clustering.
DRAWING = ("random", "emoe", "expertweaver", "moefication", "g-moefication", "llama-moe")
CONVERTING = [name for name in METHODS if isinstance(load_method(name), FFNMethod)]
CONVERTING = [name for name in CONVERTING if not load_method(name).needs]


@pytest.mark.parametrize("name", [name for name in CONVERTING if name not in DRAWING])
def test_no_other_draws(name: str) -> None:
    first, _, other = three_draws(name)
    assert first == other


def test_random_members_are_drawn_from_each_expert() -> None:
    experts_RM = np.arange(24).reshape(3, 8)
    drawn = np.array([random_members(experts_RM, generator(seed)) for seed in range(200)])
    for expert, members_M in enumerate(experts_RM):
        assert set(drawn[:, expert]) == set(members_M)
