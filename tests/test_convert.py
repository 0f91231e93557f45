"""The conversion as a whole: bytes, crashes, broken models, kinds of input."""

from __future__ import annotations

import errno
import json
import signal
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file

import moesaic
from moesaic import load_method
from moesaic.conversion.options import make_budget
from moesaic.conversion.plan import make_plan
from moesaic.evaluate.work import count_macs
from moesaic.families.load import load_config, load_model
from moesaic.memory import lent_to
from moesaic.modeling import MoesaicBlock, Sizes
from moesaic.output import draft as checkpoint
from tests.families import CONTEXT, LAYERS, tiny_model, tokens
from tests.processes import run_python

WINDOWS = tokens(4, CONTEXT, seed=1)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    folder = tmp_path / "dense"
    tiny_model("llama").save_pretrained(folder)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """But for the page: the last bit of what it measures moves with where weights lie."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "report.html"
    }


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_same_seed_same_bytes(dense: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        moesaic.convert(dense, "random", "S3A3E8", WINDOWS, output=tmp_path / name, command="x")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    moesaic.convert(dense, "random", "S3A3E8", WINDOWS, output=tmp_path / "c", command="x", seed=1)
    assert files(tmp_path / "a") != files(tmp_path / "c")


@pytest.mark.parametrize(
    ("method", "settings"),
    [("moesaic", {}), ("moesaic", {"up_steps": 4}), ("static-repaired", {}),
     ("moesaic-dynamic", {"directions": 24, "layer_budgets": "uniform"})],
)  # fmt: skip
def test_fitted_weights_are_the_same_bytes_every_time(
    dense: Path, tmp_path: Path, method: str, settings: dict[str, Any]
) -> None:
    given = load_method(method, settings)
    for name in ("a", "b"):
        moesaic.convert(dense, given, "S3A3E8", WINDOWS, output=tmp_path / name, command="x")
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.mark.parametrize("method", ["cmoe", "cmoe-code", "static"])
def test_the_order_of_tokens_does_not_matter_to_the_first_layer(method: str) -> None:
    one = tiny_model("llama")
    two = tiny_model("llama")
    moesaic.convert(one, method, "S3A3E8", WINDOWS)
    moesaic.convert(two, method, "S3A3E8", WINDOWS.flip(0))
    name = "model.layers.0.mlp"
    for key, value in weights(one).items():
        if key.startswith(name):
            assert torch.equal(value, two.state_dict()[key]), key


def test_calibration_is_sequential() -> None:
    """Layer 1 is profiled on what the converted layer 0 passes on, not on the dense model's."""
    whole, _ = moesaic.convert(tiny_model("llama"), "cmoe", "S0A1E8", WINDOWS)
    seen: list[torch.Tensor] = []
    whole.model.layers[1].mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        whole(input_ids=WINDOWS)
        tiny_model("llama")  # resets no state; the dense inputs below come from its own hook
    dense = tiny_model("llama")
    dense.model.layers[1].mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        dense(input_ids=WINDOWS)
    assert not torch.allclose(seen[0], seen[1], atol=1e-3)
    profiled: list[torch.Tensor] = []
    from moesaic.calibration import ffn_inputs
    from moesaic.calibration.statistics import sum_statistics

    def spy(blocks: Any, *rest: Any, **more: Any) -> Any:
        blocks = list(blocks)
        profiled.append(torch.cat([x_TD for x_TD, _ in blocks]))
        return sum_statistics(blocks, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ffn_inputs, "sum_statistics", spy)
        moesaic.convert(tiny_model("llama"), "cmoe", "S0A1E8", WINDOWS)
    torch.testing.assert_close(profiled[1].view_as(seen[0]), seen[0], rtol=1e-5, atol=1e-5)


_KILLED = """
import os, signal, sys, torch
import moesaic
from moesaic.output import draft as checkpoint
count, when = 0, int(sys.argv[3])
def dying(function):
    def wrapped(*args, **kwargs):
        global count
        result = function(*args, **kwargs)
        count += 1
        if count == when:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return wrapped
checkpoint._save = dying(checkpoint._save)
method = sys.argv[4] if len(sys.argv) > 4 else "cmoe"
moesaic.convert(sys.argv[1], method, "S3A3E8", torch.load(sys.argv[1] + "/../windows.pt"),
                output=sys.argv[2], command="x")
"""


