"""`moesaic bench`: floors by hand, engines that behave and that do not, a real run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from moesaic.bench import engine as engine_module
from moesaic.bench.bench import bench
from moesaic.bench.engine import ENGINES, Engine, find_engine, has_module, started
from moesaic.bench.floor import Counted, RoutedBytes, count, floor_of, macs_of_prompt
from moesaic.bench.regimes import Regime, make_regimes
from moesaic.bench.worker import rows_of
from moesaic.cli.bench import print_result
from moesaic.cli.main import main
from moesaic.conversion.plan import make_plan
from moesaic.errors import MoesaicError
from moesaic.evaluate.work import Macs
from moesaic.families.load import load_config
from moesaic.layout import Layout
from moesaic.methods.base import Budget
from moesaic.methods.load import load_method
from tests.families import tiny_model
from tests.stock_models import converted_folder, dense_model, tokenizer

bench_module = sys.modules["moesaic.bench.bench"]  # the package has a function of that name

# --- floors ------------------------------------------------------------------------------------


def test_bytes_of_a_batch_by_hand() -> None:
    """80 bytes of routed experts, half of them for a token: two tokens read 60."""
    layer = RoutedBytes(80.0, 0.5)
    assert layer.beyond_one_token(1) == 0
    assert layer.beyond_one_token(2) == 20
    assert layer.beyond_one_token(64) == pytest.approx(40)
    counted = Counted(1.0, 100.0, [layer, RoutedBytes(8.0, 0.75)])
    assert counted.decode_bytes(1) == 100
    assert counted.decode_bytes(2) == pytest.approx(100 + 20 + 8 * (15 / 16 - 12 / 16))
    assert Counted(1.0, 100.0, None).decode_bytes(1) == 100
    assert Counted(1.0, 100.0, None).decode_bytes(2) is None
    assert Counted(1.0, 100.0).decode_bytes(64) == 100


def test_more_tokens_hit_what_chance_says() -> None:
    """Against counting: R experts of which K run, drawn for every token."""
    generator = torch.Generator().manual_seed(0)
    routed, active, batch, draws = 16, 4, 6, 4000
    scores_NBR = torch.rand(draws, batch, routed, generator=generator)
    runs_NBK = scores_NBR.topk(active, dim=2).indices
    hit_NR = torch.zeros(draws, routed).scatter_(1, runs_NBK.flatten(1), 1.0)
    expected = active + RoutedBytes(routed, active / routed).beyond_one_token(batch)
    assert hit_NR.sum(1).mean().item() == pytest.approx(expected, rel=0.01)


def test_a_prompt_needs_the_head_once() -> None:
    macs = Macs(attention=100, ffn=200, router=20, head=50, scores=15)
    assert macs_of_prompt(macs, 10) == 100 + 200 + 20 + 5 + 15


def planned(method: str, **settings: Any) -> Any:
    """The demo model's configuration after a conversion by half, or as it is."""
    config = load_config("demo")
    if method == "dense":
        return config
    budget = Budget(Layout.parse("S1A3E8"))
    if method in ("teal", "griffin", "moesaic-neurons"):
        budget = Budget(None, 0.5, "medium")
    return make_plan(config, "demo", load_method(method, settings), budget).config


def test_floors_of_real_configurations() -> None:
    """S1A3E8 of the demo model (4 layers, 192 by 768, bfloat16): 96 neurons an expert."""
    regime = Regime(16, 128, 8)
    dense = count(planned("dense"), 128)
    one_matrix = 4 * 192 * 96 * 2  # bytes of one expert's W_up in all layers
    ours = count(planned("moesaic"), 128)
    router = 4 * 7 * 192 * 2
    bias = ours.token_bytes - (dense.token_bytes - 4 * 3 * one_matrix + router)
    assert 0 <= bias < 0.001 * dense.token_bytes
    read = ours.decode_bytes(16)
    assert read is not None
    all_read = dense.token_bytes + router + bias
    assert read == pytest.approx(all_read - 7 * 3 * one_matrix * (4 / 7) ** 16)
    floor = floor_of(ours, dense, regime, "decode")
    assert floor == pytest.approx(read / dense.token_bytes)
    static = count(planned("static"), 128)
    assert static.decode_bytes(16) == static.token_bytes < dense.token_bytes
    for kind in ("prefill", "decode"):
        value = floor_of(static, dense, regime, kind)
        assert value is not None
        assert 0.5 < value < 0.9


