"""Methods: the table, their settings, and files like them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import moesaic
from moesaic import METHODS, Method, load_method
from moesaic.conversion.options import make_budget
from moesaic.conversion.plan import make_plan
from moesaic.errors import MoesaicError
from moesaic.methods.base import FFNMethod, setting
from moesaic.methods.expert_method import ExpertMethod
from moesaic.modeling import BlockConfig, RouterConfig
from tests.families import CONTEXT, tiny_model, tokens

every_method = pytest.mark.parametrize("name", METHODS)
FFN_METHODS = [name for name in METHODS if isinstance(load_method(name), FFNMethod)]


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def block_of(name: str, settings: dict[str, Any] | None = None) -> BlockConfig:
    """What a tiny model's configuration would say of its replacements."""
    method = load_method(name, settings)
    return make_plan(tiny_model("qwen3").config, "tiny", method, make_budget("S3A3E8")).moe.block


def router_of(name: str, settings: dict[str, Any] | None = None) -> RouterConfig:
    router = block_of(name, settings).router
    assert router is not None
    return router


# --- the table ---------------------------------------------------------------------------------


@every_method
def test_a_row_is_named_as_its_key_and_leads_to_a_class_of_that_description(name: str) -> None:
    row, method = METHODS[name], load_method(name)
    assert row.name == method.name == name
    assert method.description is row
    assert method.about == row.about
    assert row.about.endswith(".")
    assert type(method).__module__ == row.where.partition(":")[0]
    assert type(method).__name__ == row.where.partition(":")[2]
    assert isinstance(method, Method)


@every_method
def test_every_setting_says_what_it_means_and_takes_its_default(name: str) -> None:
    for one in fields(load_method(name)):
        assert one.metadata["help"].endswith(".")
        load_method(name, {one.name: one.default})


def test_the_table_is_read_without_torch() -> None:
    code = "import sys; from moesaic import METHODS; print(len(METHODS), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(METHODS)), "False"]


def test_the_paper_s_method() -> None:
    cmoe: Any = load_method("cmoe")
    assert cmoe.settings == {"activation_top_k": 10, "kmeans_rounds": 20}
    assert not cmoe.normalise
    assert not cmoe.absolute
    assert router_of("cmoe") == RouterConfig("neuron-copies", "topk")
    assert "2502.04416" in METHODS["cmoe"].url
    assert "ACL 2026" in METHODS["cmoe"].paper


def test_the_released_code_differs_from_the_paper_in_these_only() -> None:
    paper: Any = load_method("cmoe")
    code: Any = load_method("cmoe-code")
    assert isinstance(code, type(paper))
    assert code.settings == paper.settings | {"kmeans_rounds": 1}
    assert code.normalise
    assert code.absolute
    own = {name for name in vars(type(code)) if not name.startswith("__")}
    assert own - {"_abc_impl"} == {"description", "normalise", "absolute", "kmeans_rounds"}
    assert block_of("cmoe-code") == replace(
        block_of("cmoe"), router=RouterConfig("neuron-copies", "topk", absolute=True)
    )


def test_only_static_pruning_does_not_route() -> None:
    unrouted = [name for name in FFN_METHODS if block_of(name).router is None]
    assert unrouted == ["static", "static-repaired", "flap"]


def test_what_a_method_needs_of_the_tokens() -> None:
    methods: dict[str, Any] = {name: load_method(name) for name in FFN_METHODS}
    fits = [name for name, method in methods.items() if method.fits_weights]
    ours = ["moesaic", "moesaic-dynamic", "moesaic-neurons", "static-repaired"]
    assert fits == [*ours, "moefication", "g-moefication", "oracle"]
    kinds = {name: method.statistics_kinds() for name, method in methods.items()}
    marking = [n for n, own in kinds.items() if any(kind.activation_top_k for kind in own)]
    assert marking == ["cmoe", "cmoe-code"]
    sampling = [n for n, own in kinds.items() if any(kind.sample for kind in own)]
    assert sampling == ["moesaic", "moesaic-dynamic", "oracle"]


