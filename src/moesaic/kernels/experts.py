"""Experts as a function that transformers calls ("moesaic").

    model.set_experts_implementation("moesaic")

does it for any model whose experts stand behind that interface, such as an exported one.
Models of moesaic's own architecture do it by themselves on a processor with AVX2 and
no GPU beside it, and with them the router and the shared expert in the same call. On a
GPU a few tokens at once run by Triton (experts_triton.py). All others, on other devices,
in training and where there is no compiler, go to transformers' grouped product.

Shape suffixes: T tokens, D hidden_size, R experts, K of them for a token, M neurons of
one, N rows of an expert's first matrix, S neurons of the shared expert.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.integrations import moe
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moesaic.kernels import gpu
from moesaic.kernels.build import library
from moesaic.kernels.inputs import (
    ACTIVATIONS,
    are_hooked,
    can_be_read,
    is_plain_inference,
    on_lines,
    rows_side_by_side,
)
from moesaic.kernels.linears import linear_forward
from moesaic.kernels.neurons import copy_weight, neurons_forward

NAME = "moesaic"
FEW_TOKENS = 4  # on a GPU: each reads its experts for itself
# On a processor with AVX2 MKL multiplies faster from so large a matrix of an expert on,
# and from so many tokens for each expert.
LARGE = 2**20
MANY_TOKENS = 8
FUNCTIONS = {
    torch.float32: "moesaic_experts_float32",
    torch.bfloat16: "moesaic_experts_bfloat16",
}
_POINTERS = (
    "x_TD",
    "out_TD",
    "first_RND",
    "down_RMD",
    "index_TK",
    "gate_TK",
    "router_RD",
    "router_gate_RD",
    "bias_R",
    "scale_R",
    "shared_gate_SD",
    "shared_up_SD",
    "shared_down_SD",
)
_SIZES = ("tokens", "K", "R", "M", "used", "D", "S")
_SWITCHES = ("gated", "activation", "threads", "copies", "absolute")


class _Call(ctypes.Structure):
    """The struct of the same name in experts_cpu.cpp; what is not given is 0."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_int32) for name in _SWITCHES),
    ]


