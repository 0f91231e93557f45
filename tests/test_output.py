"""What is written: whole or absent, under the names that loaders know, by one run at a time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, metadata_load
from huggingface_hub.errors import EntryNotFoundError
from safetensors import safe_open

import moesaic
from moesaic.families import load as load_module
from moesaic.families.load import file_beside, load_model
from moesaic.finetune.model_card import finetune_card
from moesaic.finetune.report import FinetuneReport
from moesaic.output import draft as drafts
from moesaic.output.atomic import new_path, write_file
from moesaic.output.model_card import build_card, code, front_matter, licence_of
from tests.families import CONTEXT, LAYERS, tiny_model, tokens
from tests.processes import run_python

WINDOWS = tokens(4, CONTEXT, seed=1)
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / "dense"
    tiny_model("llama").save_pretrained(folder)
    torch.save(WINDOWS, folder.parent / "windows.pt")
    return folder


@pytest.fixture(scope="module")
def converted(dense: Path) -> Path:
    """A model that was converted in one go."""
    output = dense.with_name("calm")
    moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=output, command="x")
    return output


def files(folder: Path) -> dict[str, bytes]:
    """But for the page: the last bit of what it measures moves with where weights lie."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.name != "report.html"
    }


# --- names -------------------------------------------------------------------------------------


def test_files_of_weights_have_the_names_that_transformers_gives(converted: Path) -> None:
    shards = sorted(path.name for path in converted.glob("*.safetensors"))
    total = LAYERS + 1
    assert shards == [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    assert not list(converted.glob("*.part"))


def test_the_index_says_which_file_holds_what(converted: Path) -> None:
    index = json.loads((converted / INDEX).read_text())
    weight_map = index["weight_map"]
    held: dict[str, str] = {}
    size = 0
    for path in converted.glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            for key in shard.keys():  # noqa: SIM118 - no mapping
                held[key] = path.name
                size += shard.get_tensor(key).nbytes
    assert weight_map == held
    assert index["metadata"]["total_size"] == size


def test_converted_layers_come_first_and_in_order(converted: Path) -> None:
    weight_map = json.loads((converted / INDEX).read_text())["weight_map"]
    for key, name in weight_map.items():
        layer = re.search(r"layers\.(\d+)\.mlp\.", key)
        number = int(layer[1]) + 1 if layer else LAYERS + 1
        assert name.startswith(f"model-{number:05d}-of-"), key


def test_transformers_loads_the_folder_without_moesaic(converted: Path, tmp_path: Path) -> None:
    program = """
import sys, torch
sys.modules["moesaic"] = None
from transformers import AutoModelForCausalLM
folder, ids, logits = sys.argv[1:]
model, info = AutoModelForCausalLM.from_pretrained(
    folder, trust_remote_code=True, output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"], info
with torch.no_grad():
    torch.save(model.eval()(torch.load(ids)).logits, logits)
"""
    torch.save(WINDOWS, tmp_path / "ids.pt")
    words = [sys.executable, "-W", "ignore", "-c", program]
    paths = [converted, tmp_path / "ids.pt", tmp_path / "logits.pt"]
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run([*words, *paths], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = load_model(converted)(WINDOWS).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected)


# --- a kill while files get their names --------------------------------------------------------

# Dies after so many renames of a file of weights: to its final name, or back.
_DIES_RENAMING = """
import os, pathlib, signal, sys, torch
import moesaic
folder, output, final, when, resume = sys.argv[1:]
real, count = pathlib.Path.rename, 0
def rename(self, target):
    global count
    result = real(self, target)
    name = pathlib.Path(target).name
    if name.endswith(".safetensors") and name.startswith("model-") == (final == "final"):
        count += 1
        if count == int(when):
            os.kill(os.getpid(), signal.SIGKILL)
    return result
pathlib.Path.rename = rename
moesaic.convert(folder, "cmoe", "S3A3E8", torch.load(folder + "/../windows.pt"),
                output=output, command="x", resume=resume == "resume")
"""


def kill_while_renaming(dense: Path, output: Path, which: str, when: int, resume: str) -> None:
    done = run_python(_DIES_RENAMING, dense, output, which, when, resume)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not output.exists()


@pytest.mark.parametrize("when", [1, LAYERS + 1])
def test_a_kill_while_files_get_their_names_costs_nothing(
    dense: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    output = tmp_path / "out"
    kill_while_renaming(dense, output, "final", when, "anew")
    folder = drafts.draft_folder(output) / "model"
    assert len(list(folder.glob("model-*"))) == when
    made = []
    real = drafts.save_layer
    monkeypatch.setattr(
        "moesaic.conversion.saved_layers.save_layer",
        lambda *arguments: [made.append(arguments[1]), real(*arguments)],
    )
    moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=output, resume=True, command="x")
    assert made == []
    assert files(output) == files(converted)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_kill_while_names_are_taken_back_costs_nothing(
    dense: Path, converted: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    kill_while_renaming(dense, output, "final", 3, "anew")
    kill_while_renaming(dense, output, "private", 2, "resume")
    moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=output, resume=True, command="x")
    assert files(output) == files(converted)


# --- one run at a time -------------------------------------------------------------------------


def test_another_process_may_not_write_the_same_output(dense: Path, tmp_path: Path) -> None:
    program = """
import pathlib, sys
from moesaic.output import draft
with draft.open_draft(pathlib.Path(sys.argv[1]), {"seed": 0}, resume=False):
    pass
"""
    output = tmp_path / "out"
    lock = tmp_path / "out.partial.lock"
    with drafts.open_draft(output, {"seed": 0}, resume=False) as draft:
        assert lock.exists()
        done = run_python(program, output)
        assert done.returncode == 1
        refusal = f"another run is writing {output}; choose another output"
        assert refusal in done.stderr
        assert (draft / "model").is_dir()
        assert lock.exists()
    assert not lock.exists()
    done = run_python(program, output)
    assert done.returncode == 0, done.stderr


def test_the_lock_of_a_killed_run_holds_nobody_up(tmp_path: Path) -> None:
    output = tmp_path / "out"
    (tmp_path / "out.partial.lock").touch()
    with drafts.open_draft(output, {"seed": 0}, resume=False):
        pass
    assert not (tmp_path / "out.partial.lock").exists()


@pytest.mark.parametrize("text", ["[]", "5", "{", "null"])
def test_a_draft_that_says_nothing_of_its_run_is_not_resumed(tmp_path: Path, text: str) -> None:
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), drafts.open_draft(output, {"seed": 0}, resume=False):
        raise KeyboardInterrupt
    (drafts.draft_folder(output) / "draft.json").write_text(text)
    with (
        pytest.raises(moesaic.MoesaicError, match="--overwrite"),
        drafts.open_draft(output, {"seed": 0}, resume=True),
    ):
        pass