def test_a_prompt_that_runs_all_neurons_costs_what_the_dense_one_does() -> None:
    dense = count(planned("dense"), 128)
    floors = []
    for prompts in ("all", "each"):
        ours = count(planned("moesaic-neurons", prompts=prompts), 128)
        floors.append(floor_of(ours, dense, Regime(1, 128, 8), "prefill"))
    assert floors[0] == pytest.approx(1.0)
    assert floors[1] != pytest.approx(1.0, abs=1e-3)


def test_a_prompt_that_runs_all_neurons_in_some_layers_only_has_no_floor() -> None:
    """The others choose for each token there: what that reads is another count."""
    config = planned("moesaic-neurons")
    first, *others = config.moesaic.sizes
    few = replace(first, num_active=first.num_routed // 4)
    config.moesaic = replace(config.moesaic, sizes=[few, *others])
    assert count(config, 128).prompt_macs is None


def test_what_is_not_known_has_no_floor() -> None:
    """Inputs that are skipped, neurons of one prompt, neurons by copies."""
    dense = count(planned("dense"), 128)
    alone, many = Regime(1, 128, 8), Regime(16, 128, 8)
    for method in ("teal", "griffin", "moesaic-neurons"):
        ours = count(planned(method), 128)
        assert floor_of(ours, dense, alone, "decode") is not None
        assert floor_of(ours, dense, many, "decode") is None
        prefill = floor_of(ours, dense, many, "prefill")
        assert (prefill is None) == (method == "griffin")
    assert floor_of(None, dense, alone, "prefill") is None


def test_regimes_are_checked() -> None:
    assert make_regimes(4, 2, [1, 3, 1]) == [Regime(1, 4, 2), Regime(3, 4, 2)]
    for prefill, decode, batches in ((0, 1, [1]), (1, 0, [1]), (1, 1, []), (1, 1, [0])):
        with pytest.raises(MoesaicError):
            make_regimes(prefill, decode, batches)


def test_a_prompt_is_as_long_as_the_contexts_leave_it() -> None:
    short = LlamaConfig(max_position_embeddings=300)
    long = LlamaConfig(max_position_embeddings=4096)
    usual = bench_module._usual_prompt
    assert usual([long], 128) == 512
    assert usual([long, short], 128) == 300 - 128 - 1
    assert usual([short], 300) == 1  # which is refused, with the numbers
    assert usual([None], 128) == 512


def test_batches_whose_keys_no_memory_holds_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 2**20 if name == "SC_PHYS_PAGES" else 4096)
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2)
    of_token = 2 * 2 * 64 * 2  # keys and values, layers, hidden size, bytes: 4 GiB hold 2**23
    fits = Regime(4 * 2**30 // of_token // 1024 - 1, 1000, 24)
    kept, skipped = bench_module._held_by_memory([fits, replace(fits, batch=10**6)], [config])
    assert kept == [fits]
    assert skipped == [
        "batch 1000000: keys and values alone take 488 GiB in 16 bits, and this machine has 4; "
        "take a smaller --batch"
    ]
    with pytest.raises(MoesaicError, match="488 GiB"):
        bench_module._held_by_memory([replace(fits, batch=10**6)], [config])


def test_sequences_begin_at_other_places_of_the_text() -> None:
    assert rows_of([1, 2, 3, 4, 5], 3, 3) == [[1, 2, 3], [4, 5, 1], [2, 3, 4]]
    assert rows_of([1, 2], 2, 3) == [[1, 2, 1], [2, 1, 2]]


# --- engines -----------------------------------------------------------------------------------

NOISY = """
import os, signal, subprocess, sys
sys.path.insert(0, {here!r})
print("a library says hello")
from worker import peak, serve
def load(settings):
    if settings["model"] == "broken":
        raise ValueError("bad weights")
    if settings["model"] == "ours":
        from moesaic.errors import MoesaicError
        raise MoesaicError("no such shard; fetch it")
    return settings["model"], dict(version="1.0", device="none")
def measure(model, batch, prompt, new):
    print("no newline", end="", flush=True)
    if batch == 13:
        print("noise")
        sys.exit("ValueError: no room for 13")
    if batch == 15:
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    if batch == 14:
        subprocess.Popen(["sleep", "60"], stdout=1)
        os.kill(os.getpid(), signal.SIGKILL)
    return float(prompt), float(new)
serve(load, measure, peak)
"""


@pytest.fixture
def noisy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that prints other things too."""
    script = tmp_path / "noisy.py"
    script.write_text(NOISY.format(here=str(engine_module.HERE)))
    monkeypatch.setattr(engine_module, "HERE", tmp_path)
    return Engine("noisy", "noisy.py", "json", "nothing")


def test_answers_are_told_from_noise(noisy: Engine) -> None:
    """And memory is the worker's own, however much this process has held."""
    held = bytearray(2**28)
    held[:: 2**12] = b"x" * len(held[:: 2**12])
    settings = {"model": "any", "threads": 1}
    with started(noisy, sys.executable, settings) as worker:
        assert worker.about["version"] == "1.0"
        values = worker.time(Regime(1, 7, 3))
        assert (values["prefill"], values["decode"]) == (7.0, 3.0)
        assert 2**20 < values["memory"] < 2**27
        assert worker.time(Regime(2, 8, 4))["decode"] == 4.0
    assert worker.process.returncode == 0


@pytest.mark.parametrize(
    ("model", "batch", "reason"),
    [
        ("broken", 1, "broken: the engine stopped: ValueError: bad weights"),
        ("ours", 1, "ours: the engine stopped: no such shard; fetch it$"),
        ("any", 13, "no room for 13"),
        ("any", 14, "lack of memory; take a smaller --batch"),
        ("any", 15, "CUDA out of memory.*; take a smaller --batch"),
    ],
)
def test_an_engine_that_stops_says_why(noisy: Engine, model: str, batch: int, reason: str) -> None:
    """At once, though a process that it started still holds what it held."""
    settings = {"model": model, "threads": None}
    with (
        pytest.raises(MoesaicError, match=reason),
        started(noisy, sys.executable, settings) as worker,
    ):
        worker.time(Regime(batch, 1, 1))


def test_nothing_runs_on_after_an_interruption(noisy: Engine) -> None:
    settings = {"model": "any", "threads": None}
    with (
        pytest.raises(KeyboardInterrupt),
        started(noisy, sys.executable, settings) as worker,
    ):
        raise KeyboardInterrupt
    assert worker.process.returncode == -signal.SIGKILL


def test_engines_end_with_a_bench_that_is_told_to(folder: Path, tmp_path: Path) -> None:
    """The engine is a script that starts a process of its own and never answers."""
    told = tmp_path / "process"
    python = tmp_path / "python"
    says_found = '[ "$1" = -c ] && echo found True && exit 0'
    python.write_text(f"#!/bin/sh\n{says_found}\nsleep 600 & echo $! > {told}\nwait\n")
    python.chmod(0o755)
    command = [sys.executable, "-m", "moesaic", "bench", str(folder), "--against", "none"]
    sizes = ["--prefill", "8", "--decode", "4", "--engine-python", str(python)]
    with subprocess.Popen([*command, *sizes], stderr=subprocess.DEVNULL) as process:
        while not (told.is_file() and told.read_text().endswith("\n")):
            assert process.poll() is None
            time.sleep(0.1)
        asleep = int(told.read_text())
        os.kill(asleep, 0)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    deadline = time.monotonic() + 30
    while _runs(asleep):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _runs(process: int) -> bool:
    """Whether there is such a process that has not ended, as its parent may not know yet."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_an_engine_starts(
    noisy: Engine, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The signal comes when the process runs and nobody holds it yet."""
    processes = []
    popen = subprocess.Popen

    def start(*command: Any, **settings: Any) -> subprocess.Popen[bytes]:
        processes.append(popen(*command, **settings))
        signal.raise_signal(number)
        return processes[-1]

    def stop(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(number, stop)
    try:
        monkeypatch.setattr(subprocess, "Popen", start)
        settings = {"model": "any", "threads": 1}
        with pytest.raises(SystemExit), started(noisy, sys.executable, settings):
            raise AssertionError
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, before)
    [process] = processes
    assert process.returncode == -signal.SIGKILL


def test_too_few_tokens_to_time(noisy: Engine) -> None:
    settings = {"model": "any", "threads": None}
    with (
        started(noisy, sys.executable, settings) as worker,
        pytest.raises(MoesaicError, match="take a larger --decode"),
    ):
        worker.time(Regime(1, 4, 0))


def test_engines_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MoesaicError, match="did you mean vllm"):
        find_engine("vlm", None)
    with pytest.raises(MoesaicError, match="no Python there"):
        find_engine("vllm", "/nowhere/python")
    absent = Engine("absent", "none.py", "no_such_module", "no-such-package")
    monkeypatch.setitem(ENGINES, "absent", absent)
    with pytest.raises(MoesaicError, match="pip install no-such-package"):
        find_engine("absent", sys.executable)
    assert find_engine("transformers", None) == (ENGINES["transformers"], sys.executable)


