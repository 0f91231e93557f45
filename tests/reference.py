"""Slow, obvious twins of what the package computes fast: loops, dense float64, textbook solvers.

Shape suffixes: T tokens, D hidden_size, F neurons, N neurons to group or kept, R routed experts,
K routed experts run per token, M neurons of an expert, P features of a token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.nn.functional import silu

from moesaic.families import find_ffns
from moesaic.finetune.lora import blocks_of
from moesaic.modeling import (
    MoesaicCopy,
    MoesaicExperts,
    MoesaicNeurons,
    MoesaicPairProjection,
    MoesaicThresholdedLinear,
)

Matrices = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]  # gate (F, D), up, down (D, F)
Activation = Callable[[torch.Tensor], torch.Tensor]


# --- Section 4.1: activation profiling ---------------------------------------------------------


def hidden(
    x_TD: torch.Tensor, gate_FD: torch.Tensor | None, up_FD: torch.Tensor, act: Activation = silu
) -> NDArray[np.float64]:
    """h (T, F), one token and one neuron at a time, in float64."""
    h_TF = np.zeros((len(x_TD), len(up_FD)))
    for t, x_D in enumerate(x_TD.double()):
        for i, up_D in enumerate(up_FD.double()):
            up = up_D @ x_D
            value = act(up) if gate_FD is None else act(gate_FD[i].double() @ x_D) * up
            h_TF[t, i] = float(value)
    return h_TF


def marks(h_TF: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    """The paper's A (T, F): ones at the k largest abs(h) of each token."""
    a_TF = np.zeros(h_TF.shape, dtype=np.int64)
    for t, h_F in enumerate(h_TF):
        for i in sorted(range(len(h_F)), key=lambda i: -abs(h_F[i]))[:k]:
            a_TF[t, i] = 1
    return a_TF


# --- Appendix A.3: balanced clustering ---------------------------------------------------------


def cost_of(cost_NR: NDArray[Any], expert_N: NDArray[np.int64]) -> float:
    return sum(cost_NR[i, expert] for i, expert in enumerate(expert_N))


