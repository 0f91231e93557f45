"""The suite that every method owes, also one that is added without touching the package.

Methods of the table of contents, the one that docs/add_a_method.md shows, and a method for
linear layers, all as a user has them: by name or as a file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from operator import mul
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import moesaic
from moesaic.conversion import run as run_module
from moesaic.errors import MoesaicError
from moesaic.evaluate.weight_bytes import count_bytes
from moesaic.evaluate.work import count_macs
from moesaic.families.load import dense_of, load_config
from moesaic.methods.base import FFNMethod, ModelMethod
from moesaic.methods.load import load_method
from moesaic.modeling import MoesaicReplacement, MoesaicThresholdedLinear
from tests.families import CONTEXT, tiny_model, tokens
from tests.mixtures import tiny_mixture
from tests.stock_models import tokenizer

ROOT = Path(__file__).parents[1]
SHOWN = "docs/add_a_method.md"
LINEAR = str(ROOT / "tests/method_files/magnitude.py")
SAVED = [name for name, row in moesaic.METHODS.items() if row.runs is not None]
BLOCKS = str(ROOT / "tests/method_files/last_blocks.py")
METHODS = [*SAVED, SHOWN, LINEAR, BLOCKS]
WINDOWS = tokens(16, CONTEXT, seed=1)
DOMAINS = {"even": WINDOWS[::2], "odd": WINDOWS[1::2]}  # for methods that want several texts
QUICK = {"layer_budgets": "uniform", "prompt": 16, "tokens": 64}  # where a method has it


@pytest.fixture(scope="session")
def shown(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The method that the documentation shows, as a file of the user's."""
    page = (ROOT / SHOWN).read_text()
    code = page.split("```python\n")[1].split("```")[0]
    path = tmp_path_factory.mktemp("methods") / "shown.py"
    path.write_text(code)
    return str(path)


@pytest.fixture(params=METHODS, ids=lambda name: Path(name).stem)
def method(request: pytest.FixtureRequest) -> str:
    if request.param == SHOWN:
        return str(request.getfixturevalue("shown"))
    return str(request.param)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    folder = tmp_path / "dense"
    tiny_model("qwen3").save_pretrained(folder)
    return folder


def has_experts(method: str) -> bool:
    return isinstance(load_method(method), FFNMethod)


def changes_the_model(method: str) -> bool:
    """Whether it makes the whole model smaller, and replaces no FFN by itself."""
    return isinstance(load_method(method), ModelMethod)


def settings_of(method: str) -> dict[str, object]:
    return {key: QUICK[key] for key in load_method(method).settings if key in QUICK}


def convert(model: Any, method: str, keep: float = 0.5, **more: Any) -> Any:
    """With half of the budget, or all of it."""
    budget: dict[str, Any] = {"sparsity": 1 - keep}
    if has_experts(method):
        budget = {"layout": "S2A2E8" if keep == 0.5 else "S1A7E8"}
    needs = load_method(method).needs
    calibration: Any = DOMAINS if "domains" in needs else WINDOWS
    return moesaic.convert(
        model, method, calibration=calibration, settings=settings_of(method), **budget, **more
    )


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(2, 48, seed=2), use_cache=False).logits


def test_nothing_skipped_is_the_dense_model(method: str) -> None:
    model, report = convert(tiny_model("qwen3"), method, keep=1.0)
    torch.testing.assert_close(logits(model), logits(tiny_model("qwen3")), rtol=1e-4, atol=1e-4)
    assert all(layer.relative_error < 1e-8 for layer in report.layers)


def test_what_is_skipped_is_missed(method: str) -> None:
    """Else the test above, and the suite, would tell nothing."""
    model, report = convert(tiny_model("qwen3"), method)
    assert not torch.allclose(logits(model), logits(tiny_model("qwen3")), atol=1e-3)
    assert all(0 < layer.relative_error < 2 for layer in report.layers)


def test_the_budget_is_kept(method: str) -> None:
    """What runs on the calibration text is what the configuration says."""
    model, report = convert(tiny_model("qwen3"), method)
    assert report.macs == count_macs(model, 1).total
    assert report.bytes == count_bytes(model).total
    if changes_the_model(method):
        assert report.macs < report.dense_macs
        return
    moe = model.config.moesaic
    shares = shares_that_run(model)
    if moe.linears is not None:
        mean = sum(map(mul, shares, sizes_of(model))) / sum(sizes_of(model))
        assert mean == pytest.approx(moe.linears.share, abs=0.05)
        return
    assert report.active_ffn_fraction == pytest.approx(0.5, abs=0.05)
    for share, sizes in zip(shares, moe.sizes, strict=True):
        if sizes.num_routed:
            assert share <= sizes.num_active / sizes.num_routed + 0.02


