"""`moesaic bench`: floors by hand, engines that behave and that do not, a real run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.bench import engine as engine_module
from moesaic.bench.bench import bench
from moesaic.bench.engine import ENGINES, Engine, find_engine, started
from moesaic.bench.floor import Counted, batch_bytes, floor_of
from moesaic.bench.regimes import Regime, make_regimes
from moesaic.cli.main import main
from moesaic.errors import MoesaicError
from moesaic.evaluate.weight_bytes import WeightBytes
from moesaic.evaluate.work import Macs
from tests.stock_models import dense_model, tokenizer

# --- floors ------------------------------------------------------------------------------------


def test_bytes_of_a_batch_by_hand() -> None:
    """Half of the experts for a token: two tokens leave a quarter of them out."""
    dense = WeightBytes(ffn=100.0, rest=60.0)
    ours = WeightBytes(ffn=60.0, rest=60.0)  # 20 shared, 40 of 80 routed
    assert batch_bytes(dense, ours, 0.5, 1) == 60
    assert batch_bytes(dense, ours, 0.5, 2) == 80
    assert batch_bytes(dense, ours, 0.5, 64) == pytest.approx(100)
    assert batch_bytes(dense, ours, 0.0, 64) == 60  # nothing is routed: static pruning


def test_more_tokens_hit_what_chance_says() -> None:
    """Against counting: R experts of which K run, drawn for every token."""
    generator = torch.Generator().manual_seed(0)
    routed, active, batch, draws = 16, 4, 6, 4000
    scores_NBR = torch.rand(draws, batch, routed, generator=generator)
    runs_NBK = scores_NBR.topk(active, dim=2).indices
    hit_NR = torch.zeros(draws, routed).scatter_(1, runs_NBK.flatten(1), 1.0)
    whole, one = 160.0, 40.0
    expected = batch_bytes(WeightBytes(whole, 0.0), WeightBytes(one, 0.0), 0.25, batch)
    assert 10 * hit_NR.sum(1).mean().item() == pytest.approx(expected, rel=0.01)


def test_floors_by_hand() -> None:
    """A prompt of 10 tokens needs the head once, and its scores."""
    dense = Counted(
        Macs(attention=100, ffn=200, router=0, head=50, scores=15), WeightBytes(40.0, 20.0), 0.0
    )
    ours = Counted(
        Macs(attention=100, ffn=100, router=20, head=50, scores=15), WeightBytes(22.0, 20.0), 0.5
    )
    floor = floor_of(dense, ours, Regime(1, 10, 5))
    assert floor.prefill == pytest.approx((100 + 120 + 5 + 15) / (100 + 200 + 5 + 15))
    assert floor.decode == pytest.approx(42 / 60)
    assert floor_of(dense, ours, Regime(2, 10, 5)).decode == pytest.approx(51 / 60)


def test_regimes_are_checked() -> None:
    assert make_regimes(4, 2, [1, 3, 1]) == [Regime(1, 4, 2), Regime(3, 4, 2)]
    for prefill, decode, batches in ((0, 1, [1]), (1, 0, [1]), (1, 1, []), (1, 1, [0])):
        with pytest.raises(MoesaicError):
            make_regimes(prefill, decode, batches)


# --- engines -----------------------------------------------------------------------------------

NOISY = """
import sys
sys.path.insert(0, {here!r})
print("a library says hello")
from worker import serve
def load(settings):
    if settings["model"] == "broken":
        raise ValueError("bad weights")
    return settings["model"], "1.0"
def measure(model, batch, prompt, new):
    print("noise")
    if batch == 13:
        sys.exit("ValueError: no room for 13")
    return float(prompt), float(new)
serve(load, measure)
"""


@pytest.fixture
def noisy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that prints other things too."""
    script = tmp_path / "noisy.py"
    script.write_text(NOISY.format(here=str(engine_module.HERE)))
    monkeypatch.setattr(engine_module, "HERE", tmp_path)
    return Engine("noisy", "noisy.py", "json", "nothing")


def test_answers_are_told_from_noise(noisy: Engine) -> None:
    settings = {"model": "any", "threads": 1}
    with started(noisy, sys.executable, settings) as worker:
        assert worker.version == "1.0"
        assert worker.time(Regime(1, 7, 3)) == {"prefill": 7.0, "decode": 3.0}
        assert worker.time(Regime(2, 8, 4))["decode"] == 4.0
    assert worker.process.poll() is not None


def test_an_engine_that_stops_says_why(noisy: Engine) -> None:
    broken = {"model": "broken", "threads": None}
    with (
        pytest.raises(MoesaicError, match=r"broken: the engine stopped .*bad weights"),
        started(noisy, sys.executable, broken),
    ):
        pass
    settings = {"model": "any", "threads": None}
    with (
        started(noisy, sys.executable, settings) as worker,
        pytest.raises(MoesaicError, match="no room for 13"),
    ):
        worker.time(Regime(13, 1, 1))


def test_engines_that_are_not_there() -> None:
    with pytest.raises(MoesaicError, match="did you mean vllm"):
        find_engine("vlm", None)
    with pytest.raises(MoesaicError, match="no Python there"):
        find_engine("vllm", "/nowhere/python")
    with pytest.raises(MoesaicError, match="pip install llama-cpp-python"):
        find_engine("llama.cpp", sys.executable)
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
    assert "time over dense" in printed
    assert "memory held at most" in printed
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    assert [(row["kind"], row["batch"]) for row in rows] == [
        ("prefill", 1), ("decode", 1), ("prefill", 2), ("decode", 2),
    ]  # fmt: skip
    for row in rows:
        assert row["floor"] == pytest.approx(1.0)
        assert row["least"] <= row["ratio"] <= row["most"]
        assert len(row["seconds"]) == 2
        assert min(row["memory"]) > 2**24
    assert [row["tokens"] for row in rows] == [16, 2, 32, 4]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prefill": 4096}, "do not fit the context"),
        ({"rounds": 0}, "rounds 0"),
        ({"threads": 0}, "threads 0"),
        ({"engine": "vlm"}, "unknown engine"),
        ({"device": "quantum"}, "device"),
    ],
)
def test_bad_input_is_refused(folder: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(MoesaicError, match=reason):
        bench(str(folder), **changes)


def test_llama_cpp_wants_a_file_and_one_sequence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = Engine("llama.cpp", "none.py", "json", "nothing", most_at_once=1, reads_gguf=True)
    monkeypatch.setitem(ENGINES, "llama.cpp", fake)
    with pytest.raises(MoesaicError, match=r"moesaic export .* --format gguf"):
        bench(str(folder), engine="llama.cpp")
    with pytest.raises(MoesaicError, match="no such file"):
        bench(str(tmp_path / "no.gguf"), engine="llama.cpp")
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    with pytest.raises(MoesaicError, match="runs 1 sequence at once"):
        bench(str(tmp_path / "some.gguf"), engine="llama.cpp", batches=(2,))
