"""The command line: what users type, and one line with exit code 2 for bad input."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

import moesaic
from moesaic.cli.main import main
from moesaic.demo import demo_path
from moesaic.families.load import load_model, load_tokenizer
from tests.families import tiny_model

TEXT = "def main(argument):\n    return [argument for _ in range(10)]\n" * 400


CMOE = ("--recipe", "cmoe", "--layout", "S3A3E8")


class Run:
    """Runs the command line in this process and keeps what it printed."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]):
        self.patch, self.capture = patch, capture

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self.patch.setattr(sys, "argv", ["moesaic", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = self.capture.readouterr()
        return code, printed.out, printed.err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "200")
    return Run(monkeypatch, capsys)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The demo model under another name: small, and with a tokenizer."""
    folder = tmp_path / "model"
    shutil.copytree(demo_path(), folder)
    return folder


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model converted by the paper's method; for tests that only damage a copy."""
    folder = tmp_path_factory.mktemp("converted") / "out"
    moesaic.convert("demo", "cmoe", "S3A3E8", [TEXT], output=folder, samples=4, sequence_length=64)
    return folder


def test_convert_eval_and_reload(run: Run, model: Path, text: Path, tmp_path: Path) -> None:
    output, numbers = tmp_path / "out", tmp_path / "numbers.json"
    code, printed, _ = run(
        "convert", model, "--output", output, "--calibration", text, *CMOE,
        "--samples", 2, "--sequence-length", 128,
    )  # fmt: skip
    assert code == 0
    assert "288 shared neurons, 3 of 5 routed experts of 96" in printed
    assert f"moesaic eval {output}" in printed
    names = {path.name for path in output.iterdir()}
    assert names >= {
        "config.json", "generation_config.json", "tokenizer.json", "README.md",
        "model.safetensors.index.json", "moesaic_report.json", "modeling_moesaic.py",
    }  # fmt: skip
    card = (output / "README.md").read_text()
    assert "moesaic convert" in card
    assert "ratio" in card
    assert load_tokenizer(output)("x = 1")["input_ids"]
    code, printed, _ = run(
        "eval", output, "--text", text, "--against", model, "--json", numbers,
        "--sequence-length", 128, "--max-tokens", 1000,
    )  # fmt: skip
    assert code == 0
    result = json.loads(numbers.read_text())
    key = str(text)
    assert result["tokens"] == {key: 1000 - 8}  # 7 whole windows and a shorter one
    assert result["active_ffn_fraction"] == 0.75
    assert result["against"]["active_ffn_fraction"] == 1
    assert result["ratio"][key] == pytest.approx(
        result["perplexity"][key] / result["against"]["perplexity"][key]
    )
    ids = torch.tensor(load_tokenizer(model)(TEXT, verbose=False)["input_ids"])
    expected, _ = moesaic.perplexity(load_model(output), ids, 128, 1000)
    assert result["perplexity"][key] == pytest.approx(expected, rel=1e-6)
    config = json.loads((output / "config.json").read_text())["moesaic"]
    assert config["recipe"]["name"] == "cmoe"
    assert config["calibration"]["tokens"] == 256
    code, _, error = run("convert", output, "--output", tmp_path / "twice", "--calibration", text)
    assert code == 2
    assert "converted already" in error


def test_dry_run_says_what_it_would_do_and_writes_nothing(
    run: Run, model: Path, text: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    code, printed, _ = run(
        "convert", model, "--output", tmp_path / "out", "--calibration", text, *CMOE,
        "--sequence-length", 64, "--dry-run",
    )  # fmt: skip
    assert code == 0
    assert "nothing was written" in printed
    assert "512 tokens" in printed
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("options", [CMOE, ("--samples", 8, "--grain", "coarse")])
def test_a_resumed_run_keeps_the_same_card(
    run: Run, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    options: tuple[object, ...],
) -> None:  # fmt: skip
    command = [
        "convert", model, "--output", tmp_path / "out", "--calibration", text, *options,
        "--sequence-length", 64,
    ]  # fmt: skip
    assert run(*command)[0] == 0
    calm = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr("moesaic.output.draft.finish", lambda *unused: sys.exit(9))
        assert run(*command, "--overwrite")[0] == 9
    assert run(*command, "--overwrite", "--resume")[0] == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == calm


def test_recipe_file(run: Run, model: Path, text: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("base: cmoe\nimportance: contribution\n")
    code, printed, _ = run(
        "convert", model, "--output", tmp_path / "out", "--calibration", text,
        "--sequence-length", 64, "--recipe", recipe, "--layout", "S3A3E8",
    )  # fmt: skip
    assert code == 0
    assert "mine S3A3E8" in printed


def test_flops_of_llama_2_7b_from_its_config_alone(run: Run, tmp_path: Path) -> None:
    LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
    ).save_pretrained(tmp_path)
    code, printed, _ = run("flops", tmp_path / "config.json", "--layout", "S3A3E8")
    assert code == 0
    total = next(line for line in printed.splitlines() if " total " in line)
    assert "845.7" in total
    assert "707.4" in total


def test_recipes_lists_every_recipe(run: Run) -> None:
    code, printed, _ = run("recipes")
    assert code == 0
    assert all(name in printed for name in moesaic.RECIPES)


def test_version(run: Run) -> None:
    assert run("--version")[1].strip() == moesaic.__version__


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])