def experts_forward(
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """y_T = sum of gate * expert(x_T) over each token's experts, (T, D).

    `top_k_index` (T, K) names experts, `top_k_weights` (T, K) are their gates. `experts`
    is a module of transformers' experts interface. Costs 6 K M D FLOPs a token, 4 where
    the FFN has no gate; weights of experts that nobody chose are not read. W_down is
    laid out anew, neuron by neuron, the first time: its values and shape stay.
    """
    if gpu.takes(hidden_states):
        y_TD = _on_gpu(experts, hidden_states, top_k_index, top_k_weights)
        if y_TD is not None:
            return y_TD
    if not fits(experts, hidden_states):
        grouped = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
        output: Tensor = grouped(
            experts, hidden_states, top_k_index, top_k_weights
        )
        return output
    index_TK = top_k_index.to(torch.int64).contiguous()
    gate_TK = top_k_weights.to(torch.float32).contiguous()
    given = {"index_TK": index_TK, "gate_TK": gate_TK}
    return _run(_call_of(experts, index_TK.shape[1], given), hidden_states)


def block_forward(block: Any, x_TD: Tensor) -> Tensor | None:
    """Shared expert, router and routed experts of a MoesaicBlock in one call, (T, D).

    None for a block that has other parts than those: it then runs them one by one.
    Costs 6 (S + K M) D + 2 R D FLOPs a token, 4 R D by copies of neurons, whose scores
    stay in float32 here: near ties may choose otherwise than torch in bfloat16.
    """
    # On a GPU too a graph of torch.compile holds no memory of what was looked at.
    if x_TD.device.type != "cpu" or not is_plain_inference(x_TD):
        return None
    known = _KNOWN.get(block)
    held = _held(known)  # so that no other thread frees what is read here
    if known is None or not _still_holds(known, held, block, x_TD):
        _KNOWN.pop(block, None)
        if not _is_plain(block, x_TD):
            return None
        known = _look_at(block, x_TD)
        held = _held(known)
        if _places_of(held) != known.places:
            return None  # another thread has just put something else there
        _KNOWN[block] = known
    # Other threads may be in the call that is kept.
    return _run(_Call.from_buffer_copy(known.call), x_TD)


class _Known(NamedTuple):
    """What to call a block with that was found fit, and how to see that it still is.

    A block is called for every token: to look at all of it takes longer than to run a
    small one.
    """

    call: _Call
    # Of every module its parts, and as they were.
    kept: list[tuple[dict[str, Any], dict[str, Any]]]
    modules: list[nn.Module]
    tensors: list[Tensor]
    places: list[tuple[Any, ...]]  # of the tensors in memory
    settings: tuple[Any, ...]


_KNOWN: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()


def _look_at(block: Any, x_TD: Tensor) -> _Known:
    """A block for which `_is_plain` holds. W_down is laid out anew here."""
    router = block.router
    given = {
        "bias_R": router.selection_bias,
        "scale_R": router.expert_scale,
        **_router_matrices(router),
    }
    shared = block.shared_expert
    if shared is not None:
        down_DS = shared.down_proj.weight
        given["shared_up_SD"] = _laid_out(shared.up_proj.weight)
        given["shared_down_SD"] = rows_side_by_side(down_DS)
        if shared.gate_proj is not None:
            given["shared_gate_SD"] = _laid_out(shared.gate_proj.weight)
    rows_side_by_side(block.experts.down_proj)
    _laid_out(_first_matrix(block.experts))
    modules = [block, *_parts_of(block)]
    kept = []
    tensors: list[Tensor] = []
    for module in modules:
        for parts in (module._modules, module._parameters, module._buffers):
            kept.append((parts, dict(parts)))
            tensors += [
                part for part in parts.values() if isinstance(part, Tensor)
            ]
    places = _places_of([tensor.data for tensor in tensors])
    call = _call_of(block.experts, router.num_active, given)
    call.copies = "score_proj" not in router._modules
    call.absolute = getattr(router, "absolute", False)
    settings = _settings_of(block, modules, x_TD)
    return _Known(call, kept, modules, tensors, places, settings)


def _held(known: _Known | None) -> list[Tensor]:
    """Its tensors as they lie, which stay in memory as long as this list."""
    if known is None:
        return []
    return [tensor.data for tensor in known.tensors]


def _places_of(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    return [
        (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        for tensor in tensors
    ]


def _settings_of(
    block: Any, modules: list[nn.Module], x_TD: Tensor
) -> tuple[Any, ...]:
    """What else a block's call depends on."""
    parts = block._modules
    router = vars(parts["router"])
    experts = vars(parts["experts"])
    return (
        router["chooser"],
        router["num_active"],
        router.get("absolute"),
        *(experts.get(name) for name in ("neurons", "has_gate", "has_bias")),
        *map(type, modules),
        x_TD.dtype,
        x_TD.device.type,
        x_TD.shape[1:],
    )


def _still_holds(
    known: _Known, held: list[Tensor], block: Any, x_TD: Tensor
) -> bool:
    """Whether a block is as it was, and this input for the kernel too."""
    for parts, before in known.kept:
        if len(parts) != len(before):
            return False
        for name, part in parts.items():
            if before.get(name) is not part:
                return False
    if _settings_of(block, known.modules, x_TD) != known.settings:
        return False
    if _places_of(held) != known.places or are_hooked(known.modules[1:]):
        return False
    experts = block._modules["experts"]
    if _learns(experts) or _is_offloaded(experts):
        return False
    return not _is_grouped_faster(experts, x_TD)


def fits(experts: Any, x_TD: Tensor) -> bool:
    """Whether these experts run by the CPU's kernel, on such an input."""
    if _learns(experts) or _is_offloaded(experts):
        return False
    if x_TD.device.type != "cpu" or not _is_usual(experts, x_TD):
        return False
    if _is_grouped_faster(experts, x_TD):
        return False
    return library() is not None


def _is_grouped_faster(experts: Any, x_TD: Tensor) -> bool:
    """Large experts in float32, many tokens, and registers of eight numbers.

    The kernel's panels are sixteen tokens wide there, and MKL's blocks are larger.
    """
    if x_TD.dtype != torch.float32:
        return False
    count, hidden, neurons = experts.down_proj.shape
    is_large = hidden * neurons >= LARGE
    are_many = len(x_TD) >= MANY_TOKENS * count
    is_avx2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
    return is_large and are_many and is_avx2


def _on_gpu(
    experts: Any, x_TD: Tensor, index_TK: Tensor, gate_TK: Tensor
) -> Tensor | None:
    """By Triton, few tokens at once; None where this is not for it."""
    if not 0 < len(x_TD) <= FEW_TOKENS or torch.is_grad_enabled():
        return None
    if not _is_usual(experts, x_TD) or _is_offloaded(experts):
        return None
    neurons = experts.down_proj.shape[2]
    return gpu.call(
        "experts",
        x_TD.contiguous(),
        _first_matrix(experts),
        experts.down_proj,
        index_TK.contiguous(),
        gate_TK.contiguous(),
        min(getattr(experts, "neurons", neurons), neurons),
        experts.has_gate,
        ACTIVATIONS[type(experts.act_fn).__name__],
    )


def _is_usual(experts: Any, x_TD: Tensor) -> bool:
    """Whether the kernels know what these experts do, and how their weights lie."""
    if experts.has_bias or getattr(experts, "is_transposed", False):
        return False
    if not getattr(experts, "is_concatenated", True):
        return False
    if getattr(experts, "has_post_expert_norm", False):
        return False
    usual_gate = getattr(moe, "_default_apply_gate", None)
    if getattr(type(experts), "_apply_gate", None) is not usual_gate:
        return False
    if type(experts.act_fn).__name__ not in ACTIVATIONS:
        return False
    if are_hooked(experts.children()):
        return False
    if x_TD.dtype not in FUNCTIONS or not is_plain_inference(x_TD):
        return False
    first_RND = _first_matrix(experts)
    if not can_be_read([first_RND, experts.down_proj], x_TD):
        return False
    if x_TD.shape[1] != experts.down_proj.shape[1]:
        return False
    contiguous: bool = first_RND.is_contiguous()
    return contiguous


def _is_plain(block: Any, x_TD: Tensor) -> bool:
    """Whether a block has a router that the kernel knows, the K best, and nothing besides."""
    # Whoever imports moesaic.modeling first imports this module on the way.
    from moesaic.modeling import MoesaicBlock

    router = block.router
    if type(block) is not MoesaicBlock:  # others add to what it does
        return False
    if not _is_known_router(router, block.experts):
        return False
    if router.chooser != "topk" or are_hooked(_parts_of(block)):
        return False
    parameters = list(_router_matrices(router).values())
    if any(router.num_active > len(matrix_RD) for matrix_RD in parameters):
        return False  # torch says what is wrong
    for linear in _shared_linears(block):
        if not _is_linear(linear):
            return False
        parameters.append(linear.weight)
    for vector_R in (router.expert_scale, router.selection_bias):
        # A cast of the whole model takes them along.
        if vector_R.dtype != torch.float32 or vector_R.device.type != "cpu":
            return False
        if not vector_R.is_contiguous():
            return False
    upper = parameters if block.shared_expert is None else parameters[:-1]
    if not all(parameter.is_contiguous() for parameter in upper):
        return False
    return can_be_read(parameters, x_TD) and fits(block.experts, x_TD)


def _is_known_router(router: Any, experts: Any) -> bool:
    """A matrix, or copies of neurons of these experts; PEFT's wrappers are neither."""
    from moesaic.modeling import (
        MoesaicLinearRouter,
        MoesaicNeuronCopyRouter,
        MoesaicProjection,
    )

    if type(router) is MoesaicLinearRouter:
        return type(router.score_proj) is MoesaicProjection
    if type(router) is not MoesaicNeuronCopyRouter:
        return False
    if (router.gate_proj is not None) != experts.has_gate:
        return False
    if type(router.act_fn) is not type(experts.act_fn):
        return False
    linears = [router.gate_proj, router.up_proj]
    return all(_is_linear(linear) for linear in linears if linear is not None)


def _is_linear(module: Any) -> bool:
    has_bias = getattr(module, "bias", None) is not None
    return type(module) is nn.Linear and not has_bias


def _router_matrices(router: Any) -> dict[str, Tensor]:
    """By the names of the call's fields."""
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


def _learns(experts: Any) -> bool:
    """Whether gradients are wanted, or have been in training.

    W_down of what learns stays as it lies: optimisers keep what belongs to its elements
    in their order.
    """
    if torch.is_grad_enabled():
        if experts.training:
            vars(experts)["_moesaic_has_learnt"] = True
        return True
    return "_moesaic_has_learnt" in vars(experts)


def _is_offloaded(experts: Any) -> bool:
    """Whether accelerate fetches the weights for every call."""
    hook = getattr(experts, "_hf_hook", None)
    return bool(getattr(hook, "offload", False))


def _parts_of(block: Any) -> list[Any]:
    return [module for module in block.modules() if module is not block]


def _call_of(experts: Any, num_active: int, given: dict[str, Tensor]) -> _Call:
    """The struct for these experts, but for their input; `given` are fields of it."""
    first_RND = _laid_out(_first_matrix(experts))
    down_RMD = rows_side_by_side(experts.down_proj)
    count, neurons, hidden = down_RMD.shape
    given |= {"first_RND": first_RND, "down_RMD": down_RMD}
    call = _Call(
        K=num_active,
        R=count,
        M=neurons,
        used=min(getattr(experts, "neurons", neurons), neurons),
        D=hidden,
        gated=experts.has_gate,
        activation=ACTIVATIONS[type(experts.act_fn).__name__],
    )
    for name, tensor in given.items():
        setattr(call, name, tensor.data_ptr())
    if "shared_up_SD" in given:
        call.S = len(given["shared_up_SD"])
    return call


def _laid_out(matrix: Any) -> Tensor:
    """A matrix of rows that are read as tiles: one that lies across lines takes a tenth more."""
    compiled = library()
    assert compiled is not None  # or it would not fit
    if matrix.dtype == torch.bfloat16 and compiled.moesaic_has_tiles():
        return on_lines(matrix)
    found: Tensor = matrix
    return found


def _run(call: _Call, hidden_states: Tensor) -> Tensor:
    """Calls the compiled function, (T, D)."""
    x_TD = hidden_states.contiguous()
    y_TD = torch.empty_like(x_TD)
    call.x_TD = x_TD.data_ptr()
    call.out_TD = y_TD.data_ptr()
    call.tokens = len(x_TD)
    call.threads = torch.get_num_threads()
    compiled = library()
    assert compiled is not None  # or it would not fit
    getattr(compiled, FUNCTIONS[x_TD.dtype])(ctypes.byref(call))
    return y_TD


def _first_matrix(experts: Any) -> Any:
    """Gate and up of every expert, or up alone."""
    return experts.gate_up_proj if experts.has_gate else experts.up_proj


def _by_itself() -> bool:
    """Whether converted models take it unasked: where it was measured to be faster."""
    if torch.accelerator.is_available():
        return False
    capability = torch.backends.cpu.get_cpu_capability()
    return capability.startswith(("AVX2", "AVX512"))


experts_forward.by_itself = _by_itself()  # type: ignore[attr-defined]
experts_forward.fits = fits  # type: ignore[attr-defined]
experts_forward.block = block_forward  # type: ignore[attr-defined]
experts_forward.neurons = neurons_forward  # type: ignore[attr-defined]
experts_forward.copy_weight = copy_weight  # type: ignore[attr-defined]
experts_forward.linear = linear_forward  # type: ignore[attr-defined]
ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
