"""Conversion on two processes over gloo against one: the same model, and the same figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.calibration.calibration_set import CalibrationSet, Part
from moesaic.calibration.share import ALONE, Share, device_of_process, share_of_launch
from moesaic.errors import MoesaicError
from moesaic.families.load import load_model
from moesaic.finetune.convert import dry_run
from tests import two_conversions as two
from tests.families import CONTEXT, tiny_model, tokens
from tests.mixtures import tiny_mixture
from tests.stock_models import dense_model, tokenizer

if not torch.distributed.is_available():
    pytest.skip("this torch comes without torch.distributed", allow_module_level=True)

ROOT = Path(__file__).parents[1]
PROCESSES = 2
REPORT = "moesaic_report.json"


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", PROCESSES]
# Told that there are several GPUs it starts processes, and the command says on what they run.
ACCELERATE = [
    "accelerate.commands.launch", "--multi_gpu", "--num_processes", PROCESSES, "--num_machines", 1,
    "--mixed_precision", "no", "--dynamo_backend", "no",
]  # fmt: skip


def launched(launcher: list[Any], *words: object) -> subprocess.CompletedProcess[str]:
    """Two processes of one thread each."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", *launcher, *words]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The method that the documentation shows, as a file of the user's."""
    page = (ROOT / "docs/add_a_method.md").read_text()
    path = tmp_path_factory.mktemp("methods") / "shown.py"
    path.write_text(page.split("```python\n")[1].split("```")[0])
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shown: Path) -> Path:
    """With a tiny model and a text, and what two processes found and said."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # the workers of one run share it
    folder = base / "two_conversions"
    with FileLock(base / "two_conversions.lock"):
        if not folder.exists():
            folder.mkdir()
            dense_model("llama").save_pretrained(folder / "dense")
            tokenizer().save_pretrained(folder / "dense")
            text = "the cat sat in a hat and the rat in a bin, the sun is hot. " * 200
            (folder / "text.txt").write_text(text)
            done = launched(TORCHRUN, "-m", "tests.two_conversions", folder, shown)
            (folder / "stdout").write_text(done.stdout)
            (folder / "stderr").write_text(done.stderr)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """What each of the two found."""
    paths = [folder / f"{place}.pt" for place in range(PROCESSES)]
    assert all(path.is_file() for path in paths), (folder / "stderr").read_text()[-3000:]
    return [torch.load(path, weights_only=False) for path in paths]


def assert_close(two: Any, one: Any, path: str = "") -> None:
    """Numbers up to the order of summation, all else equal."""
    if isinstance(one, dict):
        assert two.keys() == one.keys(), path
        for name in one:
            assert_close(two[name], one[name], f"{path} {name}")
    elif isinstance(one, list):
        assert len(two) == len(one), path
        for place, value in enumerate(one):
            assert_close(two[place], value, f"{path} {place}")
    elif isinstance(one, torch.Tensor):
        # Of its largest value: single weights of a router are near 0.
        bound = 1e-3 * float(one.float().abs().max()) + 1e-4
        torch.testing.assert_close(two, one, rtol=0, atol=bound, msg=lambda text: f"{path}: {text}")
    elif isinstance(one, float):
        assert two == pytest.approx(one, rel=1e-4, abs=1e-7), path
    else:
        assert two == one, path


@pytest.mark.parametrize("case", two.CASES)
def test_two_processes_convert_as_one(case: str, found: list[dict[str, Any]], shown: Path) -> None:
    """The same plan, experts and routers, and the same errors and references of every layer."""
    one = two.converted(case, shown)
    for process in found:
        assert_close(process[case], one)
    first, second = (process[case]["state"] for process in found)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("samples", [5, 17])
@pytest.mark.parametrize("hold_out", [True, False])
def test_whatever_a_method_asks_for_is_of_all_tokens(
    samples: int, hold_out: bool, found: list[dict[str, Any]]
) -> None:
    """In their order, to the last bit; and no process holds more than its own."""
    one = two.exchanged(ALONE, hold_out, samples)
    processes = [process[f"{hold_out} {samples}"] for process in found]
    windows = [process.pop("windows") for process in processes]
    held = [process.pop("own") for process in processes]
    assert sorted(chain(*windows)) == one.pop("windows")
    assert len(torch.cat(held)) == len(one.pop("own"))
    sizes = list(map(len, windows))
    assert max(sizes) - min(sizes) <= 2  # one of those to fit on, one of those held out
    for process in processes:
        assert process.keys() == one.keys()
        for name, expected in one.items():
            if name == "energy":  # from a norm, which has a root
                torch.testing.assert_close(process[name], expected, rtol=1e-6, atol=0)
            elif isinstance(expected, torch.Tensor):
                assert torch.equal(process[name], expected), name
            else:
                assert process[name] == expected, name


def test_a_stopped_conversion_is_resumed_by_both(
    found: list[dict[str, Any]], folder: Path, shown: Path
) -> None:
    """Two layers are read from the folder, and the whole is what one process makes."""
    one = two.converted("moesaic", shown)
    for process in found:
        assert process["resumed"]["before"] == [True, True, False]
        assert_close(process["resumed"]["state"], one["state"])
    written = load_model(folder / "resumed").state_dict()
    for name, tensor in found[0]["resumed"]["state"].items():
        assert torch.equal(written[name], tensor), name
    assert not list(folder.glob("*.partial*"))


def test_what_breaks_one_share_is_said_by_all(found: list[dict[str, Any]]) -> None:
    model, windows_NL = two.broken()
    one = two.refused(windows_NL, model)
    assert "NaN or infinity" in one
    assert [process["broken"] for process in found] == [one, one]


def test_processes_with_different_texts_are_refused(found: list[dict[str, Any]]) -> None:
    for process in found:
        assert "process 1 has calibration tokens = " in process["others"]
        assert "the same model, text and command" in process["others"]


def test_a_process_that_has_ended_is_no_hang(found: list[dict[str, Any]]) -> None:
    assert "another process of this run has ended" in found[0]["lost"]


# --- the command -------------------------------------------------------------------------------


def test_the_command_writes_and_speaks_once(
    folder: Path, found: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(found) == PROCESSES
    assert (folder / "stdout").read_text().count("written to") == 1
    assert (folder / "stderr").read_text().count("converting layers") == 1
    assert (folder / "commanded" / "report.html").is_file()
    assert not list(folder.glob("*.partial*"))
    monkeypatch.setattr(sys, "argv", sys.argv)
    two.commanded(folder, "alone")
    states = [dict(load_model(folder / name).state_dict()) for name in ("commanded", "alone")]
    assert_close(*states)
    reports = [json.loads((folder / name / REPORT).read_text()) for name in ("commanded", "alone")]
    assert_close(*reports)


def test_accelerate_launch_is_torchrun(folder: Path) -> None:
    words = two.command_words(folder, "accelerated")
    done = launched(ACCELERATE, "-m", "moesaic", *words)
    assert done.stdout.count("written to") == 1, done.stderr[-3000:]
    names = ("accelerated", "commanded")
    assert_close(*(dict(load_model(folder / name).state_dict()) for name in names))


@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_bad_input_is_one_line_from_one_process(folder: Path, launcher: list[Any]) -> None:
    """The launcher says of the first process that it ended with 2, and ends the other."""
    words = ["-m", "moesaic", "convert", folder / "dense", "--experts", "all of them"]
    done = launched(launcher, *words, "--output", folder / "refused", "--device", "cpu")
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1
    assert "exitcode  : 2" in done.stderr
    assert not list(folder.glob("refused*"))


# --- who holds what ----------------------------------------------------------------------------


def parts_of(samples: int, length: int, processes: int, hold_out: bool) -> list[Part]:
    calibration = CalibrationSet(torch.zeros(samples, length, dtype=torch.long))
    shares = [Share(place, processes) for place in range(processes)]
    return [calibration.part(share, hold_out) for share in shares]


@settings(deadline=None)
@given(st.integers(1, 70), st.integers(1, 20), st.integers(1, 9), st.booleans())
def test_every_window_is_held_once_and_shares_are_even(
    samples: int, length: int, processes: int, hold_out: bool
) -> None:
    parts = parts_of(samples, length, processes, hold_out)
    split = CalibrationSet(torch.zeros(samples, length)).split
    numbers = [number for part in parts for number in part.window_N]
    assert sorted(numbers) == list(range(samples))
    assert sum(part.to_fit for part in parts) == split.first_heldout
    if hold_out:
        to_fit = [part.to_fit for part in parts]
        windows = 2 if samples < 8 else 1  # the last one may be cut
        assert max(to_fit) - min(to_fit) <= windows * length
    for part in parts:
        fitted = [number for number in part.window_N if number * length < split.first_heldout]
        places = [number * length for number in fitted]
        assert places == list(range(part.first, part.first + len(fitted) * length, length))


def test_hand_worked_parts() -> None:
    """Seventeen windows of ten: two are held out, one for each process."""
    first, second = parts_of(17, 10, 2, hold_out=True)
    assert first.window_N == [0, 1, 2, 3, 4, 5, 6, 15]
    assert second.window_N == [7, 8, 9, 10, 11, 12, 13, 14, 16]
    assert (first.first, first.to_fit, first.first_heldout) == (0, 70, 0)
    assert (second.first, second.to_fit, second.first_heldout) == (70, 80, 10)
    # Three windows: the last three tokens of the last one are held out.
    first, second = parts_of(3, 10, 2, hold_out=True)
    assert (first.window_N, second.window_N) == ([0], [1, 2])
    assert (second.first, second.to_fit, second.first_heldout) == (10, 17, 0)
    # Where nothing is held out of the fit, tokens are held in their order.
    first, second = parts_of(17, 10, 2, hold_out=False)
    assert second.window_N == list(range(8, 17))
    assert (second.first, second.to_fit, second.first_heldout) == (80, 70, 0)


# --- what is refused ---------------------------------------------------------------------------


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the second of eight processes that torchrun starts on this machine."""
    names = {"WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 8, "RANK": 1, "LOCAL_RANK": 1}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("method", "windows", "reason"),
    [
        ("moesaic", 8, "7 calibration windows to fit on cannot be shared by 8 processes"),
        ("static", 7, "7 calibration windows to fit on cannot be shared by 8 processes"),
        ("teal", 16, "replaces no FFNs"),
        ("sleb", 16, "replaces no FFNs"),
        ("griffin", 16, "one prompt"),
    ],
)
def test_what_cannot_be_shared_is_refused(method: str, windows: int, reason: str) -> None:
    calibration = tokens(windows, CONTEXT)
    with pytest.raises(MoesaicError, match=reason):
        dry_run(tiny_model("qwen3"), method, None, calibration, sparsity=0.34)


