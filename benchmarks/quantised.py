"""Skipping neurons and fewer bits a weight: each alone, and both.

    python benchmarks/quantised.py MODEL --calibration TEXT --text TEXT [--samples 64]
        [--sequence-length 256] [--tokens 16384] [--up-steps 4]

Prints perplexity over the dense model's against the bytes that the FFNs read for one token. Fewer
bits are GPTQ's for the dense FFNs (groups of 64 inputs, a scale in the model's number format,
fitted on the calibration text), and each weight's nearest for experts. Attention and the head stay
as they are. A text is a file. Where both are the same file its last tenth is what is measured on.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import moesaic
from moesaic.calibration.text import read_documents
from moesaic.evaluate.weight_bytes import count_bytes
from moesaic.modeling import GROUP, MoesaicExperts, MoesaicLinearRouter
from moesaic.parts.copies import LowBits, low_bits, nearest_bits

DENSE_BITS = (8, 6, 5, 4, 3)
EXPERT_BITS = (8, 4)
SKIPPED = (0.25, 0.5)
# Sparsities of neurons chosen one by one: with the model's own weights, and in 8 bits.
OWN_SKIPPED = (0.2, 0.35, 0.5)
INT8_SKIPPED = (0.0, 0.2, 0.35, 0.5, 0.65)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--up-steps", type=int, default=4)
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    length = options.sequence_length
    fitted = _ids(tokenizer, options.calibration)
    fitted_NL = fitted[: options.samples * length].view(options.samples, length)
    text = _ids(tokenizer, options.text)
    if options.text == options.calibration:
        text = text[len(text) * 9 // 10 :]

    def evaluated(model: Any) -> float:
        return moesaic.perplexity(model, text, length, options.tokens)[0]

    dense = _load(options.model)
    dense_bytes = count_bytes(dense).ffn
    own_bits = 8 * next(dense.parameters()).element_size()
    dense_perplexity = evaluated(dense)
    print(
        f"dense: {dense_perplexity:.4f}\n\n| | FFN bytes | over dense |\n|---|---|---|"
    )

    def row(what: str, model: Any, share: float) -> None:
        ratio = evaluated(model) / dense_perplexity
        print(f"| {what} | {share:.3f} | {ratio:.4f} |", flush=True)

    for bits in DENSE_BITS:
        model = _load(options.model)
        quantise_dense(model, fitted_NL, bits)
        row(
            f"dense FFNs in {bits} bits",
            model,
            stored_bits(bits, own_bits) / own_bits,
        )

    def converted(
        method: str, settings: dict[str, object], sparsity: float
    ) -> Any:
        # Nothing skipped is a layout of its own: as many neurons as there are.
        neurons = dense.config.intermediate_size
        budget: dict[str, Any] = {"sparsity": sparsity}
        if sparsity == 0:
            budget = {"layout": f"S0A{neurons}E{neurons}"}
        model, _ = moesaic.convert(
            options.model,
            method,
            settings=settings,
            calibration=fitted_NL,
            **budget,
        )
        return model

    rounds = {"up_steps": options.up_steps}
    for sparsity in OWN_SKIPPED:
        model = converted("moesaic-neurons", rounds, sparsity)
        share = count_bytes(model).ffn / dense_bytes
        row(f"moesaic-neurons, {sparsity:.0%} skipped", model, share)
    for exact in (0.25, 1.0):
        for sparsity in INT8_SKIPPED:
            settings = {**rounds, "weights": "int8", "exact": exact}
            model = converted("moesaic-neurons", settings, sparsity)
            share = count_bytes(model).ffn / dense_bytes
            what = f"moesaic-neurons in 8 bits, exact {exact}, {sparsity:.0%} skipped"
            row(what, model, share)
    for sparsity in SKIPPED:
        model = converted("moesaic", {}, sparsity)
        share = count_bytes(model).ffn / dense_bytes
        row(f"moesaic, {sparsity:.0%} skipped", model, share)
        routers = router_bytes(model) / dense_bytes  # which keep their bits
        for bits in EXPERT_BITS:
            # In turn on the same model: 4 bits of 8 are as good as 4 bits.
            quantise_experts(model, bits)
            of_experts = stored_bits(bits, own_bits) / own_bits
            smaller = routers + (share - routers) * of_experts
            row(f"the same in {bits} bits", model, smaller)


def _ids(tokenizer: Any, source: str) -> Tensor:
    text = "\n\n".join(read_documents(source))
    ids: Tensor = tokenizer(text, return_tensors="pt", verbose=False)[
        "input_ids"
    ][0]
    return ids


def _load(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()


def router_bytes(model: Any) -> int:
    total = 0
    for module in model.modules():
        if isinstance(module, MoesaicLinearRouter):
            total += sum(weight.nbytes for weight in module.parameters())
    return total


def stored_bits(bits: int, scale_bits: int) -> float:
    """Bits of a weight, its part of a scale included."""
    return bits + scale_bits / GROUP


@torch.no_grad()
def quantise_dense(model: Any, ids_NL: Tensor, bits: int) -> None:
    """Every linear layer of the FFNs by GPTQ, fitted to the inputs of the dense model."""
    grams: dict[nn.Linear, Tensor] = {}

    def add(linear: Any, inputs: tuple[Tensor, ...]) -> None:
        x_TI = inputs[0].flatten(0, -2).float()
        grams[linear] = grams.get(linear, torch.zeros(())) + x_TI.T @ x_TI

    linears = [
        module
        for path, module in model.named_modules()
        if "mlp" in path.split(".") and isinstance(module, nn.Linear)
    ]
    handles = [linear.register_forward_pre_hook(add) for linear in linears]
    for ids_BL in ids_NL.split(4):
        model(input_ids=ids_BL, use_cache=False, logits_to_keep=1)
    for handle in handles:
        handle.remove()
    for linear in linears:
        weight = linear.weight
        few = low_bits(weight, grams.pop(linear), bits, weight.dtype)
        weight.copy_(_restored(few, weight))


@torch.no_grad()
def quantise_experts(model: Any, bits: int) -> None:
    """Every weight of shared and routed experts to the nearest multiple of its scale."""
    for path, module in model.named_modules():
        if isinstance(module, MoesaicExperts):
            for parameter in module.parameters():
                if parameter.ndim == 3:
                    rows = parameter.flatten(0, 1)
                    few = nearest_bits(rows, bits, rows.dtype)
                    parameter.copy_(_restored(few, rows).view_as(parameter))
        elif "shared_expert" in path and isinstance(module, nn.Linear):
            few = nearest_bits(module.weight, bits, module.weight.dtype)
            module.weight.copy_(_restored(few, module.weight))


def _restored(few: LowBits, weight_RI: Tensor) -> Tensor:
    scale_RI = few.scale_RG.float().repeat_interleave(GROUP, dim=1)
    return few.code_RI * scale_RI[:, : weight_RI.shape[1]]


if __name__ == "__main__":
    main()
