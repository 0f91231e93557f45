"""Whole blocks of moesaic's architecture in one call: router, shared and routed experts.

On a CPU by experts_cpu.cpp, on a GPU by blocks_triton.py and prompts_triton.py.

Shape suffixes: T tokens, D hidden_size, R experts, S neurons of the shared expert,
C directions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moesaic.kernels import gpu
from moesaic.kernels.experts_call import (
    call_of,
    first_matrix,
    laid_out,
    lay_out,
)
from moesaic.kernels.experts_fit import (
    experts_learn,
    fits,
    fits_gpu,
    is_grouped_faster,
    lay_out_on_gpu,
)
from moesaic.kernels.inputs import (
    ACTIVATIONS,
    LEARNT,
    are_parameters_beside,
    can_be_read,
    is_plain_inference,
    learns,
    rows_side_by_side,
)
from moesaic.kernels.seen import Known, Seen, run_as_known
from moesaic.modeling.replacement_moesaic import are_hooked

# Triton writes one line after the other for each pair of directions.
MOST_DIRECTIONS = 16


def block_forward(block: Any, x_TD: Tensor) -> Tensor | None:
    """Shared expert, router and routed experts of a MoesaicBlock in one call, (T, D).

    None for a block that has other parts than those: it then runs them one by one.
    Costs 6 (S + K M) D + 2 R D FLOPs a token, 4 R D by copies of neurons, whose scores
    stay in float32 here: near ties may choose otherwise than torch in bfloat16. Products
    of C directions cost 2 C D + R C^2 more. Many tokens on a GPU cost
    more, at most what all experts do (prompts_triton.py).
    """
    if gpu.takes(x_TD):
        return _on_gpu(block, x_TD)
    if not x_TD.is_cpu or not is_plain_inference(x_TD):
        return None
    if torch.is_grad_enabled() and _learns(block):
        return None
    if x_TD.dtype == torch.float32 and is_grouped_faster(block.experts, x_TD):
        return None
    return run_as_known(block, x_TD, _look_at)


def _on_gpu(block: Any, x_TD: Tensor) -> Tensor | None:
    """By Triton; None where this is not for it.

    What was seen is not kept: a graph of torch.compile could not hold it.
    """
    experts = block.experts
    if not fits_gpu(experts, x_TD):
        return None
    if not _is_plain(block, x_TD):
        return None
    router = block.router
    matrices = _router_matrices(router)
    if len(matrices.get("direction_CD", ())) > MOST_DIRECTIONS:
        return None
    lay_out_on_gpu(experts, x_TD)
    shared = block.shared_expert
    gate_SD, up_SD, down_DS = None, None, None
    if shared is not None:
        up_SD = shared.up_proj.weight
        down_DS = shared.down_proj.weight
        if shared.gate_proj is not None:
            gate_SD = shared.gate_proj.weight
    are_few = gpu.are_few(x_TD, experts.down_proj)
    return gpu.call(
        "blocks" if are_few else "prompts",
        x_TD.contiguous(),
        matrices["router_RD"],
        matrices.get("router_gate_RD"),
        matrices.get("direction_CD"),
        matrices.get("direction_bias_C"),
        router.selection_bias,
        router.expert_scale,
        gate_SD,
        up_SD,
        down_DS,
        first_matrix(experts),
        experts.down_proj,
        router.num_active,
        router.cap if router.chooser == "threshold" else None,
        experts.has_gate,
        ACTIVATIONS[type(experts.act_fn).__name__],
        "score_proj" not in router._modules,
        getattr(router, "absolute", False),
    )


# Attributes on which a call depends.
_OF_ROUTER = ("chooser", "num_active", "cap", "absolute")
_OF_EXPERTS = ("neurons", "has_gate", "has_bias", "_hf_hook", LEARNT)


def _look_at(block: Any, x_TD: Tensor) -> Known | None:
    """W_down is laid out anew here."""
    if not _is_plain(block, x_TD) or not fits(block.experts, x_TD):
        return None
    router = block.router
    experts = block.experts
    shared = block.shared_expert
    lay_out(experts)
    depends_on = [
        *((router, name) for name in _OF_ROUTER),
        *((experts, name) for name in _OF_EXPERTS),
    ]
    if shared is not None:
        depends_on.append((shared.down_proj, LEARNT))
        rows_side_by_side(shared.down_proj.weight)
        for linear in (shared.gate_proj, shared.up_proj):
            if linear is not None:
                laid_out(linear.weight)
    seen = Seen(block, x_TD, depends_on)
    given = {
        "bias_R": router.selection_bias,
        "scale_R": router.expert_scale,
        **_router_matrices(router),
    }
    if shared is not None:
        given["shared_up_SD"] = shared.up_proj.weight
        given["shared_down_SD"] = shared.down_proj.weight.mT
        if shared.gate_proj is not None:
            given["shared_gate_SD"] = shared.gate_proj.weight
    run = call_of(
        experts,
        _most_of_token(router),
        given,
        x_TD.dtype,
        copies="score_proj" not in router._modules,
        absolute=getattr(router, "absolute", False),
        by_threshold=router.chooser == "threshold",
    )
    return Known(seen, run)


def _is_plain(block: Any, x_TD: Tensor) -> bool:
    """Whether a block has a router that the kernel knows, and nothing besides."""
    # Whoever imports moesaic.modeling first imports this module on the way.
    from moesaic.modeling import MoesaicBlock

    router = block.router
    if type(block) is not MoesaicBlock:  # others add to what it does
        return False
    if _learns(block):
        return False
    if not _is_known_router(router, block.experts):
        return False
    if are_hooked(*_parts_of(block)):
        return False
    if not _act_alike(block.shared_expert, block.experts):
        return False
    experts: Any = block.experts
    count = len(experts.down_proj)
    if not _is_readable_router(router, count, x_TD):
        return False
    linears = _shared_linears(block)
    if not all(_is_linear(linear) for linear in linears):
        return False
    # W_down, the last one, may lie as it likes.
    if not all(linear.weight.is_contiguous() for linear in linears[:-1]):
        return False
    return can_be_read([linear.weight for linear in linears], x_TD)


def _is_readable_router(router: Any, count: int, x_TD: Tensor) -> bool:
    """Whether it chooses among so many experts, by matrices that lie as they are read."""
    if not 1 <= _most_of_token(router) <= count:
        return False  # torch says what is wrong
    matrices = _router_matrices(router)
    hidden = x_TD.shape[-1]
    directions = len(matrices.get("direction_CD", ()))
    width = hidden + directions * (directions + 1) // 2
    shapes = {
        "router_RD": (count, width),
        "router_gate_RD": (count, width),
        "direction_CD": (directions, hidden),
        "direction_bias_C": (directions,),
    }
    if any(matrix.shape != shapes[name] for name, matrix in matrices.items()):
        return False
    for vector_R in (router.expert_scale, router.selection_bias):
        # A cast of the whole model takes them along.
        if vector_R.dtype != torch.float32 or vector_R.device != x_TD.device:
            return False
        if not vector_R.is_contiguous():
            return False
    of_tokens = list(matrices.values())
    if not all(matrix.is_contiguous() for matrix in of_tokens):
        return False
    return are_parameters_beside(of_tokens, x_TD)


def _most_of_token(router: Any) -> int:
    """How many experts a token runs, by thresholds at most; 0 by any other choice."""
    most: dict[str, int] = {
        "topk": router.num_active,
        "threshold": router.cap,
    }
    return most.get(router.chooser, 0)


def _act_alike(shared: Any, experts: Any) -> bool:
    if shared is None:
        return True
    return type(shared.act_fn) is type(experts.act_fn)


def _is_known_router(router: Any, experts: Any) -> bool:
    """A matrix, with products of directions or not, or copies of these experts' neurons.

    PEFT's wrappers are none of these.
    """
    from moesaic.modeling import (
        MoesaicLinearRouter,
        MoesaicNeuronCopyRouter,
        MoesaicQuadraticRouter,
    )

    if type(router) is MoesaicLinearRouter:
        return _is_projection(router.score_proj, with_bias=False)
    if type(router) is MoesaicQuadraticRouter:
        return _is_projection(
            router.score_proj, with_bias=False
        ) and _is_projection(router.feature_proj, with_bias=True)
    if type(router) is not MoesaicNeuronCopyRouter:
        return False
    if (router.gate_proj is not None) != experts.has_gate:
        return False
    if type(router.act_fn) is not type(experts.act_fn):
        return False
    linears = [router.gate_proj, router.up_proj]
    return all(_is_linear(linear) for linear in linears if linear is not None)


def _is_projection(module: Any, with_bias: bool) -> bool:
    from moesaic.modeling import MoesaicProjection

    has_bias = getattr(module, "bias", None) is not None
    return type(module) is MoesaicProjection and has_bias == with_bias


def _learns(block: Any) -> bool:
    """Whether W_down has to stay as it lies. Asking marks all that learn by this call."""
    shared = block.shared_expert
    of_experts = experts_learn(block.experts)
    of_shared = shared is not None and learns(shared.down_proj)
    return of_experts or of_shared


def _is_linear(module: Any) -> bool:
    has_bias = getattr(module, "bias", None) is not None
    return type(module) is nn.Linear and not has_bias


def _router_matrices(router: Any) -> dict[str, Tensor]:
    """By the names of the call's fields."""
    if "feature_proj" in router._modules:
        return {
            "router_RD": router.score_proj.weight,
            "direction_CD": router.feature_proj.weight,
            "direction_bias_C": router.feature_proj.bias,
        }
    if "score_proj" in router._modules:
        return {"router_RD": router.score_proj.weight}
    matrices = {"router_RD": router.up_proj.weight}
    if router.gate_proj is not None:
        matrices["router_gate_RD"] = router.gate_proj.weight
    return matrices


def _shared_linears(block: Any) -> list[Any]:
    shared = block.shared_expert
    if shared is None:
        return []
    linears = [shared.gate_proj, shared.up_proj, shared.down_proj]
    return [linear for linear in linears if linear is not None]


def _parts_of(block: Any) -> list[Any]:
    return [module for module in block.modules() if module is not block]
