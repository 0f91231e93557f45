"""Fine-tuning of models that were mixtures before: LoRA, balance and merging on two levels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import moesaic
from moesaic.families.load import load_model
from moesaic.finetune.balance import chosen, hooked, measure_loads, refit_thresholds, run
from moesaic.finetune.lora import blocks_of, merge, routers_of, wrap
from moesaic.finetune.masked import masked
from moesaic.finetune.options import Mix
from moesaic.finetune.train import train
from tests.families import CONTEXT, LAYERS, tokens
from tests.mixtures import ACTIVE, MIXTURES, OUTER, tiny_mixture
from tests.stock_models import tokenizer
from tests.test_finetune import CPU, IDS, logits, settings

WINDOWS = tokens(16, CONTEXT, seed=1)


def converted(family: str, recipe: str = "moesaic", **more: Any) -> Any:
    return moesaic.convert(tiny_mixture(family), recipe, "S3A3E8", WINDOWS, **more)[0]


@pytest.mark.parametrize("family", MIXTURES)
def test_wrapping_trains_experts_and_sub_routers_and_leaves_outer_routers(family: str) -> None:
    model = converted(family)
    before = logits(model)
    wrapped = wrap(model, 4, 8, freeze_router=False)
    torch.testing.assert_close(logits(wrapped), before, rtol=1e-5, atol=1e-5)
    trained = [name for name, p in wrapped.named_parameters() if p.requires_grad]
    layers = len(blocks_of(wrapped))
    assert layers == len(model.config.moesaic.layers)
    assert (
        sum(".experts.router.modules_to_save" in n and "score_proj" in n for n in trained) == layers
    )
    assert sum(n.endswith("expert_scale") for n in trained) == len(routers_of(wrapped))
    assert sum("shared_experts." in n for n in trained) >= 2 * layers
    outer = [n for n in trained if ".gate." in n or ".router.layer." in n or "_gate" in n]
    assert not outer
    assert all("lora_" in n or "router.modules_to_save" in n for n in trained)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_dense_model_trains_its_experts_too(family: str) -> None:
    """It is what the converted mixture is divided by, whose experts are trained."""
    windows = tokens(4, CONTEXT, seed=2)
    dense = tiny_mixture(family)
    before = {name: weight.clone() for name, weight in dense.state_dict().items()}
    done = train(dense, windows, settings(samples=4, mix=Mix()), CPU)
    expected = logits(done.model)
    merged = merge(done.model)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    after = merged.state_dict()
    fused = [name for name, weight in after.items() if weight.ndim == 3]
    assert fused
    assert not any(torch.equal(after[name], before[name]) for name in fused)
    ends = ("gate.weight", "router.layer.weight")
    outer_routers = [name for name in after if name.endswith(ends)]
    assert all(torch.equal(after[name], before[name]) for name in outer_routers)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "granitemoe"])
def test_training_lowers_the_loss_and_merging_changes_nothing(family: str, tmp_path: Path) -> None:
    windows = tokens(4, CONTEXT, seed=2).repeat(16, 1)
    mix = settings(samples=64, mix=Mix(1, 0.5, 0.5))
    done = train(converted(family), windows, mix, CPU, tiny_mixture(family))
    assert done.history[-1]["lm"] < done.history[0]["lm"] - 0.05
    assert done.history[-1]["ffn"] > 0
    expected = logits(done.model)
    merged = merge(done.model)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    assert not any("lora" in name for name in merged.state_dict())
    merged.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    saved = loaded.state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in merged.state_dict().items())
    # One runs by the kernel, and the one that has learnt does not.
    torch.testing.assert_close(logits(loaded), logits(merged), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("recipe", "whole"),
    [("moesaic", None), ("cmoe", None), ("moesaic-dynamic", None), ("moesaic", 1)],
)
def test_loads_are_what_a_loop_counts(recipe: str, whole: int | None) -> None:
    """Group by group: of the pairs that an outer expert gets, which sub-experts run."""
    experts = None if whole is None else [e for e in range(OUTER) if e != whole]
    model = converted("qwen3_moe", recipe, experts=experts)
    loads = measure_loads(model, IDS)
    assert loads is not None
    assert loads.names[:2] == ["0, expert 0", "0, expert 1"]
    assert loads.tokens_L.view(LAYERS, OUTER).sum(1).tolist() == [ACTIVE * IDS.numel()] * LAYERS
    expected = torch.zeros(LAYERS, OUTER, 5, dtype=torch.long)

    def look(layer: int, router: Any, args: Any, output: Any) -> None:
        x_PD, expert_P = args[:2]
        value_PR = router.biased(router.scores(x_PD, expert_P), expert_P)
        for value_R, expert in zip(value_PR, expert_P.tolist(), strict=True):
            if expert == whole:
                runs = list(range(5))
            elif router.chooser == "topk":
                runs = value_R.topk(3).indices.tolist()
            else:
                runs = sorted({int(value_R.argmax()), *(value_R > 0).nonzero().flatten().tolist()})
            expected[layer, expert, runs] += 1
        count_GR, tokens_G = chosen(router, args, output)
        assert count_GR.shape == (OUTER, 5)
        assert tokens_G.sum() == len(expert_P)

    with torch.no_grad(), hooked(routers_of(model), look):
        run(model, IDS)
    assert torch.equal(loads.count_LR, expected.view(-1, 5))


def test_balance_evens_the_loads_inside_every_expert() -> None:
    model = converted("qwen3_moe", "cmoe")
    windows = tokens(4, CONTEXT, seed=2).repeat(32, 1)
    still = settings(samples=128, lora_lr=1e-9, scale_lr=0.0, balance_rate=0.02)
    done = train(model, windows, still, CPU)
    before, after = done.loads_before, measure_loads(done.model, windows[:4])
    assert before is not None
    assert after is not None
    uneven = [
        sum(
            row["max_over_mean"] * int(tokens)
            for row, tokens in zip(rows, loads.tokens_L, strict=True)
        )
        for loads in (before, after)
        for rows in [loads.to_dict()]
    ]
    assert uneven[1] < 0.95 * uneven[0]


def test_thresholds_hold_the_budget_inside_every_expert() -> None:
    model = converted("qwen3_moe", "moesaic-dynamic")
    for router in routers_of(model):
        router.selection_bias += torch.randn(router.selection_bias.shape)
    refit_thresholds(model, WINDOWS)
    loads = measure_loads(model, WINDOWS)
    assert loads is not None
    for row, tokens_of in zip(loads.to_dict(), loads.tokens_L.tolist(), strict=True):
        if tokens_of > 20:
            assert row["experts_per_token"] == pytest.approx(3, abs=5 / tokens_of + 1e-6)


def test_a_mixture_trains_on_what_it_runs() -> None:
    """Computing every sub-expert of every expert would be most of the work wasted."""
    model = converted("qwen3_moe")
    before = model.config._experts_implementation
    with masked(model):
        assert model.config._experts_implementation == before
        assert all(block.view is None for block in blocks_of(model))


def test_the_whole_run_writes_a_model_that_is_a_mixture_still(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat in a hat and the rat in a bin. " * 150, "utf-8")
    moesaic.convert(
        tiny_mixture("qwen3_moe"), "moesaic", "S3A3E8", WINDOWS, tokenizer=tokenizer(),
        output=tmp_path / "converted",
    )  # fmt: skip
    report = moesaic.finetune(
        str(tmp_path / "converted"), tmp_path / "tuned", str(text), samples=16,
        sequence_length=32, batch_size=8, distill="none", device="cpu",
    )  # fmt: skip
    assert report.folded is False
    assert [row["group"] for row in report.loads_after][:1] == ["0, expert 0"]
    tuned = load_model(tmp_path / "tuned")
    assert tuned.config.moesaic.outer.num_experts == OUTER
    assert any(router.expert_scale.abs().max() > 0 for router in routers_of(tuned))
    assert (tmp_path / "tuned" / "loads.png").stat().st_size > 1000
