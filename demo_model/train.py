"""Trains the embedded demo model: a SwiGLU Llama of about 3 million parameters.

    python demo_model/train.py --output build/demo_model          # again to resume

The text is the running CPython's standard library (moesaic.demo), split by whole modules: train
for the gradient, calibration for the curve, heldout only for the number in the model card. The
state is kept in safetensors and each batch is a function of (seed, step), so a killed run goes on
with exactly the batches it would have seen.
"""

from __future__ import annotations

import csv
import math
import platform
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from moesaic.demo import demo_documents

END = "<|endoftext|>"
CONTEXT = 512


def train_tokenizer(
    documents: list[str], vocab_size: int
) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that every text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        bos_token=END,
        model_max_length=CONTEXT,
    )


def encode(
    tokenizer: PreTrainedTokenizerFast, documents: list[str]
) -> torch.Tensor:
    """All documents in one row of token ids, each closed by the end token."""
    ids: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(documents):
        ids += [*encoding.ids, tokenizer.eos_token_id]
    return torch.tensor(ids)


def batch_of(
    ids: torch.Tensor, size: int, seed: int, step: int
) -> torch.Tensor:
    """Random windows: a function of seed and step alone, so a resumed run repeats nothing."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(ids) - CONTEXT, (size,), generator=generator)
    return ids[starts[:, None] + torch.arange(CONTEXT)]


@torch.no_grad()
def mean_loss(
    model: LlamaForCausalLM, ids: torch.Tensor, max_tokens: int
) -> float:
    """Nats per predicted token over consecutive windows from the start of the text."""
    model.eval()
    usable = min(len(ids), max_tokens) // CONTEXT * CONTEXT
    windows = ids[:usable].view(-1, CONTEXT)
    losses = [
        model(input_ids=w, labels=w).loss.item() for w in windows.split(16)
    ]
    sizes = [len(w) for w in windows.split(16)]
    model.train()
    return sum(a * b for a, b in zip(losses, sizes, strict=True)) / sum(sizes)


def save_state(
    path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW, step: int
) -> None:
    """Model, Adam moments and step in one safetensors file, replaced atomically."""
    tensors = {f"model.{k}": v for k, v in model.named_parameters()}
    for name, parameter in model.named_parameters():
        moments = optimizer.state[parameter]
        tensors[f"exp_avg.{name}"] = moments["exp_avg"]
        tensors[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
    draft = path.with_suffix(".part")
    save_file(
        {k: v.detach().contiguous() for k, v in tensors.items()},
        draft,
        {"step": str(step)},
    )
    draft.rename(path)


def load_state(
    path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW
) -> int:
    from safetensors import safe_open

    tensors = load_file(path)
    with safe_open(path, "pt") as handle:
        step = int(handle.metadata()["step"])
    for name, parameter in model.named_parameters():
        parameter.data.copy_(tensors[f"model.{name}"])
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step)),
            "exp_avg": tensors[f"exp_avg.{name}"],
            "exp_avg_sq": tensors[f"exp_avg_sq.{name}"],
        }
    return step


def plot_curve(curve: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    with curve.open() as file:
        rows = [
            {k: float(v) for k, v in row.items()}
            for row in csv.DictReader(file)
        ]
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    tokens = [row["tokens"] / 1e6 for row in rows]
    axis.plot(
        tokens,
        [row["train_loss"] for row in rows],
        label="train (running mean)",
    )
    axis.plot(
        tokens,
        [row["calibration_loss"] for row in rows],
        label="calibration modules",
    )
    axis.set(
        xlabel="training tokens (millions)", ylabel="loss (nats per token)"
    )
    axis.set_title("Demo model: learning curve")
    axis.legend()
    figure.savefig(picture, dpi=120)


def main(
    output: Annotated[
        Path,
        typer.Option(help="Folder for the state, the curve and the model."),
    ],
    steps: Annotated[int, typer.Option()] = 3600,
    batch: Annotated[
        int, typer.Option(help="Windows of 512 tokens a step.")
    ] = 8,
    lr: Annotated[float, typer.Option()] = 3e-3,
    weight_decay: Annotated[float, typer.Option()] = 0.1,
    seed: Annotated[int, typer.Option()] = 0,
    vocab_size: Annotated[int, typer.Option()] = 4096,
    every: Annotated[
        int, typer.Option(help="Steps between points of the curve.")
    ] = 200,
    threads: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train, or go on with a killed run; the finished model lies in OUTPUT/model."""
    if threads:
        torch.set_num_threads(threads)
    output.mkdir(parents=True, exist_ok=True)
    train_documents = demo_documents("train")
    tokenizer_path = output / "tokenizer"
    if tokenizer_path.exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_path)
    else:
        tokenizer = train_tokenizer(train_documents, vocab_size)
        tokenizer.save_pretrained(tokenizer_path)
    train, calibration, heldout = (
        encode(tokenizer, documents)
        for documents in (
            train_documents,
            demo_documents("calibration"),
            demo_documents("heldout"),
        )
    )
    typer.echo(f"tokens: train {len(train):,}, calibration {len(calibration):,}, "
               f"heldout {len(heldout):,}")  # fmt: skip

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=192, intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=3, num_key_value_heads=1, head_dim=64, max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, rms_norm_eps=1e-5, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
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
        curve.write_text("step,tokens,train_loss,calibration_loss\n")

    running = math.nan
    for step in track(range(first, steps), description="training"):
        warm = min(1.0, (step + 1) / 200)
        for group in optimizer.param_groups:
            group["lr"] = lr * warm * (1 - step / steps)
        ids = batch_of(train, batch, seed, step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running = (
            loss.item()
            if math.isnan(running)
            else 0.98 * running + 0.02 * loss.item()
        )
        if (step + 1) % every == 0 or step + 1 == steps:
            now = mean_loss(model, calibration, 65536)
            typer.echo(
                f"step {step + 1}: train {running:.4f}, calibration {now:.4f}"
            )
            with curve.open("a") as file:
                file.write(
                    f"{step + 1},{(step + 1) * batch * CONTEXT},{running:.4f},{now:.4f}\n"
                )
            save_state(state, model, optimizer, step + 1)

    model = model.to(torch.bfloat16)
    model.save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")
    perplexity = math.exp(mean_loss(model.float(), heldout, len(heldout)))
    plot_curve(curve, output / "model" / "curve.png")
    (output / "model" / "curve.csv").write_text(curve.read_text())
    typer.echo(f"held-out perplexity {perplexity:.3f} per token (windows of {CONTEXT}, fp32 "
               f"arithmetic on bf16 weights, CPython {platform.python_version()})")  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
