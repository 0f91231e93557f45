"""The command line: what users type, and one line with exit code 2 for bad input."""

from __future__ import annotations

import gzip
import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.main import get_command

import moesaic
from moesaic.cli import tables
from moesaic.cli.main import app, main
from moesaic.cli.options import parse_settings
from moesaic.cli.purpose import _measured
from moesaic.conversion.advice import next_steps
from moesaic.demo import demo_path
from moesaic.families.load import load_model, load_tokenizer
from moesaic.methods.contents import METHODS, Description
from tests.families import tiny_model

TEXT = "def main(argument):\n    return [argument for _ in range(10)]\n" * 400


CMOE = ("--method", "cmoe", "--layout", "S3A3E8")


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
    assert config["method"]["name"] == "cmoe"
    assert config["calibration"]["tokens"] == 256
    code, _, error = run("convert", output, "--output", tmp_path / "twice", "--calibration", text)
    assert code == 2
    assert "converted already" in error


@pytest.mark.parametrize("method", ["sleb", "slicegpt"])
def test_a_model_of_the_same_family_is_reported_too(
    run: Run, model: Path, text: Path, tmp_path: Path, method: str
) -> None:
    """Its configuration has no part of ours."""
    output = tmp_path / "out"
    code, printed, _ = run(
        "convert", model, "--output", output, "--method", method, "--sparsity", "0.25",
        "--calibration", text, "--samples", "2", "--sequence-length", "128",
    )  # fmt: skip
    assert code == 0
    assert "written to" in printed


@pytest.mark.parametrize(
    ("purpose", "words", "measured"),
    [
        ("prefill", "routed experts of", "llama.cpp 1.2 to 5.8"),
        ("decode", "copies of all in 4 bits", "moesaic beside it 1.09 and 0.85"),
        ("batch", "no routing", "vLLM 0.80 to 0.88"),
    ],
)
def test_a_purpose_chooses_the_method_and_says_what_it_can_gain(
    run: Run, tmp_path: Path, purpose: str, words: str, measured: str
) -> None:
    output = tmp_path / "out"
    code, out, _ = run("convert", "demo", "--for", purpose, "--output", output, "--dry-run")
    assert code == 0
    assert words in out
    first, second, third, *_ = out.splitlines()
    assert second.startswith("time over dense as measured with SmolLM2")
    assert third.startswith("one token of each of 16 sequences, measured likewise: ")
    assert measured in second
    assert first.startswith("time over dense at best, by counted work: a prompt of 512 ")
    ours = {"prefill": "a prompt of 512 0.", "decode": "one token 0.", "batch": "sequences 0."}
    assert ours[purpose] in first
    assert "warning" not in out


@pytest.mark.parametrize(
    ("routed", "kind", "chooser", "told"),
    [
        (128, "linear", "topk", "transformers 0.82 to 1.11"),
        (248, "linear", "topk", "256 experts in transformers 0.94"),
        (31, "quadratic", "threshold", "128 experts in transformers 0.84"),
        (31, "quadratic", "topk", "None"),
        (31, "units", "threshold", "None"),
    ],
)
def test_experts_are_told_the_times_of_their_kind(
    routed: int, kind: str, chooser: str, told: str
) -> None:
    router = SimpleNamespace(kind=kind, chooser=chooser)
    sizes = SimpleNamespace(num_routed=routed)
    moe: Any = SimpleNamespace(layers=(0,), router=router, first_sizes=sizes)
    single, *_ = _measured(moe) or (None,)
    assert str(single).startswith(told)


def test_a_purpose_that_gains_nothing_is_warned_of(run: Run, tmp_path: Path) -> None:
    given = ("convert", "demo", "--method", "moesaic", "--for", "batch", "--dry-run")
    code, out, _ = run(*given, "--output", tmp_path / "out")
    assert code == 0
    assert "warning: nothing is saved for batch; leave --method out to get static-repaired" in out
    code, _, err = run("convert", "demo", "--for", "bach", "--output", tmp_path / "out")
    assert code == 2
    assert "unknown purpose 'bach'" in err
    assert "batch" in err


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