def test_references_save_nothing_and_run_nowhere() -> None:
    no_models = [name for name in METHODS if not load_method(name).saves]
    assert no_models == ["oracle", "neuron-oracle"]
    assert [name for name, row in METHODS.items() if row.runs is None] == no_models


def test_only_what_stays_a_model_of_its_family_runs_in_stock_engines_as_it_is() -> None:
    """slicegpt puts matrices on shortcuts, which no family has."""
    assert "with our architecture" in (METHODS["slicegpt"].runs or "")
    anywhere = [name for name, row in METHODS.items() if "llama.cpp" in (row.runs or "")]
    at_once = [name for name in anywhere if "export" not in (METHODS[name].runs or "")]
    assert at_once == ["sleb"]


def test_the_exportable_method_is_top_k_with_a_linear_router_and_no_intercept() -> None:
    """What stock architectures can hold."""
    assert router_of("moesaic") == RouterConfig("linear", "topk")
    assert not block_of("moesaic").output_bias
    assert "llama.cpp" in (METHODS["moesaic"].runs or "")


def test_moesaic_dynamic_routes_by_threshold_and_directions() -> None:
    assert router_of("moesaic-dynamic") == RouterConfig("quadratic", "threshold", directions=8)
    assert router_of("moesaic-dynamic", {"cap": 4}).cap == 4
    assert router_of("moesaic-dynamic", {"directions": 24}).directions == 24
    assert router_of("moesaic-dynamic", {"directions": 0}).kind == "linear"
    assert router_of("moesaic-dynamic", {"directions": 999}).directions == 32  # the hidden size
    assert block_of("moesaic-dynamic").output_bias
    assert not block_of("moesaic-dynamic", {"intercept": False}).output_bias


# --- loading -----------------------------------------------------------------------------------


@every_method
def test_load_by_name_and_as_it_is(name: str) -> None:
    method = load_method(name)
    assert load_method(name) == load_method(method) == method
    assert type(load_method(method)) is type(method)


@pytest.mark.parametrize("suffix", ["yaml", "yml"])
@every_method
def test_a_yaml_file_is_a_name_and_settings(tmp_path: Path, name: str, suffix: str) -> None:
    settings = load_method(name).settings
    lines = [f"method: {name}", *(f"{key}: {value}" for key, value in settings.items())]
    lines = [line.replace("None", "null") for line in lines]
    path = write(tmp_path, "\n".join(lines), f"file.{suffix}")
    assert load_method(path) == load_method(str(path)) == load_method(name)


def test_settings_come_from_the_call_then_the_file_then_the_class(tmp_path: Path) -> None:
    path = write(tmp_path, "method: cmoe-code\nkmeans_rounds: 5\nactivation_top_k: 3\n")
    assert load_method(path).settings == {"kmeans_rounds": 5, "activation_top_k": 3}
    assert load_method(path).name == "cmoe-code"
    again = load_method(path, {"kmeans_rounds": 7})
    assert again.settings == {"kmeans_rounds": 7, "activation_top_k": 3}
    assert load_method(again, {"activation_top_k": 4}) == load_method(
        "cmoe-code", {"kmeans_rounds": 7, "activation_top_k": 4}
    )


def test_a_method_is_changed_by_replace_and_checked_again() -> None:
    method: Any = replace(load_method("moesaic"), up_steps=4)
    assert method == load_method("moesaic", {"up_steps": 4})
    with pytest.raises(MoesaicError, match="up_steps is -1"):
        replace(method, up_steps=-1)


