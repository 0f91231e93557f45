"""Bytes of weights read for one token: by hand, and against a run whose reads are added up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

import moesaic
from moesaic.conversion.options import make_budget, make_options
from moesaic.conversion.plan import Plan, make_plan
from moesaic.conversion.prepare import prepare
from moesaic.evaluate.weight_bytes import WeightBytes, count_bytes
from moesaic.evaluate.work import count_macs, meta_model
from moesaic.families.load import load_config, load_model
from moesaic.modeling import (
    MoesaicNeurons,
    MoesaicReplacement,
    MoesaicThresholdedLinear,
    block_moesaic,
)
from tests import reference
from tests.families import CONTEXT, FAMILIES, tiny_model, tokens
from tests.mixtures import MIXTURES, tiny_mixture
from tests.stock_models import tokenizer
from tests.test_work import ATTENTION, FFN, HEAD, TINY

WINDOWS = tokens(8, CONTEXT, seed=1)
LINEAR = str(Path(__file__).parent / "method_files" / "magnitude.py")
SIZES = {"float32": 4, "bfloat16": 2}


def tiny(dtype: str, **changes: Any) -> Any:
    """The model of tests/test_work.py in a dtype, without weights."""
    return meta_model(LlamaConfig(**TINY | changes, dtype=dtype))


def plan_of(config: Any, method: str, layout: str = "S3A3E8", **settings: Any) -> Plan:
    chosen = moesaic.load_method(method, settings)
    return make_plan(config, "a model", chosen, make_budget(layout))


def a_model(family: str, dtype: str = "float32") -> Any:
    """With weights. Experts of 24, of which bf16's grouped products can take rows."""
    if family not in MIXTURES:
        return tiny_model(family).to(getattr(torch, dtype))
    width = "intermediate_size"
    if "moe_" + width in MIXTURES[family]:
        width = "moe_" + width
    return tiny_mixture(family, **{width: 24}).to(getattr(torch, dtype))


def converted(dtype: str, method: str, layout: str = "S3A3E8", **settings: Any) -> Any:
    plan = plan_of(LlamaConfig(**TINY, dtype=dtype), method, layout, **settings)
    return meta_model(plan.config)


# --- by hand -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_dense_model_reads_every_matrix_once_and_no_embedding(dtype: str, tied: bool) -> None:
    size = SIZES[dtype]
    counted = count_bytes(tiny(dtype, tie_word_embeddings=tied))
    assert counted == WeightBytes(ffn=size * FFN, rest=size * (ATTENTION + HEAD))
    assert counted.total == size * (FFN + ATTENTION + HEAD)


@pytest.mark.parametrize("dtype", SIZES)
def test_experts_that_run_and_a_router_of_copies(dtype: str) -> None:
    """18 shared neurons and 3 experts of 5 in 3 layers; the router has 2 rows for each of 5."""
    size = SIZES[dtype]
    counted = count_bytes(converted(dtype, "cmoe"))
    experts = 3 * 3 * 16 * (18 + 3 * 5)
    router = 3 * 2 * 5 * 16
    assert counted == WeightBytes(size * (experts + router), size * (ATTENTION + HEAD))


def test_a_router_kept_in_float32_counts_as_it_is_stored() -> None:
    model = converted("bfloat16", "moesaic")
    for layer in model.model.layers:
        layer.mlp.router.float()
    experts = 3 * 3 * 16 * (18 + 3 * 5)
    router = 3 * 5 * 16
    assert count_bytes(model).ffn == 2 * experts + 4 * router


@pytest.mark.parametrize("sketch_dtype", [torch.bfloat16, torch.float32])
def test_neurons_read_all_gates_and_a_sketch_in_its_own_dtype(sketch_dtype: torch.dtype) -> None:
    """43 gate rows, 33 rows of up and of down, and a sketch of rank 4, in 3 layers."""
    model = converted("bfloat16", "moesaic-neurons", choose_by="sketch", directions=4)
    for layer in model.model.layers:
        layer.mlp.router.to(sketch_dtype)
    rows = 3 * 16 * (43 + 2 * 33)
    sketch = 3 * 4 * (16 + 43)
    assert count_bytes(model).ffn == 2 * rows + sketch_dtype.itemsize * sketch


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("dtype", SIZES)
def test_neurons_by_copies_read_codes_scales_and_the_rows_that_run(dtype: str, bits: int) -> None:
    """Of 43 neurons 33 run, 16 of them on exact rows; a scale for each row of 16.

    16: 33/43 is three tenths of the way from 2/3 to 1, and so is 0.48 from 1/4 to 1.
    """
    model = converted(dtype, "moesaic-neurons", bits=bits, exact=0.25)
    rows = 3 * 16 * (33 + 2 * 16)
    codes = 3 * 2 * 43 * 16 * bits / 8
    scales = 3 * 2 * 43
    assert count_bytes(model).ffn == SIZES[dtype] * (rows + scales) + codes


