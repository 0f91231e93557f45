"""Trains a small mixture of experts: the demo model upcycled to 8 experts, top-2, trained on.

    python demo_model/train_moe.py --output build/moe      # again to resume

The demo's FFN of 768 neurons becomes 8 experts of 152: the 64 neurons that matter most, which every
expert gets a copy of, and 88 of its own, grouped by contribution, their output doubled since two
gates share a weight of 1. The outer router starts as the linear router of those experts. All of it
is then trained on the demo's text (whole modules; nothing of the calibration or held-out ones) with
Mixtral's load-balance loss. 4.0 M parameters, 8.0 MB in bf16; the result lies in OUTPUT/model and
is no part of the repository. A killed run goes on with the batches it would have seen.
"""

from __future__ import annotations

import math
import platform
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from train import CONTEXT, batch_of, encode, load_state, mean_loss, save_state
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MixtralConfig,
    MixtralForCausalLM,
)

from moesaic.calibration.calibration_set import Split
from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.calibration.hidden_states import Stream
from moesaic.demo import demo_documents, demo_path
from moesaic.families import find_ffns
from moesaic.methods.load import load_method
from moesaic.modeling import Sizes
from moesaic.parts.energies import expert_energies, expert_grams
from moesaic.parts.ridge_router import fit_linear_router

EXPERTS, ACTIVE, COMMON, OWN = 8, 2, 64, 88
GATE_SPREAD = (
    0.5  # standard deviation of the outer router's logits at the start
)