def test_what_the_configuration_keeps() -> None:
    kept = load_method("cmoe", {"kmeans_rounds": 5}).to_dict()
    assert kept == {
        "name": "cmoe",
        "about": "The paper's method to the letter.",
        "settings": {"activation_top_k": 10, "kmeans_rounds": 5},
    }
    model, report = moesaic.convert(
        tiny_model("llama"), "cmoe", "S3A3E8", tokens(2, CONTEXT), settings={"kmeans_rounds": 5}
    )
    assert model.config.moesaic.method == report.method == kept


@pytest.mark.parametrize(
    ("name", "nearest"), [("cmeo", "cmoe"), ("cmoe_code", "cmoe-code"), ("statics", "static")]
)
def test_an_unknown_method_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(MoesaicError, match=f"unknown method '{name}': did you mean {nearest}"):
        load_method(name)


def test_an_unknown_method_lists_the_known() -> None:
    with pytest.raises(MoesaicError) as refusal:
        load_method("zzzzz")
    assert "did you mean" not in str(refusal.value)
    assert all(name in str(refusal.value) for name in METHODS)
    assert "FILE.py" in str(refusal.value)


# --- settings and their checks -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("method: cmo", "unknown method 'cmo': did you mean cmoe"),
        (
            "method: cmoe\nkmeans_round: 3",
            "setting of method cmoe 'kmeans_round': did you mean kmeans_rounds",
        ),
        ("method: cmoe\n3: 3", "unknown setting of method cmoe '3'"),
        ("method: static\nrounds: 3", "unknown setting of method static 'rounds': known are none"),
        ("method: moesaic\nimportance: varience", "'varience': did you mean variance"),
        ("method: moesaic\ngroups: contribution-means", "did you mean contribution-kmeans"),
        ("method: moesaic\nrepair_by: least squares", "did you mean least-squares"),
        ("method: moesaic\nrepair_by: null", "unknown repair_by 'None': did you mean none"),
        ("method: moesaic-dynamic\nlayer_budgets: gradients", "did you mean gradient"),
        (
            "method: moesaic\nlayer_budgets: gradual",
            "known are dense-first, gradient, uniform",
        ),
        ("method: static\nlayer_budgets: curves", "unknown setting of method static"),
        ("method: cmoe\nrouter: linear", "unknown setting of method cmoe 'router'"),
    ],
)
def test_an_unknown_name_in_a_file_suggests_the_nearest(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(MoesaicError, match=message) as refusal:
        load_method(write(tmp_path, text))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "key"),
    [("cmoe", "activation_top_k"), ("cmoe", "kmeans_rounds"), ("moesaic", "kmeans_rounds"),
     ("moesaic-neurons", "directions"), ("moesaic-dynamic", "cap")],
)  # fmt: skip
@pytest.mark.parametrize("value", ["0", "-1", "2.5", "'3'", "true", "[1]"])
def test_counts_are_whole_and_positive(tmp_path: Path, name: str, key: str, value: str) -> None:
    with pytest.raises(MoesaicError, match=rf"{key} is .* it must be a whole number >= 1"):
        load_method(write(tmp_path, f"method: {name}\n{key}: {value}"))


