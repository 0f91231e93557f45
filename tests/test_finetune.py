"""Fine-tuning: what is trained, what is saved, and what a crash leaves."""

from __future__ import annotations

import copy
import csv
import errno
import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import moesaic
from moesaic.calibration.checks import checksum
from moesaic.cli import main as cli
from moesaic.errors import MoesaicError
from moesaic.evaluate.work import meta_model
from moesaic.families.load import load_model
from moesaic.finetune import checks as checks_module
from moesaic.finetune import prepare as prepare_module
from moesaic.finetune import run as run_module
from moesaic.finetune import save as save_module
from moesaic.finetune import train as train_module
from moesaic.finetune.balance import measure_loads
from moesaic.finetune.defaults import usual_rate
from moesaic.finetune.fold import fold_scale, mean_gates
from moesaic.finetune.in_memory import plan_recovery
from moesaic.finetune.lora import (
    blocks_of,
    checkpoint_bytes,
    merge,
    parameter_groups,
    rates_that_apply,
    routers_of,
    weights_of_lora,
    wrap,
)
from moesaic.finetune.masked import masked, straight_through
from moesaic.finetune.options import FinetuneOptions, Machine, Mix, Settings
from moesaic.finetune.prepare import draw_windows, prepare
from moesaic.finetune.train import (
    RecoveryTrainer,
    Trained,
    gather,
    last_checkpoint,
    train,
    without_dropout,
)
from moesaic.modeling import MoesaicQuadraticRouter
from moesaic.output import draft as checkpoint
from tests.families import CONTEXT, tiny_model, tokens
from tests.stock_models import converted_folder, dense_model, tokenizer

TEXT = "the cat sat in a hat and the rat in a bin. a dog ran on the mat, the sun is hot. " * 150
CPU = Machine(use_cpu=True)
IDS = tokens(4, CONTEXT, seed=5)


def converted(family: str = "qwen3", recipe: str = "moesaic", layout: str = "S2A3E8") -> Any:
    more = {"layer_budgets": "uniform"} if recipe == "moesaic-dynamic" else None
    windows = tokens(8, CONTEXT, seed=1)
    model, _ = moesaic.convert(tiny_model(family), recipe, layout, windows, settings=more)
    return model


def settings(**changes: Any) -> Settings:
    values = {"samples": 32, "sequence_length": CONTEXT, "batch_size": 8, "lora_lr": 3e-3}
    return Settings(**values | changes)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


# --- what is trained ---------------------------------------------------------------------------


def test_wrapping_changes_nothing_and_trains_all_it_should() -> None:
    model = converted()
    before = logits(model)
    wrapped = wrap(model, 4, 8, freeze_router=False)
    # Wrapped experts gather tokens where the others compute all under a mask.
    torch.testing.assert_close(logits(wrapped), before, rtol=1e-5, atol=1e-5)
    trained = {name for name, p in wrapped.named_parameters() if p.requires_grad}
    for part in ("q_proj", "o_proj", "shared_expert.up_proj", "experts", "expert_scale"):
        assert sum(part in name for name in trained) >= 3, part  # of three layers
    assert any("score_proj" in name for name in trained)
    assert all("lora_" in n or "router.modules_to_save" in n for n in trained)
    assert not any("head" in name or "embed" in name for name in trained)
    others, experts, scales = parameter_groups(wrapped, 1.0, 2.0)
    assert (others["lr"], experts["lr"], scales["lr"]) == (1.0, pytest.approx(6**-0.25), 2.0)
    assert len(experts["params"]) == 3 * 4  # A and B of gate_up_proj and of down_proj
    assert len(scales["params"]) == 3
    assert len(others["params"]) + 15 == len(trained)


def test_what_inference_stored_by_columns_is_stored_by_rows_again() -> None:
    """FSDP takes no other; our kernel on a CPU turns W_down round."""
    model = converted()
    turned = [p for name, p in model.named_parameters() if "experts.down_proj" in name]
    for parameter in turned:
        parameter.data = parameter.data.mT.contiguous().mT
    before = logits(model)
    assert turned
    assert not any(parameter.is_contiguous() for parameter in turned)
    wrapped = wrap(model, 4, 8, freeze_router=False)
    assert all(parameter.is_contiguous() for parameter in wrapped.parameters())
    torch.testing.assert_close(logits(wrapped), before, rtol=1e-5, atol=1e-5)


def test_routers_with_products_learn_slowly() -> None:
    wrapped = wrap(converted(recipe="moesaic-dynamic"), 4, 8, freeze_router=False)
    others, experts, scales, routers = parameter_groups(wrapped, 1.0, 2.0)
    assert (others["lr"], scales["lr"], routers["lr"]) == (1.0, 2.0, 0.1)
    assert MoesaicQuadraticRouter.rate_share == 0.1
    assert len(routers["params"]) == 3 * 3, "score_proj, and weight and bias of feature_proj"
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    groups = (others, experts, scales, routers)
    assert sum(len(group["params"]) for group in groups) == len(trained)


def test_a_frozen_router_still_learns_its_scale() -> None:
    wrapped = wrap(converted(), 4, 8, freeze_router=True)
    trained = {name for name, p in wrapped.named_parameters() if p.requires_grad}
    in_routers = {name for name in trained if "router" in name}
    assert len(in_routers) == 3
    assert all(name.endswith("expert_scale") for name in in_routers)


