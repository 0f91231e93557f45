"""LoRA around a converted (or dense) model through PEFT, and its weights folded in again.

Attention and the shared expert are nn.Linear modules; the routed experts are fused 3-D parameters;
the router is trained whole, with its bias, and saved beside the LoRA weights (`modules_to_save`).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from moesaic.evaluate.work import is_converted
from moesaic.modeling import (
    MoesaicExperts,
    MoesaicQuadraticRouter,
    MoesaicReplacement,
)

NAME = "default"  # of the adapter
# The LoRA weights of R experts add up like one of R times the rank: steps that agree want the same
# rate as elsewhere, noise one lower by the square root of R. Between the two by measurement.
ROOT = 0.25


def replacements_of(model: Any) -> dict[str, MoesaicReplacement]:
    """What stands in for FFNs, by path; wrapped by PEFT or not."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, MoesaicReplacement)
    }


def blocks_of(model: Any) -> list[Any]:
    """The replacement of every layer's FFN; in a mixture that of its experts."""
    found = replacements_of(model).values()
    if not is_mixture(model):
        return list(found)
    # A mixture's own shared expert is replaced by what could be stacked.
    return [module for module in found if module.stacked is None]


def is_mixture(model: Any) -> bool:
    """Whether the model was a mixture before it was converted."""
    return is_converted(model.config) and model.config.moesaic.outer is not None


def routers_of(model: Any) -> list[Any]:
    """The routers that count loads, shared experts' too: with PEFT the trained copies."""
    return list(named_routers(model).values())


def named_routers(model: Any) -> dict[str, Any]:
    """`routers_of` by their layers' numbers."""
    by_name = {}
    for path, module in replacements_of(model).items():
        layer = next(part for part in path.split(".") if part.isdigit())
        shared = is_mixture(model) and module.stacked is not None
        name = f"{layer}, shared expert" if shared else layer
        for router in module.router_modules().values():
            active = active_copy(router)
            if active.counts_loads:
                by_name[name] = active
    return by_name


def active_copy(router: Any) -> Any:
    """The router itself, or its trained copy inside PEFT's wrapper."""
    copies = getattr(router, "modules_to_save", None)
    return router if copies is None else copies[NAME]


def neuron_routers_of(model: Any) -> list[Any]:
    """The routers of single neurons, which count no loads."""
    routers = [
        active_copy(router)
        for module in replacements_of(model).values()
        for router in module.router_modules().values()
    ]
    return [router for router in routers if not router.counts_loads]


def targets(model: Any) -> tuple[list[str], list[str]]:
    """Names of the linear modules and of the fused expert parameters that get LoRA weights.

    Every linear module inside a layer but those of routers; the output head stays as it is.
    """
    modules = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and any(part.isdigit() for part in name.split("."))
        and not {"router", "gate", "shared_expert_gate"} & set(name.split("."))
    ]
    experts = {
        f"{'.'.join(path.split('.')[-2:])}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, MoesaicExperts)
        for name, parameter in module.named_parameters()
        if parameter.ndim == 3
    }
    return modules, sorted(experts)


def trained_routers(model: Any) -> list[str]:
    """Ends of the names of our routers, by which they differ from a mixture's own."""
    ends = {
        f"{path.split('.')[-1]}.{name}"
        for path, module in replacements_of(model).items()
        for name in module.router_modules()
    }
    return sorted(ends)


def wrap(model: Any, rank: int, alpha: float, freeze_router: bool) -> Any:
    """The model with LoRA weights that change nothing yet; they and the router are trainable.

    Trainable weights are float32 in a model of any dtype. Neurons that only pad an expert stay
    without effect: their columns of the LoRA factor of W_down start at zero, and where both
    sides of a neuron are zero neither gets a gradient.
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
    with (
        warnings.catch_warnings()
    ):  # GPT-2's transposed modules are found out one by one
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        wrapped = get_peft_model(model, config)
    with torch.no_grad():
        for module in wrapped.modules():
            if getattr(module, "parameter_name", None) == "down_proj":
                factor: Any = module
                factor.lora_A[NAME].weight[
                    :, factor.get_base_layer().neurons :
                ] = 0
    freeze(wrapped, freeze_router)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return wrapped


def freeze(wrapped: Any, freeze_router: bool) -> None:
    """With `freeze_router` only expert_scale of a router is trained. (PEFT thaws it on loading.)"""
    for router in routers_of(wrapped) + neuron_routers_of(wrapped):
        for name, parameter in router.named_parameters():
            parameter.requires_grad_(
                name == "expert_scale" or not freeze_router
            )


def learning_rates(
    model: Any, lora_lr: float, scale_lr: float
) -> dict[str, float]:
    """Of every kind of trained weight; some kinds may not be there."""
    routed = 0
    if is_converted(model.config):
        routed = model.config.moesaic.first_sizes.num_routed
    rates = {
        "LoRA, routers": lora_lr,
        "LoRA of routed experts": lora_lr / max(routed, 1) ** ROOT,
        "expert_scale": scale_lr,
    }
    slow = MoesaicQuadraticRouter.rate_share * lora_lr
    return rates | {"routers with products": slow}


def parameter_groups(
    model: Any, lora_lr: float, scale_lr: float
) -> list[dict[str, Any]]:
    """The optimizer's groups: one for each of `learning_rates` that trains weights."""
    experts = set()
    for name, module in model.named_modules():
        if name.endswith(".experts") and hasattr(module, "lora_A"):
            experts |= {id(parameter) for parameter in module.parameters()}
    slow = {
        id(parameter)
        for router in routers_of(model)
        if router.rate_share != 1
        for parameter in router.parameters()
    }
    rates = learning_rates(model, lora_lr, scale_lr)
    groups: list[dict[str, Any]] = [
        {"params": [], "lr": rate} for rate in rates.values()
    ]
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        place = 0
        if name.endswith("expert_scale"):
            place = 2
        elif id(parameter) in experts:
            place = 1
        elif id(parameter) in slow:
            place = 3
        groups[place]["params"].append(parameter)
    return [group for group in groups if group["params"]]


@torch.no_grad()
def merge(wrapped: PeftModel) -> Any:
    """The model with its LoRA weights added to its own, as it was before `wrap`.

    Padding neurons are set to zero again: W_down's LoRA may be anything there, where the hidden
    state is zero, so the outputs are the same.
    """
    model: Any = wrapped.merge_and_unload()
    for module in model.modules():
        if isinstance(module, MoesaicExperts):
            clear_padding(module)
    for router in routers_of(model) + neuron_routers_of(model):
        for name, parameter in router.named_parameters():
            if name != "expert_scale":
                parameter.data = parameter.data.to(model.dtype)
    return model.requires_grad_(True).eval()


def clear_padding(experts: Any) -> None:
    """Sets the neurons that only pad an expert to zero, in place."""
    size, padded = experts.neurons, experts.down_proj.shape[2]
    experts.down_proj[:, :, size:] = 0
    stacked = experts.gate_up_proj if experts.has_gate else experts.up_proj
    stacked.unflatten(1, (-1, padded))[:, :, size:] = 0
