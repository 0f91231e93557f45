"""Work per token: multiply-accumulates of matrix products with weights.

The count of the paper's efficiency table (Table 7): every weight of a matrix product counts once
per token, the head for every token, embeddings and element-wise work not at all. Attention
scores, which grow with the context, stand on a line of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from moesaic.errors import MoesaicError
from moesaic.families import DenseFFN, FFNs, Mixtures, find_ffns
from moesaic.modeling import (
    MoesaicBlock,
    MoesaicHierarchy,
    MoesaicPairProjection,
    MoesaicProjection,
)


@dataclass(frozen=True)
class Macs:
    """Multiply-accumulates for a number of tokens; `scores` is outside `total`.

    In a mixture `ffn` holds the experts that run, shared experts and dense layers, `router` the
    outer router, and `sub_router` the routers inside the experts.
    """

    attention: float
    ffn: float
    router: float
    head: float
    scores: float
    active_ffn_fraction: float = 1.0
    sub_router: float = 0.0

    @property
    def total(self) -> float:
        return self.attention + self.ffn + self.router + self.sub_router + self.head


def meta_model(config: Any, trust_remote_code: bool = False) -> Any:
    """The model of a configuration without its weights (on the meta device).

    Raises MoesaicError where transformers has no causal language model for it.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # transformers raises many kinds for odd values
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MoesaicError(
            f"this {config.model_type} config is no causal language model's: {reason}"
        ) from error


def count_macs(model: Any, tokens: int) -> Macs:
    """Counts a dense or converted model, with or without weights, for a context of `tokens`.

    Raises MoesaicError for a family whose FFNs are not recognised.
    """
    config = model.config
    sub_router = 0.0
    if config.model_type == "moesaic" and "num_outer" in config.moesaic:
        moe = config.moesaic
        base = getattr(model, model.base_model_prefix, model)
        layers, _, path = moe["ffn"]["path"].partition(".{}.")
        blocks = [m for m in model.modules() if isinstance(m, MoesaicHierarchy)]
        inside, router = _around_experts(base.get_submodule(layers), path)
        ffn = inside + sum(_active_weights_of_pairs(block, moe) for block in blocks)
        neuron = (
            3 * config.get_text_config().hidden_size
        )  # of experts that are as they were
        ffn += (
            _layers_kept(config)
            * moe["outer_active"]
            * neuron
            * _active_neurons(moe)[1]
        )
        for beside in (m for m in model.modules() if isinstance(m, MoesaicBlock)):
            ffn += _active_weights(beside, moe["beside"]) - _matrices(beside)
            sub_router += _matrices(beside.router)
        sub_router += sum(
            moe["outer_active"] * part.inputs * part.outputs
            for part in model.modules()
            if isinstance(part, MoesaicPairProjection)
        )
    elif config.model_type == "moesaic":
        flat = [
            module for module in model.modules() if isinstance(module, MoesaicBlock)
        ]
        ffn = sum(_active_weights(block, config.moesaic) for block in flat)
        router = sum(_matrices(_router_of(block)) for block in flat)
        inside = sum(_matrices(block) for block in flat)
        rows = 3 if config.moesaic["ffn"]["gated"] else 2
        neuron = rows * config.get_text_config().hidden_size
        dense = neuron * _active_neurons(config.moesaic)[1] * _layers_kept(config)
        ffn, inside = ffn + dense, inside + dense
    else:
        found = find_ffns(model)
        ffn, router = routed_macs(found), 0
        inside = ffn
        if isinstance(found, Mixtures):
            inside, router = _around_experts(found.layers, found.ffn_path)
            ffn += inside
    head = model.get_output_embeddings().weight.numel()
    return Macs(
        attention=(_matrices(model) - inside - head) * tokens,
        ffn=ffn * tokens,
        router=router * tokens,
        head=head * tokens,
        scores=_scores(config.get_text_config(), tokens),
        active_ffn_fraction=active_ffn_fraction(config),
        sub_router=sub_router * tokens,
    )


def routed_macs(found: FFNs, beside: bool = False) -> int:
    """Weights of the FFNs that a conversion changes, as many as one token uses of them.

    With those of a mixture's shared experts where `beside`.
    """

    def weights(ffn: DenseFFN | None) -> int:
        return (
            sum(t.numel() for t in ffn.tensors().values() if t.ndim == 2) if ffn else 0
        )

    each = sum(weights(found.read(layer)) for layer in found.converted)
    if not isinstance(found, Mixtures):
        return each
    shared = sum(weights(found.read_beside(layer)) for layer in found.converted)
    return each * found.outer_active + (shared if beside else 0)