@pytest.mark.parametrize("recipe", ["moesaic", "cmoe"])
def test_the_scale_moves_and_lowers_the_loss(recipe: str) -> None:
    """With everything else held still: LoRA and routers at a rate that rounds to nothing."""
    model, windows = converted(recipe=recipe), tokens(64, CONTEXT, seed=2)
    with torch.no_grad():
        before = float(model(input_ids=windows, labels=windows).loss)
    alone = settings(samples=64, lora_lr=1e-20, scale_lr=0.3, balance_rate=0, epochs=2)
    done = train(model, windows, alone, CPU)
    assert all(router.expert_scale.abs().max() > 0.1 for router in routers_of(done.model))
    with torch.no_grad():
        after = float(done.model.eval()(input_ids=windows, labels=windows).loss)
    assert after < before - 0.01


@pytest.mark.parametrize(
    ("family", "recipe"),
    [("llama", "moesaic"), ("gpt2", "cmoe"), ("opt", "moesaic"), ("phi3", "moesaic-dynamic"),
     ("gemma2", "moesaic"), ("qwen2", "static")],
)  # fmt: skip
def test_merging_keeps_the_function_and_the_padding_silent(family: str, recipe: str) -> None:
    """Experts of 6 neurons are stored as 8; without a gate a padded neuron could come alive."""
    model = converted(family, recipe)
    done = train(model, tokens(32, CONTEXT, seed=2), settings(lora_lr=3e-2), CPU)
    before, padding = logits(done.model), None
    merged = merge(done.model)
    assert type(merged).__name__ == "MoesaicForCausalLM"
    torch.testing.assert_close(logits(merged), before, rtol=1e-4, atol=1e-4)
    for block in blocks_of(merged):
        if block.experts is not None:
            padding = block.experts.down_proj[:, :, 6:]
            stacked = getattr(block.experts, "gate_up_proj", None)
            stacked = block.experts.up_proj if stacked is None else stacked
            rows = stacked.unflatten(1, (-1, 8))[:, :, 6:]
            assert padding.abs().max() == 0
            assert rows.abs().max() == 0
    assert not any("lora" in name for name in merged.state_dict())


def test_a_dense_model_trains_by_the_same_function() -> None:
    """The fair reference; its FFNs get LoRA weights as well."""
    windows = tokens(4, CONTEXT, seed=2).repeat(16, 1)
    done = train(tiny_model("llama"), windows, settings(samples=64), CPU)
    assert done.loads_before is None
    assert done.history[-1]["loss"] < done.history[0]["loss"] - 0.1
    assert any("mlp.down_proj.lora_A" in name for name, _ in done.model.named_parameters())


def test_accumulation_and_checkpointing_change_rounding_only() -> None:
    """One step of 8 windows at once, as 4 times 2, and with activations computed again.

    Where two experts nearly tie, rounding lets the other one run after some steps.
    """
    found = []
    for machine in (
        Machine(micro_batch=8, use_cpu=True),
        Machine(micro_batch=2, use_cpu=True),
        Machine(micro_batch=8, use_cpu=True, gradient_checkpointing=True),
    ):
        mix = settings(mix=Mix(1, 1, 1))
        dense = tiny_model("qwen3")
        found.append(train(converted(), tokens(32, CONTEXT, seed=2), mix, machine, dense))
    assert len(found[0].history) == 4
    for router in routers_of(found[0].model):  # what counted loads is gone
        assert not router._forward_hooks
    for other in found[1:]:
        for one, two in zip(found[0].history, other.history, strict=True):
            for name in ("loss", "lm", "logits", "ffn"):
                assert two[name] == pytest.approx(one[name], rel=1e-3)
        for one, two in zip(routers_of(found[0].model), routers_of(other.model), strict=True):
            torch.testing.assert_close(one.selection_bias, two.selection_bias)


def test_shards_are_gathered_around_a_model_loaded_anew(tmp_path: Path) -> None:
    model = converted()
    fresh = copy.deepcopy(model)
    done = train(model, tokens(32, CONTEXT, seed=2), settings(), CPU)
    before = logits(done.model)
    done.model.save_pretrained(tmp_path)  # as Trainer does with what FSDP gathered
    found = Trained(None, [], None, tmp_path)
    gather(found, fresh, settings())
    torch.testing.assert_close(logits(found.model), before, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits(merge(found.model)), before, rtol=1e-4, atol=1e-4)


def test_bf16_models_keep_their_dtype_and_train_in_float32() -> None:
    model, _ = moesaic.convert(
        tiny_model("llama").bfloat16(), "cmoe", "S2A3E8", tokens(8, CONTEXT, seed=1)
    )
    done = train(model, tokens(32, CONTEXT, seed=2), settings(), CPU)
    assert all(p.dtype == torch.float32 for p in done.model.parameters() if p.requires_grad)
    merged = merge(done.model)
    for name, tensor in merged.state_dict().items():
        fine = name.endswith(("expert_scale", "selection_bias"))
        assert tensor.dtype == (torch.float32 if fine else torch.bfloat16), name


@pytest.mark.parametrize(
    ("family", "recipe"),
    [("llama", "moesaic"), ("gpt2", "cmoe"), ("opt", "moesaic-dynamic"), ("qwen3", "cmoe")],
)
def test_computing_all_experts_under_a_mask_changes_nothing(family: str, recipe: str) -> None:
    """Outputs and gradients of a trained model, but for the routers', which learn more there."""
    away = settings(lora_lr=1e-2, scale_lr=0.3)
    model = train(
        converted(family, recipe), tokens(32, CONTEXT, seed=2), away, CPU
    ).model.eval()  # no dropout
    found = []
    for context in (nullcontext(), masked(model)):
        model.zero_grad()
        with context:
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
        grads = {
            name: parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
            and ("router" not in name or name.endswith("expert_scale"))
        }
        found.append((loss.detach(), grads))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-6)
    assert found[0][1].keys() == found[1][1].keys()
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], rtol=1e-3, atol=1e-6, msg=name)
    assert all(block.view is None for block in blocks_of(model))