@pytest.mark.parametrize(
    ("when", "method"),  # mid-way and in the last step
    [(1, "cmoe"), (2, "cmoe"), (LAYERS + 1, "cmoe"), (2, "moesaic-dynamic")],
)
def test_resume_after_kill_gives_the_same_bytes(
    dense: Path, tmp_path: Path, when: int, method: str
) -> None:
    torch.save(WINDOWS, tmp_path / "windows.pt")
    moesaic.convert(dense, method, "S3A3E8", WINDOWS, output=tmp_path / "calm", command="x")
    output = tmp_path / "killed"
    done = run_python(_KILLED, dense, output, when, method)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not output.exists()
    with pytest.raises(moesaic.MoesaicError, match="--resume"):
        moesaic.convert(dense, method, "S3A3E8", WINDOWS, output=output)
    with pytest.raises(moesaic.MoesaicError, match="layout = S3A3E8"):
        moesaic.convert(dense, method, "S2A2E8", WINDOWS, output=output, resume=True)
    moesaic.convert(dense, method, "S3A3E8", WINDOWS, output=output, resume=True, command="x")
    assert files(output) == files(tmp_path / "calm")
    assert not checkpoint.draft_folder(output).exists()


def test_a_damaged_draft_shard_is_made_anew(dense: Path, tmp_path: Path) -> None:
    torch.save(WINDOWS, tmp_path / "windows.pt")
    output = tmp_path / "out"
    run_python(_KILLED, dense, output, 2)
    shard = checkpoint.draft_folder(output) / "model" / "layer-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=output, resume=True, command="x")
    moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=tmp_path / "calm", command="x")
    assert files(output) == files(tmp_path / "calm")


_DIES_AT = """
import os, signal, shutil, sys, pathlib, torch
import moesaic
from moesaic.output import draft as checkpoint
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[3] == "before its name":
    checkpoint.sync_all = die
elif sys.argv[3] == "between two names":
    real = pathlib.Path.rename
    def rename(self, target):
        result = real(self, target)
        if pathlib.Path(target).name == "old":
            die()
        return result
    pathlib.Path.rename = rename
else:
    checkpoint.shutil.rmtree = die
moesaic.convert(sys.argv[1], "cmoe", "S3A3E8", torch.load(sys.argv[1] + "/../windows.pt"),
                output=sys.argv[2], command="x", overwrite=True)
"""


@pytest.mark.parametrize("when", ["before its name", "between two names", "after its name"])
def test_a_kill_in_the_last_step_keeps_the_old_model_or_the_new(
    dense: Path, tmp_path: Path, when: str
) -> None:
    torch.save(WINDOWS, tmp_path / "windows.pt")
    moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=tmp_path / "calm", command="x")
    output = tmp_path / "out"
    moesaic.convert(dense, "static", "S3A3E8", WINDOWS, output=output, command="x")
    old = files(output)
    done = run_python(_DIES_AT, dense, output, when)
    assert done.returncode == -signal.SIGKILL, done.stderr
    if when == "after its name":
        assert files(output) == files(tmp_path / "calm")
    else:
        kept = output if output.exists() else checkpoint.draft_folder(output) / "old"
        assert files(kept) == old
    moesaic.convert(
        dense, "cmoe", "S3A3E8", WINDOWS, output=output, command="x", overwrite=True, resume=True
    )
    assert files(output) == files(tmp_path / "calm")
    assert not checkpoint.draft_folder(output).exists()


def test_resume_refuses_other_weights_of_the_same_shape(dense: Path, tmp_path: Path) -> None:
    torch.save(WINDOWS, tmp_path / "windows.pt")
    output = tmp_path / "out"
    run_python(_KILLED, dense, output, 1)
    tiny_model("llama", seed=1).save_pretrained(dense)
    with pytest.raises(moesaic.MoesaicError, match="was started with weights"):
        moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=output, resume=True)


def test_resume_refuses_another_configuration_of_the_same_weights(
    dense: Path, tmp_path: Path
) -> None:
    torch.save(WINDOWS, tmp_path / "windows.pt")
    output = tmp_path / "out"
    run_python(_KILLED, dense, output, 1)
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(moesaic.MoesaicError, match="was started with configuration"):
        moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=output, resume=True)