def _around_experts(layers: Any, path: str) -> tuple[int, int]:
    """Weights of shared experts and dense layers beside the fused experts; of outer routers."""
    parent = path.rpartition(".")[0]
    beside = router = 0
    for layer in layers:
        try:
            block = layer.get_submodule(parent)
        except AttributeError:  # a layer without an FFN, as hybrids have
            continue
        linear = _matrices(block)
        experts = getattr(block, path.rpartition(".")[2], None)
        inside = () if experts is None else experts.parameters()
        fused = sum(p.numel() for p in inside if p.ndim == 2)
        beside += linear
        router += (
            sum(p.numel() for p in block.parameters() if p.ndim == 2) - linear - fused
        )
    return beside, router


def _active_weights_of_pairs(block: MoesaicHierarchy, moe: dict[str, Any]) -> float:
    """Weights that one token uses in a layer's experts, on average; padding is not one.

    An expert that stays whole is taken to be chosen as often as any other.
    """
    rows = 3 if moe["ffn"]["gated"] else 2
    experts: Any = block.shared_experts or block.experts
    neuron = rows * experts.down_proj.shape[1]
    active = moe["shared_size"] + moe["num_active"] * moe["expert_size"] * bool(
        moe["num_routed"]
    )
    total = moe["shared_size"] + moe["num_routed"] * moe["expert_size"] + moe["dropped"]
    whole = len(block.whole) / moe["num_outer"]
    return float(moe["outer_active"] * neuron * (whole * total + (1 - whole) * active))


def active_ffn_fraction(config: Any) -> float:
    """Share of the model's FFN neurons that a token computes; 1 before a conversion.

    In a mixture, of the neurons of the experts that a token is sent to, each expert counting
    alike, and of a shared one that has been converted.
    """
    if config.model_type != "moesaic":
        return 1.0
    moe = config.moesaic
    active, total = _active_neurons(moe)
    kept, converted = _layers_kept(config), len(moe["layers"])
    if "num_outer" in moe:
        whole = sum(map(len, moe["whole"].values())) / (converted * moe["num_outer"])
        active = moe["outer_active"] * (whole * total + (1 - whole) * active)
        total *= moe["outer_active"]
        if "beside" in moe:
            more = _active_neurons(moe["beside"])
            active, total = active + more[0], total + more[1]
    return float((converted * active + kept * total) / ((converted + kept) * total))


def _layers_kept(config: Any) -> int:
    """Layers that a conversion has left as they were, of those with experts in a mixture."""
    moe = config.moesaic
    return int(
        moe.get("mixtures", config.get_text_config().num_hidden_layers)
        - len(moe["layers"])
    )


def _active_neurons(moe: dict[str, Any]) -> tuple[float, float]:
    """Neurons of one FFN that a token computes, and all of them."""
    total = moe["shared_size"] + moe["num_routed"] * moe["expert_size"] + moe["dropped"]
    return moe["shared_size"] + moe["num_active"] * moe["expert_size"], total


def _matrices(module: nn.Module | None) -> int:
    """Weights of all matrix products inside a module."""
    if module is None:
        return 0
    kinds = nn.Linear | Conv1D | MoesaicProjection
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, kinds))


def _active_weights(block: MoesaicBlock, moe: dict[str, Any]) -> int:
    """Weights of shared and routed experts that one token uses, on average; padding is not one."""
    weights = _matrices(block.shared_expert)
    if block.neurons is not None:  # gates of all neurons
        hidden = block.neurons.gate_proj.in_features
        weights += hidden * (moe["num_routed"] + 2 * moe["num_active"])
    if block.experts is not None:
        stacked = sum(p.numel() for p in block.experts.parameters() if p.ndim == 3)
        neuron = stacked // (moe["num_routed"] * moe["padded_size"])
        weights += neuron * moe["expert_size"] * moe["num_active"]
    return weights


def _router_of(block: MoesaicBlock) -> nn.Module | None:
    return block.router if block.neurons is None else block.neurons.router


def _scores(config: Any, tokens: int) -> float:
    """Queries times keys and probabilities times values, causal, within sliding windows."""
    head_dim = (
        getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )
    window = getattr(config, "sliding_window", None)
    # A family with a window and no list of layer types slides in every layer.
    types = (
        getattr(config, "layer_types", None)
        or ["sliding_attention"] * config.num_hidden_layers
    )
    seen = 0
    for kind in types:
        reach = (
            min(window, tokens) if window and kind == "sliding_attention" else tokens
        )
        seen += reach * (reach + 1) // 2 + (tokens - reach) * reach
    return float(2 * config.num_attention_heads * head_dim * seen)
