"""LoRA around a converted (or dense) model through PEFT, and its weights merged again.

Attention and the shared expert are nn.Linear modules; the routed experts are fused 3-D
parameters; the router is trained whole, with its bias, and saved beside the LoRA
weights (`modules_to_save`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import ModulesToSaveWrapper
from peft.utils import transformers_weight_conversion as weight_conversion
from torch import nn
from transformers.pytorch_utils import Conv1D

from moesaic.evaluate.work import is_converted
from moesaic.modeling import (
    MoesaicCopy,
    MoesaicExperts,
    MoesaicQuadraticRouter,
    MoesaicReplacement,
)

NAME = "default"  # of the adapter
# The LoRA weights of R experts add up like one of R times the rank: steps that agree
# want the same rate as elsewhere, noise one lower by the square root of R. Between the
# two by measurement.
ROOT = 0.25

# Of a trained weight, with Adam's two moments, in float32.
CHECKPOINT_BYTES = 12

# Parts of a module's path that say it belongs to a router.
ROUTER_NAMES = {"router", "gate", "shared_expert_gate"}


def replacements_of(model: Any) -> dict[str, MoesaicReplacement]:
    """What stands in for FFNs, by path; wrapped by PEFT or not."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, MoesaicReplacement)
    }


def blocks_of(model: Any) -> list[Any]:
    """The replacement of every layer's FFN; in a mixture that of its experts."""
    blocks = list(replacements_of(model).values())
    if is_mixture(model):
        # A mixture's own shared expert is replaced by what could be stacked.
        blocks = [block for block in blocks if block.stacked is None]
    return blocks


def is_mixture(model: Any) -> bool:
    """Whether the model was a mixture before it was converted."""
    if not is_converted(model.config):
        return False
    return model.config.moesaic.outer is not None


def routers_of(model: Any) -> list[Any]:
    """The routers that count loads, shared experts' too.

    With PEFT, their trained copies.
    """
    return list(named_routers(model).values())


def named_routers(model: Any) -> dict[str, Any]:
    """`routers_of` by their layers' numbers."""
    by_name = {}
    for path, module in replacements_of(model).items():
        name = next(part for part in path.split(".") if part.isdigit())
        if is_mixture(model) and module.stacked is not None:
            name = f"{name}, shared expert"
        for router in module.router_modules().values():
            active = active_copy(router)
            if active.counts_loads:
                by_name[name] = active
    return by_name


def active_copy(router: Any) -> Any:
    """The router itself, or its trained copy inside PEFT's wrapper."""
    copies = getattr(router, "modules_to_save", None)
    if copies is None:
        return router
    return copies[NAME]


def neuron_routers_of(model: Any) -> list[Any]:
    """The routers that count no loads: of single neurons, and those by token ids."""
    routers = []
    for module in replacements_of(model).values():
        for router in module.router_modules().values():
            active = active_copy(router)
            if not active.counts_loads:
                routers.append(active)
    return routers


def targets(model: Any) -> tuple[list[str], list[str]]:
    """Names of the linear modules and of the fused parameters that get LoRA weights.

    Every linear module inside a layer but those of routers; the output head stays as it
    is. The fused parameters are those of experts, ours and those of a mixture's family.
    """
    linears = []
    experts = set()
    for path, module in model.named_modules():
        names = path.split(".")
        if isinstance(module, nn.Linear | Conv1D):
            in_layer = any(name.isdigit() for name in names)
            if in_layer and ROUTER_NAMES.isdisjoint(names):
                linears.append(path)
        elif isinstance(module, MoesaicExperts) or names[-1] == "experts":
            end_of_path = ".".join(names[-2:])
            for name in _fused_weights(module):
                experts.add(f"{end_of_path}.{name}")
    return linears, sorted(experts)


def _fused_weights(experts: nn.Module) -> dict[str, nn.Parameter]:
    """Matrices of all experts in one: ours, or those that a mixture's family has."""
    own = experts.named_parameters(recurse=False)
    return {name: weight for name, weight in own if weight.ndim == 3}