def test_what_was_replaced_goes_if_a_run_is_killed_before_it_does(tmp_path: Path) -> None:
    """Else the next run cannot put aside what it replaces."""
    output = tmp_path / "out"
    output.mkdir()
    with pytest.raises(KeyboardInterrupt), drafts.open_draft(output, {}, resume=False):
        raise KeyboardInterrupt
    old = drafts.draft_folder(output) / "old"
    old.mkdir()
    (old / "config.json").write_text("{}")
    with drafts.open_draft(output, {}, resume=True) as again:
        assert not (again / "old").exists()
    assert output.is_dir()


def test_what_is_half_deleted_never_gets_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is killed while what it replaced goes; then its output is taken elsewhere."""
    output = tmp_path / "out"
    output.mkdir()
    (output / "config.json").write_text('{"model_type": "moesaic"}')
    remove = drafts.shutil.rmtree

    def killed(path: Path, *args: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    with drafts.open_draft(output, {}, resume=False) as draft:
        (draft / "model" / "config.json").write_text("{}")
        monkeypatch.setattr(drafts.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            drafts.take_name(draft, output, overwrite=True)
    monkeypatch.setattr(drafts.shutil, "rmtree", remove)
    output.rename(tmp_path / "elsewhere")
    drafts.check_output(output, overwrite=False, resume=False)
    with drafts.open_draft(output, {}, resume=False):
        assert not output.exists()


def test_what_a_killed_run_put_aside_is_asked_for_before_it_is_replaced(tmp_path: Path) -> None:
    """It gets its name back when the next run begins, and is in the way like any output."""
    output = tmp_path / "out"
    draft = drafts.draft_folder(output)
    for folder in ("old", "model"):
        (draft / folder).mkdir(parents=True)
        (draft / folder / "config.json").write_text('{"model_type": "moesaic"}')
    (draft / "draft.json").write_text("{}")
    with pytest.raises(
        moesaic.MoesaicError, match=r"old exists; choose another or pass --overwrite"
    ):
        drafts.check_output(output, overwrite=False, resume=True)
    drafts.check_output(output, overwrite=True, resume=True)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"recover": 5}, "left from another command or another version"),
        ({"seed": 0, "settings": {"rank": 8, "rate": 0.1}}, r"with settings.rate = 0.2, .*has 0.1"),
    ],
)
def test_a_draft_of_another_run_is_not_resumed(
    tmp_path: Path, run: dict[str, Any], message: str
) -> None:
    output = tmp_path / "out"
    before = {"seed": 0, "settings": {"rank": 8, "rate": 0.2}}
    with pytest.raises(KeyboardInterrupt), drafts.open_draft(output, before, resume=False):
        raise KeyboardInterrupt
    with (
        pytest.raises(moesaic.MoesaicError, match=message),
        drafts.open_draft(output, run, resume=True),
    ):
        pass
    assert (drafts.draft_folder(output) / "draft.json").is_file()


# --- layers of a draft -------------------------------------------------------------------------


def test_a_layer_is_read_as_it_was_saved(tmp_path: Path) -> None:
    state = {"a.weight": torch.arange(6.0).view(2, 3).T}
    report = {"layer": 2, "notes": ["few tokens"]}
    with drafts.open_draft(tmp_path / "out", {}, resume=False) as draft:
        assert drafts.load_layer(draft, 2) is None
        drafts.save_layer(draft, 2, state, report)
        found = drafts.load_layer(draft, 2)
        assert found is not None
        assert torch.equal(found[0]["a.weight"], state["a.weight"])
        assert found[1] == report
        (draft / "report-00002.json").write_text("{")
        assert drafts.load_layer(draft, 2) is None


# --- whole or absent ---------------------------------------------------------------------------


def test_a_file_that_cannot_be_replaced_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.json"
    write_file(path, "old")

    def fails(self: Path, target: Path) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fails)
        with pytest.raises(OSError, match="no"):
            write_file(path, "new")
    assert files(tmp_path) == {"rows.json": b"old"}
    write_file(path, b"new")
    assert files(tmp_path) == {"rows.json": b"new"}


def test_a_file_has_the_mode_that_the_user_gives_new_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "rows.json", "{}")
    finally:
        os.umask(before)
    assert (tmp_path / "rows.json").stat().st_mode & 0o777 == 0o640


def test_links_and_pipes_are_written_to_and_stay(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.touch()
    link.symlink_to(target)
    write_file(link, "text")
    assert link.is_symlink()
    assert target.read_text() == "text"
    write_file(Path(os.devnull), "text")
    assert not Path(os.devnull).is_file()


def test_a_path_that_is_taken_meanwhile_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "out"

    def write() -> None:
        with new_path(output) as part:
            part.write_text("ours")
            output.write_text("theirs")

    with pytest.raises(moesaic.MoesaicError, match="exists by now"):
        write()
    assert files(tmp_path) == {"out": b"theirs"}


def test_a_folder_that_appears_during_a_run_is_left_alone(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finished model waits beside it; once the name is free, --resume gives it."""
    output = tmp_path / "out"
    finish = drafts.finish

    def meanwhile(*args: Any) -> None:
        output.mkdir()
        (output / "thesis.txt").write_text("three years")
        finish(*args)

    monkeypatch.setattr(drafts, "finish", meanwhile)
    with pytest.raises(moesaic.MoesaicError, match="made or changed by someone else since"):
        moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=output)
    monkeypatch.undo()
    assert files(output) == {"thesis.txt": b"three years"}
    output.rename(tmp_path / "elsewhere")
    moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=output, resume=True)
    assert (output / "config.json").is_file()
    assert not (tmp_path / "out.partial").exists()


