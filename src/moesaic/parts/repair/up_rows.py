"""Refits the rows of W_up: beside a gate, an FFN's output is linear in them too.

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
    """Corrections U (N, D) of the rows of W_up.

    They bring (gate * (x U^T)) W_down near r. `gate_TN` is act(gate x), 0 where the
    mask lets nothing through. Least squares in N D unknowns, whose normal matrix would
    have (N D)^2 entries: `steps` of conjugate gradients instead, preconditioned with
    the Kronecker product of neurons' energies and the inputs' Gram matrix, which it
    would be if neurons fired independently. 8 T N D FLOPs a step; memory 3 T N floats.
    """
    gram_DD = (x_TD.T @ x_TD).double() / len(x_TD)
    diagonal_D = gram_DD.diagonal()
    mean_square = diagonal_D.mean()
    diagonal_D.add_(RIDGE * mean_square + 1e-30)
    inverse_DD = torch.linalg.inv(gram_DD).float()
    gate_energy_N = gate_TN.square().sum(0)
    norm2_N = down_ND.square().sum(1)
    energy_N = gate_energy_N * norm2_N
    floor = (RIDGE * energy_N.mean()).clamp(min=1e-30)
    damped_N1 = (energy_N + floor)[:, None]
    ridge = float(floor * mean_square)

    def transposed(y_TD: Tensor) -> Tensor:
        image_TN = gate_TN * (y_TD @ down_ND.T)
        return torch.mm(image_TN.T, x_TD)

    def normal(u_ND: Tensor) -> Tensor:
        y_TD = (gate_TN * (x_TD @ u_ND.T)) @ down_ND
        return transposed(y_TD) + ridge * u_ND

    def precondition(r_ND: Tensor) -> Tensor:
        return torch.mm(r_ND / damped_N1, inverse_DD)

    u_ND = torch.zeros_like(down_ND)
    r_ND = transposed(residual_TD)
    z_ND = precondition(r_ND)
    direction_ND = z_ND
    size = (r_ND * z_ND).sum()
    least_size = 1e-12 * size
    for _ in range(steps):
        # Solved as far as float32 goes.
        if not size > least_size:
            break
        image_ND = normal(direction_ND)
        curvature = (direction_ND * image_ND).sum()
        step = size / curvature
        u_ND = u_ND + step * direction_ND
        r_ND = r_ND - step * image_ND
        z_ND = precondition(r_ND)
        previous_size = size
        size = (r_ND * z_ND).sum()
        direction_ND = z_ND + size / previous_size * direction_ND
    return u_ND
