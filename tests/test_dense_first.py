"""The first layers dense, the others with fewer experts, at the same budget."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import moesaic
from moesaic import load_method
from moesaic.calibration.calibration_set import CalibrationSet
from moesaic.conversion import dense_first
from moesaic.conversion.dense_first import search_split, splits, with_split
from moesaic.conversion.layer_budgets import divergence, marginal_values, share_budgets
from moesaic.conversion.options import make_budget
from moesaic.conversion.plan import Plan, make_plan
from moesaic.errors import MoesaicError
from moesaic.evaluate.work import count_macs
from moesaic.families import find_ffns
from moesaic.modeling import MoesaicBlock
from moesaic.output import draft as drafts
from tests.families import CONTEXT, LAYERS, tiny_model, tokens
from tests.mixtures import tiny_mixture
from tests.stock_models import dense_model, tokenizer

WINDOWS = tokens(16, CONTEXT, seed=1)
CALIBRATION = CalibrationSet(WINDOWS)
CPU = torch.device("cpu")
LAYOUT = "S2A4E10"
SETTINGS = {"layer_budgets": "dense-first"}


def plan_for(model: Any, layout: str = LAYOUT) -> Plan:
    method = load_method("moesaic", SETTINGS)
    return make_plan(model.config, "tiny", method, make_budget(layout))


def idle(*layers: int, model: Any = None) -> Any:
    """A model whose FFNs in these layers hardly add anything."""
    model = tiny_model("llama") if model is None else model
    ffns = find_ffns(model)
    with torch.no_grad():
        for layer in layers:
            ffns.read(layer).down_DF.mul_(1e-3)
    return model


def test_splits_by_hand() -> None:
    """30 layers, 31 routed experts: 3 x 31 + 27 x 22 = 687 and 6 x 31 + 24 x 21 = 690 of 690."""
    found = list(islice(splits(30, 31, 23), 5))
    assert found == [(0, 23), (3, 22), (6, 21), (8, 20), (10, 19)]
    assert list(splits(3, 8, 4)) == [(0, 4), (1, 2)]
    assert list(splits(2, 5, 1)) == [(0, 1)]
    # Of many experts a step takes more than one: 7 of 224, or the fewest that fill the budget.
    assert list(islice(splits(32, 224, 168), 3)) == [(0, 168), (3, 162), (6, 155)]


@given(st.integers(2, 80), st.integers(2, 260), st.data())
def test_every_split_fills_the_budget(layers: int, routed: int, data: st.DataObject) -> None:
    active = data.draw(st.integers(1, routed - 1))
    previous, fewest = -1, active + 1
    for dense, run in splits(layers, routed, active):
        assert previous < dense < layers
        assert 1 <= run < fewest
        others = layers - dense
        assert dense * routed + others * run <= layers * active
        assert dense * routed + others * (run + 1) > layers * active
        previous, fewest = dense, run


def test_the_search_goes_on_while_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_first, "splits", lambda *_: iter([(0, 4), (1, 3), (2, 2), (2, 1)]))
    plan = plan_for(tiny_model("llama"))
    asked: list[tuple[int, ...]] = []

    def search(*values: Any) -> tuple[tuple[int, ...], list[str]]:
        left, lines = list(values), []
        asked.clear()

        def divergence_of(split: Plan) -> float:
            asked.append(split.moe.layers)
            value = left.pop(0)
            if isinstance(value, str):
                raise MoesaicError(value)
            return float(value)

        found = search_split(plan, divergence_of, lines.append)
        return found.moe.layers, lines

    assert search(3, 2, 1, 4)[0] == (2,)
    assert search(3, 2, 2.5)[0] == (1, 2)
    assert asked == [(0, 1, 2), (1, 2), (2,)]
    assert search(3, 4)[0] == (0, 1, 2)
    kept, lines = search(3, 2, "it broke")
    assert kept == (1, 2)
    assert lines[1] == "dense layers 1, experts in the others 3: KL divergence 2.0000"
    assert lines[2].endswith("it broke")
    with pytest.raises(MoesaicError, match="at once"):
        search("at once")
    monkeypatch.setattr(dense_first, "TRIES", 2)
    assert search(3, 2, 1)[0] == (1, 2)


def test_a_split_says_what_it_is() -> None:
    model = tiny_model("llama")
    plan = plan_for(model)
    moe = with_split(plan, 1, 2).moe
    assert moe.layers == (1, 2)
    assert moe.layout == "S2A2E10"
    assert {sizes.num_active for sizes in moe.sizes} == {2}
    assert moe.sizes[0].shared == plan.sizes.shared
    assert with_split(plan, 0, 4).moe == plan.moe


def test_the_divergence_is_that_of_its_definition() -> None:
    model, other, probe = tiny_model("llama"), tiny_model("llama"), tokens(3, 12, seed=5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        wanted = [model(input_ids=ids, use_cache=False).logits for ids in probe.split(1)]
        log_q = other(input_ids=probe, use_cache=False).logits.log_softmax(-1)
        log_p = torch.cat(wanted).log_softmax(-1)
        expected = float((log_p.exp() * (log_p - log_q)).sum() / probe.numel())
    found = divergence(other, probe, wanted)
    assert found == pytest.approx(expected, rel=1e-4)
    assert found > 1e-4
    assert divergence(model, probe, wanted) == pytest.approx(0.0, abs=1e-7)
    wanted[1][0, 2, 3] = float("nan")
    with pytest.raises(MoesaicError, match="broken"):
        divergence(other, probe, wanted)


def test_both_strategies_judge_alike() -> None:
    """The divergence that comes with the gradients is the one without them."""
    model, probe = tiny_model("llama"), WINDOWS[-2:]
    with torch.no_grad():
        wanted = [model(input_ids=ids, use_cache=False).logits for ids in probe.split(1)]
    converted, _ = moesaic.convert(tiny_model("llama"), "moesaic", LAYOUT, WINDOWS)
    blocks: list[Any] = [layer.mlp for layer in converted.model.layers]
    plain = divergence(converted, probe, wanted)
    assert marginal_values(converted, blocks, probe, wanted).divergence == pytest.approx(plain)


@pytest.mark.parametrize(("family", "pays"), [("llama", True), ("opt", True), ("llama", False)])
def test_first_layers_stay_dense_where_that_pays(family: str, pays: bool) -> None:
    layers = (1, 2) if pays else (0,)
    model = idle(*layers, model=tiny_model(family))
    plan, lines = plan_for(model), []
    found = share_budgets(model, find_ffns(model), plan, CALIBRATION, CPU, 0, lines.append)
    assert found.moe.layers == ((1, 2) if pays else (0, 1, 2))
    assert len(lines) == 2
    assert found.macs.total <= plan.macs.total
    if not pays:
        assert found.moe == plan.moe


def test_a_model_that_keeps_its_first_layers_is_written_and_exported(tmp_path: Path) -> None:
    dense = idle(1, 2, model=dense_model("llama"))
    output, plain = tmp_path / "out", tmp_path / "plain"
    model, report = moesaic.convert(
        dense, "moesaic", LAYOUT, WINDOWS, settings=SETTINGS, tokenizer=tokenizer(), output=output
    )
    assert list(model.config.moesaic.layers) == [1, 2]
    assert report.layout == model.config.moesaic.layout == "S2A2E10"
    assert [layer.layer for layer in report.layers] == [1, 2]
    assert not isinstance(model.model.layers[0].mlp, MoesaicBlock)
    assert report.budgets == []
    assert report.macs == count_macs(model, 1).total
    again = AutoModelForCausalLM.from_pretrained(output)
    ids = tokens(2, 12, seed=3)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    moesaic.convert(
        idle(1, 2, model=dense_model("llama")), "moesaic", "S2A2E10", WINDOWS, dense_layers=[0],
        tokenizer=tokenizer(), output=plain,
    )  # fmt: skip
    by_hand = AutoModelForCausalLM.from_pretrained(plain)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, by_hand(ids).logits)
    moesaic.export(output, "glm4_moe", tmp_path / "stock")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert stock.config.first_k_dense_replace == 1


def test_a_resumed_run_takes_the_split_that_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, output = tmp_path / "dense", tmp_path / "out"
    idle(1, 2).save_pretrained(folder)

    def convert(resume: bool) -> Any:
        return moesaic.convert(
            folder, "moesaic", LAYOUT, WINDOWS, settings=SETTINGS, output=output, resume=resume
        )

    def stop(*arguments: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(drafts, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(resume=False)
    monkeypatch.setattr("moesaic.conversion.layer_budgets.search_split", stop)
    model, report = convert(resume=True)
    assert list(model.config.moesaic.layers) == [1, 2]
    assert report.layout == "S2A2E10"


def test_layers_that_the_user_keeps_come_on_top() -> None:
    model, report = moesaic.convert(
        idle(1, 2), "moesaic", "S2A4E10", WINDOWS, settings=SETTINGS, dense_layers=[2]
    )
    kept = [layer for layer in range(LAYERS) if layer not in model.config.moesaic.layers]
    assert 2 in kept
    assert len(report.layers) == LAYERS - len(kept)


def test_a_mixture_keeps_equal_budgets() -> None:
    model, lines = tiny_mixture("mixtral"), []
    plan = plan_for(model, "S1A2E4")
    assert share_budgets(model, find_ffns(model), plan, CALIBRATION, CPU, 0, lines.append) is plan
    assert lines == ["the layers of a model that is a mixture already keep equal budgets"]
