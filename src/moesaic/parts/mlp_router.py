"""A router of two small matrices, trained on which experts hold most of the activation.

Zhang et al., MoEfication, Findings of ACL 2022, Section 3.3, and the code released with
it, which says how the training goes.

Shape suffixes: T tokens, B those of a batch, D hidden_size, F neurons, R routed experts,
M neurons of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    normalize,
)

from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.families import DenseFFN
from moesaic.modeling import BlockConfig, MoesaicMLPRouter, Sizes, new_router

FIT_TOKENS = 32_768  # more are not read
BATCH = 512
VALIDATED = 10  # one token in so many, the last ones, says which epoch was best


def expert_masses(
    blocks: Iterable[Tensor],
    ffn: DenseFFN,
    experts_RM: NDArray[np.int64],
    size: Callable[[Tensor], Tensor],
) -> Tensor:
    """The sum of every expert's activations (T, R), each as large as `size` says.

    Costs the hidden states, a block at a time.
    """
    index_RM = torch.from_numpy(experts_RM).to(ffn.up_FD.device)
    masses = []
    for x_TD in blocks:
        size_TF = size(ffn.hidden(x_TD).float())
        size_TRM = size_TF[:, index_RM]
        masses.append(size_TRM.sum(-1))
    return torch.cat(masses)


def trained_mlp_router(
    inputs: FFNInputs,
    ffn: DenseFFN,
    experts_RM: NDArray[np.int64],
    size: Callable[[Tensor], Tensor],
    block: BlockConfig,
    sizes: Sizes,
    epochs: int,
    rate: float,
    generator: np.random.Generator,
) -> MoesaicMLPRouter:
    """A router of these experts, from about FIT_TOKENS tokens, in the FFN's dtype."""
    router = new_router(block, sizes).to(ffn.up_FD.device)
    assert isinstance(router, MoesaicMLPRouter)
    start_router(router, ffn.up_FD, experts_RM)
    if epochs and sizes.num_active < sizes.num_routed:
        sample = inputs.apart(FIT_TOKENS)
        x_TD = torch.cat([x_TD.float() for x_TD in sample.fit()])
        mass_TR = expert_masses(sample.fit(), ffn, experts_RM, size)
        seed = int(generator.integers(2**31))
        train_mlp_router(router, x_TD, mass_TR, epochs, rate, seed)
    for projection in (router.hidden_proj, router.score_proj):
        projection.weight.data = projection.weight.data.to(ffn.up_FD.dtype)
    return router


@torch.no_grad()
def start_router(
    router: MoesaicMLPRouter, row_FD: Tensor, experts_RM: NDArray[np.int64]
) -> None:
    """Each expert's mean row of unit length, and the identity, in place."""
    unit_FD = normalize(row_FD.float(), dim=1)
    index_RM = torch.from_numpy(experts_RM).to(unit_FD.device)
    router.hidden_proj.weight.data = unit_FD[index_RM].mean(dim=1)
    experts = len(experts_RM)
    router.score_proj.weight.data = torch.eye(experts, device=unit_FD.device)


def train_mlp_router(
    router: MoesaicMLPRouter,
    x_TD: Tensor,
    mass_TR: Tensor,
    epochs: int,
    rate: float,
    seed: int,
) -> float:
    """Trains in place by binary cross-entropy; returns the share of mass it lets run.

    The target of a batch is its masses over the largest of them, as the released code
    has it; Adam at `rate`. Of all epochs the one is taken whose choice of K experts
    keeps the most of the last tokens' mass. Costs 6 T D R FLOPs an epoch.
    """
    held = max(len(x_TD) // VALIDATED, 1)
    fitted = max(len(x_TD) - held, 1)
    best_share = kept_share(router, x_TD[-held:], mass_TR[-held:])
    # On the CPU: the same order wherever the model is.
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode(False), torch.enable_grad():
        # What was made in inference mode cannot be differentiated.
        x_TD = x_TD.clone()
        mass_TR = mass_TR.clone()
        weights = []
        for projection in (router.hidden_proj, router.score_proj):
            projection.weight = nn.Parameter(projection.weight.clone())
            weights.append(projection.weight)
        best = [weight.detach().clone() for weight in weights]
        adam = torch.optim.Adam(weights, lr=rate)
        for _ in range(epochs):
            order_T = torch.randperm(fitted, generator=generator)
            for index_B in order_T.to(x_TD.device).split(BATCH):
                mass_BR = mass_TR[index_B]
                target_BR = mass_BR / mass_BR.max().clamp(min=1e-30)
                score_BR = router.scores(x_TD[index_B])
                loss = binary_cross_entropy_with_logits(score_BR, target_BR)
                adam.zero_grad()
                loss.backward()
                adam.step()
            share = kept_share(router, x_TD[-held:], mass_TR[-held:])
            if share > best_share:
                best_share = share
                best = [weight.detach().clone() for weight in weights]
    for weight, value in zip(weights, best, strict=True):
        weight.data = value
        weight.grad = None
    return best_share


@torch.no_grad()
def kept_share(
    router: MoesaicMLPRouter, x_TD: Tensor, mass_TR: Tensor
) -> float:
    """The mean over tokens of the mass in the experts that run, over that of all."""
    runs_TR = router.choose(router.scores(x_TD))
    kept_T = (mass_TR * runs_TR).sum(1)
    share_T = kept_T / mass_TR.sum(1).clamp(min=1e-30)
    return float(share_T.mean())
