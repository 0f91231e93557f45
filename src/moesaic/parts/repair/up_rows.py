"""Refits the rows of W_up: an FFN's output is linear in them too, where a gate is beside them.

Shape suffixes: T tokens, D hidden_size, N neurons that are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-2  # of the mean diagonal of what is solved


@torch.no_grad()
def refit_up(
    x_TD: Tensor,
    gate_TN: Tensor,
    residual_TD: Tensor,
    down_ND: Tensor,
    steps: int,
) -> Tensor:
    """Corrections U (N, D) of the rows of W_up that bring (gate * (x U^T)) W_down near r.

    `gate_TN` is act(gate x), 0 where the mask lets nothing through. Least squares in N D unknowns,
    whose normal matrix would have (N D)^2 entries: `steps` of conjugate gradients instead,
    preconditioned with the Kronecker product of neurons' energies and the inputs' Gram matrix,
    which it would be if neurons fired independently. 8 T N D FLOPs a step; memory 3 T N floats.
    """
    gram_DD = (x_TD.T @ x_TD).double() / len(x_TD)
    mean = gram_DD.diagonal().mean()
    gram_DD.diagonal().add_(RIDGE * mean + 1e-30)
    inverse_DD = torch.linalg.inv(gram_DD).float()
    energy_N = gate_TN.square().sum(0) * down_ND.square().sum(1)
    floor = (RIDGE * energy_N.mean()).clamp(min=1e-30)
    ridge = float(floor * mean)

    def normal(u_ND: Tensor) -> Tensor:
        y_TD = (gate_TN * (x_TD @ u_ND.T)) @ down_ND
        return transposed(y_TD) + ridge * u_ND

    def transposed(y_TD: Tensor) -> Tensor:
        return torch.mm((gate_TN * (y_TD @ down_ND.T)).T, x_TD)

    def precondition(r_ND: Tensor) -> Tensor:
        return torch.mm(r_ND / (energy_N + floor)[:, None], inverse_DD)

    u_ND = torch.zeros_like(down_ND)
    r_ND = transposed(residual_TD)
    z_ND = precondition(r_ND)
    direction_ND, size = z_ND, (r_ND * z_ND).sum()
    least = 1e-12 * size
    for _ in range(steps):
        if not size > least:  # solved as far as float32 goes
            break
        image_ND = normal(direction_ND)
        step = size / (direction_ND * image_ND).sum()
        u_ND = u_ND + step * direction_ND
        r_ND = r_ND - step * image_ND
        z_ND = precondition(r_ND)
        before, size = size, (r_ND * z_ND).sum()
        direction_ND = z_ND + size / before * direction_ND
    return u_ND
