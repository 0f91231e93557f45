"""One fine-tuning: checks, text, training in DIR.partial, merge, and a folder that is whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from moesaic.calibration.checks import check_vocabulary
from moesaic.conversion.layout_search import HELDOUT_TOKENS
from moesaic.errors import MoesaicError
from moesaic.evaluate.perplexity import perplexity
from moesaic.families.load import load_model, resolve
from moesaic.finetune.balance import Loads, measure_loads, refit_thresholds
from moesaic.finetune.curves import curve_csv, curve_png, loads_png
from moesaic.finetune.distill import Mix
from moesaic.finetune.fold import fold_scale, mean_gates
from moesaic.finetune.lora import (
    blocks_of,
    is_mixture,
    learning_rates,
    neuron_routers_of,
    routers_of,
)
from moesaic.finetune.lora import merge as merge_lora
from moesaic.finetune.model_card import finetune_card
from moesaic.finetune.prepare import Ready, prepare
from moesaic.finetune.report import FinetuneReport
from moesaic.finetune.train import Machine, Settings, gather, train
from moesaic.output import draft as checkpoint
from moesaic.output.atomic import set_usual_permissions
from moesaic.output.model_card import licence_of

FOLD_LOSS = (
    1.001  # perplexity over the unfolded model's up to which the gates are folded
)
LOAD_TOKENS = (
    8192  # of the training text, on which loads, gates and thresholds are measured
)
SHARD_SIZE = "5GB"


def finetune(
    model: str | Path,
    output: str | Path,
    data: Any = None,
    *,
    samples: int = 2048,
    sequence_length: int | None = None,
    epochs: int = 1,
    batch_size: int = 16,
    rank: int = 8,
    alpha: float = 32,
    lora_lr: float | None = None,
    scale_lr: float = 1e-3,
    balance_rate: float = 1e-3,
    distill: str | Path | None = None,
    tune_teacher: bool = False,
    freeze_router: bool = False,
    merge: bool = True,
    micro_batch: int | None = None,
    gradient_checkpointing: bool = False,
    checkpoint_every: int | None = None,
    tensorboard: str | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    overwrite: bool = False,
    resume: bool = False,
    trust_remote_code: bool = False,
    command: str | None = None,
    progress: bool = False,
) -> FinetuneReport:
    """Recovers a converted model's quality by light fine-tuning (paper, Section 4.3).

    LoRA weights of `rank` and `alpha` in attention and experts, the routers (unless frozen) and
    expert_scale are trained by Adam on `samples` windows of `data`, a SOURCE (wikitext2 unless
    given, or demo for what came from the demo model). After every optimiser step the selection
    biases move by `balance_rate` towards equal loads. `distill` names the dense model: its logits
    and FFNs are then imitated as well. With `tune_teacher` it first learns the same windows by
    next-token loss, in memory: it teaches better then, and is the fair reference. `merge` writes a
    model like the one given, otherwise `output` is a PEFT adapter for it. Measures perplexity on
    held-out text and loads before and after; writes the learning curve beside the weights.

    Runs alone or under `accelerate launch`. Raises MoesaicError for bad input, leaving nothing
    behind, and for a loss that stops being finite or a full disk, leaving the checkpoints in
    DIR.partial. Costs about three forward passes per token, four with `distill`, and three of the
    dense model with `tune_teacher`; memory: the model, the dense one with `distill`, and
    activations of `micro_batch` windows.
    """
    started = time.perf_counter()
    target = Path(output).absolute()
    ready = prepare(
        model,
        target,
        data,
        distill=distill,
        tune_teacher=tune_teacher,
        samples=samples,
        sequence_length=sequence_length,
        epochs=epochs,
        batch_size=batch_size,
        rank=rank,
        alpha=alpha,
        lora_lr=lora_lr,
        scale_lr=scale_lr,
        balance_rate=balance_rate,
        freeze_router=freeze_router,
        micro_batch=micro_batch,
        checkpoint_every=checkpoint_every,
        tensorboard=tensorboard,
        seed=seed,
        device=device,
        overwrite=overwrite,
        resume=resume,
        trust_remote_code=trust_remote_code,
    )
    settings = ready.settings
    machine = Machine(
        micro_batch,
        device == "cpu" or not torch.cuda.is_available(),
        gradient_checkpointing,
        tensorboard,
        checkpoint_every,
        progress,
    )
    state = PartialState(cpu=machine.use_cpu)
    loaded = load_model(model, dtype, trust_remote_code)
    if loaded.dtype == torch.float16:
        raise MoesaicError(
            f"{model} is in float16, whose range gradients leave; pass --dtype bfloat16 or float32"
        )
    dense = None if distill is None else load_model(distill, dtype, trust_remote_code)
    if dense is not None:
        ready.check_teacher(loaded, dense)
    report = FinetuneReport(
        model=str(model),
        data=ready.source,
        distill=None if distill is None else str(distill),
        teacher_tuned=tune_teacher,
        settings=settings.to_dict(),
        rates=_rates(loaded, settings),
        merged=merge,
        heldout=ready.heldout,
    )
    check_vocabulary(loaded, ready.windows_NL)
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        loaded.to(state.device)
    length = settings.sequence_length
    if ready.heldout_ids is not None and state.is_main_process:
        report.perplexity_before, report.heldout_tokens = perplexity(
            loaded, ready.heldout_ids, length, HELDOUT_TOKENS
        )
    run = _fingerprint(ready, loaded, report, state.num_processes)
    alone = state.is_main_process
    with (
        checkpoint.open_draft(target, run, resume) if alone else nullcontext(),
        _keeping(),
    ):
        state.wait_for_everyone()
        draft = checkpoint.draft_folder(target)
        with checkpoint.writing(draft, "checkpoints"):
            if tune_teacher:
                dense = _taught(
                    dense, ready, machine, draft / "teacher", resume, report
                )
            trained = train(
                loaded,
                ready.windows_NL,
                settings,
                machine,
                dense,
                draft / "trainer",
                resume,
            )
        if not alone:
            return report
        if trained.sharded is not None:
            gather(trained, load_model(model, dtype, trust_remote_code), settings)
        few = ready.windows_NL[: max(1, LOAD_TOKENS // length)]
        with torch.no_grad():
            refit_thresholds(trained.model, few)
        report.loads(trained.loads_before, after := measure_loads(trained.model, few))
        heldout = (ready.heldout_ids, length)
        folder = draft / "model"
        with checkpoint.writing(draft, "checkpoints"):
            _save(trained.model, folder, merge, ready, report, few, heldout)
            report.seconds = time.perf_counter() - started
            _write_files(
                folder, report, trained.history, trained.loads_before, after, command
            )
            checkpoint.take_name(draft, target)
    return report


def _taught(
    dense: Any,
    ready: Ready,
    machine: Machine,
    folder: Path,
    resume: bool,
    report: FinetuneReport,
) -> Any:
    """The dense model after next-token fine-tuning, by the same settings on the same windows."""
    settings = replace(ready.settings, mix=Mix())
    if (
        machine.tensorboard is not None
    ):  # a run of its own, else its curves mix with the student's
        machine = replace(
            machine, tensorboard=str(Path(machine.tensorboard) / "teacher")
        )
    model = merge_lora(
        train(dense, ready.windows_NL, settings, machine, None, folder, resume).model
    )
    if ready.heldout_ids is not None and PartialState().is_main_process:
        report.teacher_perplexity, _ = perplexity(
            model, ready.heldout_ids, settings.sequence_length, HELDOUT_TOKENS
        )
    return model


@contextmanager
def _keeping() -> Iterator[None]:
    """What goes wrong after training has begun costs no checkpoint."""
    try:
        yield
    except checkpoint.UnfinishedError:
        raise
    except MoesaicError as error:
        raise checkpoint.UnfinishedError(str(error)) from error


def _save(
    wrapped: Any,
    folder: Path,
    merge: bool,
    ready: Ready,
    report: FinetuneReport,
    few_NL: torch.Tensor,
    heldout: tuple[torch.Tensor | None, int],
) -> None:
    """Writes the adapter, or the merged model with its gates folded where that costs little."""

    def measured(model: Any) -> float | None:
        ids, length = heldout
        return (
            None
            if ids is None
            else perplexity(model.eval(), ids, length, HELDOUT_TOKENS)[0]
        )

    # A killed run may have begun to write it; a draft without this folder would be none.
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    wrapped.config.use_cache = True
    if not merge:
        report.perplexity = measured(wrapped)
        wrapped.save_pretrained(folder)
        if ready.tokenizer is not None:
            ready.tokenizer.save_pretrained(folder)
        return
    model = merge_lora(wrapped)
    report.perplexity = measured(model)
    router = model.config.moesaic["router"]
    stock = (router["kind"], router["gating"]) == ("linear", "topk") and not is_mixture(
        model
    )
    if (
        routers_of(model) and stock
    ):  # an architecture that holds its experts, but no gates
        scales = [router.expert_scale.clone() for router in routers_of(model)]
        downs = [block.experts.down_proj.clone() for block in _routed(model)]
        fold_scale(model, mean_gates(model, few_NL))
        report.folded_perplexity = measured(model)
        whole, folded = report.perplexity, report.folded_perplexity
        report.folded = whole is None or folded is None or folded <= FOLD_LOSS * whole
        if not report.folded:
            for block, scale_R, down in zip(_routed(model), scales, downs, strict=True):
                block.router.expert_scale.data.copy_(scale_R)
                block.experts.down_proj.data.copy_(down)
    model.config.moesaic["finetune"] = report.recipe()
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    if ready.tokenizer is not None:
        ready.tokenizer.save_pretrained(folder)


def _rates(model: Any, settings: Settings) -> dict[str, float]:
    """Learning rates, as far as the model has such weights."""
    rates = learning_rates(model, settings.lora_lr, settings.scale_lr)
    kinds = 1 if neuron_routers_of(model) else len(rates)
    return dict(list(rates.items())[:kinds])


def _routed(model: Any) -> list[Any]:
    return [block for block in blocks_of(model) if block.router is not None]


def _write_files(
    folder: Path,
    report: FinetuneReport,
    history: list[dict[str, float]],
    before: Loads | None,
    after: Loads | None,
    command: str | None,
) -> None:
    (folder / "learning_curve.csv").write_text(curve_csv(history), "utf-8")
    (folder / "learning_curve.png").write_bytes(curve_png(history))
    if before is not None and after is not None:
        (folder / "loads.png").write_bytes(loads_png(before, after))
    text = json.dumps(report.to_dict(), indent=2) + "\n"
    (folder / "moesaic_finetune.json").write_text(text, "utf-8")
    (folder / "README.md").write_text(
        finetune_card(report, licence_of(resolve(report.model)), command), "utf-8"
    )
    for path in folder.iterdir():
        if path.is_file():
            set_usual_permissions(path)


def _fingerprint(
    ready: Ready, model: Any, report: FinetuneReport, processes: int
) -> dict[str, Any]:
    """What must be equal for checkpoints to be worth going on with."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(
            tensor.detach().float().sum(dtype=torch.double).cpu().numpy().tobytes()
        )
    windows = hashlib.sha256(ready.windows_NL.numpy().tobytes()).hexdigest()
    return {
        "model": report.model,
        "weights": digest.hexdigest(),
        "distill": report.distill,
        "tune_teacher": report.teacher_tuned,
        "settings": json.loads(json.dumps(asdict(ready.settings))),
        "merge": report.merged,
        "training tokens": windows,
        "dtype": str(model.dtype).removeprefix("torch."),
        "processes": processes,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
    }
