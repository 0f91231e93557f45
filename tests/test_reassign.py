"""Grouping by contribution: k-means and re-assignment against brute force and slow twins.

Shape suffixes: T tokens, F neurons, N neurons to group, R routed experts, M neurons of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moesaic.calibration.calibration_set import Split
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.statistics import (
    SAMPLE_TOKENS,
    Statistics,
    StatisticsKind,
    compute_statistics,
)
from moesaic.families import DenseFFN
from moesaic.layout import Layout
from moesaic.methods.moesaic import Moesaic, MoesaicDynamic
from moesaic.parts.clustering import (
    PATIENCE,
    best_of_tokens,
    contribution_kmeans,
    largest_of_all,
    random_groups,
    reassign,
)
from moesaic.parts.partition import Partition
from tests import reference

Array = NDArray[np.float64]
Neurons = NDArray[np.int64]


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def scaled_ffn(norm_F: Array) -> DenseFFN:
    """h is x itself, and output vector i has the length norm_F[i]."""
    size = len(norm_F)
    return DenseFFN(torch.eye(size), torch.diag(torch.from_numpy(norm_F).float()), "linear")


def statistics_of(h_TF: Array, ffn: DenseFFN) -> Statistics:
    kind = StatisticsKind(sample=True)
    return compute_statistics([torch.from_numpy(h_TF).float()], ffn, kind, len(h_TF))


def topical(tokens: int, neurons: int, seed: int, noise: float = 0.7) -> tuple[Array, DenseFFN]:
    """Hidden states that follow four topics, and output vectors of different lengths."""
    random = generator(seed)
    topic_TF = random.normal(size=(tokens, 4)) @ random.normal(size=(4, neurons))
    h_TF = topic_TF + noise * random.normal(size=(tokens, neurons))
    return h_TF, scaled_ffn(random.uniform(0.5, 2.0, neurons))


def kmeans(h_TF: Array, ffn: DenseFFN, candidates_N: Neurons, r: int, rounds: int) -> Neurons:
    return contribution_kmeans(statistics_of(h_TF, ffn), ffn, candidates_N, r, rounds)


def unit_columns(h_TF: Array, candidates_N: Neurons) -> Array:
    columns_TN = np.abs(h_TF[:, candidates_N])
    return columns_TN / np.linalg.norm(columns_TN, axis=0)


def seeds_of(h_TF: Array, ffn: DenseFFN, candidates_N: Neurons, r: int) -> list[int]:
    """Places of the r candidates of largest contribution energy."""
    energy_F = (h_TF**2).sum(axis=0) * np.diag(ffn.down_DF.numpy()) ** 2
    return sorted(range(len(candidates_N)), key=lambda i: -energy_F[candidates_N[i]])[:r]


def groups(candidates_N: Neurons, expert_N: Neurons, r: int) -> list[list[int]]:
    return [candidates_N[expert_N == j].tolist() for j in range(r)]


def kept_share(h_TF: Array, ffn: DenseFFN, experts_RM: Neurons, num_active: int) -> float:
    """The share of energy in the experts of largest energy: what the oracle keeps."""
    energy_TF = (h_TF * np.diag(ffn.down_DF.numpy())) ** 2
    energy_TR = np.stack([energy_TF[:, m].sum(axis=1) for m in experts_RM], axis=1)
    kept = np.sort(energy_TR, axis=1)[:, -num_active:].sum()
    return float(kept / energy_TR.sum())


# --- k-means on contributions ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("r", [2, 3])
def test_one_round_is_the_best_of_all_balanced_partitions(r: int, seed: int) -> None:
    h_TF, ffn = topical(30, 8, seed)
    candidates_N = np.array([0, 2, 3, 5, 6, 7])
    columns_TN = unit_columns(h_TF, candidates_N)
    seed_TR = columns_TN[:, seeds_of(h_TF, ffn, candidates_N, r)]
    cost_NR = reference.squared_distances(columns_TN, seed_TR)
    best = min(
        reference.all_balanced_assignments(6, r),
        key=lambda expert_N: reference.cost_of(cost_NR, np.array(expert_N)),
    )
    given_RM = kmeans(h_TF, ffn, candidates_N, r, rounds=1)
    assert given_RM.tolist() == groups(candidates_N, np.array(best), r)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("r", [2, 4])
def test_every_round_equals_textbook_k_means(r: int, seed: int) -> None:
    """Squared distances to mean columns in float64; stops when an assignment repeats."""
    h_TF, ffn = topical(400, 72, seed, noise=0.3)
    candidates_N = np.setdiff1d(np.arange(72), [1, 4, 17, 20, 21, 29, 40, 50])
    columns_TN = unit_columns(h_TF, candidates_N)
    seed_R = seeds_of(h_TF, ffn, candidates_N, r)
    history = reference.balanced_kmeans(columns_TN, r, 20, seed_R)
    assert len(history) > 2, "choose other data"
    for rounds in range(1, len(history) + 2):
        _, expert_N = history[min(rounds, len(history)) - 1]
        given_RM = kmeans(h_TF, ffn, candidates_N, r, rounds)
        assert given_RM.tolist() == groups(candidates_N, expert_N, r)


def test_neurons_that_are_large_for_the_same_tokens_meet_by_hand() -> None:
    """Neurons 0 and 3 for the first tokens, 1 and 2 for the others; sign and scale do not count."""
    h_TF = np.array([[9.0, 0, 0, -1], [8, 0, 0, 1], [0, 5, -0.1, 0], [0, -5, 0.1, 0]])
    ffn = scaled_ffn(np.array([1.0, 1, 1, 1]))
    assert kmeans(h_TF, ffn, np.arange(4), 2, rounds=4).tolist() == [[0, 3], [1, 2]]


@pytest.mark.parametrize("seed", range(3))
def test_token_order_does_not_matter(seed: int) -> None:
    h_TF, ffn = topical(300, 24, seed)
    assert len(h_TF) <= SAMPLE_TOKENS
    expected = kmeans(h_TF, ffn, np.arange(24), 4, rounds=8)
    given_RM = kmeans(generator(seed).permutation(h_TF), ffn, np.arange(24), 4, rounds=8)
    assert np.array_equal(given_RM, expected)


@pytest.mark.parametrize("dead", [1, 10, 23, 24])
def test_dead_neurons_are_grouped_like_any_other(dead: int) -> None:
    h_TF, ffn = topical(50, 24, seed=5)
    h_TF[:, :dead] = 0
    given_RM = kmeans(h_TF, ffn, np.arange(24), 4, rounds=5)
    assert given_RM.shape == (4, 6)
    assert sorted(given_RM.reshape(-1)) == list(range(24))


# --- re-assignment -----------------------------------------------------------------------------


Scores = Callable[[torch.Tensor], torch.Tensor]


def moved(
    h_TF: Array,
    ffn: DenseFFN,
    experts_RM: Neurons,
    num_active: int,
    rounds: int,
    fit: Scores,
    choose: Callable[[torch.Tensor, int], torch.Tensor] = best_of_tokens,
) -> tuple[Neurons, list[float]]:
    def route(energy_TR: torch.Tensor) -> torch.Tensor:
        return choose(fit(energy_TR), num_active)

    return reassign(statistics_of(h_TF, ffn), ffn, experts_RM, rounds, route)


def blurred(seed: int, experts: int) -> Scores:
    """A router that sees energies through fixed noise: deterministic, and not the oracle."""
    mix = generator(seed).normal(size=(experts, experts)) * 0.3 + np.eye(experts)
    return lambda energy: energy @ torch.from_numpy(mix).to(energy.dtype)


def test_two_neurons_move_and_everything_is_kept_by_hand() -> None:
    """Tokens of one kind use neurons 0 and 1, of the other 2 and 3; experts start across."""
    h_TF = np.array([[3.0, 1, 0, 0], [3, 1, 0, 0], [0, 0, 1, 3], [0, 0, 1, 3]])
    start_RM = np.array([[0, 2], [1, 3]])
    given_RM, kept = moved(h_TF, scaled_ffn(np.ones(4)), start_RM, 1, 6, lambda energy: energy)
    assert given_RM.tolist() == [[0, 1], [2, 3]]
    assert kept == pytest.approx([0.9, 1.0])


def test_a_threshold_may_leave_a_token_without_an_expert_by_hand() -> None:
    """The four largest of eight scores: both of the first two tokens, none of the others."""
    score_TR = torch.tensor([[5.0, 6.0], [4.0, 3.0], [1.0, 2.0], [0.0, 1.0]])
    assert largest_of_all(score_TR, 1).tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
    assert best_of_tokens(score_TR, 1).tolist() == [[0, 1], [1, 0], [0, 1], [0, 1]]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_active", [1, 2])
@pytest.mark.parametrize("choose", [best_of_tokens, largest_of_all])
def test_every_round_equals_brute_force(choose: Any, num_active: int, seed: int) -> None:
    """Six neurons in three experts: the best of all 90 partitions under the router's choices."""
    h_TF, ffn = topical(40, 8, seed, noise=0.3)
    neurons_N = np.array([0, 1, 3, 4, 6, 7])
    start_RM = np.sort(generator(seed).permutation(neurons_N).reshape(3, 2), axis=1)
    expert_N = np.array([int(np.argwhere(start_RM == i)[0, 0]) for i in neurons_N])
    energy_TN = (h_TF[:, neurons_N] * np.diag(ffn.down_DF.numpy())[neurons_N]) ** 2
    fit = blurred(seed, 3)

    def fit_numpy(energy_TR: Array) -> Array:
        scores: Array = fit(torch.from_numpy(energy_TR)).numpy()
        return scores

    history = reference.reassign(
        energy_TN, expert_N, num_active, 6, fit_numpy, by_threshold=choose is largest_of_all
    )
    for rounds in range(7):
        given_RM, kept = moved(h_TF, ffn, start_RM, num_active, rounds, fit, choose)
        seen = history[: len(kept)]
        assert kept == pytest.approx(np.maximum.accumulate([share for share, _ in seen]), rel=1e-4)
        best = max(range(len(seen)), key=lambda i: seen[i][0])
        assert given_RM.tolist() == groups(neurons_N, seen[best][1], 3)
        stopped = len(kept)
        if stopped < rounds + 1:  # nothing moved any more, or nothing was gained for three rounds
            moved_on = not np.array_equal(history[stopped - 1][1], history[stopped][1])
            assert not moved_on or best == stopped - 1 - PATIENCE


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([(2, 3), (4, 2), (5, 4), (1, 6)]), st.integers(0, 6))
def test_kept_energy_never_falls_and_the_partition_stays_balanced(
    seed: int, shape: tuple[int, int], rounds: int
) -> None:
    r, m = shape
    h_TF, ffn = topical(30, r * m + 3, seed)
    neurons_N = generator(seed).permutation(r * m + 3)[: r * m]
    start_RM = np.sort(neurons_N.reshape(r, m), axis=1)
    num_active = max(1, r // 2)
    given_RM, kept = moved(h_TF, ffn, start_RM, num_active, rounds, blurred(seed, r))
    assert kept == sorted(kept)
    assert 1 <= len(kept) <= rounds + 1
    assert 0 <= kept[0] <= kept[-1] <= 1 + 1e-6
    assert given_RM.shape == (r, m)
    assert sorted(given_RM.reshape(-1)) == sorted(neurons_N)
    assert (np.diff(given_RM, axis=1) > 0).all()
    again_RM, once = moved(h_TF, ffn, given_RM, num_active, 0, blurred(seed, r))
    assert np.array_equal(np.sort(again_RM), np.sort(given_RM))
    assert once == pytest.approx([kept[-1]], rel=1e-4)


def test_the_oracle_s_choices_never_fall_below_the_start_either() -> None:
    h_TF, ffn = topical(200, 24, seed=3)
    start_RM = kmeans(h_TF, ffn, np.arange(24), 4, rounds=8)
    given_RM, kept = moved(h_TF, ffn, start_RM, 2, 6, lambda energy: energy)
    assert kept[0] == pytest.approx(kept_share(h_TF, ffn, start_RM, 2), rel=1e-4)
    assert kept[-1] == pytest.approx(kept_share(h_TF, ffn, given_RM, 2), rel=1e-4)
    assert kept[-1] >= kept[0]


def test_a_dead_ffn_is_left_as_it_is() -> None:
    start_RM = np.array([[0, 3], [1, 2]])
    given_RM, kept = moved(
        np.zeros((10, 4)), scaled_ffn(np.ones(4)), start_RM, 1, 6, lambda energy: energy
    )
    assert sorted(given_RM.reshape(-1)) == [0, 1, 2, 3]
    assert set(kept) == {0.0}


# --- as the method does it ---------------------------------------------------------------------


def partition_of(
    ffn: DenseFFN, blocks: list[torch.Tensor], method: Moesaic | None = None
) -> Partition:
    method = method or Moesaic()
    split = Split.last_eighth(sum(map(len, blocks)))
    inputs = FFNInputs(blocks, split, False, torch.device("cpu"), torch.device("cpu"))
    sizes = Layout.parse("S1A3E8").sizes(40)
    return method.partition(method.begin(ffn, inputs, sizes, generator()))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("method", [Moesaic(), MoesaicDynamic()])
def test_the_method_keeps_at_least_what_k_means_alone_keeps(method: Moesaic, seed: int) -> None:
    torch.manual_seed(seed)
    ffn = DenseFFN(torch.randn(40, 8), torch.randn(8, 40), "silu", torch.randn(40, 8))
    parts = partition_of(ffn, [torch.randn(400, 8)], method)
    assert len(parts.kept_energy) > 1
    assert parts.kept_energy == sorted(parts.kept_energy)
    assert 3 / 7 < parts.kept_energy[0] < parts.kept_energy[-1] < 1


def test_neurons_are_grouped_for_the_choices_that_thresholds_make() -> None:
    """Some tokens are ten times as loud as others: thresholds run most experts for those."""
    torch.manual_seed(0)
    ffn = DenseFFN(torch.randn(40, 8), torch.randn(8, 40), "silu", torch.randn(40, 8))
    loudness_T1 = torch.where(torch.arange(400) % 4 == 0, 10.0, 1.0)[:, None]
    x_TD = loudness_T1 * torch.randn(400, 8)
    by_token = partition_of(ffn, [x_TD])
    by_threshold = partition_of(ffn, [x_TD], MoesaicDynamic())
    assert np.array_equal(by_token.shared_S, by_threshold.shared_S)
    assert by_threshold.kept_energy[0] > by_token.kept_energy[-1]
    assert not np.array_equal(by_token.experts_RM, by_threshold.experts_RM)


def test_permuted_tokens_give_the_same_partition() -> None:
    ffn = DenseFFN(torch.randn(40, 8), torch.randn(8, 40), "silu", torch.randn(40, 8))
    x_TD = torch.randn(400, 8)
    orders = (x_TD, x_TD.flip(0), x_TD[torch.randperm(400)])
    found = [partition_of(ffn, list(x.split(64))) for x in orders]
    for parts in found[1:]:
        assert np.array_equal(parts.shared_S, found[0].shared_S)
        assert np.array_equal(parts.experts_RM, found[0].experts_RM)
        assert parts.kept_energy == pytest.approx(found[0].kept_energy, rel=1e-4)


def test_random_groups_are_balanced_and_depend_on_the_seed() -> None:
    candidates_N = np.array([1, 2, 5, 6, 8, 9])
    one, again, other = (random_groups(candidates_N, 3, generator(seed)) for seed in (0, 0, 1))
    assert sorted(one.reshape(-1)) == candidates_N.tolist()
    assert one.shape == (3, 2)
    assert (np.diff(one, axis=1) > 0).all()
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