def upcycle(dense: Any, ids_NL: torch.Tensor) -> MixtralForCausalLM:
    """The demo model with every FFN shared out to experts; runs 2 of 8 of them for a token."""
    kept = {
        k: v
        for k, v in dense.config.to_dict().items()
        if k in MixtralConfig().to_dict()
    }
    config = MixtralConfig(
        **(kept | {"model_type": "mixtral", "architectures": None}
           | {"intermediate_size": COMMON + OWN, "num_local_experts": EXPERTS,
              "num_experts_per_tok": ACTIVE, "sliding_window": None, "router_aux_loss_coef": 0.02})
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    rest = {k: v for k, v in dense.state_dict().items() if ".mlp." not in k}
    missing, unexpected = model.load_state_dict(rest, strict=False)
    assert not unexpected
    assert all(".mlp." in name for name in missing)
    ffns = find_ffns(dense)
    stream = Stream(ffns, ids_NL, torch.device("cpu"))
    sizes = Sizes(
        shared=COMMON, expert=OWN, num_routed=EXPERTS, num_active=ACTIVE
    )
    method: Any = load_method("moesaic")
    for layer in range(len(ffns.layers)):
        ffn = ffns.read(layer)
        x_TD = torch.cat(list(stream.ffn_inputs(layer)))
        split = Split(len(x_TD), len(x_TD))
        inputs = FFNInputs([x_TD], split, False, x_TD.device, x_TD.device)
        fit = method.begin(ffn, inputs, sizes, np.random.default_rng(layer))
        parts = method.partition(fit)
        experts_RM = torch.from_numpy(parts.experts_RM)
        energy_TR = expert_energies(
            ffn.hidden(x_TD), experts_RM, expert_grams(ffn, experts_RM)
        )
        router_RD = fit_linear_router(
            lambda x_TD=x_TD: [x_TD], energy_TR, absolute=False
        )
        router_RD *= GATE_SPREAD / (x_TD @ router_RD.T).std(dim=1).mean()
        mlp: Any = model.model.layers[layer].mlp
        mlp.gate.weight.data.copy_(router_RD)
        assert ffn.gate_FD is not None
        common = torch.from_numpy(parts.shared_S)
        for expert, own in enumerate(experts_RM):
            rows = torch.cat([common, own])
            gate_up = torch.cat([ffn.gate_FD[rows], ffn.up_FD[rows]])
            mlp.experts.gate_up_proj.data[expert] = gate_up
            down_DF = ffn.down_DF[:, rows].clone()
            down_DF[:, COMMON:] *= ACTIVE
            mlp.experts.down_proj.data[expert] = down_DF
        stream.advance(layer, [x_TD])
    return model


def main(
    output: Annotated[
        Path,
        typer.Option(help="Folder for the state, the curve and the model."),
    ],
    steps: Annotated[int, typer.Option()] = 1200,
    batch: Annotated[
        int, typer.Option(help="Windows of 512 tokens a step.")
    ] = 8,
    lr: Annotated[float, typer.Option()] = 1e-3,
    weight_decay: Annotated[float, typer.Option()] = 0.1,
    seed: Annotated[int, typer.Option()] = 1,
    every: Annotated[
        int, typer.Option(help="Steps between points of the curve.")
    ] = 100,
    stop_after: Annotated[
        float, typer.Option(help="Minutes; then it ends as if killed.")
    ] = 1e9,
) -> None:
    """Train, or go on with a killed run; every point of the curve writes OUTPUT/model."""
    began = time.perf_counter()
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    train, calibration, heldout = (
        encode(tokenizer, demo_documents(split))
        for split in ("train", "calibration", "heldout")
    )
    torch.manual_seed(seed)
    dense = AutoModelForCausalLM.from_pretrained(
        demo_path(), dtype=torch.float32
    ).eval()
    model = upcycle(dense, batch_of(train, 32, seed, 0))
    model.set_experts_implementation(
        "eager"
    )  # under autocast in bf16; grouped_mm is in fp32
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0},
        ],
        lr=lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    state, curve = output / "state.safetensors", output / "curve.csv"
    first = load_state(state, model, optimizer) if state.exists() else 0
    if first == 0:
        start = mean_loss(model, calibration, 65536)
        typer.echo(f"dense: calibration {mean_loss(dense, calibration, 65536):.4f}; "
                   f"upcycled, untrained: {start:.4f}")  # fmt: skip
        curve.write_text(
            f"step,tokens,train_loss,calibration_loss\n0,0,,{start:.4f}\n"
        )
    running = math.nan
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 100) * (1 - step / steps)
        ids = batch_of(train, batch, seed, step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(
                input_ids=ids, labels=ids, output_router_logits=True
            ).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running = (
            loss.item()
            if math.isnan(running)
            else 0.98 * running + 0.02 * loss.item()
        )
        late = time.perf_counter() - began > 60 * stop_after
        if (step + 1) % every == 0 or step + 1 == steps or late:
            now = mean_loss(model, calibration, 65536)
            typer.echo(f"step {step + 1}: train with balance loss {running:.4f}, "
                       f"calibration {now:.4f}, {time.perf_counter() - began:.0f} s")  # fmt: skip
            with curve.open("a") as file:
                file.write(
                    f"{step + 1},{(step + 1) * batch * CONTEXT},{running:.4f},{now:.4f}\n"
                )
            save_state(state, model, optimizer, step + 1)
            _save(model, tokenizer, output / "model")
        if late:
            return
    rounded = AutoModelForCausalLM.from_pretrained(
        output / "model", dtype=torch.float32
    )
    perplexity = math.exp(mean_loss(rounded, heldout, len(heldout)))
    typer.echo(f"held-out perplexity {perplexity:.3f} per token (windows of {CONTEXT}, fp32 "
               f"arithmetic on bf16 weights, CPython {platform.python_version()})")  # fmt: skip


def _save(model: MixtralForCausalLM, tokenizer: Any, folder: Path) -> None:
    """The model so far, in bf16; the one being trained stays as it is."""
    state = {k: v.to(torch.bfloat16) for k, v in model.state_dict().items()}
    with torch.device("meta"):
        copy = MixtralForCausalLM(model.config)
    copy.load_state_dict(state, assign=True)
    copy.tie_weights()
    copy.config.dtype = torch.bfloat16
    copy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    typer.run(main)