def tamper_header(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(b"\xff" * 8 + weights.read_bytes()[8:])


def drop_tensor(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def reshape_tensor(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    state[name] = state[name][:-1].contiguous()
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def poison(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][5, 5] = torch.nan
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def misspell_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "lama"}))


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def fewer_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))


def no_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 0}))


def no_heads(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 0}))


def quantise(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    quantised = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config | quantised))


def lead_outside(folder: Path) -> None:
    shutil.move(folder / "model.safetensors", folder.parent / "outside.safetensors")
    names = load_file(folder.parent / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def break_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


def break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (fewer_layers, "weights that its config.json leaves out, among them model.layers.3"),
        (no_layers, "supported are"),
        (no_heads, "error"),
        (quantise, "is quantised"),
        (lead_outside, "names '../outside.safetensors', which is no file of its folder"),
        (break_index, "model.safetensors.index.json is damaged"),
        (break_tokenizer, "no usable tokenizer"),
        (truncate, "cannot load"),
        (tamper_header, "cannot load"),
        (drop_tensor, "missing in the checkpoint, among them model.layers.1.mlp.up_proj.weight"),
        (reshape_tensor, "model.layers.1.mlp.up_proj.weight"),
        (poison, "layer 1: the weights 'model.layers.1.mlp.up_proj.weight' hold NaN"),
        (misspell_family, "did you mean llama"),
        (break_config, "cannot load"),
        (remove_config, "has no config.json"),
        (remove_weights, "cannot load"),
        (remove_tokenizer, "no usable tokenizer"),
    ],
)
def test_damaged_models(
    run: Run, model: Path, text: Path, tmp_path: Path, damage, message: str
) -> None:
    damage(model)
    before = sorted(tmp_path.rglob("*"))
    code, _, error = run(
        "convert", model, "--output", tmp_path / "out", "--calibration", text,
        "--sequence-length", 64,
    )  # fmt: skip
    check_error(code, error, message)
    assert sorted(tmp_path.rglob("*")) == before