@pytest.mark.parametrize("dtype", SIZES)
def test_linear_layers_read_their_share_in_ffns_and_in_attention(dtype: str) -> None:
    size = SIZES[dtype]
    method = moesaic.load_method(LINEAR)
    budget = make_budget(None, sparsity=0.25)
    plan = make_plan(LlamaConfig(**TINY, dtype=dtype), "a model", method, budget)
    assert plan.bytes == WeightBytes(0.75 * size * FFN, size * (0.75 * ATTENTION + HEAD))
    assert plan.dense_bytes == WeightBytes(size * FFN, size * (ATTENTION + HEAD))


def test_an_ffn_in_two_parts_is_an_ffn_to_linear_methods_too() -> None:
    """OPT's layer holds both matrices itself."""
    plan = make_plan(
        tiny_model("opt").config, "a model", moesaic.load_method(LINEAR), make_budget(None, 0.25)
    )
    assert plan.bytes.ffn == 0.75 * plan.dense_bytes.ffn
    assert plan.macs.ffn == 0.75 * plan.dense_macs.ffn


@pytest.mark.parametrize("dtype", SIZES)
def test_a_mixture_reads_what_runs_and_what_stands_around_it(dtype: str) -> None:
    """DeepSeek-V3: the first layer dense, then 2 of 4 experts, a shared one and a router."""
    size = SIZES[dtype]
    model = a_model("deepseek_v3", dtype)
    dense_layer = 3 * 32 * 44
    mixed = 2 * 3 * 32 * 24 + 3 * 32 * 24 + 4 * 32
    assert count_bytes(model).ffn == size * (dense_layer + 2 * mixed)
    # The outer router may be kept in float32.
    for layer in model.model.layers[1:]:
        layer.mlp.gate.float()
    more = (4 - size) * 2 * 4 * 32
    assert count_bytes(model).ffn == size * (dense_layer + 2 * mixed) + more


def test_a_mixture_of_mixtures_reads_sub_experts_and_both_kinds_of_routers() -> None:
    """Each expert of 24 skips 2 of its 5 routed sub-experts of 3, and so does the shared one."""
    plan = plan_of(a_model("deepseek_v3").config, "cmoe")
    sub = 3 * 32 * (24 - 2 * 3) + 2 * 5 * 32
    dense_layer = 3 * 32 * 44
    mixed = (2 + 1) * sub + 4 * 32
    assert plan.bytes.ffn == 4 * (dense_layer + 2 * mixed)


def test_what_holds_its_weights_elsewhere_has_to_count_them_itself() -> None:
    class Elsewhere(MoesaicReplacement):
        def active_weights(self) -> float:
            return 8.0

    with pytest.raises(NotImplementedError, match="Elsewhere counts no bytes"):
        Elsewhere().weight_bytes()