def test_the_router_learns_from_experts_that_did_not_run() -> None:
    """Expert 1 is useful and does not run: its score rises; expert 2's, harmful, falls."""
    model = converted("qwen3", "moesaic", "S5A1E8")
    router = routers_of(model)[0]
    x_TD = torch.randn(40, 32)
    worth_R = torch.tensor([0.0, 1.0, -1.0])
    router.zero_grad()
    gates_TR = straight_through(
        router, lambda: router.biased(router.scores(x_TD)), router.gates_of_all(x_TD)
    )
    index_TK, gate_TK = router(x_TD)
    expected = torch.zeros(40, 3).scatter(1, index_TK, gate_TK)
    torch.testing.assert_close(gates_TR, expected)  # forward, the gates are what they were
    (-(gates_TR * worth_R).sum()).backward()
    with torch.no_grad():
        before = router.scores(x_TD).mean(0)
        router.score_proj.weight -= 1e-3 * router.score_proj.weight.grad
        after = router.scores(x_TD).mean(0)
    assert after[1] > before[1]
    assert after[2] < before[2]
    assert after[0] == pytest.approx(float(before[0]), abs=0.2 * float(after[1] - before[1]))


# --- gates folded into experts -----------------------------------------------------------------


def test_folding_is_exact_where_the_gates_are_constant() -> None:
    """Scores of zero: every probability is 1 / 6, and the bias alone chooses."""
    model = converted()
    with torch.no_grad():
        for router in routers_of(model):
            router.score_proj.weight.zero_()
            router.expert_scale.copy_(torch.tensor([3.0, -1.0, 0.5, 2.0, 0.0, -2.0]))
            router.selection_bias.copy_(torch.randn(6))
    before, gates = logits(model), mean_gates(model, IDS)
    chosen = measure_loads(model, IDS).count_LR > 0
    expected = 1 + routers_of(model)[0].expert_scale / 6
    for gate, runs in zip(gates, chosen, strict=True):
        torch.testing.assert_close(gate, torch.where(runs, expected, 1.0))
    fold_scale(model, gates)
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
    assert all(router.expert_scale.abs().max() == 0 for router in routers_of(model))


# --- text --------------------------------------------------------------------------------------


def test_windows_cover_the_text_evenly() -> None:
    ids = torch.arange(1000)
    windows = draw_windows(ids, 50, 10, seed=3)
    assert windows.shape == (50, 10)
    assert (windows[:, 1:] - windows[:, :-1] == 1).all()
    starts = windows[:, 0].sort().values
    edges = torch.arange(51) * 991 / 50
    assert ((starts > edges[:-1] - 1) & (starts < edges[1:])).all()  # one in each fiftieth
    assert not torch.equal(windows[:, 0], starts)
    assert torch.equal(windows, draw_windows(ids, 50, 10, seed=3))
    with pytest.raises(MoesaicError, match="the training text has 9 tokens, one sample needs 10"):
        draw_windows(ids[:9], 5, 10, seed=3)


# --- folders -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted_folder("llama", tmp_path_factory.mktemp("moe") / "moe")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense")
    dense_model("llama").save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def tuned(folder: Path, output: Path, **changes: Any) -> Any:
    """Without a teacher unless one is given."""
    values = {
        "data": [TEXT],
        "samples": 64,
        "batch_size": 8,
        "lora_lr": 1e-3,
        "distill": "none",
        "device": "cpu",
    }
    return moesaic.finetune(str(folder), output, **values | changes)