def weights_of_lora(model: Any, rank: int) -> int:
    """How many LoRA weights `wrap` would add; the model may have no weights itself."""
    names, fused_names = targets(model)
    shapes = [model.get_submodule(name).weight.shape for name in names]
    fused = tuple(fused_names)
    for name, weight in model.named_parameters():
        if fused and name.endswith(fused):
            shapes.append(weight.shape)
    total = 0
    for *experts, rows, columns in shapes:
        total += math.prod(experts) * rank * (rows + columns)
    return total


def checkpoint_bytes(model: Any, rank: int) -> int:
    """Of one checkpoint: LoRA weights and whole routers; the model may have no weights."""
    trained = weights_of_lora(model, rank)
    kept = 0
    for module in replacements_of(model).values():
        for router in module.router_modules().values():
            trained += trained_weights(router)
            kept += sum(buffer.nbytes for buffer in router.buffers())
    return CHECKPOINT_BYTES * trained + kept


def trained_weights(model: Any) -> int:
    """How many weights are trained: of LoRA, routers and gates."""
    trained = [one for one in model.parameters() if one.requires_grad]
    return sum(parameter.numel() for parameter in trained)


def trained_routers(model: Any) -> list[str]:
    """Ends of the names of our routers, by which they differ from a mixture's own."""
    ends = set()
    for path, module in replacements_of(model).items():
        block_name = path.split(".")[-1]
        for name in module.router_modules():
            ends.add(f"{block_name}.{name}")
    return sorted(ends)


def wrap(model: Any, rank: int, alpha: float, freeze_router: bool) -> Any:
    """The model with LoRA weights that change nothing yet.

    They and the router are trainable. Trainable weights are float32 in a model of any
    dtype. Neurons that only pad an expert stay without effect: their columns of the
    LoRA factor of W_down start at zero, and where both sides of a neuron are zero
    neither gets a gradient.
    """
    modules, parameters = targets(model)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type] # any number
        target_modules=modules,
        target_parameters=parameters or None,
        modules_to_save=trained_routers(model) or None,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings(), _names_as_they_are():
        # GPT-2's transposed modules are found out one by one.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        wrapped = get_peft_model(model, config)
    _clear_padding_of_factors(wrapped)
    _share_copies(wrapped)
    freeze(wrapped, freeze_router)
    for parameter in wrapped.parameters():
        # Inference on a CPU may have stored a matrix by columns, and FSDP takes none such.
        parameter.data = parameter.data.contiguous()
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return wrapped


@contextmanager
def _names_as_they_are() -> Iterator[None]:
    """Keeps PEFT from taking our names for those of transformers 4.

    In a mixture it turns linear layers called gate_proj, of layers without experts or of
    a shared expert, into the fused matrices of routed ones.
    """
    name = "convert_peft_config_for_transformers"
    convert = getattr(weight_conversion, name)
    setattr(weight_conversion, name, lambda *args, **others: None)
    try:
        yield
    finally:
        setattr(weight_conversion, name, convert)


@torch.no_grad()
def _clear_padding_of_factors(wrapped: Any) -> None:
    """LoRA factors of W_down: zero where a neuron only pads an expert, in place."""
    for module in wrapped.modules():
        if getattr(module, "parameter_name", None) != "down_proj":
            continue
        experts = module.get_base_layer()
        if not isinstance(experts, MoesaicExperts):
            continue
        neurons = experts.neurons
        factor = module.lora_A[NAME].weight
        factor[:, neurons:] = 0


def _share_copies(wrapped: Any) -> None:
    """Copies of weights in few bits, never trained, are not held twice with a router."""
    for module in wrapped.modules():
        if not isinstance(module, ModulesToSaveWrapper):
            continue
        for path, copy in module.original_module.named_modules():
            if not isinstance(copy, MoesaicCopy):
                continue
            trained = active_copy(module).get_submodule(path)
            for name, values in copy.named_buffers(recurse=False):
                setattr(trained, name, values)


def freeze(wrapped: Any, freeze_router: bool) -> None:
    """With `freeze_router` only expert_scale of a router is trained.

    (PEFT thaws it on loading.)
    """
    for router in _all_routers(wrapped):
        for name, parameter in router.named_parameters():
            is_trained = name == "expert_scale" or not freeze_router
            parameter.requires_grad_(is_trained)


def _all_routers(model: Any) -> list[Any]:
    return routers_of(model) + neuron_routers_of(model)