def check_error(code: int, error: str, message: str) -> None:
    assert code == 2
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, error
    assert message in lines[0]
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layout", "S3A3"], "not of the form SxAyEz"),
        (["--layout", "S3A6E8"], "A <= E - S"),
        (["--layout", "S8A1E8"], "leave none to route"),
        (["--layout", "S1A0E8"], "A >= 1"),
        (["--layout", "S1A1E769"], "768 neurons"),
        (["--recipe", "cmo"], "did you mean cmoe"),
        (["--recipe", "none.yaml"], "none.yaml"),
        (["--device", "cpux"], "did you mean cpu"),
        (["--device", "cuda:99"], "not usable here"),
        (["--dtype", "float3"], "did you mean float32"),
        (["--samples", "0"], "at least 1"),
        (["--samples", "99999999999999999999999"], "fewer --samples"),
        (["--seed", "-1"], "outside 0.."),
        (["--output", "/"], "exists; choose another"),
        (["--output", "."], "exists; choose another"),
        (["--sequence-length", "1000"], "outside 2..512"),
        (["--calibration", "no.txt"], "no such text: no.txt"),
        (["--calibration", "hub:a:b"], "hub:NAME:CONFIG:SPLIT:FIELD"),
        (["--calibration", "wikitext2"], "cannot load Salesforce/wikitext"),
    ],
)
def test_bad_options(
    run: Run, model: Path, text: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    code, _, error = run(
        "convert", model, "--output", tmp_path / "out", "--calibration", text, *arguments
    )
    check_error(code, error, message)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "holds no text"),
        ("blank.txt", b" \n\n", "holds no text"),
        ("short.txt", b"def f(): pass", "two that share none need 1024"),
        ("latin.txt", b"\xff\xfe\xfa", "cannot read"),
        ("body.jsonl", b'{"body": "x"}\n', "has a line without the field 'text'; it has body"),
        ("broken.jsonl", b"{", "cannot read"),
        ("broken.gz", gzip.compress(b"x" * 1000, mtime=0)[:-12], "cannot read"),
        ("broken.zip", b"PK", "cannot read"),
        ("broken.parquet", b"PAR1", "cannot read"),
    ],
)
def test_bad_calibration_text(
    run: Run, model: Path, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    code, _, error = run(
        "convert", model, "--output", tmp_path / "out", "--calibration", tmp_path / name
    )
    check_error(code, error, message)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("there/is/no/model", "no such model folder"),
        ("./absent", "no such model folder"),
        ("somebody/absent-model", "no such folder, and the hub has no such model"),
        ("text.txt", "is a file"),
    ],
)
def test_what_is_no_model(
    run: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (["convert", where, "--output", "out"], ["eval", where], ["flops", where]):
        code, _, error = run(*command)
        check_error(code, error, message)


def test_an_output_that_exists(run: Run, model: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    arguments = ["convert", model, "--output", tmp_path / "out", "--calibration", text]
    check_error(*run(*arguments)[::2], "exists; choose another or pass --overwrite")
    check_error(*run(*arguments, "--overwrite")[::2], "not a model made by moesaic")
    assert (tmp_path / "out" / "mine").read_text() == "keep"
    file = tmp_path / "file"
    file.write_text("")
    arguments[3] = file / "out"
    check_error(*run(*arguments)[::2], "is not a folder")


def test_eval_refuses_what_cannot_be_compared(
    run: Run, model: Path, text: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    tiny_model("llama").save_pretrained(other)
    check_error(*run("eval", other, "--text", text)[::2], "no usable tokenizer")
    shutil.copy(model / "tokenizer.json", other)
    shutil.copy(model / "tokenizer_config.json", other)
    check_error(*run("eval", other, "--text", text)[::2], "the tokenizer is not this model's")
    check_error(
        *run("eval", model, "--text", text, "--json", tmp_path / "no" / "x.json")[::2],
        "no file in a folder",
    )
    check_error(*run("eval", model, "--text", text, "--sequence-length", 1)[::2], "outside 2..512")


def test_eval_refuses_another_tokenizer(run: Run, model: Path, text: Path, shared: Path) -> None:
    other = shared / "models" / "babyllama-105"
    arguments = ["eval", model, "--text", text, "--against", other, "--max-tokens", 100]
    check_error(*run(*arguments)[::2], "into different tokens: not comparable")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_active": 5}, "num_active does not fit the layout S3A3E8"),
        ({"num_active": 0}, "num_active does not fit"),
        ({"shared_size": 0}, "contradicts itself"),
        ({"expert_size": 90}, "contradicts itself"),
        ({"layout": "S2A2E8"}, "contradicts itself"),
        ({"layers": [0, 99]}, "layers does not fit"),
        ({"ffn": None}, "is damaged"),
        ({"layout": 7}, "is damaged"),
        ({"recipe": {}}, "is damaged"),
        ({"router": {}}, "is damaged"),
        ({"output_bias": "yes"}, "output_bias does not fit"),
        (None, "is damaged"),
    ],
)
def test_tampered_configuration_of_a_converted_model(
    run: Run, converted: Path, text: Path, tmp_path: Path, change: dict[str, object] | None,
    message: str,
) -> None:  # fmt: skip
    output = tmp_path / "out"
    shutil.copytree(converted, output)
    config = json.loads((output / "config.json").read_text())
    config["moesaic"] = change if change is None else config["moesaic"] | change
    (output / "config.json").write_text(json.dumps(config))
    check_error(*run("eval", output, "--text", text)[::2], message)
    check_error(*run("flops", output)[::2], message)


@pytest.mark.parametrize(
    "arguments", [["convert"], ["convert", "demo", "--seed", "abc"], ["nonsense"], ["flops", "-x"]]
)
def test_wrong_usage_is_one_line(run: Run, arguments: list[str]) -> None:
    check_error(*run(*arguments)[::2], "(see moesaic --help)")


def test_no_arguments_show_the_help(run: Run) -> None:
    code, printed, _ = run()
    assert code == 0
    assert "convert" in printed


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["convert", "demo", "--output", "x"], "--device cpu or shorter windows"),
        (["finetune", "demo", "--output", "x"], "--micro-batch 1, --gradient-checkpointing or"),
    ],
)
def test_a_full_gpu_is_one_line_with_the_command_s_own_advice(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: list[str], advice: str
) -> None:
    def full(*unused: object, **more: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr("moesaic.cli.main.convert_model", full)
    monkeypatch.setattr("moesaic.cli.finetune.finetune", full)
    code, _, error = run(*words)
    assert (code, error.count("\n")) == (2, 1)
    assert f"out of memory on the GPU; try {advice}" in error


def test_an_interrupt_says_how_to_go_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*unused: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moesaic.cli.flops.load_config", interrupted)
    monkeypatch.setattr("moesaic.cli.main.convert_model", interrupted)
    assert run("flops", "demo")[0::2] == (130, "interrupted\n")
    code, _, error = run("convert", "demo", "--output", "x")
    assert code == 130
    assert "goes on with --resume" in error


def test_demo(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.cli.demo.HELDOUT_TOKENS", 4096)
    monkeypatch.setattr("moesaic.cli.demo.SAMPLES", 8)
    with monkeypatch.context() as patch:
        patch.setattr("moesaic.cli.demo.RECIPES", ("static",))
        assert run("demo", "--output", tmp_path / "demo")[0] == 0
    code, printed, _ = run("demo", "--output", tmp_path / "demo")  # replaces the first
    assert code == 0
    config = json.loads((tmp_path / "demo" / "config.json").read_text())
    assert config["moesaic"]["recipe"]["name"] == "moesaic"
    rows = {line.split("│")[1].strip(): line for line in printed.splitlines() if "│" in line}
    known = {"dense", "moesaic", "cmoe", "static-repaired", "static", "random"}
    assert known <= rows.keys()
    value = {name: float(rows[name].split("│")[2]) for name in known}
    assert value["dense"] < value["cmoe"] < value["random"]
    assert value["dense"] < value["moesaic"] < value["cmoe"]
    assert "moesaic eval" in printed