def test_resume_refuses_the_same_tokens_in_other_windows(dense: Path, tmp_path: Path) -> None:
    torch.save(WINDOWS, tmp_path / "windows.pt")
    output = tmp_path / "out"
    run_python(_KILLED, dense, output, 1)
    halves = WINDOWS.view(2 * len(WINDOWS), -1)
    with pytest.raises(moesaic.MoesaicError, match="was started with calibration tokens"):
        moesaic.convert(dense, "cmoe", "S3A3E8", halves, output=output, resume=True)


def test_resume_does_not_mix_equal_budgets_with_others(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What met a target has equal budgets; the same layout without one shares them."""
    save = checkpoint._save
    saved: list[Any] = []

    def die(*arguments: Any) -> Any:
        saved.append(save(*arguments))
        raise KeyboardInterrupt

    ids = torch.randint(0, 96, (4000,), generator=torch.Generator().manual_seed(1))
    usual: dict[str, Any] = {"samples": 8, "sequence_length": 32, "output": tmp_path / "out"}
    monkeypatch.setattr(checkpoint, "_save", die)
    with pytest.raises(KeyboardInterrupt):
        moesaic.convert(dense, "moesaic-dynamic", calibration=ids, target_ratio=2.0, **usual)
    monkeypatch.undo()
    assert len(saved) == 1
    mark = checkpoint.draft_folder(tmp_path / "out") / checkpoint._DRAFT
    layout = json.loads(mark.read_text())["layout"]
    with pytest.raises(moesaic.MoesaicError, match="layer_budgets = uniform, this run has grad"):
        moesaic.convert(dense, "moesaic-dynamic", layout, ids, resume=True, **usual)


@pytest.mark.parametrize("method", ["cmoe", "moebert", "moesaic-neurons", "static"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bytes_of_a_result_are_known_before(
    dense: Path, tmp_path: Path, method: str, dtype: str
) -> None:
    """Copies, overlapping experts and tied weights counted: so much room must be there."""
    output = tmp_path / "out"
    moesaic.convert(dense, method, calibration=WINDOWS, sparsity=0.5, output=output, dtype=dtype)
    stored = 0
    for path in output.glob("*.safetensors"):
        stored += sum(tensor.nbytes for tensor in load_file(path).values())
    config = load_config(str(dense))
    budget = make_budget(None, 0.5)
    plan = make_plan(config, str(dense), load_method(method), budget)
    planned = plan.stored_bytes(getattr(torch, dtype))
    assert stored == pytest.approx(planned, rel=0.01)


def test_an_empty_draft_is_no_obstacle(dense: Path, tmp_path: Path) -> None:
    """A run killed between making its folder and its first file leaves one."""
    (tmp_path / "out.partial").mkdir()
    moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=tmp_path / "out", resume=True)
    assert not (tmp_path / "out.partial").exists()


def test_folders_of_the_user_are_left_alone(dense: Path, tmp_path: Path) -> None:
    for name in ("out.partial", "out.old", "out.partial.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("mine")
    for more in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(moesaic.MoesaicError, match="in the way and not ours"):
            moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=tmp_path / "out", **more)
    for name in ("out.partial", "out.old", "out.partial.old"):
        assert (tmp_path / name / "thesis.txt").read_text() == "mine"


def test_two_runs_do_not_write_into_one_output(dense: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    first = checkpoint.open_draft(output, {"seed": 0}, resume=False)
    with first as draft:
        (draft / "model" / "layer-00000.safetensors").write_bytes(b"the first run's")
        with pytest.raises(moesaic.MoesaicError, match="another run is writing"):
            moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=output, overwrite=True)
        assert (draft / "model" / "layer-00000.safetensors").exists()


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(moesaic.MoesaicError, match="LlamaModel is no causal language model"):
        moesaic.convert(tiny_model("llama").model, "cmoe", "S3A3E8", WINDOWS)


def poisoned(layer: int, value: float) -> Any:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[layer].mlp.up_proj.weight[3, 4] = value
    return model


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_name_their_layer_and_leave_nothing(tmp_path: Path, value: float) -> None:
    output = tmp_path / "out"
    with pytest.raises(
        moesaic.MoesaicError, match=r"layer 2: the weights 'model.layers.2.mlp.up_proj.weight'"
    ):
        moesaic.convert(poisoned(2, value), "cmoe", "S3A3E8", WINDOWS, output=output)
    assert list(tmp_path.iterdir()) == []


def test_activations_that_overflow_name_their_layer() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight *= 1e30
        model.model.layers[1].mlp.gate_proj.weight *= 1e30
    with pytest.raises(moesaic.MoesaicError, match=r"layer 1 of .*not finite"):
        moesaic.convert(model, "cmoe", "S3A3E8", WINDOWS)


def test_activations_that_overflow_are_found_before_the_dense_model_is_scored(
    tmp_path: Path,
) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight *= 1e30
        model.model.layers[1].mlp.gate_proj.weight *= 1e30
    ids = tokens(1, 2000)[0]
    with pytest.raises(moesaic.MoesaicError, match="layer 1 puts out NaN"):
        moesaic.convert(model, "cmoe", "S3A3E8", ids, output=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_failing_with_overwrite_keeps_the_old_model(dense: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=output)
    before = files(output)
    with pytest.raises(moesaic.MoesaicError, match="exists"):
        moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=output)
    with pytest.raises(moesaic.MoesaicError, match="layer 2"):
        moesaic.convert(
            poisoned(2, float("nan")), "cmoe", "S3A3E8", WINDOWS, output=output, overwrite=True
        )
    assert files(output) == before
    moesaic.convert(dense, "static", "S3A3E8", WINDOWS, output=output, overwrite=True)
    assert json.loads((output / "config.json").read_text())["moesaic"]["method"]["name"] == "static"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out"]


def test_overwrite_leaves_alone_what_is_not_ours(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(moesaic.MoesaicError, match="not a model made by moesaic"):
        moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=dense, overwrite=True)
    assert (dense / "model.safetensors").exists()


@pytest.mark.parametrize("other", ["notes.txt", "ft/config.json", "tokenizers/x.json", "eval.json"])
def test_overwrite_deletes_nothing_beside_the_model(
    dense: Path, tmp_path: Path, other: str
) -> None:
    """The dense model that is converted may lie there, or the text that calibrates."""
    output = tmp_path / "out"
    moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=output)
    (output / "__pycache__").mkdir()  # nothing of anybody's
    path = output / other
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    before = files(output)
    name = other.split("/")[0]
    with pytest.raises(moesaic.MoesaicError, match=f"also holds {name}.*--overwrite would delete"):
        moesaic.convert(dense, "static", "S3A3E8", WINDOWS, output=output, overwrite=True)
    assert files(output) == before
    path.unlink()
    if path.parent != output:
        path.parent.rmdir()
    moesaic.convert(dense, "static", "S3A3E8", WINDOWS, output=output, overwrite=True)


def test_a_full_disk_is_found_before_and_during_writing(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    usage = checkpoint.shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)
        with pytest.raises(moesaic.MoesaicError, match="make room"):
            moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=output)
    assert not checkpoint.draft_folder(output).exists()
    real, calls = checkpoint.save_file, []

    def full(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(moesaic.MoesaicError, match=r"finished layers are kept.*--resume"):
            moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=output)
    assert not output.exists()
    moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=output, resume=True)
    assert output.exists()


def test_a_model_in_memory_with_each_kind_of_text(shared: Path) -> None:
    from moesaic.families.load import load_tokenizer

    folder = shared / "models" / "stories260K"
    text = (shared / "data" / "tinystories.txt").read_text()[:40_000]
    tokenizer = load_tokenizer(folder)
    results = []
    for source in (
        [text],
        datasets.Dataset.from_dict({"text": [text]}),
        torch.tensor(tokenizer(text, verbose=False)["input_ids"]),
    ):
        model, report = moesaic.convert(
            load_model(folder), "cmoe", "S3A3E8", source, tokenizer=tokenizer, samples=4
        )
        assert report.tokens == 4 * 512
        results.append(weights(model))
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


def test_the_report_is_consistent() -> None:
    _, report = moesaic.convert(tiny_model("qwen3"), "cmoe", "S3A3E8", WINDOWS)
    assert report.tokens == WINDOWS.numel()
    assert [layer.layer for layer in report.layers] == list(range(LAYERS))
    for layer in report.layers:
        assert layer.tokens == WINDOWS.numel() // 8  # the last eighth
        assert not layer.heldout  # cmoe fits nothing, so it profiles all tokens
        assert sum(layer.expert_load) == pytest.approx(3, abs=1e-4)
        assert 0 < layer.relative_error < 1
        assert 3 / 5 - 0.4 <= layer.router_recall <= 1
        assert 0 < layer.mass_kept <= layer.oracle_mass <= 1
    # 52 neurons: 8 experts of 6, the 4 left over are shared
    assert report.active_ffn_fraction == pytest.approx((3 * 6 + 4 + 3 * 6) / 52)


def test_static_keeps_the_best_neurons_without_a_router() -> None:
    model, report = moesaic.convert(tiny_model("llama"), "static", "S3A3E8", WINDOWS)
    block = model.model.layers[0].mlp
    assert block.router is None
    assert block.experts is None
    assert block.shared_expert.up_proj.weight.shape[0] == 40
    assert report.layers[0].router_recall is None
    assert model.config.moesaic.sizes == (Sizes(40, 0, 0, 0, 52),) * LAYERS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 0}, "at least 1"),
        ({"sequence_length": 1}, "outside 2..64"),
        ({"sequence_length": 65}, "outside 2..64"),
        ({"layout": "S1A1E53"}, "cannot share the 52 neurons"),
        ({"calibration": torch.full((2, 8), 96)}, "the model knows 0..95"),
        ({"calibration": [" "]}, "empty"),
        ({"calibration": [3, 4]}, "must be strings"),
        ({"calibration": 7}, "a int is no text"),
        ({"calibration": {"input_ids": [1]}}, "must be strings"),
        ({"calibration": {}}, "mapping of calibration texts is empty"),
        ({"calibration": torch.ones(3, 0).long()}, "expected one row"),
        ({"calibration": torch.rand(3, 9)}, "of whole numbers"),
        ({"calibration": tokens(2, 65)}, "exceed 64, the context"),
        ({"seed": 1.5}, "whole numbers"),
        ({"layout": 3}, "not of the form"),
        ({"calibration": torch.arange(3, 20)}, "too short: 17 tokens, at least 128"),
        ({"device": "cpu"}, "keeps its dtype and device"),
        ({"seed": -1}, "outside 0"),
        ({"seed": None}, "whole numbers"),
        ({"sequence_length": 32.0}, "sequence length 32.0: a whole number"),
        ({"layout": None, "sparsity": "0.25"}, "sparsity '0.25': a number is needed"),
        ({"layout": None, "target_ratio": "1.03"}, "target ratio '1.03': a number is needed"),
        ({"dense_layers": 0}, "dense layers 0: several numbers are needed"),
        ({"experts": 3}, "experts 3: several numbers are needed"),
        ({"layout": None, "recipe": "moesaic", "grain": 3}, "unknown grain 3"),
        ({"recipe": "moesaic", "grain": "fine"}, "grain fine and layout S3A3E8: give one"),
        ({"recipe": None}, "unknown method 'None'"),
        ({"samples": 10**8}, "take fewer --samples"),
        ({"recipe": "cmeo"}, "did you mean cmoe"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    arguments = {"recipe": "cmoe", "layout": "S3A3E8", "calibration": WINDOWS} | change
    with pytest.raises(moesaic.MoesaicError, match=message):
        moesaic.convert(tiny_model("llama"), **arguments)


def test_a_converted_model_is_not_converted_again() -> None:
    model, _ = moesaic.convert(tiny_model("llama"), "cmoe", "S3A3E8", WINDOWS)
    with pytest.raises(moesaic.MoesaicError, match="converted already"):
        moesaic.convert(model, "cmoe", "S3A3E8", WINDOWS)


@pytest.mark.parametrize("dense", [(0,), (1,), (0, 2)])
def test_layers_that_are_to_stay_dense_stay(dense: tuple[int, ...], tmp_path: Path) -> None:
    """The same weights, counted in whole, and loaded again; the others are converted."""
    original, ids = tiny_model("llama"), tokens(2, 48, seed=2)
    model, report = moesaic.convert(
        tiny_model("llama"), "moesaic", "S1A3E8", tokens(8, CONTEXT, seed=1), dense_layers=dense,
        output=tmp_path / "out",
    )  # fmt: skip
    converted = [layer for layer in range(LAYERS) if layer not in dense]
    assert list(model.config.moesaic.layers) == converted
    assert [layer.layer for layer in report.layers] == converted
    for layer in range(LAYERS):
        found, before = model.model.layers[layer].mlp, original.model.layers[layer].mlp
        assert isinstance(found, MoesaicBlock) == (layer in converted)
        if layer in dense:
            assert torch.equal(found.up_proj.weight, before.up_proj.weight)
    shared, size, active, total = 10, 6, 3, 52  # the four neurons left over are shared ones
    computed = len(dense) * total + len(converted) * (shared + active * size)
    assert report.active_ffn_fraction == pytest.approx(computed / (LAYERS * total))
    loaded = load_model(tmp_path / "out")
    whole = count_macs(original, 1)
    macs = count_macs(loaded, 1)
    assert macs.ffn == pytest.approx(whole.ffn * report.active_ffn_fraction)
    assert macs.attention == whole.attention
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("dense", "reason"),
    [((9,), "has layers 0 to"), ((-1,), "has layers 0 to"), (range(LAYERS), "would stay dense")],
)
def test_layers_that_cannot_stay_dense(dense: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(moesaic.MoesaicError, match=reason):
        moesaic.convert(
            tiny_model("llama"), "moesaic", "S1A3E8", tokens(8, CONTEXT, seed=1),
            dense_layers=dense, output=tmp_path / "out",
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_a_written_model_reads_its_weights_from_its_files(dense: Path, tmp_path: Path) -> None:
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc/self/maps, which says what lies in a file")
    output = tmp_path / "out"
    model, _ = moesaic.convert(dense, "moesaic", "S1A3E8", WINDOWS, output=output)
    for name, parameter in model.named_parameters():
        mapped = file_at(parameter.data_ptr())
        assert mapped.endswith(".safetensors"), name
        if ".mlp." in name:
            assert Path(mapped).parent == output, name


def file_at(address: int) -> str:
    """The file that this address of our memory is mapped from, if any."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_ = line.split()
        first, last = (int(bound, 16) for bound in span.split("-"))
        if first <= address < last:
            return line.split(maxsplit=5)[-1]
    return ""


def test_a_layer_that_was_lent_to_a_device_lies_where_it_lay() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    before = layer[0].weight.data_ptr()
    value = layer[0].weight.detach().clone()
    elsewhere = torch.device("meta")
    with lent_to(elsewhere, layer):
        assert layer[0].weight.device == elsewhere
        layer[1] = torch.nn.Linear(4, 4)  # a replacement
    assert layer[0].weight.data_ptr() == before
    assert torch.equal(layer[0].weight, value)
    assert layer[1].weight.device.type == "cpu"


def test_static_pruning_may_refit_rows_of_w_up_too() -> None:
    """In the one layer that is converted; then they are an ordinary, narrower FFN's."""
    errors = []
    for steps in (0, 4):
        _, report = moesaic.convert(
            "demo", "static-repaired", "S2A2E8", "demo", samples=8, sequence_length=512,
            settings={"up_steps": steps, "undo_drift": 0}, dense_layers=[0, 1, 2],
        )  # fmt: skip
        [layer] = report.layers
        errors.append(layer.relative_error)
    plain, refitted = errors
    assert refitted < 0.99 * plain


@pytest.mark.parametrize("method", ["moesaic", "moesaic-dynamic", "static-repaired"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_that_are_kept_change_nothing(
    monkeypatch: pytest.MonkeyPatch, method: str, dtype: torch.dtype
) -> None:
    """Nor does anything that reads them change them."""
    states = []
    for most in (0, 2**31):
        monkeypatch.setattr("moesaic.calibration.ffn_inputs.HIDDEN_BYTES", most)
        model, _ = moesaic.convert(
            tiny_model("llama").to(dtype), method, "S1A2E4", WINDOWS, settings={"up_steps": 1}
        )
        states.append(model.state_dict())
    kept, computed = states
    assert kept.keys() == computed.keys()
    for name, tensor in kept.items():
        assert torch.equal(tensor, computed[name]), name
