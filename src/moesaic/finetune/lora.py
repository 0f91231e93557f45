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

from moesaic.modeling import (
    MoesaicBlock,
    MoesaicExperts,
    MoesaicHierarchy,
    MoesaicNeurons,
)

NAME = "default"  # of the adapter
# Of a router that multiplies products of directions: at the rate of LoRA its scores move
# too far in a step of Adam (docs/log.md, 2026-11-21).
PRODUCTS_SHARE = 0.1
# The LoRA weights of R experts add up like one of R times the rank: steps that agree want the same
# rate as elsewhere, noise one lower by the square root of R. Between the two by measurement.
ROOT = 0.25


def blocks_of(model: Any) -> list[Any]:
    """The MoE block of every layer, wrapped by PEFT or not; in a mixture that of its experts."""
    kind = MoesaicHierarchy if is_mixture(model) else MoesaicBlock
    return [module for module in model.modules() if isinstance(module, kind)]


def is_mixture(model: Any) -> bool:
    """Whether the model was a mixture before it was converted."""
    return "num_outer" in getattr(model.config, "moesaic", {})


def routers_of(model: Any) -> list[Any]:
    """The routers of all MoE blocks, shared experts' too: with PEFT the trained copies."""
    return list(named_routers(model).values())


def named_routers(model: Any) -> dict[str, Any]:
    """`routers_of` by their layers' numbers."""
    found = {}
    for path, block in model.named_modules():
        if (
            isinstance(block, MoesaicBlock | MoesaicHierarchy)
            and block.router is not None
        ):
            layer = next(part for part in path.split(".") if part.isdigit())
            beside = is_mixture(model) and isinstance(block, MoesaicBlock)
            name = f"{layer}, shared expert" if beside else layer
            found[name] = active_copy(block.router)
    return found


def active_copy(router: Any) -> Any:
    """The router itself, or its trained copy inside PEFT's wrapper."""
    copies = getattr(router, "modules_to_save", None)
    return router if copies is None else copies[NAME]


def neuron_routers_of(model: Any) -> list[Any]:
    """The routers of blocks each of whose neurons is an expert; they count no loads."""
    alone = [module for module in model.modules() if isinstance(module, MoesaicNeurons)]
    return [active_copy(neurons.router) for neurons in alone]


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
    return sorted(
        {
            f"{'.'.join(path.split('.')[-1:])}.router"
            for path, block in model.named_modules()
            if isinstance(block, MoesaicBlock | MoesaicHierarchy | MoesaicNeurons)
            and block.router is not None
        }
    )


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
                factor.lora_A[NAME].weight[:, factor.get_base_layer().neurons :] = 0
    freeze(wrapped, freeze_router)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return wrapped


def freeze(wrapped: Any, freeze_router: bool) -> None:
    """With `freeze_router` only expert_scale of a router is trained. (PEFT thaws it on loading.)"""
    for router in routers_of(wrapped) + neuron_routers_of(wrapped):
        for name, parameter in router.named_parameters():
            parameter.requires_grad_(name == "expert_scale" or not freeze_router)


def learning_rates(model: Any, lora_lr: float, scale_lr: float) -> dict[str, float]:
    """Of every kind of trained weight; some kinds may not be there."""
    routed = getattr(model.config, "moesaic", {}).get("num_routed", 0)
    return {
        "LoRA, routers": lora_lr,
        "LoRA of routed experts": lora_lr / max(routed, 1) ** ROOT,
        "expert_scale": scale_lr,
        "routers with products": PRODUCTS_SHARE * lora_lr,
    }


def parameter_groups(
    model: Any, lora_lr: float, scale_lr: float
) -> list[dict[str, Any]]:
    """The optimizer's groups: one for each of `learning_rates` that has weights to train."""
    experts, slow = set(), set()
    for name, module in model.named_modules():
        if name.endswith(".experts") and hasattr(module, "lora_A"):
            experts |= {id(parameter) for parameter in module.parameters()}
    for router in routers_of(model):
        if router.feature_proj is not None:
            slow |= {id(parameter) for parameter in router.parameters()}
    rates = learning_rates(model, lora_lr, scale_lr)
    groups: list[dict[str, Any]] = [
        {"params": [], "lr": rate} for rate in rates.values()
    ]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            place = 1 if id(parameter) in experts else 3 if id(parameter) in slow else 0
            groups[2 if name.endswith("expert_scale") else place]["params"].append(
                parameter
            )
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
