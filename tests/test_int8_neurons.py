"""Neurons chosen one by one in 8 bits a weight: copies, what they leave, and W_down's rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN

import moesaic
from moesaic import load_method
from moesaic.conversion.options import make_budget
from moesaic.conversion.plan import make_plan
from moesaic.errors import MoesaicError
from moesaic.finetune.balance import refit_thresholds
from moesaic.finetune.lora import merge
from moesaic.finetune.options import Machine, Settings
from moesaic.finetune.train import train
from moesaic.modeling import (
    GROUP,
    REST_BITS,
    BlockConfig,
    MoesaicInt8Neurons,
    MoesaicInt8Rows,
    RouterConfig,
    as_they_are,
)
from moesaic.parts.copies import nearest_bits
from tests import reference
from tests.families import CONTEXT, HIDDEN, NEURONS, tiny_model, tokens

WINDOWS = tokens(16, CONTEXT, seed=1)
OWN: Any = load_method("moesaic-neurons", {"prompts": "each"})
INT8: Any = load_method("moesaic-neurons", {"weights": "int8", "prompts": "each"})


def converted(family: str = "llama", sparsity: float = 0.5, method: Any = INT8) -> Any:
    return moesaic.convert(tiny_model(family), method, sparsity=sparsity, calibration=WINDOWS)[0]


def neurons_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, MoesaicInt8Neurons)]


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def row_by_row(rows: MoesaicInt8Rows) -> torch.Tensor:
    """The matrix (F, D), one number at a time."""
    weight_FD = torch.zeros(rows.codes.shape)
    for f, codes_D in enumerate(rows.codes.tolist()):
        for d, code in enumerate(codes_D):
            weight_FD[f, d] = code * float(rows.scales[f, d // GROUP])
    return weight_FD


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("exact", [0.0, 0.5, 1.0])
def test_the_block_is_the_loop(family: str, count: int, exact: float) -> None:
    """Neurons are skipped, run on copies, or on copies and what those leave."""
    model = converted(family, method=replace(INT8, exact=exact))
    torch.manual_seed(1)
    for block in neurons_of(model):
        x_TD = torch.randn(count, HIDDEN)
        router = block.router
        pairs = ((router.gate_copy, block.gate_proj), (router.up_copy, block.up_proj))
        copies, whole = [], []
        for copy, rest in pairs:
            copies.append(reference.copied_rows(copy.planes, copy.scales, HIDDEN, GROUP))
            planes_BFP = rest.planes.transpose(0, 1)
            left = reference.copied_rows(planes_BFP, rest.scales, HIDDEN, GROUP)
            whole.append(torch.from_numpy(copies[-1] + left))
        biases = [copy.bias if copy.bias is not None else torch.zeros(NEURONS) for copy, _ in pairs]
        y_TD, kind_TF = reference.copied_neurons_block(
            x_TD,
            (whole[0], whole[1], row_by_row(block.down_proj).T),
            (biases[0], biases[1], block.down_proj.bias),
            (copies[0], copies[1]),
            router.selection_bias,
            float(router.exact_margin),
            ACT2FN[model.config.moesaic.block.activation],
        )
        with torch.no_grad():
            assert np.array_equal(block.chosen(x_TD).numpy(), kind_TF > 0)
            np.testing.assert_allclose(block(x_TD).numpy(), y_TD, rtol=1e-4, atol=1e-5)
            block.view = as_they_are
            np.testing.assert_allclose(block(x_TD).numpy(), y_TD, rtol=1e-4, atol=1e-5)
        assert 0.2 < (kind_TF > 0).mean() < 0.8


def test_numbers_rounded_by_hand() -> None:
    weight_RI = torch.tensor([[-4.0, 0.9, 3.0, -2.2], [0.0, 0.0, 0.0, 0.0]])
    few = nearest_bits(weight_RI, 3, torch.float32)
    assert 0.9 < float(few.scale_RG[0, 0]) < 1.1
    assert few.code_RI.tolist() == [[-4, 1, 3, -2], [0, 0, 0, 0]]
    assert few.scale_RG[1, 0] == 0


@pytest.mark.parametrize("inputs", [5, GROUP, 2 * GROUP + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_8_bits_hardly_anything_is_lost(inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(inputs)
    weight_RI = torch.randn(30, inputs).to(dtype)
    few = nearest_bits(weight_RI, 8, dtype)
    assert few.scale_RG.dtype == dtype
    scale_RI = few.scale_RG.float().repeat_interleave(GROUP, dim=1)[:, :inputs]
    error_RI = few.code_RI * scale_RI - weight_RI.float()
    assert error_RI.norm() < 0.01 * weight_RI.float().norm()
    inside = (few.code_RI > -128) & (few.code_RI < 127)
    assert (error_RI.abs() <= 0.5001 * scale_RI.abs())[inside].all()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_all_neurons_and_no_repair_are_nearly_the_dense_model(family: str) -> None:
    ids = tokens(2, 40, seed=3)
    whole = replace(INT8, repair_by="none", intercept=False, up_steps=0)
    model, _ = moesaic.convert(tiny_model(family), whole, f"S0A{NEURONS}E{NEURONS}", WINDOWS)
    expected = logits(tiny_model(family), ids)
    error = (logits(model, ids) - expected).norm() / expected.norm()
    assert 0 < error < 0.02


def test_who_runs_is_as_with_whole_weights() -> None:
    """Copies choose; how exact rows are kept has no part in it."""
    eight = neurons_of(converted())[0].router
    own = converted(method=OWN).model.layers[0].mlp.router
    for name, tensor in eight.state_dict().items():
        assert torch.equal(tensor, own.state_dict()[name])


def test_a_bf16_model_comes_back_and_generates(tmp_path: Path) -> None:
    dense = tiny_model("qwen3").to(torch.bfloat16)
    dense.save_pretrained(tmp_path / "dense")
    model, report = moesaic.convert(
        tmp_path / "dense", INT8, sparsity=0.25, calibration=WINDOWS, output=tmp_path / "out"
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for block in neurons_of(loaded):
        assert block.down_proj.codes.dtype == torch.int8
        assert block.gate_proj.planes.shape == (NEURONS, REST_BITS, -(-HIDDEN // 8))
        assert block.gate_proj.planes.dtype == torch.uint8
        assert block.gate_proj.scales.dtype == torch.bfloat16
    assert torch.equal(logits(loaded, WINDOWS[:1]), logits(model, WINDOWS[:1]))
    out = loaded.generate(WINDOWS[:1, :8], max_new_tokens=4, do_sample=False)
    assert out.shape == (1, 12)
    assert "weights in 8 bits" in INT8.words(model.config.moesaic)
    assert np.isfinite(report.layers[0].relative_error)


@pytest.mark.parametrize("exact", [0.25, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_what_is_read(exact: float, dtype: torch.dtype) -> None:
    method = replace(INT8, exact=exact)
    size = torch.empty((), dtype=dtype).element_size()
    groups = -(-HIDDEN // GROUP)
    running = NEURONS // 2
    exact_rows = round(exact * running)
    for block in neurons_of(converted("qwen3", method=method)):
        half_row = HIDDEN / 2 + groups * size
        down_row = HIDDEN + groups * size
        expected = 2 * (NEURONS + exact_rows) * half_row + running * down_row
        assert block.to(dtype).weight_bytes() == pytest.approx(expected)


def test_as_many_multiplications_as_with_whole_weights() -> None:
    config = tiny_model("qwen3").config
    budget = make_budget(layout=None, sparsity=0.5)
    eight = make_plan(config, "tiny", INT8, budget)
    own = make_plan(config, "tiny", OWN, budget)
    assert eight.macs == own.macs
    assert eight.bytes.ffn < own.bytes.ffn


def test_the_budget_holds_after_fine_tuning_what_can_be_trained() -> None:
    """Attention learns; the FFNs' weights are whole numbers and stay."""
    model = converted("qwen3")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    windows = tokens(48, CONTEXT, seed=1)
    settings = Settings(samples=48, sequence_length=CONTEXT, batch_size=8, epochs=2, lora_lr=3e-3)
    done = train(model, windows, settings, Machine(use_cpu=True))
    assert done.history[-1]["loss"] < done.history[0]["loss"]
    with torch.no_grad():
        refit_thresholds(done.model, windows)
    after = merge(done.model).state_dict()
    for name, tensor in before.items():
        changed = not torch.equal(after[name], tensor)
        is_threshold = name.endswith(("selection_bias", "exact_margin"))
        assert changed == ("self_attn" in name and "proj" in name) or is_threshold
    for block in neurons_of(model):
        assert block.sizes.num_active == NEURONS // 2


def test_a_sketch_has_no_copies_to_be_a_part_of() -> None:
    with pytest.raises(MoesaicError, match="weights is 'int8'; it needs choose_by=copies"):
        load_method("moesaic-neurons", {"weights": "int8", "choose_by": "sketch"})
    with pytest.raises(MoesaicError, match="bits is 3; with weights=int8 a copy has half"):
        load_method("moesaic-neurons", {"weights": "int8", "bits": 3})
    with pytest.raises(MoesaicError, match="weights"):
        load_method("moesaic-neurons", {"weights": "int4"})


def test_other_routers_contradict_it() -> None:
    block = BlockConfig("int8-neurons", 8, True, False, "silu", True)
    gates = replace(block, router=RouterConfig("gates", "threshold", 4))
    assert gates.wrong() == "router kind"
    copies = RouterConfig("copies", "threshold", bits=4, exact=0.5)
    assert replace(block, router=copies).wrong() is None
    ungated = replace(block, router=copies, gated=False)
    assert ungated.wrong() == "router kind"
