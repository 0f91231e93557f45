"""How long training will take, by one forward pass over a little of the text.

And, before a model is read, how long a conversion and training will, by one product.

Shape suffixes: N windows, L tokens of one; T tokens, D hidden_size, F = 4 D neurons.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from moesaic.conversion.prepare import Prepared
from moesaic.families.load import choose_device, choose_dtype
from moesaic.finetune.masked import masked
from moesaic.finetune.prepare import TrainingInput
from moesaic.finetune.train import computes_again
from moesaic.parts.products import widened_products
from moesaic.progress import duration

PROBE_TOKENS = 1024
STUDENT_PASSES = 3.0  # its forward pass, and back as long as twice that
TEACHER_PASSES = 1.0
# Over the calibration tokens: from `cmoe` to trials for layer budgets (docs/method.md).
CONVERSION_PASSES = (2.0, 8.0)
# A forward pass over the time of its products alone: 1.6 of SmolLM2 on a CPU, 2.2 of demo.
PASS_OVER_PRODUCTS = 2.0
TIMED_TOKENS = 512
TIMED_ROUNDS = 5


def training_seconds(
    student: Any, inputs: TrainingInput, processes: int
) -> float:
    """Of all steps; measuring and saving come on top. Costs two forward passes."""
    settings = inputs.settings
    probe = max(1, PROBE_TOKENS // settings.sequence_length)
    windows_NL = inputs.windows_NL[:probe]
    with masked(student):
        _seconds(student, windows_NL)  # the first pass takes longer
        seconds = _seconds(student, windows_NL)
    trained = STUDENT_PASSES
    if computes_again(settings, inputs.options.machine()):
        trained += 1
    passes = trained
    if inputs.teacher is not None:
        passes += TEACHER_PASSES
    if inputs.options.tune_teacher:
        passes += trained
    of_a_token = seconds / windows_NL.numel()
    tokens = inputs.windows_NL.numel() * settings.epochs
    return passes * of_a_token * tokens / processes


def outlook(prepared: Prepared, tokens: int, dense_first: bool) -> str:
    """How long a conversion and the training after it will take, in words.

    From counted multiply-accumulates and the time of one product as wide as the model:
    right to a factor of about two. Costs some products of TIMED_TOKENS tokens.
    """
    plan = prepared.plans[0]
    config = plan.dense_config.get_text_config()
    device = choose_device(prepared.options.device)
    rate = product_rate(config.hidden_size, _dtype(prepared), device)
    pass_of_a_token = PASS_OVER_PRODUCTS * plan.dense_macs.total / rate
    calibrated = prepared.windows_NL.numel()
    fewest, most = (
        duration(passes * calibrated * pass_of_a_token)
        for passes in CONVERSION_PASSES
    )
    converted = fewest
    if most != fewest:
        converted = f"{fewest} to {most} by method"
    passes = STUDENT_PASSES + TEACHER_PASSES
    if dense_first:
        passes += STUDENT_PASSES
    trained = passes * tokens * pass_of_a_token
    return (
        f"by this machine's speed in products, conversion: {converted}; "
        f"training: {duration(trained)}"
    )


def _dtype(prepared: Prepared) -> torch.dtype:
    dtype = choose_dtype(prepared.options.dtype)
    if dtype == "auto":
        dtype = prepared.plans[0].dense_config.dtype
    return dtype or torch.float32


@torch.no_grad()
def product_rate(
    hidden_size: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Multiply-accumulates in a second of a product as FFNs have them."""
    neurons = 4 * hidden_size
    x_TD = torch.ones(TIMED_TOKENS, hidden_size, dtype=dtype, device=device)
    w_FD = torch.ones(neurons, hidden_size, dtype=dtype, device=device)
    seconds = []
    with widened_products(dtype, device):
        for _ in range(TIMED_ROUNDS):
            started = time.perf_counter()
            h_TF = linear(x_TD, w_FD)
            h_TF[0, 0].item()  # waits for a GPU
            seconds.append(time.perf_counter() - started)
    return x_TD.numel() * neurons / statistics.median(seconds)


@torch.no_grad()
def _seconds(model: Any, windows_NL: Tensor) -> float:
    """Of one forward pass."""
    device = model.get_input_embeddings().weight.device
    started = time.perf_counter()
    logits = model(input_ids=windows_NL.to(device), use_cache=False).logits
    logits[0, 0, 0].item()  # waits for a GPU
    return time.perf_counter() - started
