"""Loading: GGUF files as models, and the dense model that a converted one was made from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

import moesaic
from moesaic.cli.main import main
from moesaic.conversion.plan import public_name
from moesaic.errors import MoesaicError
from moesaic.families.gguf_header import read_header
from moesaic.families.load import (
    _check_gguf_attention,
    dense_of,
    load_config,
    load_model,
    load_tokenizer,
    mend_generation,
    resolve,
    source_of,
)
from tests.families import CONTEXT, tiny_model, tokens
from tests.gguf_models import tiny_llama, write_gguf

TEXT = "the cat and the hat, 12 Grüße\n" * 300


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(2 * 40).view(2, 40)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


# --- GGUF files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_is_the_model_that_was_written(tmp_path: Path, tied: bool) -> None:
    original = tiny_llama(tied)
    path = write_gguf(tmp_path / "tiny.gguf", original)
    loaded = load_model(path)
    assert loaded.dtype == torch.float32  # the file's own
    torch.testing.assert_close(logits(loaded), logits(original), rtol=1e-5, atol=1e-5)
    assert loaded.config.name_or_path == load_config(path).name_or_path == str(path)
    loaded.save_pretrained(tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    assert torch.equal(logits(again), logits(loaded))


def test_quantised_weights_become_bfloat16_unless_asked(tmp_path: Path) -> None:
    original = tiny_llama()
    path = write_gguf(tmp_path / "tiny.gguf", original, Kind.Q8_0)
    assert load_model(path).dtype == torch.bfloat16
    loaded = load_model(path, "float32")
    assert loaded.dtype == torch.float32
    difference = (logits(loaded) - logits(original)).norm() / logits(original).norm()
    assert 0 < difference < 0.05


def test_what_lies_beside_a_gguf_file_is_not_of_the_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    for name in ("config.json", "tokenizer_config.json", "adapter_config.json"):
        (tmp_path / name).write_text("{ broken")
    expected = logits(tiny_llama())
    torch.testing.assert_close(logits(load_model(path)), expected, rtol=1e-5, atol=1e-5)
    assert load_tokenizer(path).decode(load_tokenizer(path)(TEXT)["input_ids"]) == TEXT


def test_a_card_can_say_from_what_the_weights_were_read(tmp_path: Path) -> None:
    quantised = write_gguf(tmp_path / "a.gguf", tiny_llama(), Kind.Q8_0)
    named = write_gguf(tmp_path / "b.gguf", tiny_llama(), Kind.Q8_0, general__file_type=15)
    plain = write_gguf(tmp_path / "c.gguf", tiny_llama(), Kind.F16)
    assert source_of(quantised) == "dequantised from a.gguf (Q8_0)"
    assert source_of(named) == "dequantised from b.gguf (Q4_K_M)"
    assert source_of(plain) == "read from c.gguf (F16)"
    assert source_of("demo") is None
    assert source_of(tiny_llama()) is None


def test_a_gguf_file_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saved folder is whole: weights, tokenizer, and no mark of quantisation."""
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), Kind.Q8_0)
    output = tmp_path / "out"
    model, report = moesaic.convert(
        path, "cmoe", "S3A3E8", [TEXT], output=output, samples=4, sequence_length=CONTEXT
    )
    assert report.model == str(path)
    config = load_config(output)
    assert config.moesaic.base_model == "tiny.gguf"
    assert not hasattr(config, "quantization_config")
    assert str(tmp_path) not in (output / "config.json").read_text()
    assert str(tmp_path) not in (output / "tokenizer_config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(output)
    assert torch.equal(logits(loaded), logits(model))
    tokenizer = AutoTokenizer.from_pretrained(output)
    ids = tokenizer(TEXT)["input_ids"]
    assert ids == load_tokenizer(path)(TEXT)["input_ids"]
    assert tokenizer.decode(ids) == TEXT
    monkeypatch.chdir(tmp_path)
    assert dense_of("out", config) == "tiny.gguf"


@pytest.mark.parametrize("command", ["eval", "flops"])
def test_commands_take_a_gguf_file(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    more = ["--text", str(text)] if command == "eval" else []
    monkeypatch.setattr(sys, "argv", ["moesaic", command, str(path), *more])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code


def cut(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def damaged(folder: Path, what: str) -> Path:
    """A GGUF file that is no model, for one reason or another."""
    path = folder / "bad.gguf"
    more: dict[str, Any] = {
        "other architecture": {"architecture": "mpt"},
        "shard": {"split__count": 3},
        "adapter": {"general__type": "adapter"},
    }.get(what, {})
    write_gguf(path, tiny_llama(), **more)
    if what == "cut in the weights":
        cut(path, 0.9)
    elif what == "cut in the header":
        cut(path, 0.01)
    elif what == "text":
        path.write_text("not a model")
    elif what == "empty":
        path.write_bytes(b"")
    return path


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("other architecture", "mpt is not supported yet; exports in GGUF run in llama.cpp"),
        ("shard", "one of 3 parts of a GGUF; join them"),
        ("adapter", "holds a GGUF adapter"),
        ("cut in the weights", "is cut short: it has"),
        ("cut in the header", "is cut short: it ends within its header"),
        ("text", "does not begin with GGUF"),
        ("empty", "is empty"),
    ],
)
def test_gguf_files_that_are_refused(
    what: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line, exit code 2, and nothing is written."""
    path = damaged(tmp_path, what)
    output = tmp_path / "out"
    for arguments in (["convert", str(path), "--output", str(output)], ["flops", str(path)]):
        monkeypatch.setattr(sys, "argv", ["moesaic", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    with pytest.raises(MoesaicError, match=message) as error:
        load_model(path)
    assert "\n" not in str(error.value)
    assert [file.name for file in tmp_path.iterdir()] == ["bad.gguf"]


def test_weights_that_transformers_would_leave_out_are_refused(tmp_path: Path) -> None:
    """Such as the factors by which Llama 3 stretches its rotary embedding."""
    model = tiny_llama()
    weights = model.state_dict()
    weights["rope_freqs.weight"] = torch.ones(4)
    stretched = SimpleNamespace(config=model.config, state_dict=lambda: weights)
    path = write_gguf(tmp_path / "more.gguf", stretched)
    with pytest.raises(MoesaicError, match=r"holds [\d,]+ weights, and transformers reads"):
        load_model(path)


@pytest.mark.parametrize(
    ("metadata", "what"),
    [
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4},
         r"rope scaling \(linear, factor 4\)"),
        ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 8},
         r"rope scaling \(yarn, factor 8\)"),
        ({"llama__rope__scale_linear": 2}, r"rope scaling \(linear, factor 2\)"),
        ({"llama__attention__sliding_window": 16}, "sliding window of 16 tokens"),
    ],
)  # fmt: skip
def test_attention_that_transformers_leaves_out_of_a_gguf_is_refused(
    metadata: dict[str, Any], what: str, tmp_path: Path
) -> None:
    """Else another model would be converted, and measured as the dense one."""
    path = write_gguf(tmp_path / "stretched.gguf", tiny_llama(), **metadata)
    with pytest.raises(MoesaicError, match=f"leaves out its {what}"):
        load_config(path)


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama__rope__scaling__type": "none", "llama__rope__scaling__factor": 4},
        {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 1},
        {"llama__attention__sliding_window": 64},  # as long as the context
    ],
)
def test_attention_as_usual_is_taken_from_a_gguf(metadata: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "usual.gguf", tiny_llama(), **metadata)
    assert load_config(path).model_type == "llama"


def test_families_without_one_rotary_embedding_have_their_gguf_checked_too(tmp_path: Path) -> None:
    """GPT-2 has learned positions, Gemma-3 one embedding for each kind of layer."""
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(), llama__rope__scaling__factor=4)
    header = read_header(path)
    gemma = {"full_attention": {"rope_type": "default"}, "sliding_attention": {}}
    for config in (GPT2Config(), SimpleNamespace(rope_parameters=gemma)):
        with pytest.raises(MoesaicError, match="leaves out its rope scaling"):
            _check_gguf_attention(config, header, "m.gguf")
    gemma["full_attention"] = {"rope_type": "linear"}
    _check_gguf_attention(SimpleNamespace(rope_parameters=gemma), header, "m.gguf")
    usual = read_header(write_gguf(tmp_path / "usual.gguf", tiny_llama()))
    _check_gguf_attention(GPT2Config(), usual, "usual.gguf")


def test_a_folder_of_gguf_files_names_them(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(MoesaicError, match=r"give one of them: a\.gguf, b\.gguf"):
        load_config(tmp_path)
    with pytest.raises(MoesaicError, match="no such GGUF file"):
        resolve(tmp_path / "c.gguf")


# --- the dense model of a converted one ----------------------------------------------------------


def made_from(base: str) -> Any:
    return SimpleNamespace(model_type="moesaic", moesaic=SimpleNamespace(base_model=base))


@pytest.mark.parametrize("base", ["demo", "somebody/model"])
def test_a_dense_model_with_a_name_of_its_own(base: str) -> None:
    assert dense_of("out", made_from(base)) == base


@pytest.mark.parametrize(
    "base", ["../victim", "/etc", "~/models", "models/..", "./model", "a/b/c", "", "..", "a b/c"]
)
def test_a_path_that_a_checkpoint_names_is_not_followed(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert dense_of("out", made_from(base)) is None


def test_a_dense_model_beside_the_converted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "runs" / "out"
    output.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = made_from("dense")
    assert dense_of(output, config) is None
    for folder in (tmp_path, tmp_path / "runs"):  # the nearer one comes first
        (folder / "dense").mkdir()
        assert dense_of(output, config) == str(folder / "dense")
    (elsewhere / "dense").mkdir()
    assert dense_of(output, config) == "dense"


def test_a_converted_model_is_not_its_own_dense_model(tmp_path: Path) -> None:
    for folder in (tmp_path / "dense", tmp_path / "out" / "dense"):
        folder.mkdir(parents=True)
    found = dense_of(tmp_path / "out" / "dense", made_from("dense"))
    assert found == str(tmp_path / "dense")


@pytest.mark.parametrize("base", ["", ".", "..", "/etc/hosts", "../../etc/hosts"])
def test_a_base_model_that_is_no_bare_name(base: str, tmp_path: Path) -> None:
    assert dense_of(tmp_path, made_from(base)) is None


def test_a_dense_model_was_made_from_none(tmp_path: Path) -> None:
    assert dense_of(tmp_path, tiny_llama().config) is None


# --- what transformers would load without a word -------------------------------------------------


def saved(folder: Path) -> Path:
    tiny_llama().save_pretrained(folder)
    return folder


def test_a_model_with_an_adapter_beside_it_is_refused(tmp_path: Path) -> None:
    """Its matrices would be in the model, and weights that are missing would not be told."""
    folder = saved(tmp_path / "model")
    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(tiny_llama(), config).save_pretrained(folder)
    assert (folder / "config.json").is_file()
    with pytest.raises(MoesaicError, match="holds a PEFT adapter beside the model"):
        load_model(folder)


def test_a_hub_model_with_an_adapter_beside_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "model")
    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(tiny_llama(), config).save_pretrained(folder)
    monkeypatch.setattr("moesaic.families.load._check_folder", lambda folder: None)  # of no hub id
    with pytest.raises(MoesaicError, match="holds a PEFT adapter beside the model"):
        load_model(folder)


def test_biases_that_the_configuration_does_not_name_are_not_dropped(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    path = folder / "model.safetensors"
    weights = load_file(path)
    assert load_model(folder) is not None
    # Old checkpoints have a table that a module without weights computes now.
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(weights | table, path, {"format": "pt"})
    assert load_model(folder) is not None
    name = "model.layers.1.mlp.up_proj.bias"
    save_file(weights | {name: torch.ones(64)}, path, {"format": "pt"})
    with pytest.raises(MoesaicError, match=f"config.json leaves out, among them {name}"):
        load_model(folder)


def test_weights_that_a_configuration_places_elsewhere_are_not_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["transformers_weights"] = "other.safetensors.index.json"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(MoesaicError, match=r"names files of weights \(transformers_weights\)"):
        load_config(folder)


def test_a_folder_has_a_name_wherever_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "llama-9b")
    monkeypatch.chdir(folder)
    assert public_name(".") == "llama-9b"
    assert public_name(str(folder)) == "llama-9b"
    assert public_name("someone/llama-9b") == "someone/llama-9b"


def test_a_generation_config_that_cannot_be_saved_is_mended_first(tmp_path: Path) -> None:
    """A temperature where nothing is sampled does nothing; transformers refuses to save it."""
    model = tiny_model("llama")
    model.generation_config.temperature = 0.7
    with pytest.raises(ValueError, match="save"):
        model.generation_config.save_pretrained(tmp_path)
    moesaic.convert(model, "static", "S2A3E8", tokens(8, CONTEXT), output=tmp_path / "new")
    assert load_model(tmp_path / "new").generation_config.do_sample is not True


def test_a_generation_config_that_is_wrong_otherwise_is_named() -> None:
    model = tiny_model("llama")
    model.generation_config.num_return_sequences = 3
    with pytest.raises(MoesaicError, match=r"tiny: .*num_return_sequences.*mend its"):
        mend_generation(model, "tiny")
