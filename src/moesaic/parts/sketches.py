"""A router of single neurons: the FFN's own gates, and a sketch of W_up.

Shape suffixes: T tokens, D hidden_size, F neurons, C directions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.families import DenseFFN
from moesaic.parts.directions import largest_axes

RIDGE = 1e-4  # of the mean variance of the inputs


@dataclass(frozen=True)
class Sketch:
    """A few directions that stand in for W_up: up ~ out_FC (in_CD x) + bias_F.

    `variance_F` is what it leaves open of up^2.
    """

    in_CD: Tensor
    out_FC: Tensor
    bias_F: Tensor
    variance_F: Tensor


@torch.no_grad()
def sketch_up(x_TD: Tensor, ffn: DenseFFN, directions: int) -> Sketch:
    """The best stand-in of rank C for W_up on these inputs, where it matters.

    Minimises sum_tf a_f ((W_up x)_tf - (B A x)_tf)^2 with a_f = mean g_tf^2
    |w_down_f|^2, the energy that an error in up costs: reduced-rank regression, in
    closed form. With the inputs' covariance C = L L^T and V the C first eigenvectors of
    L^T W_up^T diag(a) W_up L, A = V^T L^-1 and B = W_up L V. The inputs' mean is left
    to a bias. `variance_F` is the mean squared error, weighted by g^2. Costs
    4 T F D + 2 T D^2 + 2 F D^2 FLOPs and an eigendecomposition of D^3.
    """
    gate_TF = ffn.gates(x_TD).float()
    up_FD = ffn.up_FD.float()
    x_TD = x_TD.float()
    mean_D = x_TD.mean(0)
    centred_TD = x_TD - mean_D

    covariance_DD = (centred_TD.T @ centred_TD).double() / len(x_TD)
    diagonal_D = covariance_DD.diagonal()
    mean_variance = diagonal_D.mean().clamp(min=1e-20)
    diagonal_D.add_(RIDGE * mean_variance)
    root_DD = torch.linalg.cholesky(covariance_DD)

    gate_energy_F = gate_TF.square().mean(0)
    norm2_F = ffn.down_DF.float().square().sum(0)
    cost_F = gate_energy_F * norm2_F
    gram_DD = (up_FD * cost_F[:, None]).T @ up_FD
    whitened_DD = root_DD.T @ gram_DD.double() @ root_DD
    _, axes_DC = largest_axes(whitened_DD, directions)

    in_CD = torch.linalg.solve_triangular(root_DD.T, axes_DC, upper=True).T
    # Rows of unit length: what a float16 model keeps of them is in its range.
    length_C = torch.linalg.vector_norm(in_CD, dim=1).clamp(min=1e-30)
    in_CD = (in_CD / length_C[:, None]).float()
    colored_DC = root_DD @ axes_DC * length_C
    out_FC = up_FD @ colored_DC.float()

    # The error of a linear map: no need to compute up and its stand-in.
    error_FD = up_FD - out_FC @ in_CD
    bias_F = error_FD @ mean_D
    if ffn.up_bias_F is not None:
        bias_F = bias_F + ffn.up_bias_F.float()
    error_TF = centred_TD @ error_FD.T
    lost_F = (gate_TF * error_TF).square().mean(0)
    variance_F = lost_F / gate_energy_F.clamp(min=1e-30)
    return Sketch(in_CD, out_FC, bias_F, variance_F)