def balanced_assignment(cost_NR: NDArray[Any]) -> NDArray[np.int64]:
    """Every column repeated N / R times, then a square assignment, as the paper does it."""
    n, r = cost_NR.shape
    _, column_N = linear_sum_assignment(np.repeat(cost_NR, n // r, axis=1))
    return column_N // (n // r)


def all_balanced_assignments(n: int, r: int) -> Iterator[tuple[int, ...]]:
    for expert_N in itertools.product(range(r), repeat=n):
        if all(expert_N.count(expert) == n // r for expert in range(r)):
            yield expert_N


def is_only_optimum(cost_NR: NDArray[Any], expert_N: NDArray[np.int64]) -> bool:
    """Whether every cyclic exchange of neurons between experts makes this optimum worse."""
    r = cost_NR.shape[1]
    move = {
        (a, b): min(cost_NR[i, b] - cost_NR[i, a] for i in np.flatnonzero(expert_N == a))
        for a, b in itertools.permutations(range(r), 2)
    }
    cycles = (c for size in range(2, r + 1) for c in itertools.permutations(range(r), size))
    return all(sum(move[a, b] for a, b in zip(c, c[1:] + c[:1], strict=True)) > 0 for c in cycles)


def squared_distances(a_TN: NDArray[Any], centroid_TR: NDArray[np.float64]) -> NDArray[np.float64]:
    """Squared L2 from each column to each centroid (N, R)."""
    difference_TNR = a_TN[:, :, None].astype(np.float64) - centroid_TR[:, None, :]
    return (difference_TNR**2).sum(axis=0)


def absolute_distances(a_TN: NDArray[Any], centroid_TR: NDArray[np.float64]) -> NDArray[np.float64]:
    """L1 from each column to each centroid (N, R)."""
    return np.abs(a_TN[:, :, None].astype(np.float64) - centroid_TR[:, None, :]).sum(axis=0)


def seeds(a_TN: NDArray[Any], r: int) -> list[int]:
    """The r most active columns; of equally active ones those of lowest index."""
    return sorted(range(a_TN.shape[1]), key=lambda i: (-a_TN[:, i].sum(), i))[:r]


def centroids(a_TN: NDArray[Any], expert_N: NDArray[np.int64], r: int) -> NDArray[np.float64]:
    """Mean column of each expert (T, R)."""
    return np.stack([a_TN[:, expert_N == j].mean(axis=1) for j in range(r)], axis=1)


def balanced_kmeans(
    a_TN: NDArray[Any], r: int, rounds: int, seed_R: Sequence[int] | None = None
) -> list[tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """(costs, assignment) of every round; ends with the first assignment that repeats."""
    history: list[tuple[NDArray[np.float64], NDArray[np.int64]]] = []
    seed_R = seeds(a_TN, r) if seed_R is None else seed_R
    centroid_TR = a_TN[:, seed_R].astype(np.float64)
    for _ in range(rounds):
        cost_NR = squared_distances(a_TN, centroid_TR)
        expert_N = balanced_assignment(cost_NR)
        repeats = bool(history) and np.array_equal(expert_N, history[-1][1])
        history.append((cost_NR, expert_N))
        if repeats:
            break
        centroid_TR = centroids(a_TN, expert_N, r)
    return history


def representative(a_TF: NDArray[Any], members_M: Sequence[int]) -> int:
    """The member whose column is nearest the mean column (eq. 7); ties to the first.

    Float64 is exact here where the number of members is a power of two.
    """
    centroid_T = np.mean([a_TF[:, i] for i in members_M], axis=0)
    distance_M = [np.linalg.norm(a_TF[:, i] - centroid_T) for i in members_M]
    return members_M[int(np.argmin(distance_M))]


# --- the MoE layer -----------------------------------------------------------------------------


def ffn_forward(x_TD: torch.Tensor, ffn: Matrices, act: Activation = silu) -> torch.Tensor:
    """down (act(gate x) * (up x)), or down act(up x) where there is no gate."""
    gate_FD, up_FD, down_DF = ffn
    up_TF = x_TD @ up_FD.T
    h_TF = act(up_TF) if gate_FD is None else act(x_TD @ gate_FD.T) * up_TF
    return h_TF @ down_DF.T


def moe_forward(
    x_TD: torch.Tensor,
    shared: Matrices | None,
    experts: Sequence[Matrices],
    index_TK: Sequence[torch.Tensor] | torch.Tensor,
    gate_TK: Sequence[torch.Tensor] | torch.Tensor,
    act: Activation = silu,
) -> torch.Tensor:
    """shared(x) + sum over the chosen experts of gate * expert(x), one token at a time.

    Differentiable in the inputs, the gates and every matrix. Tokens may differ in K.
    """
    rows = []
    for t in range(len(x_TD)):
        x_1D = x_TD[t : t + 1]
        y_1D = torch.zeros_like(x_1D) if shared is None else ffn_forward(x_1D, shared, act)
        for slot, expert in enumerate(index_TK[t].tolist()):
            y_1D = y_1D + gate_TK[t][slot] * ffn_forward(x_1D, experts[expert], act)
        rows.append(y_1D)
    return torch.cat(rows)


def threshold_choice(biased_TR: NDArray[np.float64], cap: int) -> list[list[int]]:
    """Experts above zero, the largest `cap` of them at most, the largest of all at least."""
    chosen = []
    for biased_R in biased_TR:
        best = sorted(range(len(biased_R)), key=lambda j: -biased_R[j])
        chosen.append([best[0]] + [j for j in best[1:cap] if biased_R[j] > 0])
    return chosen


def hierarchy_forward(
    x_TD: torch.Tensor,
    index_TO: torch.Tensor,
    weight_TO: torch.Tensor,
    shared: Sequence[Matrices],
    subs: Sequence[Sequence[Matrices]],
    choose: Callable[[torch.Tensor, int], tuple[list[int], list[torch.Tensor]]],
    act: Activation = silu,
) -> torch.Tensor:
    """Sum over a token's outer experts of weight * (shared(x) + sum of gate * sub-expert(x)).

    One pair of a token and an outer expert at a time; `choose(x, expert)` says which sub-experts
    of that expert run for it, and their gates.
    """
    rows = []
    for t in range(len(x_TD)):
        y_1D = torch.zeros_like(x_TD[t : t + 1])
        for slot, expert in enumerate(index_TO[t].tolist()):
            sub_K, gate_K = choose(x_TD[t], expert)
            mixture_1D = moe_forward(
                x_TD[t : t + 1], shared[expert], subs[expert],
                [torch.tensor(sub_K, dtype=torch.long)], [gate_K], act,
            )  # fmt: skip
            y_1D = y_1D + weight_TO[t, slot] * mixture_1D
        rows.append(y_1D)
    return torch.cat(rows)


# --- fitted routers ----------------------------------------------------------------------------


def expert_energies(
    h_TF: NDArray[np.float64], down_DF: NDArray[np.float64], experts_RM: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Squared norm of what each expert adds to the output (T, R)."""
    outputs = [h_TF[:, members_M] @ down_DF[:, members_M].T for members_M in experts_RM]
    return np.stack([(y_TD**2).sum(axis=1) for y_TD in outputs], axis=1)


def damped_lstsq(
    phi_TP: NDArray[np.float64], target_TR: NDArray[np.float64], damping: float
) -> NDArray[np.float64]:
    """Ridge regression as plain least squares: rows sqrt(damping) I with target 0 appended."""
    p = phi_TP.shape[1]
    rows = np.concatenate([phi_TP, math.sqrt(damping) * np.eye(p)])
    targets = np.concatenate([target_TR, np.zeros((p, target_TR.shape[1]))])
    solution: NDArray[np.float64] = np.linalg.lstsq(rows, targets, rcond=None)[0]
    return solution


def gamma_deviance(
    energy_TR: NDArray[np.float64], score_TR: NDArray[np.float64], absolute: bool
) -> tuple[float, NDArray[np.float64]]:
    """mean(e / mu + log mu) and e / mu, expert by expert where absolute, else token by token."""
    ratio_TR, log_mu_TR = np.zeros_like(energy_TR), np.zeros_like(energy_TR)
    e, s = (energy_TR.T, score_TR.T) if absolute else (energy_TR, score_TR)
    for i in range(len(e)):
        mu = np.exp(s[i]) * e[i].sum() / np.exp(s[i]).sum()
        where = (slice(None), i) if absolute else (i, slice(None))
        ratio_TR[where], log_mu_TR[where] = e[i] / mu, np.log(mu)
    return float((ratio_TR + log_mu_TR).mean()), ratio_TR


def linear_router(
    phi_TP: NDArray[np.float64], energy_TR: NDArray[np.float64], absolute: bool, steps: int
) -> NDArray[np.float64]:
    """Weights (R, P): ridge on log energies, then damped scoring steps while they help."""
    axis = 0 if absolute else 1
    if absolute:
        phi_TP = phi_TP - phi_TP.mean(axis=0)
    damping = 1e-2 * float(np.mean(np.diag(phi_TP.T @ phi_TP)))
    target_TR = np.log(energy_TR + 0.1 * energy_TR.mean())
    target_TR = target_TR - target_TR.mean(axis=axis, keepdims=True)
    weight_PR = damped_lstsq(phi_TP, target_TR, damping)
    best, best_PR = math.inf, weight_PR
    for _ in range(steps + 1):
        deviance, ratio_TR = gamma_deviance(energy_TR, phi_TP @ weight_PR, absolute)
        if deviance >= best:
            break
        best, best_PR = deviance, weight_PR
        residual_TR = np.minimum(ratio_TR, 10)
        residual_TR = residual_TR - residual_TR.mean(axis=axis, keepdims=True)
        weight_PR = weight_PR + damped_lstsq(phi_TP, residual_TR, damping)
    return best_PR.T


# --- re-assignment -----------------------------------------------------------------------------


def reassign(
    energy_TN: NDArray[np.float64],
    expert_N: NDArray[np.int64],
    num_active: int,
    rounds: int,
    fit: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    by_threshold: bool = False,
) -> list[tuple[float, NDArray[np.int64]]]:
    """(kept share, expert of each neuron) at the start and after every round, brute force.

    A token runs its `num_active` best experts; by threshold the largest scores of all run.
    """
    n, r = energy_TN.shape[1], int(expert_N.max()) + 1
    history = []
    for _ in range(rounds + 1):
        energy_TR = np.stack([energy_TN[:, expert_N == j].sum(axis=1) for j in range(r)], axis=1)
        score_TR = fit(energy_TR)
        if by_threshold:
            places = largest(score_TR.reshape(-1), len(score_TR) * num_active)
            pairs = [divmod(place, r) for place in places]
        else:
            pairs = [(t, j) for t, row in enumerate(score_TR) for j in largest(row, num_active)]
        gain_NR, kept = np.zeros((n, r)), 0.0
        for t, j in pairs:
            gain_NR[:, j] += energy_TN[t]
            kept += energy_TR[t, j]
        history.append((kept / energy_TN.sum(), expert_N))
        expert_N = np.array(
            max(all_balanced_assignments(n, r), key=lambda e: cost_of(gain_NR, np.array(e)))
        )
    return history


def largest(values: NDArray[np.float64], count: int) -> list[int]:
    """The places of the largest so many."""
    return sorted(range(len(values)), key=lambda place: -values[place])[:count]


# --- evaluation --------------------------------------------------------------------------------


@torch.no_grad()
def perplexity(model: Any, ids: torch.Tensor, sequence_length: int) -> tuple[float, int]:
    """exp(mean loss of all predicted tokens), one window and one token at a time."""
    losses: list[float] = []
    for start in range(0, len(ids), sequence_length):
        window_L = ids[start : start + sequence_length]
        logits_LV = model(input_ids=window_L[None], use_cache=False).logits[0].double()
        losses += [
            -float(logits_LV[t].log_softmax(-1)[window_L[t + 1]]) for t in range(len(window_L) - 1)
        ]
    return math.exp(math.fsum(losses) / len(losses)), len(losses)


# --- work --------------------------------------------------------------------------------------


@torch.no_grad()
def bytes_read(model: Any, token: int) -> float:
    """Bytes of weights that one token meets: what every module reads is noted as it is called."""
    notes: list[float] = []
    handles = []

    def on_call(module: Any, count: Callable[[Any, Any], float]) -> None:
        def note(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            inputs = [*args, *kwargs.values()]
            notes.append(count(inputs, output))

        handles.append(module.register_forward_hook(note, with_kwargs=True))

    # Only the rows of neurons that run are read of these, whoever computes more.
    by_row = set()
    for module in model.modules():
        if isinstance(module, MoesaicNeurons):
            by_row |= {module.up_proj, module.down_proj}
            if not module.router.reads_gates:
                by_row.add(module.gate_proj)
            on_call(module.router, lambda _, score, m=module: rows_read(m, score))

    for module in model.modules():
        if module in by_row or isinstance(module, nn.Embedding):
            continue
        if isinstance(module, MoesaicCopy):
            codes = module.bits * module.in_features * module.out_features / 8
            read = codes + module.scales.nbytes
            on_call(module, lambda *_, read=read: read)
        elif isinstance(module, MoesaicThresholdedLinear):
            on_call(module, lambda x, _, m=module: columns_read(m, x[0]))
        elif isinstance(module, MoesaicPairProjection):
            size = module.inputs * module.outputs * module.weight.element_size()
            on_call(module, lambda x, _, size=size: len(x[1]) * size)
        elif isinstance(module, MoesaicExperts):
            rows = (3 if module.has_gate else 2) * module.neurons
            size = rows * module.down_proj[0, :, 0].nbytes
            on_call(module, lambda x, _, size=size: x[1].numel() * size)
        elif hasattr(module, "gate_up_proj") and not hasattr(module, "up_proj"):
            if isinstance(module.gate_up_proj, nn.Parameter):  # a family's experts
                size = module.gate_up_proj[0].nbytes + module.down_proj[0].nbytes
                on_call(module, lambda x, _, size=size: x[1].numel() * size)
        elif isinstance(getattr(module, "weight", None), nn.Parameter) and module.weight.ndim == 2:
            on_call(module, lambda *_, m=module: m.weight.nbytes)
    try:
        model(input_ids=torch.tensor([[token]]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return math.fsum(notes)


def rows_read(module: Any, score_TF: torch.Tensor) -> float:
    """Bytes of the rows that a token's neurons run on, where gates or copies say which run."""
    row = module.up_proj.weight[0].nbytes
    runs = int((score_TF > 0).sum())
    if module.router.reads_gates:
        return 2 * runs * row
    exact = int((score_TF > module.router.exact_margin).sum())
    return (runs + 2 * exact) * row


def columns_read(module: Any, x: torch.Tensor) -> float:
    """Bytes of the columns of inputs that are above the threshold, one at a time."""
    read = 0
    for i, value in enumerate(x.flatten()):
        if abs(float(value)) * float(module.input_scale[i]) > float(module.threshold):
            read += module.weight[:, i].nbytes
    return read


# --- experts of one neuron ---------------------------------------------------------------------


def neurons_block(
    x_TD: torch.Tensor,
    weights: Matrices,
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sketch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    variance_F: torch.Tensor,
    offset_F: torch.Tensor,
    act: Activation = silu,
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Output (T, D) and who runs (T, F), one token and one neuron at a time, in float64.

    `biases` of gate, up and down; the `sketch` of up is out (F, C), in (C, D) and a bias.
    """
    gate_FD, up_FD, down_DF = (m.detach().double() for m in weights if m is not None)
    gate_b, up_b, down_b = (b.detach().double() for b in biases)
    out_FC, in_CD, sketch_b = (s.detach().double() for s in sketch)
    y_TD = np.zeros((len(x_TD), len(down_DF)))
    runs_TF = np.zeros((len(x_TD), len(up_FD)), dtype=bool)
    for t, x_D in enumerate(x_TD.double()):
        for f in range(len(up_FD)):
            gate = float(act(gate_FD[f] @ x_D + gate_b[f]))
            guess = float(out_FC[f] @ (in_CD @ x_D) + sketch_b[f])
            energy = gate**2 * (guess**2 + float(variance_F[f]))
            runs_TF[t, f] = math.log(max(energy, 1e-38)) + float(offset_F[f]) > 0
            if runs_TF[t, f]:
                up = float(up_FD[f] @ x_D + up_b[f])
                y_TD[t] += gate * up * down_DF[:, f].numpy()
        y_TD[t] += down_b.numpy()
    return y_TD, runs_TF


def copied_neurons_block(
    x_TD: torch.Tensor,
    weights: Matrices,
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    copies: tuple[NDArray[np.float64], NDArray[np.float64]],
    offset_F: torch.Tensor,
    margin: float,
    act: Activation = silu,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Output (T, D), and 0, 1 or 2 (T, F) for a neuron that is skipped, copied or exact.

    One token and one neuron at a time, in float64; `copies` of gate and up (F, D).
    """
    gate_FD, up_FD, down_DF = (m.detach().double() for m in weights if m is not None)
    gate_b, up_b, down_b = (b.detach().double() for b in biases)
    gate_copy_FD, up_copy_FD = (torch.from_numpy(copy) for copy in copies)
    y_TD = np.zeros((len(x_TD), len(down_DF)))
    kind_TF = np.zeros((len(x_TD), len(up_FD)))
    for t, x_D in enumerate(x_TD.double()):
        for f in range(len(up_FD)):
            gate = float(act(gate_copy_FD[f] @ x_D + gate_b[f]))
            h = gate * float(up_copy_FD[f] @ x_D + up_b[f])
            score = math.log(max(h**2, 1e-38)) + float(offset_F[f])
            if score > margin:
                kind_TF[t, f] = 2
                gate = float(act(gate_FD[f] @ x_D + gate_b[f]))
                h = gate * float(up_FD[f] @ x_D + up_b[f])
            elif score > 0:
                kind_TF[t, f] = 1
            else:
                h = 0.0
            y_TD[t] += h * down_DF[:, f].numpy()
        y_TD[t] += down_b.numpy()
    return y_TD, kind_TF


def copied_rows(
    planes_BRP: torch.Tensor, scale_RG: torch.Tensor, inputs: int, group: int
) -> NDArray[np.float64]:
    """The weights that a low-bit copy stands for (R, I), one bit at a time."""
    bits, rows, _ = planes_BRP.shape
    planes = planes_BRP.tolist()
    weight_RI = np.zeros((rows, inputs))
    for row in range(rows):
        for i in range(inputs):
            code = -(2 ** (bits - 1))
            for bit in range(bits):
                if planes[bit][row][i // 8] & (1 << i % 8):
                    code += 2**bit
            weight_RI[row, i] = code * float(scale_RG[row, i // group])
    return weight_RI


def error_feedback(
    weight_RI: torch.Tensor, gram_II: torch.Tensor, scale_RI: torch.Tensor, bits: int
) -> torch.Tensor:
    """Codes (R, I), each column's in turn, by what least squares makes of those after it.

    With the columns before as they were rounded, the columns from j on that bring W x nearest
    are W + (their block of the Gram matrix)^-1 (its rest) (what rounding took); column j of
    them is rounded. In float64.
    """
    wanted_RI = weight_RI.double()
    code_RI = torch.zeros_like(wanted_RI)
    for j in range(wanted_RI.shape[1]):
        lost_RJ = wanted_RI[:, :j] - code_RI[:, :j] * scale_RI[:, :j].double()
        made_up_RK = torch.linalg.solve(gram_II[j:, j:], gram_II[j:, :j] @ lost_RJ.T).T
        target_R = wanted_RI[:, j] + made_up_RK[:, 0]
        half = 2 ** (bits - 1)
        code_RI[:, j] = (target_R / scale_RI[:, j]).round().clamp(-half, half - 1)
    return code_RI


def sketch_error(
    x_TD: torch.Tensor, up_FD: torch.Tensor, weight_F: torch.Tensor, directions: int
) -> float:
    """The least of sum_f a_f mean_t (up x - stand-in)^2 over stand-ins of a rank: an SVD."""
    centred_TD = (x_TD - x_TD.mean(0)).double()
    wanted_TF = centred_TD @ up_FD.double().T * weight_F.double().sqrt()
    singular = torch.linalg.svdvals(wanted_TF)
    return float(singular[directions:].square().sum()) / len(x_TD)


# --- Questions: the probability of an answer ----------------------------------------------------


def answer_log_probability(model: Any, tokenizer: Any, prompt: str, answer: str) -> float:
    """Sum of the log probabilities of an answer's tokens, each predicted on its own."""
    ids = tokenizer.encode(prompt + answer)
    total = 0.0
    for position in range(len(tokenizer.encode(prompt)), len(ids)):
        before = torch.tensor([ids[:position]])
        with torch.no_grad():
            logits_V = model(input_ids=before, use_cache=False).logits[0, -1].double()
        total += float(logits_V.log_softmax(0)[ids[position]])
    return total


def write_on(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    """The most probable next token, again and again, without a cache."""
    ids = tokenizer.encode(prompt)
    start = len(ids)
    for _ in range(tokens):
        with torch.no_grad():
            logits_V = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits_V.argmax()))
    return tokenizer.decode(ids[start:])


# --- recovery: losses of all logits at once ----------------------------------------------------


class Losses:
    """What `moesaic.finetune.distill.Losses` gives, from all logits and all outputs at once."""

    def __init__(self, student: Any, mix: Any, dense: Any = None):
        self.student = student
        self.mix = mix
        self.dense = dense

    def __call__(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        handles = []
        if self.mix.ffn:
            ffns = find_ffns(self.dense)
            imitated = [ffns.last_module(layer) for layer in range(len(ffns.layers))]
            for module in blocks_of(self.student):
                handle = module.register_forward_hook(lambda *call: outputs.append(call[2]))
                handles.append(handle)
            for module in imitated:
                handle = module.register_forward_hook(lambda *call: targets.append(call[2]))
                handles.append(handle)
        logits = self.student(input_ids=input_ids).logits.float()
        losses: dict[str, torch.Tensor] = {}
        lm: list[torch.Tensor] = []
        kl: list[torch.Tensor] = []
        if self.dense is not None:
            with torch.no_grad():
                taught = self.dense(input_ids=input_ids).logits.float()
        for window in range(len(labels)):
            for place in range(labels.shape[1] - 1):
                label = int(labels[window, place + 1])
                if label == -100:
                    continue
                log = logits[window, place].log_softmax(-1)
                lm.append(-log[label])
                if self.dense is not None:
                    target = taught[window, place].log_softmax(-1)
                    kl.append((target.exp() * (target - log)).sum())
        losses["lm"] = torch.stack(lm).mean()
        losses["loss"] = self.mix.lm * losses["lm"]
        if self.mix.logits:
            losses["logits"] = torch.stack(kl).mean()
            losses["loss"] = losses["loss"] + self.mix.logits * losses["logits"]
        if self.mix.ffn:
            errors = []
            for output, target in zip(outputs, targets, strict=True):
                y = output.view(len(labels), -1).float()
                wanted = target.view(len(labels), -1).float()
                errors.append(((y - wanted).norm(dim=1) / wanted.norm(dim=1)) ** 2)
            losses["ffn"] = torch.stack(errors).mean()
            losses["loss"] = losses["loss"] + self.mix.ffn * losses["ffn"]
        for handle in handles:
            handle.remove()
        return losses


# --- experts of other systems ------------------------------------------------------------------


def expert_masses(size_TF: NDArray[np.float64], experts: Sequence[Sequence[int]]) -> Any:
    """The sum of an expert's neurons for each token (T, R), one addition at a time."""
    mass_TR = np.zeros((len(size_TF), len(experts)))
    for t, size_F in enumerate(size_TF):
        for j, members_M in enumerate(experts):
            for i in members_M:
                mass_TR[t, j] += size_F[i]
    return mass_TR


def greedy_split(importance_RF: NDArray[np.float64], others: Sequence[int]) -> list[list[int]]:
    """Again and again the largest importance of a free neuron to an expert with room."""
    experts: list[list[int]] = [[] for _ in importance_RF]
    size = len(others) // len(importance_RF)
    free = list(others)
    while free:
        pairs = [
            (-importance_RF[j, i], j, i)
            for j, members in enumerate(experts)
            for i in free
            if len(members) < size
        ]
        _, j, i = min(pairs)
        experts[j].append(i)
        free.remove(i)
    return [sorted(members) for members in experts]


def window_gradients(model: Any, window_L: torch.Tensor) -> dict[str, torch.Tensor]:
    """w * dL/dw of every weight of a model, by plain backpropagation into the weights."""
    model.zero_grad()
    output = model(input_ids=window_L[None], labels=window_L[None], use_cache=False)
    output.loss.backward()
    products = {
        name: (parameter * parameter.grad).detach()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return products


def overlap_targets(h_TF: torch.Tensor, experts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Shares of a token's largest activations that experts hold, sharpened (T, R)."""
    size = len(experts[0])
    rows = []
    for h_F in h_TF:
        largest = set(h_F.abs().argsort(descending=True)[:size].tolist())
        rows.append([len(largest & set(members)) / size for members in experts])
    share_TR = torch.tensor(rows)
    return (10 * (share_TR - share_TR.mean())).softmax(-1)


# --- Methods of others -------------------------------------------------------------------------


def global_widths(scores: Sequence[Sequence[float]], total: int) -> list[int]:
    """Neurons picked one by one, the one of highest standardised score first."""
    standard: dict[tuple[int, int], float] = {}
    for layer, row in enumerate(scores):
        mean = sum(row) / len(row)
        spread = math.sqrt(sum((value - mean) ** 2 for value in row) / len(row))
        for neuron, value in enumerate(row):
            standard[layer, neuron] = (value - mean) / spread
    kept = [0] * len(scores)
    for layer in range(len(scores)):  # a layer's best stays in any case
        best = max((key for key in standard if key[0] == layer), key=lambda key: standard[key])
        del standard[best]
        kept[layer] += 1
    while sum(kept) < total:
        best = max(standard, key=lambda key: standard[key])
        del standard[best]
        kept[best[0]] += 1
    return kept


def cats(x_TD: torch.Tensor, ffn: Any, threshold: float, act: Activation = silu) -> torch.Tensor:
    """Neuron by neuron: nothing of W_up and W_down is touched where a gate is small."""
    y_TD = torch.zeros(len(x_TD), len(ffn.down_DF), dtype=torch.float64)
    for token, x_D in enumerate(x_TD.double()):
        for neuron in range(len(ffn.up_FD)):
            gate = act(ffn.gate_FD[neuron].double() @ x_D)
            if abs(gate) > threshold:
                h = gate * (ffn.up_FD[neuron].double() @ x_D)
                y_TD[token] += h * ffn.down_DF[:, neuron].double()
    return y_TD


def flocking(h_TF: torch.Tensor) -> list[float]:
    """GRIFFIN's statistic of each neuron over the tokens of one prompt."""
    tokens, neurons = h_TF.shape
    squares = [0.0] * neurons
    for token in range(tokens):
        length = math.sqrt(sum(float(value) ** 2 for value in h_TF[token]))
        for neuron in range(neurons):
            squares[neuron] += (float(h_TF[token, neuron]) / length) ** 2
    return [math.sqrt(square) for square in squares]


@torch.no_grad()
def loss_without(model: Any, kept: Sequence[int], windows_NL: torch.Tensor) -> float:
    """The mean loss of the next token with these blocks only; `model` loses the others."""
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    layers = model.model.layers
    model.model.layers = torch.nn.ModuleList([layers[block] for block in kept])
    text.num_hidden_layers = len(kept)
    if kinds is not None:
        text.layer_types = [kinds[block] for block in kept]
    for place, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = place
    total = 0.0
    for window_L in windows_NL:
        ids_1L = window_L[None]
        total += float(model(input_ids=ids_1L, labels=ids_1L, use_cache=False).loss)
    return total / len(windows_NL)