def test_a_folder_holds_all_and_exports(folder: Path, dense: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    report = tuned(folder, output, distill=str(dense))
    assert report.perplexity < report.perplexity_before
    assert report.folded
    assert report.folded_perplexity == pytest.approx(report.perplexity, rel=1e-3)
    assert report.written_perplexity == report.folded_perplexity
    assert not list(tmp_path.glob("*.partial*"))
    names = {path.name for path in output.iterdir()}
    assert names >= {
        "model.safetensors", "config.json", "tokenizer.json", "README.md", "learning_curve.csv",
        "learning_curve.png", "loads.png", "moesaic_finetune.json", "modeling_moesaic.py",
    }  # fmt: skip
    rows = list(csv.DictReader((output / "learning_curve.csv").read_text().splitlines()))
    assert [int(row["samples"]) for row in rows] == list(range(8, 65, 8))
    assert set(rows[0]) >= {"loss", "lm", "logits", "ffn"}
    kept = json.loads((output / "moesaic_finetune.json").read_text())
    assert len(kept["loads_before"]) == len(kept["loads_after"]) == 3
    model = load_model(output)
    assert model.config.moesaic.finetune["settings"]["samples"] == 64
    moved = [router.selection_bias.abs().max() for router in routers_of(model)]
    assert all(bias > 0 for bias in moved)  # saved with the model
    length, ids = 64, tokenizer()(TEXT)["input_ids"]
    held = torch.tensor(ids)[-(len(ids) // 10) :]
    value, _ = moesaic.perplexity(model, held, length)
    assert value == pytest.approx(report.folded_perplexity, rel=1e-5)
    exported = moesaic.export(str(output), "glm4_moe", tmp_path / "stock")
    assert exported.architecture == "glm4_moe"
    again = tuned(output, tmp_path / "again", samples=8)  # a fine-tuned model is one like others
    assert again.perplexity_before == pytest.approx(report.folded_perplexity, rel=1e-5)


def test_a_teacher_is_tuned_on_the_same_windows_first(
    folder: Path, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By next-token loss, as a dense model of its own would be; then the student imitates it."""
    runs: list[tuple[bool, Any]] = []
    real = train

    def watch(
        model: Any,
        windows: Any,
        settings: Any,
        machine: Any,
        dense: Any = None,
        **others: Any,
    ) -> Any:
        done = real(model, windows, settings, machine, dense, **others)
        runs.append((dense is None, settings))
        return done

    monkeypatch.setattr(run_module, "train", watch)
    report = tuned(folder, tmp_path / "out", distill=str(dense), tune_teacher=True)
    assert [alone for alone, _ in runs] == [True, False]
    assert runs[0][1] == replace(runs[1][1], mix=Mix())
    ids = tokenizer()(TEXT)["input_ids"]
    held = torch.tensor(ids)[-(len(ids) // 10) :]
    untuned, _ = moesaic.perplexity(load_model(dense), held, 64)
    assert report.teacher_perplexity < 0.9 * untuned
    linears = [
        module for path, module in load_model(dense).named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in path
    ]  # fmt: skip
    of_rank_one = sum(module.in_features + module.out_features for module in linears)
    assert report.teacher_trained_weights == report.settings["rank"] * of_rank_one
    assert report.trained_weights > report.teacher_trained_weights
    assert "Dense model, tuned likewise" in (tmp_path / "out" / "README.md").read_text()
    assert load_model(tmp_path / "out").config.moesaic.finetune["teacher_tuned"]


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_no_teacher_is_tuned_where_weights_are_sharded(
    name: str, folder: Path, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "true")
    with pytest.raises(MoesaicError, match="one process or data-parallel ones"):
        tuned(folder, tmp_path / "out", distill=str(dense), tune_teacher=True)
    assert not list(tmp_path.iterdir())


def test_an_adapter_loads_through_peft(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    save = PeftModel.save_pretrained

    def look(self: Any, path: Any, **others: Any) -> Any:
        if "checkpoint" not in str(path):  # while it trains it gives losses
            kept.append(logits(self))
        return save(self, path, **others)

    monkeypatch.setattr(PeftModel, "save_pretrained", look)
    output = tmp_path / "adapter"
    report = tuned(folder, output, merge=False)
    assert not report.folded
    base = AutoModelForCausalLM.from_pretrained(folder)
    before = logits(base)
    model = PeftModel.from_pretrained(base, output)
    assert not torch.allclose(before, kept[-1], atol=1e-3)
    torch.testing.assert_close(logits(model), kept[-1], rtol=1e-5, atol=1e-5)
    for use in (moesaic.export, tuned):
        arguments = ("glm4_moe", tmp_path / "x") if use is moesaic.export else (tmp_path / "x",)
        with pytest.raises(MoesaicError, match="is a PEFT adapter, and a whole model"):
            use(output, *arguments)
    tuned(folder, output, merge=False, overwrite=True, samples=8)  # ours, so it may be replaced


class Killed(Exception):
    pass


@pytest.fixture
def a_line_for_two_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "LOGGED_STEPS", 3)
        yield


@pytest.mark.usefixtures("a_line_for_two_steps")
@pytest.mark.parametrize(
    "changes", [{}, {"freeze_router": True, "epochs": 2}, {"tune_teacher": True}]
)
def test_a_killed_run_resumes_to_the_same_bits(
    changes: dict[str, Any],
    folder: Path,
    dense: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"checkpoint_every": 3, "scale_lr": 1e-2} | changes
    if "tune_teacher" in changes:
        values["distill"] = str(dense)
    tuned(folder, tmp_path / "whole", **values)
    step = RecoveryTrainer.training_step

    def die(self: Any, *arguments: Any) -> Any:
        if self.state.global_step == 5 and (self.teacher is not None or "distill" not in values):
            raise Killed
        return step(self, *arguments)

    monkeypatch.setattr(RecoveryTrainer, "training_step", die)
    with pytest.raises(Killed):
        tuned(folder, tmp_path / "out", **values)
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
    broken = tmp_path / "out.partial" / "trainer" / "checkpoint-5"  # killed while it was written
    broken.mkdir()
    (broken / "optimizer.pt").write_bytes(b"half")
    with pytest.raises(MoesaicError, match="pass --resume"):
        tuned(folder, tmp_path / "out", **values)
    with pytest.raises(MoesaicError, match="was started with settings"):
        tuned(folder, tmp_path / "out", resume=True, **values | {"lora_lr": 2e-3})
    if "distill" in values:
        shutil.copytree(dense, tmp_path / "kept")
        tiny_model("llama", seed=1).save_pretrained(dense)
        with pytest.raises(MoesaicError, match="was started with teacher's weights"):
            tuned(folder, tmp_path / "out", resume=True, **values)
        shutil.copytree(tmp_path / "kept", dense, dirs_exist_ok=True)
    tuned(folder, tmp_path / "out", resume=True, **values)
    one, two = (
        load_model(tmp_path / "whole").state_dict(),
        load_model(tmp_path / "out").state_dict(),
    )
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name
    for name in ("learning_curve.csv",):
        assert (tmp_path / "whole" / name).read_text() == (tmp_path / "out" / name).read_text()


def test_a_resumed_run_saves_as_often_as_it_is_told_now(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(self: Any, *arguments: Any) -> Any:
        if self.state.global_step == 4:
            raise KeyboardInterrupt
        return step(self, *arguments)

    saved = []
    save = RecoveryTrainer._save_checkpoint

    def note(self: Any, *arguments: Any) -> None:
        saved.append(self.state.global_step)
        save(self, *arguments)

    step = RecoveryTrainer.training_step
    monkeypatch.setattr(RecoveryTrainer, "training_step", kill)
    with pytest.raises(KeyboardInterrupt):
        tuned(folder, tmp_path / "out", checkpoint_every=3)
    monkeypatch.undo()
    monkeypatch.setattr(RecoveryTrainer, "_save_checkpoint", note)
    tuned(folder, tmp_path / "out", checkpoint_every=1, resume=True)
    assert saved == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("merge", [True, False])
def test_a_model_is_not_replaced_by_what_it_becomes(
    folder: Path, tmp_path: Path, merge: bool
) -> None:
    """An adapter would be one for a model that is gone."""
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    (tmp_path / "link").symlink_to(model)
    for output in (model, tmp_path / "link"):
        with pytest.raises(MoesaicError, match="is the model itself; choose another folder"):
            tuned(model, output, overwrite=True, merge=merge)
    assert (model / "config.json").is_file()


def test_a_model_of_the_hub_may_replace_a_folder(folder: Path) -> None:
    """Its name is no path, so that it is not the folder."""
    options = FinetuneOptions(model="some/model", output=folder)
    prepare_module._check_apart(options)


def test_short_windows_that_skip_nothing_are_refused(tmp_path: Path) -> None:
    """GRIFFIN runs the first tokens of a window whole."""
    model = converted_folder("llama", tmp_path / "moe", "griffin", "S0A3E8")
    with pytest.raises(MoesaicError, match=r"runs the first 128 tokens .* and windows have 64"):
        tuned(model, tmp_path / "out")


def test_ids_need_no_tokenizer(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    for path in bare.glob("tokenizer*"):
        path.unlink()
    report = tuned(bare, tmp_path / "out", data=tokens(8, CONTEXT))
    assert report.settings["samples"] == 8
    with pytest.raises(MoesaicError, match="tokenizer"):
        tuned(bare, tmp_path / "again")


def test_a_comparison_trains_on_as_many_windows_of_each_text(tmp_path: Path) -> None:
    options = FinetuneOptions(model="x", output=tmp_path, samples=8, distill="none")
    texts = [torch.full((900,), 11), torch.full((90,), 22)]
    recovery = plan_recovery(options, dense_model("llama"), texts, CONTEXT)
    windows = recovery.windows_NL
    assert windows.shape == (8, CONTEXT)
    assert (windows == 11).all(1).sum() == (windows == 22).all(1).sum() == 4


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_nothing_is_dropped_while_it_trains(family: str) -> None:
    model = tiny_model(family).train()
    rates = [vars(module).get("p") for module in model.modules()]
    with torch.no_grad():
        assert not torch.equal(model(IDS).logits, model(IDS).logits)
        with without_dropout(model):
            assert torch.equal(model(IDS).logits, model(IDS).logits)
        assert not torch.equal(model(IDS).logits, model(IDS).logits)
    assert [vars(module).get("p") for module in model.modules()] == rates


def test_training_drops_nothing() -> None:
    """Two runs whose random numbers differ, but for the order of windows, are one."""
    losses = []
    for place in range(2):
        model = converted("gpt2", "cmoe")
        windows = tokens(8, CONTEXT, seed=2)
        drawn = torch.nn.Dropout.forward

        def shifted(self: Any, x: Any, skip: int = place, drawn: Any = drawn) -> Any:
            torch.rand(skip)
            return drawn(self, x)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.Dropout, "forward", shifted)
            done = train(model, windows, settings(samples=8, batch_size=8), CPU)
        losses.append(done.history[-1]["loss"])
    assert losses[0] == losses[1]


def test_copies_in_few_bits_are_not_held_twice() -> None:
    wrapped = wrap(converted(recipe="moesaic-neurons", layout="S0A8E24"), 4, 8, False)
    buffers = dict(wrapped.named_buffers(remove_duplicate=False))
    names = [name for name in buffers if name.endswith("planes") and "modules_to_save" in name]
    assert len(names) == 3 * 2
    for name in names:
        own = name.replace("modules_to_save.default", "original_module")
        assert buffers[name].data_ptr() == buffers[own].data_ptr()


def test_checkpoints_are_as_large_as_counted() -> None:
    model = converted(recipe="moesaic-neurons", layout="S0A8E24")
    counted = checkpoint_bytes(model, 4)
    wrapped = wrap(model, 4, 8, freeze_router=False)
    trained = [one.numel() for one in wrapped.parameters() if one.requires_grad]
    buffers = wrapped.named_buffers(remove_duplicate=False)
    kept = [buffer.nbytes for name, buffer in buffers if "modules_to_save" in name]
    assert counted == 12 * sum(trained) + sum(kept)


def test_peft_takes_what_convert_returns(folder: Path, tmp_path: Path) -> None:
    """For a model of its own, and not for the dense one it was."""
    dense = dense_model("llama")
    dense.name_or_path = "some/dense"
    for output in (None, tmp_path / "moe"):
        model, _ = moesaic.convert(
            copy.deepcopy(dense), "cmoe", "S2A3E8", tokens(8, CONTEXT), output=output
        )
        wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        place = "" if output is None else str(output)
        named = wrapped.peft_config["default"].base_model_name_or_path or ""
        assert named == place
        wrapped.save_pretrained(tmp_path / "adapter")
        shutil.rmtree(tmp_path / "adapter")


def test_weights_of_lora_are_counted_before_there_are_any(folder: Path) -> None:
    model = load_model(folder)
    counted = weights_of_lora(meta_model(model.config), 4)
    wrapped = wrap(model, 4, 8, freeze_router=False)
    lora = [weight for name, weight in wrapped.named_parameters() if "lora_" in name]
    assert counted == sum(weight.numel() for weight in lora)


def test_a_loss_that_turns_nan_stops_before_the_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = RecoveryTrainer.compute_loss

    def poison(self: Any, *arguments: Any, **others: Any) -> Any:
        loss = compute(self, *arguments, **others)
        return loss * float("nan") if self.state.global_step == 5 else loss

    monkeypatch.setattr(RecoveryTrainer, "compute_loss", poison)
    with pytest.raises(MoesaicError, match=r"not finite at step 6 of 8; the last good .*point-4"):
        tuned(folder, tmp_path / "out", checkpoint_every=2)
    assert not (tmp_path / "out").exists()
    kept = tmp_path / "out.partial" / "trainer" / "checkpoint-4"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), kept)
    assert logits(model).isfinite().all()


def test_a_full_disk_keeps_the_checkpoints(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = RecoveryTrainer._save_checkpoint

    def full(self: Any, *arguments: Any) -> None:
        if self.state.global_step > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, *arguments)

    monkeypatch.setattr(RecoveryTrainer, "_save_checkpoint", full)
    with pytest.raises(MoesaicError, match="no space left on the disk; checkpoints are kept in"):
        tuned(folder, tmp_path / "out", checkpoint_every=2)
    assert (tmp_path / "out.partial" / "trainer" / "checkpoint-2").is_dir()
    monkeypatch.undo()
    tuned(folder, tmp_path / "out", checkpoint_every=2, resume=True)
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_disk_that_fills_at_the_very_end_costs_no_training(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(draft: Path, output: Path, overwrite: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    tuned(folder, tmp_path / "whole", checkpoint_every=2)
    monkeypatch.setattr(checkpoint, "take_name", full)
    with pytest.raises(MoesaicError, match="no space left on the disk"):
        tuned(folder, tmp_path / "out", checkpoint_every=2)
    monkeypatch.undo()
    monkeypatch.setattr(RecoveryTrainer, "training_step", None)  # no step is left to make
    tuned(folder, tmp_path / "out", checkpoint_every=2, resume=True)
    one, two = (
        load_model(tmp_path / "whole").state_dict(),
        load_model(tmp_path / "out").state_dict(),
    )
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "samples 0: a whole number of at least 1"),
        ({"epochs": 10**12}, "epochs 1000000000000: at most 10,000"),
        ({"rank": 0}, "rank 0: a whole number"),
        ({"lora_lr": -1.0}, r"lora lr -1.0: a number above 0"),
        ({"scale_lr": float("nan")}, "scale lr nan: a number at least 0"),
        ({"data": ["a cat"]}, "the training text has 5 tokens, one sample needs 64"),
        ({"data": [" "]}, "text is empty"),
        ({"sequence_length": 65}, "sequence length 65 is outside 2..64, the model's context"),
        ({"distill": "nowhere/at/all"}, "no such model folder"),
        ({"tune_teacher": True}, "--tune-teacher needs a teacher, and --distill none says"),
        ({"distill": "auto"}, "the teacher 'LlamaForCausalLM'.* is not found .*--distill PATH"),
        ({"distill": None}, "distill None: give 'auto', 'none' or the dense model's folder"),
        ({"batch_size": 0}, "batch size 0: a whole number of at least 1"),
        ({"seed": -1}, "seed -1 is outside"),
        ({"device": "cpu:0"}, "accelerate launch"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    changes: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(MoesaicError, match=message) as caught:
        tuned(folder, tmp_path / "out", **changes)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_tensorboard_is_asked_for_before_the_work(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks_module, "find_spec", lambda name: None)
    with pytest.raises(MoesaicError, match="pip install tensorboard"):
        tuned(folder, tmp_path / "out", tensorboard="events")


@pytest.mark.parametrize("place", ["out", "out/events", "out.partial/events"])
def test_tensorboard_does_not_write_where_the_model_will_lie(
    place: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks_module, "find_spec", lambda name: True)
    with pytest.raises(MoesaicError, match="is the output, or inside it"):
        tuned(folder, tmp_path / "out", tensorboard=str(tmp_path / place))
    assert not list(tmp_path.iterdir())


def test_gates_that_fold_badly_are_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_module, "FOLD_LOSS", 0.0)
    report = tuned(folder, tmp_path / "out", scale_lr=0.1)
    assert not report.folded
    model = load_model(tmp_path / "out")
    assert all(router.expert_scale.abs().max() > 0.1 for router in routers_of(model))
    ids = tokenizer()(TEXT)["input_ids"]
    value, _ = moesaic.perplexity(model, torch.tensor(ids)[-(len(ids) // 10) :], 64)
    assert value == pytest.approx(report.perplexity, rel=1e-5)
    with pytest.raises(MoesaicError, match=r"expert_scale is not 0.*--scale-lr 0"):
        moesaic.export(str(tmp_path / "out"), "glm4_moe", tmp_path / "stock")


def test_models_that_do_not_fit(folder: Path, dense: Path, tmp_path: Path) -> None:
    with pytest.raises(MoesaicError, match="is a llama model that moesaic has not converted; run"):
        tuned(dense, tmp_path / "out")
    with pytest.raises(MoesaicError, match="--distill names a converted model"):
        tuned(folder, tmp_path / "out", distill=str(folder))
    other = tmp_path / "other"
    dense_model("llama", layers=2).save_pretrained(other)
    with pytest.raises(MoesaicError, match="--distill: its layers is 2, the converted model's 3"):
        tuned(folder, tmp_path / "out", distill=str(other))
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_the_command_prints_loads_and_perplexities(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["moesaic", "finetune", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    text, numbers = tmp_path / "text.txt", tmp_path / "numbers.json"
    text.write_text(TEXT)
    common = ("--data", text, "--samples", 16, "--device", "cpu", "--distill", "none")
    code, out, _ = run(folder, "--output", tmp_path / "out", *common, "--json", numbers)
    assert code == 0
    for words in ("max/mean load", "perplexity on last tenth of text.txt", "folded into the exp"):
        assert words in out
    report = json.loads(numbers.read_text())
    rate = usual_rate(steps=16, hidden_size=32, has_teacher=False)
    assert report["settings"]["lora_lr"] == pytest.approx(rate)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"moesaic finetune {folder}" in card
    code, _, err = run(folder, "--output", tmp_path / "out", *common)
    assert code == 2
    assert err.startswith("error: output")
    assert "choose another or pass --overwrite" in err
    code, _, err = run(folder, "--output", tmp_path / "x", *common, "--json", tmp_path / "x" / "n")
    assert code == 2
    assert len(err.splitlines()) == 1


# --- what a review found -----------------------------------------------------------------------


def test_routers_of_a_bf16_model_run_while_they_are_float32() -> None:
    model, _ = moesaic.convert(
        tiny_model("llama").bfloat16(), "cmoe", "S2A3E8", tokens(8, CONTEXT, seed=1)
    )
    wrapped = wrap(model, 4, 8, freeze_router=False)  # as after sharded training: no autocast
    assert measure_loads(wrapped, IDS) is not None


def test_routers_are_measured_as_they_are_written(folder: Path, tmp_path: Path) -> None:
    """The router of an adapter is float32, and becomes what the model beside it is."""
    tuned(folder, tmp_path / "adapter", dtype="bfloat16", merge=False, samples=16)
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    routers = [weight for name, weight in weights.items() if "score_proj" in name]
    assert routers
    before = load_model(folder, "bfloat16").state_dict()
    assert not any(torch.equal(weight, old) for weight in routers for old in before.values())
    for weight in routers:
        assert torch.equal(weight.bfloat16().float(), weight.float())


def test_loads_are_named_by_the_layers_of_the_model() -> None:
    model, _ = moesaic.convert(
        tiny_model("llama"), "moesaic", "S2A3E8", tokens(8, CONTEXT, seed=1), dense_layers=[0]
    )
    loads = measure_loads(model, IDS)
    assert loads is not None
    assert loads.names == ["1", "2"]


@pytest.mark.parametrize("merge", [True, False])
def test_what_is_measured_after_training_computes_experts_under_masks(
    merge: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside LoRA weights each expert would copy its tokens: gigabytes, where they are many."""
    seen = []

    def note(model: Any, *arguments: Any) -> Any:
        seen.append([block.view is not None for block in blocks_of(model)])
        return 1.0

    measure = run_module.measure_loads

    def note_loads(model: Any, *arguments: Any) -> Any:
        note(model)
        return measure(model, *arguments)

    monkeypatch.setattr(run_module, "refit_thresholds", note)
    monkeypatch.setattr(run_module, "measure_loads", note_loads)
    monkeypatch.setattr(save_module, "heldout_perplexity", note)
    tuned(folder, tmp_path / "out", samples=8, merge=merge)
    while_wrapped = seen[:2] if merge else seen
    assert len(while_wrapped) == (2 if merge else 3)
    assert all(all(views) for views in while_wrapped)


def test_windows_that_were_given_are_taken_from_the_first_on(
    tuned_input: dict[str, Any],
) -> None:
    given_NL = tokens(20, 24)
    values = tuned_input | {"data": given_NL, "sequence_length": None}
    inputs = prepare(FinetuneOptions(**values))
    assert torch.equal(inputs.windows_NL, given_NL[:8])
    with pytest.raises(MoesaicError, match="the windows that were given have 24 tokens"):
        prepare(FinetuneOptions(**values | {"sequence_length": 32}))


@pytest.fixture
def tuned_input(tmp_path: Path) -> dict[str, Any]:
    folder = converted_folder("llama", tmp_path / "converted")
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    return {
        "model": str(folder), "output": tmp_path / "tuned", "data": str(tmp_path / "text.txt"),
        "samples": 8, "sequence_length": 32, "batch_size": 4, "device": "cpu",
        "distill": "none",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float16"}, "is in float16, whose range gradients leave"),
        ({"samples": 10**12}, "the most that are trained on"),
        ({"rank": 10**10}, "rank 10000000000 is above the model's hidden size 32"),
        ({"rank": None}, "rank None: a whole number"),
        ({"epochs": None}, "epochs None: a whole number"),
        ({"sequence_length": 32.0}, "sequence length 32.0: a whole number"),
        ({"seed": 1.5}, "seed 1.5 is outside"),
        ({"alpha": None}, "alpha None: a number"),
        ({"lora_lr": "1e-3"}, "lora lr 1e-3: a number"),
        ({"balance_rate": None}, "balance rate None: a number"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
    ],
)
def test_bad_input_that_once_was_a_traceback(
    options: dict[str, Any], reason: str, tuned_input: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(MoesaicError, match=reason):
        moesaic.finetune(**tuned_input | options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted", "text.txt"]


def test_a_teacher_of_another_family_is_refused(
    tuned_input: dict[str, Any], tmp_path: Path
) -> None:
    teacher = tmp_path / "teacher"
    dense_model("qwen3").save_pretrained(teacher)
    with pytest.raises(MoesaicError, match="its family is qwen3, the converted model's llama"):
        moesaic.finetune(**tuned_input | {"distill": str(teacher)})


def test_a_teacher_that_is_to_be_tuned_needs_a_wider_dtype(
    tuned_input: dict[str, Any], tmp_path: Path
) -> None:
    teacher = tmp_path / "teacher"
    dense_model("llama").to(torch.float16).save_pretrained(teacher)
    changes = {"distill": str(teacher), "tune_teacher": True, "dtype": "auto"}
    with pytest.raises(MoesaicError, match=r"teacher is in float16, .* --tune-teacher trains it"):
        moesaic.finetune(**tuned_input | changes)
    assert not (tmp_path / "tuned.partial").exists()


def test_only_whole_steps_and_no_private_paths(tuned_input: dict[str, Any], tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    dense_model("llama").save_pretrained(teacher)
    report = moesaic.finetune(**tuned_input | {"samples": 11, "distill": str(teacher)})
    assert report.settings["samples"] == 8
    tuned = tmp_path / "tuned"
    assert load_model(tuned).config.moesaic.finetune["distill"] == "teacher"
    for name in ("config.json", "README.md"):
        assert str(tmp_path) not in (tuned / name).read_text("utf-8")


def test_a_bias_that_no_format_holds_is_said_so(
    tuned_input: dict[str, Any], tmp_path: Path
) -> None:
    folder = converted_folder("llama", tmp_path / "middle", dense_layers=(1,))
    moesaic.finetune(**tuned_input | {"model": str(folder), "scale_lr": 0.0})
    reasons = moesaic.explain(str(tmp_path / "tuned"))
    assert any("fine-tune with --balance-rate 0" in reason for reason in reasons["qwen2_moe"])


def test_a_checkpoint_that_is_not_whole_gives_way_to_the_one_before(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_file({"a": torch.ones(1)}, folder / "adapter_model.safetensors")
        (folder / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-2/trainer_state.json").write_text('{"epoch": ')
    (tmp_path / "checkpoint-3/adapter_model.safetensors").write_bytes(b"")
    (tmp_path / "checkpoint-4/trainer_state.json").unlink()
    whole = {"step": torch.ones(1000)}
    for step, name in ((5, "optimizer.pt"), (6, "rng_state.pth")):
        folder = tmp_path / f"checkpoint-{step}"
        shutil.copytree(tmp_path / "checkpoint-1", folder)
        torch.save(whole, folder / name)
        cut = (folder / name).read_bytes()[:-100]
        (folder / name).write_bytes(cut)
    torch.save(whole, tmp_path / "checkpoint-1/optimizer.pt")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    (tmp_path / "checkpoint-1/trainer_state.json").write_text("")
    assert last_checkpoint(tmp_path) is None


def test_training_is_refused_where_it_would_run_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "choose_device", torch.device)
    with pytest.raises(MoesaicError, match="device mps: training runs on cpu or cuda only"):
        checks_module._check_device("mps")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_does_not_depend_on_the_order_of_its_numbers(dtype: torch.dtype) -> None:
    """So threads and devices agree; a sum of floats would not. Another value is another one."""
    values = torch.randn(10_000).to(dtype)
    assert checksum(values) == checksum(values.flip(0))
    changed = values.clone()
    changed[7] += 1
    assert checksum(changed) != checksum(values)
    assert checksum(torch.tensor([True, False, True])) == 2


@pytest.mark.parametrize(
    "method",
    ["moesaic", "moesaic-dynamic", "cmoe", "static-repaired", "moebert", "moesaic-neurons"],
)
def test_rates_are_told_of_what_is_trained_and_of_nothing_else(method: str) -> None:
    budget: Any = {"sparsity": 0.5} if method == "moesaic-neurons" else {"layout": "S2A2E8"}
    model, _ = moesaic.convert(
        tiny_model("qwen3"), method, calibration=tokens(16, CONTEXT, seed=1), **budget
    )
    told = rates_that_apply(model, 1e-3, 2e-2)
    groups = parameter_groups(wrap(model, 4, 8, freeze_router=False), 1e-3, 2e-2)
    assert sorted(told.values()) == sorted(group["lr"] for group in groups)


def test_thresholds_keep_their_budget_through_training(tmp_path: Path) -> None:
    """They are set anew at the end, since scores have moved."""
    method = moesaic.load_method("moesaic-dynamic", {"layer_budgets": "uniform"})
    converted = converted_folder("llama", tmp_path / "converted", method)
    report = tuned(converted, tmp_path / "out", lora_lr=3e-3, balance_rate=0)
    for row in report.loads_after:
        assert row["experts_per_token"] == pytest.approx(3, abs=0.02)