@pytest.mark.parametrize("key", ["reassign_rounds", "directions", "up_steps"])
@pytest.mark.parametrize("value", ["-1", "2.5", "null", "true"])
def test_counts_that_may_be_none(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(MoesaicError, match=rf"{key} is .* must be"):
        load_method(write(tmp_path, f"method: moesaic\n{key}: {value}"))
    method = load_method(write(tmp_path, f"method: moesaic\n{key}: 0"))
    assert method.settings[key] == 0


def test_a_cap_below_the_mean_would_make_the_work_less_than_is_said() -> None:
    with pytest.raises(MoesaicError, match="cap 4 is less than the 5 experts that run on average"):
        moesaic.convert("demo", "moesaic-dynamic", "S1A5E8", settings={"cap": 4}, samples=2)


def test_no_cap_is_a_value() -> None:
    assert load_method("moesaic-dynamic", {"cap": None}) == load_method("moesaic-dynamic")


@pytest.mark.parametrize("value", ["'false'", "3", "null"])
def test_a_switch_that_is_neither_true_nor_false(tmp_path: Path, value: str) -> None:
    with pytest.raises(MoesaicError, match=r"'moesaic': intercept is .* true or false"):
        load_method(write(tmp_path, f"method: moesaic\nintercept: {value}"))


@pytest.mark.parametrize("key", ["importance", "groups", "repair_by"])
@pytest.mark.parametrize("value", ["[rate]", "{a: b}", "3"])
def test_a_choice_that_is_not_a_name(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(MoesaicError, match=f"unknown {key}"):
        load_method(write(tmp_path, f"method: moesaic\n{key}: {value}"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repair_by": "none", "intercept": True}, "an intercept comes from a repair"),
        ({"repair_by": "none", "intercept": False, "up_steps": 2}, "refitted between two repairs"),
    ],
)
def test_choices_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    for name in ("moesaic", "moesaic-dynamic"):
        with pytest.raises(MoesaicError, match=f"'{name}': .*{message}"):
            load_method(name, settings)


# --- files that are none -----------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "cmoe", "- method: cmoe", "3", "base: cmoe",
                                  "method: [cmoe]", "method: 3", "kmeans_rounds: 3"])  # fmt: skip
def test_a_file_that_is_no_mapping_with_a_method(tmp_path: Path, text: str) -> None:
    with pytest.raises(MoesaicError, match=r"mine\.yaml: it names no method; .* 'method: flap'"):
        load_method(write(tmp_path, text))


def test_a_file_names_a_method_of_the_table(tmp_path: Path) -> None:
    """No other file: a file that named itself would never end."""
    with pytest.raises(MoesaicError, match=r"unknown method 'mine\.yaml'"):
        load_method(write(tmp_path, "method: mine.yaml"))


def test_a_file_that_is_no_yaml(tmp_path: Path) -> None:
    with pytest.raises(MoesaicError, match=r"mine\.yaml") as refusal:
        load_method(write(tmp_path, "method: [cmoe"))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("suffix", ["yaml", "py"])