def test_a_draft_half_removed_is_still_known_as_ours(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while an old draft goes: the file that says whose it is goes last."""
    output = tmp_path / "out"
    draft = tmp_path / "out.partial"
    (draft / "model").mkdir(parents=True)
    (draft / "draft.json").write_text("{}")
    (draft / "report-00000.json").write_text("{}")
    remove = drafts.shutil.rmtree

    def killed(path: Path, *args: Any, **more: Any) -> None:
        if Path(path) == draft:
            raise KeyboardInterrupt
        remove(path, *args, **more)

    monkeypatch.setattr(drafts.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=output, overwrite=True)
    monkeypatch.undo()
    assert [path.name for path in draft.iterdir()] == ["draft.json"]
    moesaic.convert(dense, "cmoe", "S3A3E8", WINDOWS, output=output)
    assert (output / "config.json").is_file()


# --- the model card ----------------------------------------------------------------------------


def test_a_card_by_hand() -> None:
    front = front_matter({"license": "mit"}, "meta-llama/Llama-2-7b")
    card = build_card(front, "A title", "What it is.", [("Text", "a|b")], ["Use:", code("x\n\ny")])
    table = "| | |\n|---|---|\n| Text | a\\|b |"
    body = f"# A title\n\nWhat it is.\n\n{table}\n\nUse:\n\n    x\n\n    y\n"
    assert card.endswith(f"\n---\n\n{body}")
    assert ModelCard(card).data.to_dict() == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "license": "mit",
        "base_model": "meta-llama/Llama-2-7b", "tags": ["moesaic", "mixture-of-experts"],
    }  # fmt: skip


def test_a_folder_is_no_base_model_to_the_hub(converted: Path) -> None:
    front = metadata_load(converted / "README.md")
    assert front is not None
    assert "base_model" not in front
    assert "license" not in front


def test_only_what_routes_is_called_a_mixture(dense: Path, converted: Path, tmp_path: Path) -> None:
    pruned = tmp_path / "pruned"
    moesaic.convert(dense, "static", calibration=WINDOWS, sparsity=0.25, output=pruned)
    for folder, tags in ((pruned, ["moesaic"]), (converted, ["moesaic", "mixture-of-experts"])):
        front = metadata_load(folder / "README.md")
        assert front is not None
        assert front["tags"] == tags
    card = (pruned / "README.md").read_text()
    assert "every dense feed-forward network pruned by moesaic" in card
    assert "routed" not in card


@pytest.mark.parametrize("routed", [True, False])
def test_fine_tuning_calls_a_mixture_only_what_routes(routed: bool) -> None:
    loads = [{"layer": 0, "load": [0.5, 0.5]}] if routed else []
    settings = {"samples": 1, "sequence_length": 8, "epochs": 1, "rank": 8, "alpha": 8.0}
    report = FinetuneReport("m", "text", None, settings, {}, True, None, loads_before=loads)
    card = finetune_card(report, {}, None)
    assert ("mixture-of-experts" in card) == routed
    assert ("A mixture of experts made" in card) == routed


def test_a_file_of_a_model_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Card and reports go along from there; without a network, or without the file, none do."""
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: mit\n---\n")
    asked = []

    def download(model: str, name: str) -> str:
        asked.append((model, name))
        if name != card.name:
            raise EntryNotFoundError("no such file")
        return str(card)

    monkeypatch.setattr(load_module, "hf_hub_download", download)
    assert licence_of(file_beside("some/model", "README.md")) == {"license": "mit"}
    assert file_beside("some/model", "moesaic_report.json") is None
    assert asked == [("some/model", "README.md"), ("some/model", "moesaic_report.json")]
    monkeypatch.undo()  # tests have no network
    assert file_beside("some/model", "README.md") is None
    assert file_beside("demo", "moesaic_report.json") is None
    assert file_beside("demo", "config.json") is not None


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: mit\n---\n# x", {"license": "mit"}),
        ("---\nlicense: mit\ntags: 5\nmodel-index: 7\n---\n# x", {"license": "mit"}),
        (
            "---\nlicense: other\nlicense_name: tongyi-qianwen\nlicense_link: https://x.y\n---\n",
            {"license": "other", "license_name": "tongyi-qianwen", "license_link": "https://x.y"},
        ),
        ("---\nlicense:\n---\n", {}),
        ("# no front matter", {}),
        ("---\nlicense: mit", {}),
        ("---\n- license\n---\n", {}),
        ("---\nlicense: [mit\n---\n", {}),
    ],
)
def test_the_licence_of_whole_and_broken_cards(
    card: str, licence: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text(card)
    assert licence_of(tmp_path / "README.md") == licence
    front = front_matter(licence).to_dict()
    assert {key: front[key] for key in licence} == licence


def test_no_card_or_no_text_is_no_licence(tmp_path: Path) -> None:
    assert licence_of(tmp_path / "README.md") == {}
    (tmp_path / "README.md").write_bytes(b"\xff\xfe---")
    assert licence_of(tmp_path / "README.md") == {}