def sizes_of(model: Any) -> list[int]:
    """Weights of every replaced linear layer."""
    return [m.weight.numel() for m in model.modules() if isinstance(m, MoesaicThresholdedLinear)]


def shares_that_run(model: Any) -> list[float]:
    """Of every replacement's experts, or inputs, on the calibration text."""
    shares: list[list[float]] = []
    handles = []
    for module in model.modules():
        if not isinstance(module, MoesaicReplacement):
            continue
        kept: list[float] = []
        shares.append(kept)

        def count(module: Any, args: Any, kept: list[float] = kept) -> None:
            x_TD = args[0].reshape(-1, args[0].shape[-1])
            if hasattr(module, "input_scale"):
                runs = x_TD.abs() * module.input_scale > module.threshold
            elif module.router is not None:
                runs = module.chosen(x_TD)
            else:
                return
            kept.append(float(runs.float().mean()))

        handles.append(module.register_forward_pre_hook(count))
    with torch.no_grad():
        model(input_ids=WINDOWS, use_cache=False)
    for handle in handles:
        handle.remove()
    return [sum(kept) / max(len(kept), 1) for kept in shares]


def test_saved_and_loaded_it_is_the_same_to_the_last_bit(
    method: str, dense: Path, tmp_path: Path
) -> None:
    model, _ = convert(dense, method, output=tmp_path / "out")
    assert "In short" in (tmp_path / "out/report.html").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for parameter in loaded.parameters():  # where a weight lies in memory moves the last bit
        parameter.data = parameter.data.clone()
    assert torch.equal(logits(model), logits(loaded.eval()))
    assert type(loaded) is type(model)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    stays_in_family = type(loaded).__name__ != "MoesaicForCausalLM"
    said = config["moesaic_conversion" if stays_in_family else "moesaic"]["method"]
    assert changes_the_model(method) or not stays_in_family
    known = load_method(method)
    assert (said["name"], said["about"]) == (known.name, known.about)
    assert said["settings"] == known.settings | settings_of(method)


def written(folder: Path) -> list[Path]:
    """But for the page: the last bit of what it measures moves with where weights lie."""
    return [path for path in folder.iterdir() if path.name != "report.html"]


