"""What one converted layer loses: measured against the dense FFN on calibration tokens.

Shape suffixes: T tokens, D hidden_size, F neurons, R routed experts, K active ones, M neurons.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from moesaic.adapters import DenseFFN
from moesaic.carve import Partition
from moesaic.modeling import MoesaicBlock

# The oracle needs every expert's output, so a sample must do: an eighth of the tokens, bounded.
FEWEST_TOKENS, MOST_TOKENS = 512, 2048


@dataclass
class LayerReport:
    """Quality of one converted layer on `tokens` calibration tokens.

    `relative_error` is the paper's objective (eq. 2) over the output's own energy:
    mean |F_MoE(x) - F(x)|^2 / mean |F(x)|^2. The oracle runs the K experts of largest output
    norm; `router_recall` is the share of them that the router picks (chance is K / R),
    `mass_kept` the share of all experts' output energy in the experts that ran (1 without
    routing: nothing is routed), `oracle_mass` the oracle's. `expert_load` is the share of tokens
    that each expert runs for.
    """

    layer: int
    seconds: float | None  # None: an earlier run made it
    tokens: int
    relative_error: float
    router_recall: float | None
    mass_kept: float | None
    oracle_mass: float | None
    expert_load: list[float]

    def to_dict(self, timing: bool = True) -> dict[str, Any]:
        """As plain data; without `timing` two equal runs give equal bytes."""
        values = asdict(self)
        return values if timing else {k: v for k, v in values.items() if k != "seconds"}


class LayerMeter:
    """Sees the converted layer's FFN inputs and outputs and sums up what the report needs."""

    def __init__(self, ffn: DenseFFN, parts: Partition, block: MoesaicBlock, tokens: int):
        self.ffn, self.parts, self.block = ffn, parts, block
        wanted = min(max(tokens // 8, FEWEST_TOKENS), MOST_TOKENS)
        self.stride = max(1, tokens // wanted)
        self.tokens = 0
        self.sums: dict[str, Any] = {
            "error": 0.0, "energy": 0.0, "hits": 0.0, "kept": 0.0, "best": 0.0, "mass": 0.0,
            "load": 0.0,
        }  # fmt: skip

    @torch.no_grad()
    def __call__(self, x_TD: torch.Tensor, y_TD: torch.Tensor) -> None:
        x_TD, y_TD = x_TD[:: self.stride], y_TD[:: self.stride]
        self.tokens += len(x_TD)
        h_TF = self.ffn.hidden(x_TD)
        dense_TD = self.ffn.output(h_TF).float()
        self.sums["error"] += (y_TD.float() - dense_TD).square().sum().item()
        self.sums["energy"] += dense_TD.square().sum().item()
        if self.block.router is None:
            return
        mass_TR = expert_energies(self.ffn, self.parts, h_TF)
        chosen_TK, _ = self.block.router(x_TD)
        best_TK = mass_TR.topk(chosen_TK.shape[1], dim=1).indices
        chosen_TR = torch.zeros_like(mass_TR).scatter_(1, chosen_TK, 1.0)
        self.sums["hits"] += chosen_TR.gather(1, best_TK).sum().item()
        self.sums["kept"] += (chosen_TR * mass_TR).sum().item()
        self.sums["best"] += mass_TR.gather(1, best_TK).sum().item()
        self.sums["mass"] += mass_TR.sum().item()
        self.sums["load"] = self.sums["load"] + chosen_TR.sum(0)

    def report(self, layer: int, seconds: float | None) -> LayerReport:
        sums, router = self.sums, self.block.router
        routed = router is not None
        chosen = self.tokens * router.num_active if router is not None else 1
        return LayerReport(
            layer=layer,
            seconds=seconds,
            tokens=self.tokens,
            relative_error=_ratio(sums["error"], sums["energy"]),
            router_recall=_ratio(sums["hits"], chosen) if routed else None,
            mass_kept=_ratio(sums["kept"], sums["mass"]) if routed else None,
            oracle_mass=_ratio(sums["best"], sums["mass"]) if routed else None,
            expert_load=[round(v / self.tokens, 6) for v in sums["load"].tolist()]
            if routed
            else [],
        )


def expert_energies(ffn: DenseFFN, parts: Partition, h_TF: torch.Tensor) -> torch.Tensor:
    """Squared output norm of every routed expert for every token (T, R), 2 T F D FLOPs."""
    columns = []
    for members_M in torch.from_numpy(parts.experts_RM).to(h_TF.device):
        output_TD = h_TF[:, members_M] @ ffn.down_DF[:, members_M].T
        columns.append(output_TD.float().square().sum(1))
    return torch.stack(columns, dim=1)


def _ratio(part: Any, whole: Any) -> float:
    return float(part) / max(float(whole), 1e-30)