def learning_rates(
    model: Any, lora_lr: float, scale_lr: float
) -> dict[str, float]:
    """Of every kind of trained weight; some kinds may not be there."""
    routed = [0]
    if is_converted(model.config):
        routed += [sizes.num_routed for sizes in model.config.moesaic.sizes]
    expert_divisor = max(*routed, 1) ** ROOT
    return {
        "LoRA, routers": lora_lr,
        "LoRA of routed experts": lora_lr / expert_divisor,
        "expert_scale": scale_lr,
        "routers with products": MoesaicQuadraticRouter.rate_share * lora_lr,
    }


def rates_that_apply(
    model: Any, lora_lr: float, scale_lr: float
) -> dict[str, float]:
    """`learning_rates` of the kinds of weights that a model has, before `wrap`."""
    rates = learning_rates(model, lora_lr, scale_lr)
    names = [name for name, _ in model.named_parameters()]
    there = {
        "LoRA, routers": True,
        "LoRA of routed experts": any(
            isinstance(module, MoesaicExperts) for module in model.modules()
        ),
        "expert_scale": any(name.endswith("expert_scale") for name in names),
        "routers with products": bool(_slow_parameters(model)),
    }
    return {kind: rate for kind, rate in rates.items() if there[kind]}


def parameter_groups(
    model: Any, lora_lr: float, scale_lr: float
) -> list[dict[str, Any]]:
    """The optimizer's groups: one for each of `learning_rates` that trains weights."""
    of_experts = _expert_parameters(model)
    of_slow_routers = _slow_parameters(model)
    rates = learning_rates(model, lora_lr, scale_lr)
    groups: dict[str, dict[str, Any]] = {}
    for kind, rate in rates.items():
        groups[kind] = {"params": [], "lr": rate}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = "LoRA, routers"
        if name.endswith("expert_scale"):
            kind = "expert_scale"
        elif id(parameter) in of_experts:
            kind = "LoRA of routed experts"
        elif id(parameter) in of_slow_routers:
            kind = "routers with products"
        groups[kind]["params"].append(parameter)
    return [group for group in groups.values() if group["params"]]


def _expert_parameters(model: Any) -> set[int]:
    """Ids of the LoRA weights of routed experts."""
    ids = set()
    for name, module in model.named_modules():
        if name.endswith(".experts") and hasattr(module, "lora_A"):
            for parameter in module.parameters():
                ids.add(id(parameter))
    return ids


def _slow_parameters(model: Any) -> set[int]:
    """Ids of the weights of routers that train at a lower rate."""
    ids = set()
    for router in routers_of(model):
        if router.rate_share != 1:
            for parameter in router.parameters():
                ids.add(id(parameter))
    return ids


@torch.no_grad()
def merge(wrapped: PeftModel) -> Any:
    """The model with its LoRA weights added to its own, as it was before `wrap`.

    Padding neurons are set to zero again: W_down's LoRA may be anything there, where
    the hidden state is zero, so the outputs are the same.
    """
    model: Any = wrapped.merge_and_unload()
    for module in model.modules():
        if isinstance(module, MoesaicExperts):
            clear_padding(module)
    for parameter in _written_rounded(model):
        parameter.data = parameter.data.to(model.dtype)
    return model.requires_grad_(True).eval()


def round_routers(model: Any, dtype: torch.dtype) -> None:
    """Gives trained routers the values that will be written, in place.

    So that thresholds, loads and perplexity are of these.
    """
    for parameter in _written_rounded(model):
        rounded = parameter.data.to(dtype)
        parameter.data = rounded.to(parameter.dtype)


def _written_rounded(model: Any) -> Iterator[nn.Parameter]:
    for router in _all_routers(model):
        for name, parameter in router.named_parameters():
            if name != "expert_scale":
                yield parameter


def clear_padding(experts: Any) -> None:
    """Sets the neurons that only pad an expert to zero, in place."""
    neurons = experts.neurons
    padded = experts.down_proj.shape[2]
    experts.down_proj[:, :, neurons:] = 0
    fused = experts.gate_up_proj if experts.has_gate else experts.up_proj
    # Gate and up lie one after the other, each padded by itself.
    by_matrix = fused.unflatten(1, (-1, padded))
    by_matrix[:, :, neurons:] = 0