def test_the_same_seed_gives_the_same_bytes(method: str, dense: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        convert(dense, method, output=tmp_path / name, command="x")
    for path in written(tmp_path / "a"):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_bad_input_is_refused_in_one_line(method: str, dense: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    wrong: list[dict[str, Any]] = [
        {"settings": {"no_such_setting": 1}},
        {"sparsity": 1.5},
        {"sparsity": -0.5},
        {"layout": "S1A9E8"},
        {"layout": "S1A3E8", "sparsity": 0.5},
    ]
    if not has_experts(method):
        wrong.append({"layout": "S1A3E8"})
    for choice in wrong:
        with pytest.raises(MoesaicError) as refusal:
            moesaic.convert(dense, method, calibration=WINDOWS, output=output, **choice)
        assert "\n" not in str(refusal.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]


def test_the_shown_method_is_about_twenty_lines_and_no_part_of_the_package(shown: str) -> None:
    code = [line for line in Path(shown).read_text().splitlines() if line.strip()]
    method = load_method(shown)
    assert method.name not in moesaic.METHODS
    body = [line for line in code if not line.startswith(("from ", "import ", "#", '"""'))]
    assert len(body) <= 30


def test_linear_methods_stand_in_a_comparison_and_leave_the_dense_model(tmp_path: Path) -> None:
    """Beside references, at the same share of the weights; what was replaced is put back."""
    result = moesaic.compare(
        "demo", [LINEAR], sparsity=(0.25,), calibration="demo", seeds=1, samples=4,
        sequence_length=64, max_tokens=1024, references=("static",), output=tmp_path / "out",
    )  # fmt: skip
    rows = {row["method"]: row for row in result["rows"]}
    assert rows["magnitude"]["macs"] < 1
    assert 1 < rows["magnitude"]["ratio"]["demo"] < 1.2
    alone = moesaic.compare(
        "demo", ["static"], sparsity=(0.25,), calibration="demo", seeds=1, samples=4,
        sequence_length=64, max_tokens=1024, references=(),
    )  # fmt: skip
    assert rows["static"]["ratio"] == alone["rows"][0]["ratio"]


def test_a_target_ratio_is_not_for_methods_without_experts(dense: Path) -> None:
    with pytest.raises(MoesaicError, match="counts experts"):
        moesaic.convert(dense, LINEAR, calibration=tokens(64, CONTEXT).flatten(), target_ratio=1.1)


NEEDY = """
from dataclasses import dataclass
from moesaic.methods.contents import Description
from moesaic.methods.cmoe import CMoE

@dataclass(frozen=True)
class Needy(CMoE):
    description = Description("needy", "", "Needs texts of several domains.", "transformers")
    needs = frozenset({"domains"})
"""


def test_a_method_that_needs_what_this_conversion_does_not_give_is_refused(
    dense: Path, tmp_path: Path
) -> None:
    path = tmp_path / "needy.py"
    path.write_text(NEEDY)
    with pytest.raises(MoesaicError, match="needy wants texts of at least two domains"):
        moesaic.convert(dense, path, "S3A3E8", WINDOWS, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_of_a_layer_is_held_once_it_is_reported(method: str) -> None:
    """What a replacement was made of is as large as the layer, and memory is bounded by one."""
    if changes_the_model(method):
        pytest.skip("nothing is replaced")
    model, _ = convert(tiny_model("qwen3"), method)
    replacements = [m for m in model.modules() if isinstance(m, MoesaicReplacement)]
    assert replacements
    for module in replacements:
        assert module.made is None
        assert module.view is None


def test_what_linear_methods_are_not_for_is_refused_in_one_line(
    dense: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with pytest.raises(MoesaicError, match="leave out --dense-layers"):
        moesaic.convert(dense, LINEAR, calibration=WINDOWS, output=output, dense_layers=[0])
    with pytest.raises(MoesaicError, match="is a mixture of experts"):
        moesaic.convert(tiny_mixture("mixtral"), LINEAR, calibration=WINDOWS)
    convert(dense, LINEAR, output=output)
    with pytest.raises(MoesaicError, match="not fine-tuned yet"):
        moesaic.finetune(output, tmp_path / "tuned", WINDOWS, samples=4, distill="none")
    for reasons in moesaic.explain(with_words(output)).values():
        assert "linear layers" in reasons[0]
    assert not (tmp_path / "tuned").exists()


def with_words(folder: Path) -> Path:
    """With a tokenizer, which exports ask for."""
    tokenizer().save_pretrained(folder)
    return folder


SETTINGS = """
from dataclasses import dataclass
from moesaic.methods.base import setting
from moesaic.methods.contents import Description
from moesaic.methods.cmoe import CMoE

@dataclass(frozen=True)
class Settings(CMoE):
    description = Description("settings", "", "Has settings of every kind.", "transformers")
    ratio: float = setting(0.5, "A number.", 0)
    word: str = setting("a", "Text.")
    count: int = setting(3, "A whole number.", 1)
    switch: bool = setting(False, "Yes or no.")
"""


def test_settings_are_numbers_words_counts_or_switches(tmp_path: Path) -> None:
    path = tmp_path / "settings.py"
    path.write_text(SETTINGS)
    changed = {"ratio": 1, "word": "b", "count": 4, "switch": True}
    assert load_method(path, changed).settings.items() >= changed.items()
    wrong = {"ratio": ["x", -1, float("nan"), True], "word": [3], "count": [0, 2.5], "switch": [1]}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(MoesaicError, match=f"{name} is"):
                load_method(path, {name: value})


def test_a_linear_conversion_is_resumed_to_the_same_bytes(dense: Path, tmp_path: Path) -> None:
    convert(dense, LINEAR, output=tmp_path / "whole", command="x")
    saved: list[int] = []

    def die(*args: Any) -> None:
        if len(saved) == 2:
            raise KeyboardInterrupt
        saved.append(1)
        save(*args)

    save = run_module.save_layer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "save_layer", die)
        with pytest.raises(KeyboardInterrupt):
            convert(dense, LINEAR, output=tmp_path / "again", command="x")
    convert(dense, LINEAR, output=tmp_path / "again", command="x", resume=True)
    for path in written(tmp_path / "whole"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_an_ordinary_result_loads_without_moesaic(dense: Path, tmp_path: Path) -> None:
    """In a process that knows nothing of us, and with a cache as with none."""
    convert(dense, BLOCKS, output=tmp_path / "out")
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM as A;"
        f"m = A.from_pretrained({str(tmp_path / 'out')!r}); m.eval();"
        "x = torch.arange(3, 19)[None];"
        "y = [m(x, use_cache=c).logits for c in (True, False)];"
        "assert torch.allclose(*y, atol=1e-5);"
        "m.generate(x, max_new_tokens=4, do_sample=False);"
        "assert 'moesaic' not in sys.modules;"
        "print(type(m).__name__, len(m.model.layers))"
    )
    found = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path = {_without_us()!r}; {code}"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout.split() == ["Qwen3ForCausalLM", "2"], found.stderr


def _without_us() -> list[str]:
    """Where Python finds modules, without the finder that an editable install adds."""
    return [path for path in sys.path if path and not path.endswith(("src", str(ROOT)))]


def test_an_ordinary_result_is_overwritten_compared_with_and_converted_again(
    dense: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    convert(dense, BLOCKS, output=output)
    convert(dense, BLOCKS, output=output, overwrite=True)
    config = load_config(str(output))
    assert dense_of(output, config) == str(dense)
    again, _ = convert(output, "static")
    assert not hasattr(again.config, "moesaic_conversion")
    assert again.config.num_hidden_layers == 2


def test_whole_blocks_stand_in_a_comparison_and_leave_the_dense_model(tmp_path: Path) -> None:
    """The next rows are what they are without them."""
    choices: dict[str, Any] = {
        "sparsity": (0.25,), "calibration": "demo", "seeds": 1, "samples": 4,
        "sequence_length": 64, "max_tokens": 1024, "references": (),
    }  # fmt: skip
    both = moesaic.compare("demo", [BLOCKS, "static"], output=tmp_path / "out", **choices)
    alone = moesaic.compare("demo", ["static"], **choices)
    rows = {row["method"]: row for row in both["rows"]}
    assert rows["static"]["ratio"] == alone["rows"][0]["ratio"]
    assert rows["last-blocks"]["macs"] < rows["static"]["macs"]
    assert rows["last-blocks"]["ratio"]["demo"] > 1
    assert "last-blocks" in (tmp_path / "out" / "compare.md").read_text()


def test_a_model_method_that_does_other_than_it_plans_is_refused(
    dense: Path, tmp_path: Path
) -> None:
    code = Path(BLOCKS).read_text()
    liar = tmp_path / "liar.py"
    liar.write_text(code.replace("keep_blocks(model, kept)", "keep_blocks(model, kept[:1])"))
    with pytest.raises(MoesaicError, match="planned"):
        convert(dense, str(liar), keep=0.7, output=tmp_path / "out")
    liar.write_text(code.replace("keep_blocks(model, kept)", "model.config.vocab_size += 1"))
    with pytest.raises(MoesaicError, match="its configuration says"):
        convert(dense, str(liar), keep=0.7, output=tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "liar.py"]


def test_what_is_for_single_layers_or_experts_is_refused_for_whole_models(
    dense: Path, tmp_path: Path
) -> None:
    with pytest.raises(MoesaicError, match="leave out --dense-layers"):
        convert(dense, BLOCKS, dense_layers=[0], output=tmp_path / "out")
    with pytest.raises(MoesaicError, match="leave out --experts"):
        convert(tiny_mixture("mixtral"), BLOCKS, experts=[0])
    with pytest.raises(MoesaicError, match="leaves none of"):
        moesaic.convert(dense, BLOCKS, calibration=WINDOWS, sparsity=0.95)


def test_what_a_method_remembers_is_not_computed_again(dense: Path, tmp_path: Path) -> None:
    counted = tmp_path / "counted.py"
    log = tmp_path / "log"
    code = Path(BLOCKS).read_text()
    code = code.replace("list(range(depth))", f"write({str(log)!r}) or list(range(depth))")
    go_on = tmp_path / "go on"
    code = code.replace("return []", f"return stop_unless({str(go_on)!r})")
    code += "\n\ndef write(path):\n    with open(path, 'a') as file:\n        file.write('x')\n"
    code += "\n\ndef stop_unless(path):\n    import os\n"
    code += "    if not os.path.exists(path):\n        raise KeyboardInterrupt\n    return []\n"
    counted.write_text(code)
    for resume in (False, True, True):
        with pytest.raises(KeyboardInterrupt):
            convert(dense, str(counted), output=tmp_path / "out", command="x", resume=resume)
    assert log.read_text() == "x"
    go_on.touch()
    convert(dense, str(counted), output=tmp_path / "out", command="x", resume=True)
    assert log.read_text() == "x"


def test_a_method_s_file_that_was_edited_is_another_method(dense: Path, tmp_path: Path) -> None:
    """Neither a conversion nor a comparison goes on with what other code made."""
    edited = tmp_path / "edited.py"
    code = Path(BLOCKS).read_text()
    edited.write_text(code.replace("return []", "raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        convert(dense, str(edited), output=tmp_path / "out", command="x")
    edited.write_text(code)
    with pytest.raises(MoesaicError, match="was started with method"):
        convert(dense, str(edited), output=tmp_path / "out", command="x", resume=True)
    first = load_method(edited)
    edited.write_text(code + "\n")
    assert load_method(edited).to_dict() != first.to_dict()
    assert "file_digest" not in load_method("cmoe").to_dict()