@pytest.mark.usefixtures("eight")
def test_a_mixture_is_refused() -> None:
    with pytest.raises(MoesaicError, match="is a mixture of experts, whose conversion 8 processes"):
        dry_run(tiny_mixture("qwen3_moe"), "static", None, tokens(16, CONTEXT), sparsity=0.25)


@pytest.mark.usefixtures("eight")
def test_as_many_windows_as_processes_are_enough() -> None:
    prepared = dry_run(tiny_model("qwen3"), "static", "S2A3E8", tokens(8, CONTEXT))
    assert prepared.calibration.samples == 8


@pytest.mark.usefixtures("eight")
def test_each_process_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU here: torch is told how many there are."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert device_of_process(torch.device("cuda")) == torch.device("cuda:1")
    assert device_of_process(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(MoesaicError, match="each takes the GPU of its own number"):
        device_of_process(torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(MoesaicError, match=r"8 processes on a machine of 2 GPUs.*start 2"):
        device_of_process(torch.device("cuda"))


@pytest.mark.usefixtures("eight")
def test_processes_do_not_share_what_cannot_send() -> None:
    with pytest.raises(MoesaicError, match="exchange sums on cpu or cuda, not on mps"):
        share_of_launch(torch.device("mps"))


def test_without_a_launcher_nothing_is_shared() -> None:
    assert share_of_launch(torch.device("cpu")) is ALONE
    assert device_of_process(torch.device("cuda:1")) == torch.device("cuda:1")
