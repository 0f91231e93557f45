"""Exports to stock MoE architectures: the same logits and choices, or a reason."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import moesaic
from moesaic.cli.main import main
from moesaic.conversion.options import make_budget
from moesaic.conversion.plan import make_plan
from moesaic.errors import MoesaicError
from moesaic.export import gguf_file, glm4_moe, qwen2_moe, run
from moesaic.export.gguf_vocab import PRE_TOKENIZERS, read_vocabulary
from moesaic.export.scale import choose_scale, chosen
from moesaic.export.stock import blocks, common_config, common_reasons
from moesaic.export.verify import (
    _changed_by_chance,
    agreement,
    calls,
    compare_models,
    experts_by_kernel,
    forced,
)
from moesaic.families.load import base_model_of, load_config, load_model, load_tokenizer
from moesaic.kernels.experts import runs_by_itself
from moesaic.output.atomic import new_path
from tests.families import CONTEXT, VOCABULARY, tiny_model, tokens
from tests.stock_models import DENSE, converted_folder, dense_model, tokenizer

TEXT = "the cat sat in a hat and the rat in a bin " * 60
HELD = {
    "glm4_moe": [name for name in DENSE if "sliding" not in name],
    "qwen2_moe": [name for name in DENSE if name not in ("qwen3", "phi3, partial")],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One converted model of each kind, made once."""
    root = tmp_path_factory.mktemp("converted")
    return {name: converted_folder(name, root / str(i)) for i, name in enumerate(DENSE)}


def exported(folder: Path, format: str, output: Path, **options: Any) -> Any:
    report = moesaic.export(str(folder), format, output, **options)
    return report, AutoModelForCausalLM.from_pretrained(output).eval()