def test_a_file_that_is_missing_or_not_text(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(MoesaicError, match=rf"absent\.{suffix}"):
        load_method(tmp_path / f"absent.{suffix}")
    (tmp_path / f"bytes.{suffix}").write_bytes(b"method: \xff\xfe\x00")
    with pytest.raises(MoesaicError, match=rf"bytes\.{suffix}") as refusal:
        load_method(tmp_path / f"bytes.{suffix}")
    assert "\n" not in str(refusal.value)


# --- a Python file of the user's ---------------------------------------------------------------

HEAD = """
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.methods.base import FFNMethod, Method, setting
from moesaic.methods.contents import Description
from moesaic.methods.expert_method import ExpertMethod
from moesaic.methods.static import Static
from moesaic.parts.partition import NO_EXPERTS, Partition

MINE = Description("mine", "", "The first neurons, or the last.", None)
"""
FIRST = """
@dataclass(frozen=True)
class First(Static):
    description = MINE
    skipped: int = setting(0, "Neurons that are left out at the start.", 0)

    def partition(self, fit):
        kept = np.arange(fit.sizes.shared) + self.skipped
        return Partition(kept, NO_EXPERTS)
"""


def python(folder: Path, text: str) -> Path:
    return write(folder, HEAD + text, "mine.py")


def test_a_file_with_one_class_is_a_method(tmp_path: Path) -> None:
    path = python(tmp_path, FIRST)
    method = load_method(path)
    assert (method.name, method.settings) == ("mine", {"skipped": 0})
    assert method.to_dict()["about"] == "The first neurons, or the last."
    assert load_method(str(path), {"skipped": 2}).settings == {"skipped": 2}
    before = tiny_model("llama").model.layers[0].mlp.up_proj.weight
    model, report = moesaic.convert(
        tiny_model("llama"), path, "S3A3E8", tokens(2, CONTEXT), settings={"skipped": 2}
    )
    kept = model.model.layers[0].mlp.shared_expert.up_proj.weight
    assert kept.equal(before[2:42])
    assert report.method == load_method(path, {"skipped": 2}).to_dict()


def test_the_settings_of_a_file_are_checked(tmp_path: Path) -> None:
    path = python(tmp_path, FIRST)
    with pytest.raises(MoesaicError, match=r"mine\.py 'skip': did you mean skipped"):
        load_method(path, {"skip": 1})
    with pytest.raises(MoesaicError, match=r"'mine': skipped is -1; .* >= 0"):
        load_method(path, {"skipped": -1})


def test_classes_that_are_imported_do_not_count(tmp_path: Path) -> None:
    """Method, FFNMethod, ExpertMethod and Static stand in the file too."""
    assert type(load_method(python(tmp_path, FIRST))).__name__ == "First"
    assert issubclass(type(load_method(python(tmp_path, FIRST))), ExpertMethod)


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("class First: pass\n", 0), (FIRST + FIRST.replace("First", "Last"), 2)],
)
def test_a_file_with_no_class_or_two(tmp_path: Path, text: str, count: int) -> None:
    with pytest.raises(
        MoesaicError, match=rf"mine\.py defines {count} classes .* a method file defines one"
    ) as refusal:
        load_method(python(tmp_path, text))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("base", "steps"),
    [("Method", "convert, plans, words"), ("FFNMethod", "block, convert_ffn"),
     ("ExpertMethod", "make_router, partition, router_config")],
)  # fmt: skip
def test_a_class_that_lacks_steps(tmp_path: Path, base: str, steps: str) -> None:
    text = f"@dataclass(frozen=True)\nclass First({base}):\n    description = MINE\n"
    with pytest.raises(MoesaicError, match=rf"mine\.py: First lacks the step {steps}; define"):
        load_method(python(tmp_path, text))


@pytest.mark.parametrize("own", ["", "    description = 'The first neurons.'\n"])
def test_a_class_without_a_description(tmp_path: Path, own: str) -> None:
    text = f"@dataclass(frozen=True)\nclass First(ExpertMethod):\n    x = 1\n{own}"
    with pytest.raises(MoesaicError, match=r"mine\.py: First has no `description`: its name"):
        load_method(python(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def f(:\n", "SyntaxError: "),
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise ValueError('two\\nlines')\n", "ValueError: two$"),
        ("raise RuntimeError\n", "RuntimeError$"),
        ("@dataclass\nclass First(Static):\n    x: int = 3\n", "TypeError: cannot inherit"),
    ],
)
def test_a_file_that_fails_to_run(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(MoesaicError, match=rf"mine\.py cannot be run: {reason}") as refusal:
        load_method(python(tmp_path, text))
    assert "\n" not in str(refusal.value)


def test_a_field_that_has_no_default_is_refused(tmp_path: Path) -> None:
    text = FIRST.replace(' = setting(0, "Neurons that are left out at the start.", 0)', "")
    with pytest.raises(MoesaicError, match=r"mine\.py: .* skipped .*default"):
        load_method(python(tmp_path, text))


def test_a_setting_without_a_least_value_takes_any_whole_number(tmp_path: Path) -> None:
    path = python(tmp_path, FIRST.replace('", 0)', '")'))
    assert load_method(path, {"skipped": -3}).settings == {"skipped": -3}
    with pytest.raises(MoesaicError, match=r"skipped is 0\.5; it must be a whole number$"):
        load_method(path, {"skipped": 0.5})


def test_public_names() -> None:
    assert moesaic.Method is Method
    assert moesaic.load_method is load_method
    assert moesaic.METHODS is METHODS
    metadata = setting(3, "Help.", 1).metadata
    assert metadata == {"help": "Help.", "least": 1, "choices": None, "most": None}
