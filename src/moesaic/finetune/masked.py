"""MoE blocks for training: every expert on every token, and gates of 0 where none was chosen.

The same outputs as the block's own, up to rounding, and the same gradients but for the router's:
since every expert's output is known, it also learns from those that did not run. Where a large
part of the experts run anyway this is faster than gathering each token once per expert, and it
holds less: hidden states of R experts, not K copies of a token's input.

Shape suffixes: T tokens, D hidden_size, R routed experts, M neurons of one, N rows of its first
matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moesaic.finetune.lora import blocks_of
from moesaic.parts.thresholds import soft_choice

NAME = "moesaic_masked"
WIDTH = 0.3  # of a neuron's choice, in nats of its energy (docs/log.md, 2026-11-22)
WORTH = 0.25  # share of the experts that run from which on all are computed


def masked_experts(
    experts: Any, x_TD: torch.Tensor, _: torch.Tensor | None, gate_TR: torch.Tensor
) -> torch.Tensor:
    """Sum over all experts of gate * expert(x), as an implementation of transformers' seam."""
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    size = experts.neurons  # those beyond pad an expert and do nothing

    def rows(tensor: torch.Tensor) -> Any:
        parts = tensor.unflatten(1, (2 if experts.has_gate else 1, -1))
        return parts[:, :, :size].flatten(0, 2)

    bias_RN = getattr(experts, f"{name}_bias", None)
    h = linear(
        x_TD, rows(getattr(experts, name)), None if bias_RN is None else rows(bias_RN)
    )
    h_TRN = h.unflatten(1, (experts.num_experts, -1))
    h_TRM = experts._apply_gate(h_TRN) if experts.has_gate else experts.act_fn(h_TRN)
    h_TRM = h_TRM * gate_TR[:, :, None].to(h_TRM.dtype)
    return linear(
        h_TRM.flatten(1), experts.down_proj[:, :, :size].transpose(0, 1).flatten(1)
    )


ALL_EXPERTS_FUNCTIONS.register(NAME, masked_experts)


def all_gates(router: Any, x_TD: torch.Tensor) -> torch.Tensor:
    """Gates (T, R) under either gating, 0 for experts that do not run.

    Their gradient also reaches the scores that chose them: as if a gate were a sigmoid of how far
    its expert is above the threshold between the last that runs and the first that does not
    (straight-through). The forward values are the block's own.
    """
    chosen = router(x_TD)
    gate_TR: torch.Tensor = chosen[-1].new_zeros(len(x_TD), len(router.selection_bias))
    if router.gating == "topk":
        index_TK, gate_TK = chosen
        gate_TR = gate_TR.scatter(1, index_TK, gate_TK)
    else:
        token_P, expert_P, gate_P = chosen
        gate_TR = gate_TR.index_put((token_P, expert_P), gate_P)
    if router.num_active == len(router.selection_bias):
        return gate_TR  # all run
    value_TR = router.biased(router.scores(x_TD.detach()))
    with torch.no_grad():
        threshold_T1: Any = 0.0
        if router.gating == "topk":
            best = value_TR.topk(router.num_active + 1, dim=-1).values
            threshold_T1 = best[:, -2:].mean(dim=-1, keepdim=True)
    soft_TR = soft_choice(value_TR, threshold_T1)
    return gate_TR + (soft_TR - soft_TR.detach())


def _forward(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
    y_TD: torch.Tensor = block.experts(x_TD, None, all_gates(block.router, x_TD))
    if block.shared_expert is not None:
        y_TD = block.shared_expert(x_TD) + y_TD
    if block.output_bias is not None:
        y_TD = y_TD + block.output_bias
    return y_TD.view_as(hidden_states)


def _neurons_forward(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The same where every neuron is an expert: gates also learn from who they choose."""
    x_TD, neurons = hidden_states.reshape(-1, hidden_states.shape[-1]), block.neurons
    gate_TF = neurons.act_fn(neurons.gate_proj(x_TD))
    score_TF = neurons.router(x_TD, gate_TF)
    soft_TF = (score_TF / WIDTH).sigmoid()
    runs_TF = (score_TF > 0) + (soft_TF - soft_TF.detach())
    h_TF = gate_TF * neurons.up_proj(x_TD) * runs_TF.to(gate_TF.dtype)
    y_TD: torch.Tensor = neurons.down_proj(h_TF)
    return y_TD.view_as(hidden_states)


@contextmanager
def masked(model: Any) -> Iterator[None]:
    """Blocks of a model, wrapped by PEFT or not, compute all experts for a while, if worth it."""
    moe = getattr(model.config, "moesaic", {})
    # In a model that was a mixture before most pairs of token and sub-expert do not run.
    alone = [
        block
        for block in blocks_of(model)
        if getattr(block, "neurons", None) is not None
    ]
    few = moe.get("num_active", 0) <= WORTH * moe.get("num_routed", 0)
    kept = []
    for block in alone:
        block.forward = partial(_neurons_forward, block)
    for block in () if few or alone or "num_outer" in moe else blocks_of(model):
        experts: Any = block.experts
        config = (
            experts.get_base_layer() if hasattr(experts, "get_base_layer") else experts
        ).config
        kept.append((block, config, config._experts_implementation_internal))
        config._experts_implementation_internal = NAME
        block.forward = partial(_forward, block)
    try:
        yield
    finally:
        for block in alone:
            del block.forward
        for block, config, implementation in reversed(kept):
            config._experts_implementation_internal = implementation
            del block.forward