def test_dry_run_checks_the_place_of_the_output(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("convert", "demo", "--dry-run", "--output")
    if Path("/proc").is_dir():  # where root too may not write
        check_error(*run(*given, "/proc/x")[::2], "/proc cannot be written")
    full = SimpleNamespace(free=1000)
    monkeypatch.setattr("moesaic.output.draft.shutil.disk_usage", lambda _: full)
    check_error(*run(*given, tmp_path / "out")[::2], "MB more, the disk has 0.0 MB free")
    assert not list(tmp_path.iterdir())


def test_dry_run_reads_the_headers_of_weights(run: Run, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    loaded = AutoModelForCausalLM.from_pretrained(model)
    loaded.save_pretrained(folder, max_shard_size="100KB")
    for path in model.glob("tokenizer*"):
        shutil.copy(path, folder)
    given = ("convert", folder, "--dry-run", "--calibration", "demo", *CMOE)
    given += ("--output", tmp_path / "out", "--sequence-length", 64)
    assert run(*given)[0] == 0
    shard = sorted(folder.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    check_error(*run(*given)[::2], f"{shard.name} is damaged or cut short, fetch the model")
    shard.unlink()
    check_error(*run(*given)[::2], f"{shard.name}, which its index names, is missing; fetch")
    for path in folder.glob("model*"):
        path.unlink()
    check_error(*run(*given)[::2], "has no weights in safetensors files")


def test_times_are_told_of_methods_that_were_timed(run: Run, tmp_path: Path) -> None:
    given = ("convert", "demo", "--dry-run", "--output", tmp_path / "out")
    given += ("--method", "cmoe")
    code, out, _ = run(*given)
    assert code == 0
    assert "time over dense at best" in out
    assert "as measured" not in out


def test_recovery_needs_room_for_all_its_models(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo model takes 5.9 MB: two of them, or three; three checkpoints 19 or 29."""
    disk = SimpleNamespace(free=40_000_000)
    monkeypatch.setattr("moesaic.output.draft.shutil.disk_usage", lambda _: disk)
    given = ("convert", "demo", "--dry-run", "--output", tmp_path / "out")
    for enough in ((), ("--recover", 4096)):
        assert run(*given, *enough)[0] == 0
    code, _, error = run(*given, "--recover", 4096, "--tune-dense")
    check_error(code, error, "the model takes 46.6 MB more, the disk has 40.0 MB free")


def parts_of(folder: Path) -> list[Path]:
    """But for the page: the last bit of what it measures moves with where weights lie."""
    return [path for path in folder.iterdir() if path.name != "report.html"]


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
    calm = {path.name: path.read_bytes() for path in parts_of(tmp_path / "out")}
    with monkeypatch.context() as patch:
        patch.setattr("moesaic.output.draft.finish", lambda *unused: sys.exit(9))
        assert run(*command, "--overwrite")[0] == 9
    assert run(*command, "--overwrite", "--resume")[0] == 0
    assert {path.name: path.read_bytes() for path in parts_of(tmp_path / "out")} == calm


def test_where_there_is_nothing_to_resume_it_says_so(
    run: Run, model: Path, text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    code, _, error = run(
        "convert", model, "--output", output, "--calibration", text, *CMOE, "--samples", 2,
        "--sequence-length", 64, "--resume",
    )  # fmt: skip
    assert code == 0
    line = f"nothing to resume in {output}.partial; starting from the beginning"
    assert error.splitlines().count(line) == 1


def test_method_file(run: Run, model: Path, text: Path, tmp_path: Path) -> None:
    method = tmp_path / "mine.yaml"
    method.write_text("method: cmoe\nactivation_top_k: 5\n")
    code, printed, _ = run(
        "convert", model, "--output", tmp_path / "out", "--calibration", text,
        "--sequence-length", 64, "--method", method, "--layout", "S3A3E8",
    )  # fmt: skip
    assert code == 0
    assert "cmoe S3A3E8" in printed
    config = json.loads((tmp_path / "out" / "config.json").read_text())["moesaic"]
    assert config["method"]["settings"]["activation_top_k"] == 5


def test_names_are_printed_as_they_are(run: Run, tmp_path: Path) -> None:
    """What rich takes for markup or an emoji stands in names of folders too."""
    for name in ("m [base] :train:", "br[/x]"):
        folder = tmp_path / name
        shutil.copytree(demo_path(), folder)
        code, printed, _ = run("flops", folder, "--layout", "S3A3E8")
        assert code == 0
        assert name in " ".join(printed.split())
        output = folder / "config.json"  # a file in the way
        code, _, error = run("convert", folder, "--output", output, "--calibration", "demo")
        assert code == 2
        assert name in error


def test_flops_of_llama_2_7b_from_its_config_alone(run: Run, tmp_path: Path) -> None:
    LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
    ).save_pretrained(tmp_path)
    code, printed, _ = run("flops", tmp_path / "config.json", *CMOE)
    assert code == 0
    total = next(line for line in printed.splitlines() if " total " in line)
    assert "845.7" in total
    assert "707.4" in total


@pytest.mark.parametrize("command", ["methods", "recipes"])
def test_methods_lists_every_method_with_where_it_runs_and_its_paper(
    run: Run, command: str
) -> None:
    code, printed, _ = run(command)
    assert code == 0
    for method in METHODS.values():
        assert method.name in printed
        assert method.about in printed
        assert method.runs is None or method.runs in printed
        assert method.url is None or method.url in printed


def test_settings_of_a_method(run: Run) -> None:
    load = pytest.importorskip("moesaic.methods.load")
    code, printed, _ = run("methods", "moesaic")
    assert code == 0
    for setting in fields(load.load_method("moesaic", None)):
        assert not setting.init or setting.name in printed


def test_settings_of_a_method_come_with_value_and_meaning(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True)
    class Method:
        description: ClassVar[Description] = METHODS["cmoe"]
        rounds: int = field(default=7, metadata={"help": "How often to repeat."})
        plain: float = 0.5

    module = ModuleType("moesaic.methods.load")
    module.load_method = lambda name, settings: Method()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "moesaic.methods.load", module)
    code, printed, _ = run("methods", "mine.yaml")
    assert code == 0
    rows = {cells[1].strip(): cells for cells in map(cut, printed.splitlines()) if len(cells) > 3}
    assert [cell.strip() for cell in rows["rounds"][2:4]] == ["7", "How often to repeat."]
    assert rows["plain"][2].strip() == "0.5"


def cut(line: str) -> list[str]:
    return line.split("│")


def test_methods_of_an_unknown_name(run: Run) -> None:
    check_error(*run("methods", "moesiac")[::2], "did you mean moesaic")


def test_settings_are_read_as_numbers_truth_and_text() -> None:
    given = ["a=3", "b=0.5", "c=true", "d=least-squares", "e=1e-3", "f=x=y", "g= false ", "h=a: b"]
    assert parse_settings(given) == {
        "a": 3, "b": 0.5, "c": True, "d": "least-squares", "e": 0.001, "f": "x=y", "g": False,
        "h": "a: b",
    }  # fmt: skip
    assert parse_settings([]) == {}


@pytest.mark.parametrize("given", ["rounds", "=3", ""])
def test_a_setting_without_name_or_value_is_refused(run: Run, given: str) -> None:
    result = run("convert", "demo", "--output", "x", "--set", given)
    check_error(*result[::2], "is not of the form NAME=VALUE")


def test_method_and_set_reach_the_conversion(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def convert(**choices: object) -> None:
        asked.append(choices)
        raise moesaic.MoesaicError("enough")

    monkeypatch.setattr(importlib.import_module("moesaic.finetune.convert"), "convert", convert)
    settings = ("--set", "kmeans_rounds=3", "--set", "intercept=true")
    for option in ("--method", "--recipe"):
        run("convert", "demo", "--output", "x", option, "moesaic", *settings)
    for choices in asked:
        assert choices["recipe"] == "moesaic"
        assert choices["settings"] == {"kmeans_rounds": 3, "intercept": True}
    assert len(asked) == 2


@pytest.mark.parametrize(("options", "distill"), [([], "auto"), (["--distill", "none"], "none")])
def test_fine_tuning_imitates_the_dense_model_unless_told_not_to(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: list[str], distill: str
) -> None:
    asked: dict[str, object] = {}

    def finetune(*unused: object, **choices: object) -> None:
        asked.update(choices)
        raise moesaic.MoesaicError("enough")

    monkeypatch.setattr(importlib.import_module("moesaic.finetune.run"), "finetune", finetune)
    check_error(*run("finetune", "demo", "--output", "x", *options)[::2], "enough")
    assert asked["distill"] == distill


@pytest.mark.parametrize("option", ["--methods", "--recipes"])
def test_methods_to_compare_have_two_names(
    run: Run, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    def compare(model: str, names: list[str], **unused: object) -> None:
        raise moesaic.MoesaicError(f"asked for {names}")

    monkeypatch.setattr("moesaic.comparison.compare.compare", compare)
    result = run("compare", "demo", option, "cmoe, moesaic")
    check_error(*result[::2], "asked for ['cmoe', 'moesaic']")


def test_flops_of_a_method(run: Run) -> None:
    named = run("flops", "demo", "--layout", "S1A5E8", "--method", "moesaic")
    assert named == run("flops", "demo", "--layout", "S1A5E8", "--recipe", "moesaic")
    assert named[0] == 0


def test_flops_by_sparsity_counts_methods_without_experts_too(run: Run) -> None:
    code, printed, _ = run("flops", "demo", "--method", "teal", "--sparsity", "0.5")
    assert code == 0
    assert "50% sparse" in printed
    assert run("flops", "demo") == run("flops", "demo", "--method", "moesaic", "--sparsity", 0.25)
    given = run("flops", "demo", "--layout", "S1A5E8", "--sparsity", "0.5")
    check_error(*given[::2], "give one")


@pytest.mark.parametrize(
    "option", [["--layout", "S1A5E8"], ["--method", "moesaic"], ["--sparsity", "0.5"]]
)
def test_flops_of_a_converted_model_takes_it_as_it_is(
    run: Run, converted: Path, option: list[str]
) -> None:
    assert run("flops", converted)[0] == 0
    check_error(*run("flops", converted, *option)[::2], f"leave {option[0]} out")


def test_help_of_export_names_every_format(run: Run) -> None:
    _, printed, _ = run("export", "--help")
    for name in importlib.import_module("moesaic.export.fits").FORMATS:
        assert name in printed


@pytest.mark.parametrize("command", list(get_command(app).commands))
def test_every_command_and_option_has_a_help_text(command: str) -> None:
    found = get_command(app).commands[command]
    assert found.help
    assert [option.name for option in found.params if not option.help] == []


HEAVY = ("torch", "transformers", "numpy", "scipy", "accelerate", "matplotlib", "datasets")


@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        ["--help"],
        *([command, "--help"] for command in get_command(app).commands),
        ["methods"],
        ["methods", "moesiac"],
        ["convrt"],
        ["convert", "--hlep"],
        ["convert", "demo", "--output", "x", "--set", "rounds"],
    ],
    ids=" ".join,
)
def test_what_needs_no_torch_does_not_import_it(words: list[str]) -> None:
    code = f"""
import sys
sys.argv = ["moesaic", *{words!r}]
from moesaic.cli.main import main
try:
    main()
except SystemExit:
    print("loaded:", [name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded: []"


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


def unknown_activation(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "foo"}))


def quantise(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    quantised = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config | quantised))


def lead_outside(folder: Path) -> None:
    shutil.move(folder / "model.safetensors", folder.parent / "outside.safetensors")
    names = load_file(folder.parent / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def lead_to_the_card(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "README.md"}}
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
        (no_heads, "cannot load"),
        (unknown_activation, "'foo' is no known name; see where its config.json has it"),
        (quantise, "is quantised in 4 bits already; convert the full-precision model"),
        (lead_to_the_card, "names 'README.md', which is no safetensors file"),
        (lead_outside, "names '../outside.safetensors', which is no file of its folder"),
        (break_index, "model.safetensors.index.json is damaged"),
        (break_tokenizer, "no usable tokenizer"),
        (truncate, "cut short, fetch the model again"),
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
    check_refused(run, model, text, tmp_path, message)


def check_refused(run: Run, model: Path, text: Path, tmp_path: Path, message: str) -> None:
    """A conversion says so in one line, and writes nothing."""
    before = sorted(tmp_path.rglob("*"))
    code, _, error = run(
        "convert", model, "--output", tmp_path / "out", "--calibration", text,
        "--sequence-length", 64,
    )  # fmt: skip
    check_error(code, error, message)
    assert sorted(tmp_path.rglob("*")) == before


def remove(shard: Path) -> None:
    shard.unlink()


def cut_short(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:100_000])


@pytest.mark.parametrize(
    ("damage", "message"),
    [(remove, "{}"), (cut_short, "{} is damaged or cut short, fetch")],
)
def test_a_damaged_shard_is_named(
    run: Run, model: Path, text: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    whole = load_model(model)
    (model / "model.safetensors").unlink()
    whole.save_pretrained(model, max_shard_size="1MB")
    shards = sorted(model.glob("model-*.safetensors"))
    assert len(shards) > 2
    damage(shards[1])
    check_refused(run, model, text, tmp_path, message.format(shards[1].name))


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
        (["--method", "cmo"], "did you mean cmoe"),
        (["--layout", "S3A3E8", "--grain", "huge"], "give one"),
        (["--grain", "huge"], "unknown grain 'huge'"),
        (["--grain", "fine", "--method", "teal"], "leave the grain out"),
        (["--grain", "fine", "--method", "moesaic-neurons"], "leave the grain out"),
        (["--grain", "fine", "--method", "cmoe"], "leave the grain out"),
        (["--for", "decode", "--layout", "S3A3E8"], "leave out --layout S3A3E8"),
        (["--method", "none.yaml"], "no such file: none.yaml"),
        (["--method", "none.py"], "no such file: none.py"),
        (["--calibration", "demo", "--calibration", "demo"], "names demo twice"),
        (["--device", "cpux"], "did you mean cpu"),
        (["--device", "cuda:99"], "not usable here"),
        (["--device", "mps"], "not usable here: it is not in this build of torch; take"),
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
        ("short.txt", b"def f(): pass", "at least 1,024 (two windows of 512)"),
        ("latin.txt", b"\xff\xfe\xfa", "text is read as UTF-8, so convert it first"),
        ("body.jsonl", b'{"body": "x"}\n', "line 1 has no field 'text'; it has body"),
        ("broken.jsonl", b'{"text": "abc"}\n\n{broken', "line 3 is not JSON"),
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
    if Path("/proc").is_dir():  # where root too may not write
        check_error(
            *run("eval", "nowhere", "--text", text, "--json", "/proc/x.json")[::2],
            "no file in a folder",
        )
    check_error(*run("eval", model, "--text", text, "--sequence-length", 1)[::2], "outside 2..512")


def test_eval_refuses_another_tokenizer(run: Run, model: Path, text: Path, shared: Path) -> None:
    other = shared / "models" / "babyllama-105"
    arguments = ["eval", model, "--text", text, "--against", other, "--max-tokens", 100]
    check_error(*run(*arguments)[::2], "into different tokens: not comparable")


def eval_row(printed: str, model: object) -> bool:
    return any(cut(line)[1].strip() == str(model) for line in printed.splitlines() if "│" in line)


def test_eval_compares_with_the_dense_model_unless_told_not_to(
    run: Run, converted: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.families.load.dense_of", lambda *_: "demo", raising=False)
    words = ["eval", converted, "--text", text, "--max-tokens", 100]
    code, printed, _ = run(*words)
    assert code == 0
    assert eval_row(printed, "demo")
    assert "ratio on" in printed
    code, printed, _ = run(*words, "--against", "none")
    assert code == 0
    assert not eval_row(printed, "demo")
    assert "ratio on" not in printed


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        (None, "the dense model was not found: no comparison; name it by --against"),
        ("somebody/absent-model", "no comparison with the dense model: "),
    ],
)
def test_eval_goes_on_without_a_dense_model_that_cannot_be_had(
    run: Run, converted: Path, text: Path, monkeypatch: pytest.MonkeyPatch, dense: str | None,
    message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("moesaic.families.load.dense_of", lambda *_: dense, raising=False)
    code, printed, error = run("eval", converted, "--text", text, "--max-tokens", 100)
    assert code == 0
    assert message in error
    assert eval_row(printed, converted)


def test_eval_of_a_dense_model_compares_with_nothing(run: Run, model: Path, text: Path) -> None:
    code, printed, error = run("eval", model, "--text", text, "--max-tokens", 100)
    assert code == 0
    assert "ratio" not in printed
    assert "comparison" not in error


def report(**facts: object) -> SimpleNamespace:
    """What the advice reads of a ConversionReport: a usual one that lost 10 %."""
    usual = {
        "perplexity": 11.0,
        "dense_perplexity": 10.0,
        "method": {"name": "moesaic", "settings": {"layer_budgets": "uniform"}},
        "layout": "S1A21E32",
        "tokens": 131_072,
        "active_ffn_fraction": 0.75,
        "layers": [SimpleNamespace(experts=[], repair=None) for _ in range(2)],
    }
    return SimpleNamespace(**(usual | facts))


def advice(**facts: object) -> str:
    return "\n".join(next_steps(report(**facts), "out"))  # type: ignore[arg-type]


def test_advice_follows_from_the_facts_of_a_report() -> None:
    usual = advice()
    assert "--grain fine" in usual
    assert "skips 25% of the FFN neurons" in usual
    assert "--target-ratio 1.03" in usual
    assert "moesaic finetune out --output out-tuned" in usual
    assert "--method moesaic-dynamic" in usual
    assert "--method moesaic-neurons" in usual
    assert "--set layer_budgets=dense-first" in usual
    assert "calibration" not in advice(tokens=262_144)
    assert "longer in proportion" in advice(tokens=65_536)
    assert "calibration" not in advice(tokens=65_536, method={"name": "cmoe"})
    assert "dense-first" not in advice(layers=[SimpleNamespace(experts=[])])
    shared = {"name": "moesaic", "settings": {"layer_budgets": "dense-first"}}
    assert "dense-first" not in advice(method=shared)
    mixture = [SimpleNamespace(experts=[{"expert": 0}])] * 2
    assert "--method moesaic-neurons" not in advice(layers=mixture)
    assert "dense-first" not in advice(layers=mixture)
    assert advice(perplexity=10.3) == ""
    assert advice(perplexity=None) == ""
    assert "4,096 tokens are few" in advice(tokens=4096)
    assert "--grain fine" not in advice(layout="S1A95E128")
    assert "--grain fine" not in advice(method={"name": "cmoe"}, layout="S3A3E8")
    neurons = advice(method={"name": "moesaic-neurons"})
    assert "--method" not in neurons
    assert "--method moesaic" in advice(method={"name": "cmoe"})
    assert "a method that repairs its outputs: --method moesaic" in advice(method={"name": "flap"})
    repaired = [SimpleNamespace(experts=[], repair="ridge 1e-3")] * 2
    static = advice(method={"name": "static-repaired"}, layers=repaired)
    assert "experts chosen for each token: --method moesaic" in static
    assert "repairs its outputs" not in static
    assert "moesaic-dynamic" in advice(active_ffn_fraction=0.5)
    assert "finetune" not in advice(method={"name": "oracle"})
    assert "finetune" in advice(method={"name": "griffin"})
    assert "--target-ratio" in advice(method={"name": "moesaic-dynamic"})
    assert "--target-ratio" not in advice(method={"name": "flap"})  # layers differ in width
    for name in ("teal", "wina", "sleb", "slicegpt"):  # these are refused there
        other = advice(method={"name": name})
        assert "finetune" not in other
        assert "--target-ratio" not in other


def test_a_bad_conversion_ends_with_advice(
    run: Run, model: Path, text: Path, tmp_path: Path
) -> None:
    code, printed, _ = run(
        "convert", model, "--output", tmp_path / "out", "--calibration", text, *CMOE,
        "--sequence-length", 64, "--samples", 4,
    )  # fmt: skip
    assert code == 0
    assert "if that is too much loss, try one of:" in printed
    assert "  - more calibration text: 256 tokens are few" in printed
    for meaning in ("error: of the layer's output", "recall: share of", "load: tokens of"):
        assert meaning in printed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": {"num_active": 6}}, "num_active does not fit the layout S3A3E8"),
        ({"sizes": {"num_active": 0}}, "num_active does not fit"),
        ({"sizes": {"shared": -1}}, "contradicts itself"),
        ({"sizes": {"expert": 200, "intermediate": 768}}, "intermediate does not fit"),
        ({"sizes": {"intermediate": 10}}, "contradicts itself"),
        ({"layers": [0, 99]}, "layers does not fit"),
        ({"block": None}, "is damaged"),
        ({"layout": 7}, "is damaged"),
        ({"method": {}}, "is damaged"),
        ({"block": {"router": {}}}, "is damaged"),
        ({"block": {"output_bias": "yes"}}, "output_bias does not fit"),
        ({"format": 1}, "in a form that this one does not read; convert the dense model again"),
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
    config["moesaic"] = change and tampered(config["moesaic"], change)
    (output / "config.json").write_text(json.dumps(config))
    check_error(*run("eval", output, "--text", text)[::2], message)
    check_error(*run("flops", output)[::2], message)


def tampered(moe: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """With another value; in every layer's sizes, or inside the block, where it says so."""
    if "sizes" in change:
        return moe | {"sizes": [sizes | change["sizes"] for sizes in moe["sizes"]]}
    if change.get("block"):
        return moe | {"block": moe["block"] | change["block"]}
    return moe | change


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["convert"], "moesaic convert --help"),
        (["convert", "demo", "--seed", "abc"], "moesaic convert --help"),
        (["nonsense"], "moesaic --help"),
        (["flops", "-x"], "moesaic flops --help"),
        (["export", "demo", "--verify"], "moesaic export --help"),
    ],
)
def test_wrong_usage_is_one_line(run: Run, arguments: list[str], where: str) -> None:
    check_error(*run(*arguments)[::2], f"(see {where})")


def test_an_example_of_numbers_fits_the_option(run: Run) -> None:
    check_error(
        *run("bench", "demo", "--batch", "a")[::2], "--batch 'a': give whole numbers such as 1,16"
    )
    asked = run("eval", "demo", "--tasks", "piqa", "--self-consistency", "a")
    check_error(*asked[::2], "give whole numbers such as 1,3,5")


def test_no_arguments_show_the_help(run: Run) -> None:
    code, printed, _ = run()
    assert code == 0
    assert "convert" in printed


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["convert", "demo", "--output", "x"], "--device cpu or shorter windows"),
        (["finetune", "demo", "--output", "x"], "--micro-batch 1, --gradient-checkpointing or"),
        (["eval", "demo", "--text", "demo"], "--device cpu or shorter windows"),
        (["eval", "demo", "--tasks", "piqa"], "--device cpu or a smaller --batch-size"),
    ],
)
def test_a_full_gpu_is_one_line_with_the_command_s_own_advice(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: list[str], advice: str
) -> None:
    def full(*unused: object, **more: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(importlib.import_module("moesaic.finetune.convert"), "convert", full)
    monkeypatch.setattr(importlib.import_module("moesaic.finetune.run"), "finetune", full)
    monkeypatch.setattr("moesaic.evaluate.evaluate", full)
    monkeypatch.setattr("moesaic.evaluate.tasks.evaluate_tasks", full)
    code, _, error = run(*words)
    assert (code, error.count("\n")) == (2, 1)
    assert f"out of memory on the GPU; try {advice}" in error


def test_an_interrupt_says_how_to_go_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*unused: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moesaic.families.load.load_config", interrupted)
    monkeypatch.setattr(importlib.import_module("moesaic.finetune.convert"), "convert", interrupted)
    assert run("flops", "demo")[0::2] == (130, "interrupted\n")
    code, _, error = run("convert", "demo", "--output", "x")
    assert code == 130
    assert "goes on with --resume" in error


def test_demo(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.cli.demo_run.HELDOUT_TOKENS", 4096)
    monkeypatch.setattr("moesaic.cli.demo_run.SAMPLES", 8)
    with monkeypatch.context() as patch:
        patch.setattr("moesaic.cli.demo_run.METHODS_SHOWN", ("static",))
        assert run("demo", "--output", tmp_path / "demo")[0] == 0
    code, _, error = run("demo", "--output", tmp_path / "demo")
    assert code == 2
    assert "--overwrite" in error
    assert (tmp_path / "demo" / "config.json").is_file()
    code, printed, _ = run("demo", "--output", tmp_path / "demo", "--overwrite")
    assert code == 0
    config = json.loads((tmp_path / "demo" / "config.json").read_text())
    assert config["moesaic"]["method"]["name"] == "moesaic"
    rows = {line.split("│")[1].strip(): line for line in printed.splitlines() if "│" in line}
    known = {"dense", "moesaic", "cmoe", "static-repaired", "static", "random"}
    assert known <= rows.keys()
    value = {name: float(rows[name].split("│")[2]) for name in known}
    assert value["dense"] < value["cmoe"] < value["random"]
    assert value["dense"] < value["moesaic"] < value["cmoe"]
    assert "moesaic eval" in printed


@pytest.mark.parametrize(
    ("unit", "model_bytes", "said"),
    [
        ("neurons", 1, "reads fewer bytes for a token than the dense one, and computes more"),
        ("neurons", 3, "take a lower budget"),
        ("experts", 1, "take a coarser grain or a lower budget"),
    ],
)
def test_a_result_that_computes_more_than_the_dense_model(
    monkeypatch: pytest.MonkeyPatch, unit: str, model_bytes: int, said: str
) -> None:
    printed: list[str] = []
    monkeypatch.setattr(tables.out, "print", printed.append)
    report: Any = SimpleNamespace(
        layers=[], unit=unit, macs=2, dense_macs=2, bytes=model_bytes, dense_bytes=2
    )
    tables._print_warnings(report)
    (line,) = printed
    assert said in line