# --- against multiply-accumulates, and against a run -------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_in_float32_every_multiplication_reads_four_bytes(family: str) -> None:
    model = a_model(family)
    macs = count_macs(model, 1)
    counted = count_bytes(model)
    assert counted.ffn == 4 * macs.ffn_and_routers
    assert counted.rest == 4 * (macs.attention + macs.head)
    assert counted.total == reference.bytes_read(model, token=7)


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("method", ["cmoe", "moesaic", "static", "random"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "deepseek_v3"])
def test_a_converted_model_reads_what_it_counts(
    family: str, method: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where tokens are gathered: a CPU reads all of experts as small as these."""
    monkeypatch.setattr(block_moesaic, "SMALL_EXPERT", 0)
    dense = a_model(family, dtype)
    settings = {"repair_by": "none"} if method == "moesaic" else {}
    model, report = moesaic.convert(dense, method, "S2A3E8", WINDOWS, settings=settings)
    counted = count_bytes(model)
    assert counted.total == report.bytes
    assert counted.total == reference.bytes_read(model, token=7)
    assert counted.total < report.dense_bytes


@pytest.mark.parametrize("dtype", SIZES)
def test_neurons_and_linear_layers_read_what_they_count(dtype: str) -> None:
    """With thresholds put where the token at hand meets the budget exactly."""
    chosen_by: list[tuple[str, dict[str, object]]] = [
        ("moesaic-neurons", {"choose_by": "sketch"}),
        ("moesaic-neurons", {"choose_by": "copies"}),
        (LINEAR, {}),
    ]
    for method, settings in chosen_by:
        dense = tiny_model("qwen3").to(getattr(torch, dtype))
        model, report = moesaic.convert(
            dense, method, None, WINDOWS, sparsity=0.25, settings=settings
        )
        for module in model.modules():
            if isinstance(module, MoesaicNeurons):
                module.router.register_forward_hook(exactly(module))
            elif isinstance(module, MoesaicThresholdedLinear):
                module.register_forward_pre_hook(exact_share)
        counted = count_bytes(model)
        assert counted.total == report.bytes
        assert counted.total == pytest.approx(reference.bytes_read(model, token=7), rel=1e-12)


def exactly(neurons: Any) -> Any:
    """A hook that moves scores so that as many as planned are above zero, or above the margin."""
    active = neurons.sizes.num_active

    def shift(router: Any, args: Any, score_TF: torch.Tensor) -> torch.Tensor:
        shifted_TF = score_TF - between(score_TF, active)
        if not router.reads_gates:
            router.exact_margin.copy_(between(shifted_TF, router.num_exact).squeeze())
        return shifted_TF

    def between(score_TF: torch.Tensor, count: int) -> torch.Tensor:
        ordered_TF = score_TF.sort(dim=1, descending=True).values
        return ordered_TF[:, count - 1 : count + 1].mean(dim=1, keepdim=True)

    return shift


def exact_share(module: Any, args: Any) -> None:
    """Keeps as many of this token's inputs as the share says."""
    size = args[0].abs().float().flatten() * module.input_scale
    kept = module.share * module.in_features
    assert kept == int(kept)
    ordered = size.sort(descending=True).values
    module.threshold = ordered[int(kept) - 1 : int(kept) + 1].mean()


# --- plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_plan_counts_what_the_saved_model_holds(family: str, dtype: str, tmp_path: Path) -> None:
    a_model(family, dtype).save_pretrained(tmp_path / "dense")
    tokenizer().save_pretrained(tmp_path / "dense")
    config = load_config(tmp_path / "dense")
    plan = plan_of(config, "cmoe")
    assert plan.dense_bytes == count_bytes(load_model(tmp_path / "dense"))
    _, report = moesaic.convert(
        tmp_path / "dense", "cmoe", "S3A3E8", WINDOWS, output=tmp_path / "out"
    )
    assert plan.bytes == count_bytes(load_model(tmp_path / "out"))
    assert report.bytes == plan.bytes.total
    assert report.dense_bytes == plan.dense_bytes.total
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| Weights read for one token | {report.bytes / 1e6:.4g} MB (dense" in card


@pytest.mark.parametrize("family", sorted(MIXTURES))
def test_a_mixture_without_weights_counts_as_the_one_that_is_loaded(
    family: str, tmp_path: Path
) -> None:
    """Also where a family keeps its router in float32."""
    a_model(family, "bfloat16").save_pretrained(tmp_path)
    skeleton = meta_model(load_config(tmp_path))
    assert count_bytes(skeleton) == count_bytes(load_model(tmp_path))


def test_the_dtype_asked_for_is_counted(tmp_path: Path) -> None:
    a_model("llama", "bfloat16").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    counts = {}
    for dtype in ("auto", "float32"):
        options = make_options(tmp_path, "cmoe", "S3A3E8", WINDOWS, dtype=dtype)
        plan = prepare(options).plans[0]
        counts[dtype] = plan.bytes.total, plan.dense_bytes.total
    assert counts["float32"] == tuple(2 * count for count in counts["auto"])


def test_a_model_in_memory_is_counted_in_the_dtype_it_has() -> None:
    dense = tiny_model("llama")
    _, full = moesaic.convert(dense, "static", "S3A3E8", WINDOWS)
    cast = a_model("llama", "bfloat16")
    _, half = moesaic.convert(cast, "static", "S3A3E8", WINDOWS)
    assert (half.bytes, half.dense_bytes) == (full.bytes / 2, full.dense_bytes / 2)


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
def test_an_oracle_reads_what_static_pruning_does(family: str) -> None:
    config = tiny_mixture(family).config
    oracle = plan_of(config, "oracle", "S1A2E5")
    static = plan_of(config, "static", "S1A2E5")
    assert oracle.bytes.ffn == pytest.approx(static.bytes.ffn)
    assert oracle.bytes.rest == static.bytes.rest
    assert oracle.bytes.total < oracle.dense_bytes.total


def test_layers_that_stay_are_read_in_whole() -> None:
    model, _ = moesaic.convert(tiny_model("opt"), "static", "S3A3E8", WINDOWS, dense_layers=[1])
    assert count_bytes(model).ffn == 4 * 2 * 32 * (52 + 2 * 40)
    assert count_bytes(model).total == reference.bytes_read(model, token=7)


def test_a_norm_and_a_bias_are_no_matrices() -> None:
    model = tiny_model("llama")
    vectors = [p for p in model.parameters() if p.ndim == 1]
    assert vectors
    matrices = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    assert count_bytes(model).total == sum(weight.nbytes for weight in matrices)