# --- a run -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "dense"
    dense_model("llama").save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def test_a_model_beside_itself(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """The floor of equal models is 1; the table and the file hold the same rows."""
    path = tmp_path / "bench.json"
    words = [
        "moesaic", "bench", str(folder), "--against", str(folder), "--prefill", "16",
        "--decode", "2", "--batch", "1,2", "--rounds", "2", "--threads", "1", "--device", "cpu",
        "--json", str(path),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    printed = capsys.readouterr().out
    assert "time over the other's" in printed
    assert "memory held at most" in printed
    assert "timed in" not in printed  # both in the same format
    result = json.loads(path.read_text())
    assert result["dtypes"] == ["float32", "float32"]
    rows: list[dict[str, Any]] = result["rows"]
    assert [(row["kind"], row["batch"]) for row in rows] == [
        ("prefill", 1), ("decode", 1), ("prefill", 2), ("decode", 2),
    ]  # fmt: skip
    for row in rows:
        assert row["floor"] == pytest.approx(1.0)
        assert row["least"] <= row["ratio"] <= row["most"]
        assert len(row["seconds"]) == 2
        assert min(row["memory"]) > 2**24
    assert [row["tokens"] for row in rows] == [16, 2, 32, 4]


class Clocked:
    """A worker that takes so long each time."""

    def __init__(self, *seconds: float):
        self.seconds = iter(seconds)

    def time(self, regime: Regime) -> dict[str, float]:
        taken = next(self.seconds)
        return {"prefill": 10 * taken, "decode": taken}


def test_ratios_are_ours_over_the_dense_models_without_the_round_that_warms_up() -> None:
    regime = Regime(batch=2, prompt=16, new=4)
    workers: Any = [Clocked(100, 4, 6, 6), Clocked(1, 2, 2, 4)]
    times = bench_module._timed(workers, regime, 3, lambda line: None)
    row = bench_module._row(regime, "decode", times)
    assert row["seconds"] == [[4, 6, 6], [2, 2, 4]]
    assert (row["least"], row["ratio"], row["most"]) == (1.5, 2, 3)
    assert row["tokens_per_second"] == [8 / 6, 8 / 2]
    row = bench_module._row(regime, "prefill", times)
    assert row["seconds"] == [[40, 60, 60], [20, 20, 40]]
    assert row["tokens"] == 32


def test_transformers_reads_the_prompt_at_once_and_then_token_by_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(engine_module.HERE))
    run_transformers = import_module("run_transformers")
    model = tiny_model("llama")
    shapes = []

    def note(module: Any, positional: Any, named: dict[str, Any]) -> None:
        shapes.append(tuple(named["input_ids"].shape))

    with model.register_forward_pre_hook(note, with_kwargs=True):
        loaded = (model, list(range(3, 40)), torch.device("cpu"))
        prefill, decode = run_transformers.measure(loaded, batch=2, prompt=8, new=3)
    assert shapes == [(2, 8), (2, 1), (2, 1), (2, 1)]
    assert prefill > 0
    assert decode > 0


def test_a_batch_that_does_not_fit_leaves_the_rows_before_it(
    folder: Path, noisy: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, "noisy", noisy)
    sizes: dict[str, Any] = {"prefill": 16, "decode": 2, "rounds": 1, "engine": "noisy"}
    result = bench(str(folder), batches=[1, 15], **sizes)
    assert [row["batch"] for row in result["rows"]] == [1, 1]
    (why,) = result["skipped"]
    assert why.startswith("batch 15: ")
    assert "take a smaller --batch" in why
    with pytest.raises(MoesaicError, match="take a smaller --batch"):
        bench(str(folder), batches=[15], **sizes)


def test_a_model_that_runs_without_its_kernel_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine without a compiler, whose user would else compare what is slow."""
    converted = converted_folder("llama", tmp_path / "converted")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    result = bench(str(converted), prefill=16, decode=2, batches=[1], rounds=1, device="cpu")
    print_result(result)
    printed = " ".join(capsys.readouterr().out.split())
    assert "note: torch computes in place of moesaic's kernels" in printed
    assert "no C++ compiler was found" in printed


def test_models_timed_in_formats_of_their_own_are_told_apart(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_module, "is_emulated", lambda dtype: dtype == torch.bfloat16)
    halved = tmp_path / "halved"
    dense_model("llama").to(torch.bfloat16).save_pretrained(halved)
    tokenizer().save_pretrained(halved)
    sizes: dict[str, Any] = {"prefill": 16, "decode": 2, "batches": [1], "rounds": 1}
    result = bench(str(folder), against=str(halved), device="cpu", **sizes)
    assert result["dtypes"] == ["float32", "bfloat16"]
    print_result(result)
    printed = " ".join(capsys.readouterr().out.split())
    assert "timed in float32, the other in bfloat16: --dtype" in printed
    assert "no instructions for bfloat16" in printed
    same = [bench_module._format_of(load_config(str(halved)), "float32")] * 2
    assert same == ["float32", "float32"]
    assert bench_module._emulated(same, ENGINES["transformers"], "cpu") == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prefill": 4096}, "the context of .* is 64"),
        ({"rounds": 0}, "rounds 0"),
        ({"threads": 0}, "threads 0"),
        ({"threads": 10**6}, "threads 1000000: this machine has .* processors"),
        ({"engine": "vlm"}, "unknown engine"),
        ({"device": "quantum"}, "device"),
    ],
)
def test_bad_input_is_refused(folder: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(MoesaicError, match=reason):
        bench(str(folder), **changes)


def test_llama_cpp_wants_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = replace(ENGINES["llama.cpp"], module="json")
    monkeypatch.setitem(ENGINES, "llama.cpp", fake)
    with pytest.raises(MoesaicError, match="moesaic export writes one"):
        bench(str(folder), engine="llama.cpp")
    with pytest.raises(MoesaicError, match="no such GGUF file"):
        bench(str(tmp_path / "no.gguf"), engine="llama.cpp")
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    with pytest.raises(MoesaicError, match=r"--dtype float16 does not go with llama.cpp"):
        bench(str(tmp_path / "some.gguf"), engine="llama.cpp", dtype="float16")


def test_code_beside_the_weights_runs_only_if_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By an engine whose Python has no moesaic, as the one that this environment came from."""
    monkeypatch.setitem(ENGINES, "vllm", replace(ENGINES["vllm"], module="json"))
    planned("moesaic").save_pretrained(tmp_path)
    bare = str(Path(sys.base_prefix) / "bin" / "python3")
    assert not has_module(bare, "moesaic")
    assert has_module(sys.executable, "moesaic")
    assert not has_module("/bin/true", "moesaic")  # no Python, and content with anything
    with pytest.raises(MoesaicError, match=r"install moesaic for .* or say --trust-remote-code"):
        bench(str(tmp_path), engine="vllm", engine_python=bare, prefill=8, decode=2)


def test_each_model_is_run_in_the_format_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself vLLM runs a model of 32 bits in 16, and the floor counts 32."""
    given = []

    def note(engine: Any, python: str, settings: dict[str, Any]) -> Any:
        given.append(settings["dtype"])
        if len(given) == 2:
            raise MoesaicError("far enough")
        return nullcontext()

    monkeypatch.setattr(bench_module, "started", note)
    for dtype, expected in (("auto", ["bfloat16"] * 2), ("float32", ["float32"] * 2)):
        with pytest.raises(MoesaicError, match="far enough"):
            bench("demo", against="demo", dtype=dtype, rounds=1)
        assert given == expected
        given.clear()


def test_a_configuration_without_a_format_names_none() -> None:
    config = LlamaConfig(dtype=None)
    format_of = bench_module._format_of
    assert format_of(config, "auto") is None
    assert format_of(config, "bfloat16") == "bfloat16"
    assert format_of(LlamaConfig(dtype="float16"), "auto") == "float16"