# --- the same function -------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "name"), [(f, n) for f, names in HELD.items() for n in names])
def test_a_stock_model_gives_the_same_logits(
    format: str, name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The same experts for all but one token in a thousand, and logits of rms 1 within 5e-3.

    Where two experts tie in float32, the other one may run: that shows in all later tokens of the
    window, so logits are compared up to there.
    """
    report, stock = exported(folders[name], format, tmp_path / "out")
    assert type(stock).__module__.startswith(f"transformers.models.{format}")
    original, ids = load_model(folders[name]), tokens(128, 64, seed=5)
    routers = [block.router for block in blocks(original)]
    gates = [layer.mlp.gate for layer in stock.model.layers]
    with torch.no_grad(), calls(routers) as own, calls(gates) as others:
        expected, found = original(ids).logits, stock(ids).logits
    experts = original.config.moesaic.sizes[0].num_routed
    changed = torch.stack([
        (chosen(ours[0], experts) != chosen(stocks[2], experts)).any(1).view(ids.shape)
        for (_, ours), (_, stocks) in zip(own, others, strict=True)
    ])  # fmt: skip
    assert changed.double().mean() < 1e-3
    same = changed.any(0).cumsum(1) == 0
    assert same.double().mean() > 0.9
    error = (found - expected).abs() / expected.square().mean().sqrt()
    assert error[same].max() < 5e-3
    assert error[same].mean() < 1e-3
    assert max(scale.changed for scale in report.scales) < 1e-3
    assert max(scale.gate_error for scale in report.scales) < 2e-3


@pytest.mark.parametrize("name", ["llama, llama3 rope", "qwen2", "phi3, partial"])
def test_narrow_heads_are_filled_up_and_attend_as_before(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Heads of 8 dimensions as heads of 32: the inputs of the first layer's router show it."""
    report, stock = exported(folders[name], "glm4_moe", tmp_path / "out")
    assert stock.config.head_dim == 32
    rotated = 8 * (0.5 if "partial" in name else 1)
    assert stock.config.rope_parameters["partial_rotary_factor"] * 32 == rotated
    assert any("heads of 8" in line for line in report.warnings)
    original, ids = load_model(folders[name]), tokens(4, 64, seed=5)
    with torch.no_grad(), calls([blocks(original)[0].router]) as own:
        original(ids)
    with torch.no_grad(), calls([stock.model.layers[0].mlp.gate]) as others:
        stock(ids)
    torch.testing.assert_close(others[0][0].view_as(own[0][0]), own[0][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("format", "name", "dense"),
    [
        ("glm4_moe", "qwen3", (0,)),
        ("glm4_moe", "phi3", (0, 1)),
        ("qwen2_moe", "qwen2, sliding", (1,)),
        ("qwen2_moe", "phi3", (0, 2)),
    ],
)
def test_layers_that_stayed_dense_go_along(
    format: str, name: str, dense: tuple[int, ...], tmp_path: Path
) -> None:
    folder = converted_folder(name, tmp_path / "converted", dense_layers=dense)
    report, stock = exported(folder, format, tmp_path / "out", verify="demo")
    original, ids = load_model(folder), tokens(4, 64, seed=5)
    for layer in stock.model.layers:
        assert hasattr(layer.mlp, "gate") == (layer.self_attn.layer_idx not in dense)
    with torch.no_grad():
        expected, found = original(ids).logits, stock(ids).logits
    error = (found - expected).abs() / expected.square().mean().sqrt()
    assert error.mean() < 1e-3
    converted = sorted(set(range(3)) - set(dense))
    assert [scale.layer for scale in report.scales] == converted


def test_dense_layers_where_a_format_has_no_place_for_them(tmp_path: Path) -> None:
    folder = converted_folder("llama", tmp_path / "converted", dense_layers=(1,))
    found = moesaic.explain(str(folder))
    assert any("its layers 1 are dense, in glm4_moe the first" in why for why in found["glm4_moe"])
    assert found["gguf-qwen2moe"] == ["llama.cpp gives qwen2moe no dense layers"]
    assert found["qwen2_moe"] == []


def test_a_gguf_file_names_the_dense_layers_before_the_first_mixture(tmp_path: Path) -> None:
    folder = converted_folder("llama", tmp_path / "converted", dense_layers=(0,))
    moesaic.export(str(folder), "gguf", tmp_path / "out.gguf", dtype="float32")
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert reader.fields["glm4moe.leading_dense_block_count"].contents() == 1
    stored = {tensor.name: tensor.data for tensor in reader.tensors}
    own = load_model(folder).model.layers[0].mlp.up_proj.weight.detach().numpy()
    assert (stored["blk.0.ffn_up.weight"] == own).all()
    assert "blk.0.ffn_gate_inp.weight" not in stored
    assert "blk.1.ffn_gate_inp.weight" in stored


def test_wide_heads_and_heads_with_a_norm_stay(folders: dict[str, Path]) -> None:
    config = load_model(folders["qwen3"]).config
    assert glm4_moe.warnings(config) == []
    assert glm4_moe.stock_config(config, torch.float32).head_dim == 8
    config = load_model(folders["llama, tied, head_dim 16"]).config
    assert glm4_moe.stock_config(config, torch.float32).head_dim == 32
    config.head_dim = 64
    assert glm4_moe.warnings(config) == []
    assert glm4_moe.stock_config(config, torch.float32).head_dim == 64


@pytest.mark.parametrize("layout", ["S0A3E8", "S1A5E6", "S2A1E4"])
@pytest.mark.parametrize("format", list(HELD))
def test_shared_experts_of_any_size(format: str, layout: str, tmp_path: Path) -> None:
    folder = converted_folder("llama", tmp_path / "converted", layout=layout)
    _, stock = exported(folder, format, tmp_path / "out")
    ids = tokens(4, 64, seed=5)
    with torch.no_grad():
        expected, found = load_model(folder)(ids).logits, stock(ids).logits
    assert ((found - expected).abs().mean() / expected.square().mean().sqrt()) < 1e-3


def test_a_selection_bias_goes_with_glm4_moe(folders: dict[str, Path], tmp_path: Path) -> None:
    """Sigmoid's slope at 0 is 1/4; qwen2_moe has no such bias."""
    model = load_model(folders["llama"])
    for layer in model.model.layers:
        layer.mlp.router.selection_bias.copy_(torch.randn(6))
    model.save_pretrained(tmp_path / "biased")
    tokenizer().save_pretrained(tmp_path / "biased")
    _, stock = exported(tmp_path / "biased", "glm4_moe", tmp_path / "out")
    ids = tokens(4, 64, seed=5)
    with torch.no_grad():
        difference = (model(ids).logits - stock(ids).logits).abs().mean()
        unbiased = (load_model(folders["llama"])(ids).logits - stock(ids).logits).abs().mean()
    assert difference < 1e-2 < 0.05 < unbiased
    with pytest.raises(MoesaicError, match="selection bias"):
        moesaic.export(str(tmp_path / "biased"), "qwen2_moe", tmp_path / "no")
    reasons = moesaic.explain(str(tmp_path / "biased"))
    assert not reasons["glm4_moe"]
    assert "selection bias" in reasons["qwen2_moe"][0]


def test_trained_gates_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    model = load_model(folders["llama"])
    with torch.no_grad():
        model.model.layers[1].mlp.router.expert_scale[2] = 0.01
    model.save_pretrained(tmp_path / "trained")
    tokenizer().save_pretrained(tmp_path / "trained")
    with pytest.raises(MoesaicError, match="expert_scale"):
        moesaic.export(str(tmp_path / "trained"), "glm4_moe", tmp_path / "no")
    for reasons in moesaic.explain(tmp_path / "trained").values():
        assert any("expert_scale" in reason for reason in reasons)
    assert not (tmp_path / "no").exists()


def test_bf16_keeps_its_dtype_and_the_scores_their_bits(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Scales are powers of two: the router's weights lose nothing."""
    report, stock = exported(folders["qwen3"], "glm4_moe", tmp_path / "out", dtype="bfloat16")
    assert stock.dtype == torch.bfloat16
    own = load_model(folders["qwen3"], "bfloat16")
    for layer, other, scale in zip(
        own.model.layers, stock.model.layers, report.scales, strict=True
    ):
        weight = other.mlp.gate.weight.float() / scale.factor
        assert torch.equal(weight, layer.mlp.router.score_proj.weight.float())


def test_a_float16_model_needs_a_wider_dtype(folders: dict[str, Path], tmp_path: Path) -> None:
    """Scaled router weights would be subnormal; GGUF has them in float32."""
    model = load_model(folders["llama"]).to(torch.float16)
    model.save_pretrained(tmp_path / "half")
    tokenizer().save_pretrained(tmp_path / "half")
    with pytest.raises(MoesaicError, match="float16, whose range the scaled router"):
        moesaic.export(tmp_path / "half", "glm4_moe", tmp_path / "out")
    exported(tmp_path / "half", "glm4_moe", tmp_path / "out", dtype="bfloat16")
    report = moesaic.export(tmp_path / "half", "gguf", tmp_path / "out.gguf")
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    weight = model.model.layers[0].mlp.router.score_proj.weight.detach().float().numpy()
    assert (found["blk.0.ffn_gate_inp.weight"].data == weight * report.scales[0].factor).all()
    assert found["blk.0.attn_q.weight"].tensor_type == gguf.GGMLQuantizationType.F16


@pytest.mark.parametrize(("routed", "active"), [(5, 3), (64, 4)])
def test_llama_cpps_qwen2moe_does_not_normalise(routed: int, active: int) -> None:
    """Gates R p_j by hand; chosen experts have the larger p, so that the scale is smaller."""
    logit_TR = torch.randn(100, routed) * 1e-3
    index_TK, gate_TK = gguf_file.qwen2moe_route(logit_TR, torch.zeros(routed), active)
    p_TR = logit_TR.double().exp() / logit_TR.double().exp().sum(1, keepdim=True)
    torch.testing.assert_close(
        gate_TK, (routed * p_TR.gather(1, index_TK)).float(), rtol=1e-6, atol=1e-6
    )
    assert (gate_TK.mean() > 1) == (active < routed)
    x_TD, weight_RD = torch.randn(512, 16), torch.randn(routed, 16)
    scales = [
        choose_scale(x_TD, weight_RD, torch.zeros(routed), active, route)
        for route in (gguf_file.qwen2moe_route, qwen2_moe.route)
    ]
    assert scales[0].factor <= scales[1].factor


def test_the_output_needs_no_moesaic(folders: dict[str, Path], tmp_path: Path) -> None:
    """Loaded in a process that cannot import us, with its tokenizer; weights in hub layout."""
    outputs = []
    for format in HELD:
        moesaic.export(str(folders["llama"]), format, tmp_path / format, verify=None)
        outputs.append(str(tmp_path / format))
    ids = tokens(2, 20, seed=5)
    torch.save(ids, tmp_path / "ids.pt")
    code = """
import sys, torch
sys.modules["moesaic"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
ids = torch.load(sys.argv[1])
found = []
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("the cat").input_ids
    with torch.no_grad():
        found.append(model(ids).logits)
    assert model.generate(ids[:1], max_new_tokens=3, do_sample=False).shape[1] > 20
torch.save(found, sys.argv[1])
"""
    subprocess.run([sys.executable, "-c", code, tmp_path / "ids.pt", *outputs], check=True)
    with torch.no_grad():
        expected = load_model(folders["llama"])(ids).logits
    for found in torch.load(tmp_path / "ids.pt"):
        assert (found - expected).abs().mean() < 1e-3
    for format in HELD:
        names = {path.name for path in (tmp_path / format).iterdir()}
        assert names >= {"config.json", "generation_config.json", "tokenizer.json", "README.md",
                         "model.safetensors", "moesaic_export.json"}  # fmt: skip
        assert not any(name.endswith(".py") for name in names)
        config = json.loads((tmp_path / format / "config.json").read_text())
        assert "auto_map" not in config
        base = load_config(folders["llama"]).moesaic.base_model
        assert config["moesaic_export"] == {"base_model": base}
        assert base_model_of(load_config(tmp_path / format)) == base
        keys = set(load_file(tmp_path / format / "model.safetensors"))
        assert keys >= {"model.layers.0.mlp.experts.5.up_proj.weight", "lm_head.weight"}


@pytest.mark.parametrize(("pad", "eos"), [(-1, []), (10**6, [2, 3]), (None, None)])
def test_special_tokens_that_no_vocabulary_holds_are_none(pad: Any, eos: Any) -> None:
    """Old configurations say -1 for no padding, which GGUF has no number for."""
    config = SimpleNamespace(bos_token_id=1, eos_token_id=eos, pad_token_id=pad, vocab_size=96)
    names = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"))
    tokens = gguf_file._special_tokens(SimpleNamespace(**names), config)
    assert tokens == {"bos": 1, "eos": eos[0] if eos else None, "pad": None, "unk": None}


# --- the scale of the scores -------------------------------------------------------------------


@pytest.mark.parametrize("route", [glm4_moe.route, qwen2_moe.route])
@settings(deadline=None, max_examples=20)
@given(st.integers(0, 100), st.integers(1, 5), st.sampled_from([1e-3, 1.0, 50.0]))
def test_gates_are_one_and_choices_kept(route: Any, seed: int, active: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(512, 16, generator=generator)
    weight_RD = torch.randn(6, 16, generator=generator) * spread
    scale = choose_scale(x_TD, weight_RD, torch.zeros(6), active, route)
    assert scale.gate_error <= 2e-3
    assert scale.changed <= 4 / 512
    assert float(torch.tensor(scale.factor).log2()) % 1 == 0


def test_a_scale_by_hand() -> None:
    """Two experts, scores +1 and -1: gates of two chosen ones are 1 +- tanh(scale / 2)."""
    x_TD, weight_RD = torch.ones(4, 1), torch.tensor([[1.0], [-1.0]])
    for target, expected in ((glm4_moe, 2.0**-10), (qwen2_moe, 2.0**-9)):
        scale = choose_scale(x_TD, weight_RD, torch.zeros(2), 2, target.route, 2.0**-10)
        spread = 2.0 ** round(torch.tensor(8 / 7).sqrt().log2().item())
        assert scale.factor == 2.0**-10 / spread
        assert scale.gate_error == pytest.approx(expected / 2, rel=1e-2)
        assert scale.changed == 0


def test_a_router_in_bfloat16_changes_choices_whatever_the_scale() -> None:
    """The same scale, since no other would help."""
    torch.manual_seed(0)
    x_TD, weight_RD = torch.randn(4096, 64), torch.randn(32, 64)
    arguments = (x_TD, weight_RD, torch.zeros(32), 16, qwen2_moe.route)
    exact = choose_scale(*arguments)
    rounded = choose_scale(*arguments, logit_dtype=torch.bfloat16)
    assert rounded.factor == exact.factor
    assert exact.changed < 1e-3 < rounded.changed < 0.2


def test_where_long_factors_begin_stays_where_vllm_reads_it() -> None:
    """LongRoPE of Phi-3: the length is an attribute of the configuration itself."""
    config = CONFIG_MAPPING["llama"](max_position_embeddings=64)
    config.original_max_position_embeddings = 16
    assert common_config(config, torch.float32)["original_max_position_embeddings"] == 16
    del config.original_max_position_embeddings
    assert "original_max_position_embeddings" not in common_config(config, torch.float32)


def test_sliding_windows_are_warned_of_where_engines_leave_them_out() -> None:
    """vLLM keeps the window that all layers have."""
    for name, layers in (("mistral, sliding", 0), ("qwen2, sliding", 1)):
        config = dense_model(name).config
        assert len(qwen2_moe.warnings(config)) == layers


def test_smaller_scales_bring_gates_nearer_to_one_and_choices_apart() -> None:
    torch.manual_seed(0)
    x_TD, weight_RD = torch.randn(4096, 64), torch.randn(32, 64)
    found = [
        choose_scale(x_TD, weight_RD, torch.zeros(32), 16, glm4_moe.route, 2.0**power)
        for power in (-6, -10, -16)
    ]
    errors, changes = [s.gate_error for s in found], [s.changed for s in found]
    assert errors == sorted(errors, reverse=True)
    assert changes == sorted(changes)
    assert changes[-1] > 0.01


def test_chosen_marks_each_index() -> None:
    found = chosen(torch.tensor([[0, 2], [1, 2]]), 4)
    assert found.int().tolist() == [[1, 0, 1, 0], [0, 1, 1, 0]]


# --- GGUF --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16", "q8_0"])
@pytest.mark.parametrize("format", ["gguf", "gguf-qwen2moe"])
def test_a_gguf_file_holds_the_stock_models_weights(
    format: str, dtype: str, tmp_path: Path
) -> None:
    folder = converted_folder("qwen2", tmp_path / "converted", hidden=64, neurons=256)
    own = moesaic.export(str(folder), format, tmp_path / "out.gguf", dtype=dtype)
    target = run.GGUF[format]
    other, stock = exported(folder, target, tmp_path / "stock")
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert reader.fields["general.architecture"].contents() == target.replace("_", "")
    found = {tensor.name: tensor for tensor in reader.tensors}
    tolerance = {"auto": 1e-6, "float16": 1e-3, "bfloat16": 8e-3, "q8_0": 2e-2}[dtype]
    names = dict(gguf_file._tensors(stock))
    assert found.keys() == names.keys()
    for name, tensor in names.items():
        values = gguf.quants.dequantize(found[name].data, found[name].tensor_type)
        assert values.shape == tuple(tensor.shape)
        expected = tensor.float().numpy()
        if name.endswith("ffn_gate_inp.weight"):  # llama.cpp's qwen2moe takes another scale
            layer = int(name.split(".")[1])
            expected = expected * (own.scales[layer].factor / other.scales[layer].factor)
        limit = 1e-6 if "ffn_gate_inp" in name or expected.ndim == 1 else tolerance
        assert abs(values - expected).max() <= limit * max(abs(expected).max(), 1e-3), name
    assert all(f"blk.2.ffn_{part}_exps.weight" in found for part in ("gate", "up", "down"))


def test_a_gguf_vocabulary_is_the_tokenizers(folders: dict[str, Path], tmp_path: Path) -> None:
    moesaic.export(str(folders["llama"]), "gguf", tmp_path / "out.gguf")
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    words = fields["tokenizer.ggml.tokens"].contents()
    own = tokenizer()
    assert len(words) == VOCABULARY
    assert words[: len(own)] == own.convert_ids_to_tokens(range(len(own)))
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert fields["tokenizer.ggml.merges"].contents() == ["t h", "th e", "i n", "Ġ a"]
    assert fields["tokenizer.ggml.bos_token_id"].contents() == 1
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False
    types = fields["tokenizer.ggml.token_type"].contents()
    assert types[:4] == [3, 3, 3, 1]
    assert types[len(own) :] == [5] * (VOCABULARY - len(own))


def test_a_gguf_file_holds_several_chat_templates_under_a_name_without_effect(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """llama.cpp asks files named after Phi-3 for tokens of its tokenizer."""
    folder = tmp_path / "converted"
    shutil.copytree(folders["llama"], folder)
    several = tokenizer()
    several.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    several.save_pretrained(folder)
    moesaic.export(folder, "gguf", tmp_path / "my-Phi-3.gguf")
    fields = gguf.GGUFReader(tmp_path / "my-Phi-3.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == "{{ messages }}"
    assert fields["tokenizer.chat_template.tool_use"].contents() == "{{ tools }}"
    assert fields["general.name"].contents() == "moesaic"


def test_a_sentencepiece_vocabulary_scores_by_merge_rank(shared: Path, tmp_path: Path) -> None:
    found = read_vocabulary(load_tokenizer(shared / "models" / "stories260K"), 512)
    assert (found.model, found.space_prefix) == ("llama", True)
    assert found.types[:4] == [2, 3, 3, 6]
    spec = json.loads((shared / "models" / "stories260K" / "tokenizer.json").read_text())
    first = spec["model"]["merges"][0]
    assert found.scores is not None
    assert found.scores[found.tokens.index("".join(first if isinstance(first, list) else
                                                   first.split()))] == 0  # fmt: skip


def word_level(spec: dict[str, Any]) -> None:
    spec["model"] = {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"}


def unknown_cut(spec: dict[str, Any]) -> None:
    spec["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "[a-z]+"}, "behavior": "Isolated",
             "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": False},
        ],
    }  # fmt: skip


def space_before(spec: dict[str, Any]) -> None:
    spec["pre_tokenizer"]["add_prefix_space"] = True


def lower_case(spec: dict[str, Any]) -> None:
    spec["normalizer"] = {"type": "Lowercase"}


def removed_cuts(spec: dict[str, Any]) -> None:
    unknown_cut(spec)
    split = spec["pre_tokenizer"]["pretokenizers"][0]
    split |= {"pattern": {"Regex": list(PRE_TOKENIZERS)[2]}, "behavior": "Removed"}


def other_merges(spec: dict[str, Any]) -> None:
    spec["model"]["ignore_merges"] = True


def spaces_beside(spec: dict[str, Any]) -> None:
    spec["added_tokens"][0]["rstrip"] = True


def lower_case_sentencepiece(spec: dict[str, Any]) -> None:
    spec["model"] |= {"byte_fallback": True}
    spec["pre_tokenizer"] = None
    lower_case(spec)


def words_sentencepiece(spec: dict[str, Any]) -> None:
    spec["model"] |= {"byte_fallback": True}
    spec["pre_tokenizer"] = {"type": "Whitespace"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (word_level, "tokenizer is WordLevel, GGUF is written for BPE only"),
        (unknown_cut, "cuts text by Split and ByteLevel in a way"),
        (space_before, "cuts text by ByteLevel in a way"),
        (lower_case, "changes text by Lowercase first"),
        (removed_cuts, "cuts text by Split and ByteLevel in a way"),
        (other_merges, "merges otherwise than llama.cpp's gpt-2"),
        (spaces_beside, "takes spaces beside it, which llama.cpp does not see"),
        (lower_case_sentencepiece, "changes text by Lowercase first"),
        (words_sentencepiece, "cuts text by Whitespace before it merges"),
    ],
)
def test_a_tokenizer_that_gguf_cannot_express(
    change: Callable[[dict[str, Any]], None], reason: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    spec = json.loads(tokenizer().backend_tokenizer.to_str())
    change(spec)
    other = Tokenizer.from_str(json.dumps(spec))
    with pytest.raises(MoesaicError, match=reason):
        read_vocabulary(PreTrainedTokenizerFast(tokenizer_object=other), VOCABULARY)
    folder = tmp_path / "converted"
    shutil.copytree(folders["llama"], folder)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert any(reason in why for why in moesaic.explain(folder)["gguf"])
    assert not moesaic.explain(folder)["glm4_moe"]


@pytest.mark.parametrize(("name", "pattern"), [(v, k) for k, v in PRE_TOKENIZERS.items()])
def test_known_regular_expressions_have_their_names(name: str, pattern: str) -> None:
    spec = json.loads(tokenizer().backend_tokenizer.to_str())
    unknown_cut(spec)
    spec["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    spec["model"]["ignore_merges"] = name == "llama-bpe"
    other = Tokenizer.from_str(json.dumps(spec))
    found = read_vocabulary(PreTrainedTokenizerFast(tokenizer_object=other), VOCABULARY)
    assert (found.model, found.pre) == ("gpt2", name)


@pytest.mark.parametrize("name", ["griffin", "moebert", "read-me"])
def test_nobody_is_sent_to_an_engine_that_does_not_run_the_model(name: str) -> None:
    windows = tokens(8, CONTEXT, seed=1)
    calibration: Any = {"a": windows[:4], "b": windows[4:]} if name == "read-me" else windows
    model, _ = moesaic.convert(
        tiny_model("llama"), name, sparsity=0.5, calibration=calibration
    )  # fmt: skip
    (reason,) = [one for one in common_reasons(model.config) if "its router is" in one]
    assert "through transformers" in reason
    assert "vLLM" not in reason


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"format": "glm_moe"}, "unknown format 'glm_moe': did you mean glm4_moe"),
        ({"dtype": "float16"}, "float16: the scaled router weights are below its range"),
        ({"dtype": "float"}, "unknown dtype"),
        ({"epsilon": 2.0}, "epsilon 2.0 is outside"),
        ({"format": "gguf"}, "one file for llama.cpp"),
        ({"model": "demo"}, "is a llama model that moesaic has not converted"),
        ({"model": "nowhere/at/all"}, "no such model folder"),
        ({"verify": "missing.txt"}, "no such text"),
    ],
)
def test_bad_arguments_leave_nothing(
    options: dict[str, Any], reason: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    arguments = {"model": str(folders["llama"]), "format": "glm4_moe"} | options
    with pytest.raises(MoesaicError, match=reason):
        moesaic.export(output=tmp_path / "out", **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("method", "format", "reason"),
    [
        ("cmoe", "glm4_moe", "its router is neuron-copies, stock ones are a matrix"),
        ("moesaic-dynamic", "glm4_moe", "its router is quadratic, stock ones are a matrix"),
        ("moesaic-dynamic", "glm4_moe", "its tokens run different numbers of experts"),
        ("static", "qwen2_moe", "method static left no experts"),
        ("random", "gguf", "its router is neuron-copies, stock ones are a matrix"),
    ],
)
def test_methods_that_stock_routers_cannot_hold(
    method: str, format: str, reason: str, tmp_path: Path
) -> None:
    folder = converted_folder("llama", tmp_path / "converted", method)
    with pytest.raises(MoesaicError, match=reason):
        moesaic.export(str(folder), format, tmp_path / "out.gguf")
    assert any(reason in why for why in moesaic.explain(str(folder))[format])
    assert [path.name for path in tmp_path.iterdir()] == ["converted"]


@pytest.mark.parametrize(
    ("name", "format", "reason"),
    [
        ("mistral, sliding", "glm4_moe", "windows of 8 tokens"),
        ("qwen2, sliding", "gguf", "windows of 8 tokens"),
        ("qwen2, sliding", "gguf-qwen2moe", "no sliding windows"),
        ("qwen3", "qwen2_moe", "queries and keys are normalised"),
        ("llama, llama3 rope", "gguf", "rope scaling is llama3"),
        ("phi3, partial", "gguf-qwen2moe", "a part of each head"),
        ("llama, tied, head_dim 16", "gguf-qwen2moe", "heads . head_dim = hidden_size"),
    ],
)
def test_models_that_a_format_cannot_hold(
    name: str, format: str, reason: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(MoesaicError, match=reason):
        moesaic.export(str(folders[name]), format, tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_exists_is_kept(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(MoesaicError, match="exists"):
        moesaic.export(str(folders["llama"]), "glm4_moe", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_an_interrupted_export_leaves_nothing_under_its_name(tmp_path: Path) -> None:
    def interrupted() -> None:
        with new_path(tmp_path / "out") as part:
            part.mkdir()
            (part / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_computes_something_else_is_not_kept(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = glm4_moe.stock_state

    def wrong(model: Any, factors: list[float]) -> Any:
        state = real(model, factors)
        return {k: v * 1.5 if "down_proj" in k else v for k, v in state.items()}

    monkeypatch.setattr(glm4_moe, "stock_state", wrong)
    with pytest.raises(MoesaicError, match="differs from the original"):
        moesaic.export(str(folders["llama"]), "glm4_moe", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_epsilon_that_loses_the_choices_is_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(MoesaicError, match=r"at epsilon .* run other experts"):
        moesaic.export(str(folders["llama"]), "glm4_moe", tmp_path / "out", epsilon=2.0**-23)
    assert list(tmp_path.iterdir()) == []


def test_files_have_the_modes_that_the_user_gives_new_files(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    before = os.umask(0o027)
    try:
        moesaic.export(str(folders["llama"]), "gguf", tmp_path / "out.gguf")
    finally:
        os.umask(before)
    assert (tmp_path / "out.gguf").stat().st_mode & 0o777 == 0o640


def test_folders_made_for_a_refused_export_go_with_it(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(MoesaicError, match="at epsilon"):
        moesaic.export(str(folders["llama"]), "glm4_moe", tmp_path / "a/b/out", epsilon=0.9)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_shard_is_named_by_explain(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "converted"
    shutil.copytree(folders["llama"], folder)
    shard = next(folder.glob("model-00001-*"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(MoesaicError, match=f"cannot read .*{shard.name}"):
        moesaic.explain(folder)


def test_router_weights_that_are_not_numbers(folders: dict[str, Path]) -> None:
    with pytest.raises(MoesaicError, match="scores are not finite"):
        choose_scale(
            torch.randn(9, 4), torch.full((3, 4), torch.nan), torch.zeros(3), 2, glm4_moe.route
        )


def test_a_weight_without_a_place_is_refused(tmp_path: Path) -> None:
    """Nothing of the model is dropped silently."""
    model = dense_model("llama")
    converted, _ = moesaic.convert(model, "moesaic", "S2A3E8", tokens(8, 64, seed=1))
    converted.model.layers[0].self_attn.extra = torch.nn.Linear(4, 4)
    options = run.ExportOptions(
        "it", "glm4_moe", tmp_path / "out", epsilon=None, dtype="auto", verify=None,
        trust_remote_code=False,
    )  # fmt: skip
    with pytest.raises(MoesaicError, match=r"no place for .*extra"):
        run._build(options, converted, [1.0] * 3)


def test_the_command_exports_explains_and_verifies(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "text.txt").write_text(TEXT)

    def call(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["moesaic", "export", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0)

    folder = folders["mistral, sliding"]
    assert call(folder, "--explain") == 0
    explained = " ".join(capsys.readouterr().out.split())
    assert "windows of 8" in explained
    assert "in llama.cpp on a CPU" not in explained  # which cannot hold it
    assert call(folders["llama"], "--explain") == 0
    assert "in llama.cpp on a CPU experts take longer" in " ".join(capsys.readouterr().out.split())
    out, report = tmp_path / "out", tmp_path / "report.json"
    assert call(folder, "--format", "qwen2_moe", "--output", out, "--verify",
                tmp_path / "text.txt", "--json", report) == 0  # fmt: skip
    printed = " ".join(capsys.readouterr().out.split())
    assert "perplexity" in printed
    found = json.loads(report.read_text())
    assert found["comparison"]["mean"] < 1e-3
    assert found["comparison"]["perplexity"] == pytest.approx(
        found["comparison"]["original_perplexity"], rel=1e-3
    )
    assert call(folder, "--format", "qwen2_moe", "--output", out) == 2
    assert "exists" in capsys.readouterr().err
    assert call(folder) == 2
    inside = out / "report.json"
    assert call(folder, "--format", "qwen2_moe", "--output", tmp_path / "new", "--json",
                tmp_path / "new" / "report.json") == 2  # fmt: skip
    assert not inside.exists()
    assert not (tmp_path / "new").exists()
    for option, value in (("--output", tmp_path / "new"), ("--epsilon", "1"), ("--dtype", "q8_0")):
        assert call(folder, "--explain", option, value) == 2
        assert f"{option} does not go with --explain" in capsys.readouterr().err
    assert call(out, "--explain") == 2
    assert "there is nothing to export" in capsys.readouterr().err
    assert call(folder, "--explain", "--json", report) == 0
    assert json.loads(report.read_text())["qwen2_moe"] == []


class _TwoOfFour(torch.nn.Module):
    """Runs the two experts of largest score; inputs are the scores."""

    num_routed = 4
    num_active = 2

    def forward(self, x_TR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index_TK = x_TR.topk(2, dim=1).indices
        return index_TK, torch.ones_like(x_TR).gather(1, index_TK)

    def scores(self, x_TR: torch.Tensor) -> torch.Tensor:
        return x_TR

    def gates(self, score_TR: torch.Tensor) -> torch.Tensor:
        return 10 * score_TR


def test_choices_that_differ_are_counted_against_chance() -> None:
    """Of two of four experts one differs by chance; the gates are those of what was told."""
    router = _TwoOfFour()
    score_TR = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
    told_TK = torch.tensor([[2, 0], [3, 2], [0, 1]])
    changed = [0]
    with forced([router], [told_TK], changed):
        index_TK, gate_TK = router(score_TR)
    assert torch.equal(index_TK, told_TK)
    assert gate_TK.tolist() == [[20, 40], [40, 30], [10, 20]]
    assert changed == [1 + 0 + 2]
    assert _changed_by_chance(router) == 1.0
    router.num_active = 4
    assert _changed_by_chance(router) == 0.0


def test_experts_run_by_the_kernel_meanwhile(folders: dict[str, Path], tmp_path: Path) -> None:
    _, stock = exported(folders["llama"], "glm4_moe", tmp_path / "out")
    own = stock.config._experts_implementation
    assert own != "moesaic"
    with experts_by_kernel(stock):
        assert (stock.config._experts_implementation == "moesaic") == runs_by_itself()
    assert stock.config._experts_implementation == own


def test_near_ties_are_no_other_architecture(folders: dict[str, Path], tmp_path: Path) -> None:
    """What a stock router chooses otherwise is counted apart from what its model computes."""
    _, stock = exported(folders["llama"], "glm4_moe", tmp_path / "out")
    original = load_model(str(folders["llama"]))
    ids = tokens(1, 64, seed=7)[0]
    same = agreement(original, stock, ids, 32)
    assert same.difference < 1e-3
    assert same.changed < 0.1
    assert max(compare_models(original, stock, ids, 32, 64).changed) < 0.1
    with torch.no_grad():
        for layer in stock.model.layers:
            layer.mlp.gate.weight.neg_()
    free = compare_models(original, stock, ids, 32, 64)
    turned = agreement(original, stock, ids, 32)
    assert free.mean > 10 * turned.difference
    # The least likely experts of the first layer, where both get the same inputs.
    sizes = original.config.moesaic.first_sizes
    others = min(sizes.num_active, sizes.num_routed - sizes.num_active)
    assert free.changed[0] == pytest.approx(others / sizes.num_active)
    assert turned.difference < 1e-3
    assert turned.changed > 0.5
    with torch.no_grad():
        stock.model.layers[0].mlp.experts.down_proj.mul_(2)
    assert agreement(original, stock, ids, 32).difference > 0.05


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("gemma2", {}, "has other layers than Llama's"),
        ("gpt2", {}, "has no gate projection"),
        ("gemma", {}, "its FFN computes gelu"),
        ("qwen3", {"intercept": True}, "has biases, stock MoE layers have none"),
        ("qwen3", {}, None),
    ],
)
def test_why_no_stock_architecture_holds_a_model(
    family: str, settings: dict[str, Any], reason: str | None
) -> None:
    method = moesaic.load_method("moesaic", settings)
    plan = make_plan(tiny_model(family).config, "t", method, make_budget("S2A3E8"))
    reasons = common_reasons(plan.config)
    if reason is None:
        assert reasons == []
    else:
        assert any(reason in told for told in reasons), reasons
