"""Recipes: the table, and YAML files like its rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.errors import MoesaicError
from moesaic.methods.recipe import RECIPES, Recipe, load_recipe, recipe_yaml
from moesaic.parts.grouping import GROUPING
from moesaic.parts.importance import IMPORTANCE
from moesaic.parts.routers import ROUTERS

MINIMAL = "importance: rate\ngrouping: random\nrouter: random\n"


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", RECIPES)
def test_a_row_is_named_as_its_key_and_made_of_known_ingredients(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.name == name
    assert recipe.about
    assert recipe.importance in IMPORTANCE
    assert recipe.grouping in GROUPING
    assert recipe.router in ROUTERS
    assert recipe.routed == (GROUPING[recipe.grouping] is not None)


def test_the_paper_s_recipe() -> None:
    cmoe = RECIPES["cmoe"]
    assert (cmoe.importance, cmoe.grouping, cmoe.router) == (
        "rate", "balanced-kmeans", "representative",
    )  # fmt: skip
    assert (cmoe.activation_top_k, cmoe.kmeans_rounds) == (10, 20)
    assert not cmoe.normalise
    assert not cmoe.absolute


def test_the_released_code_differs_from_the_paper_in_these_fields_only() -> None:
    expected = replace(RECIPES["cmoe"], kmeans_rounds=1, normalise=True, absolute=True)
    given = RECIPES["cmoe-code"]
    assert replace(given, name=expected.name, about=expected.about) == expected


def test_only_static_does_not_route() -> None:
    unrouted = [name for name, recipe in RECIPES.items() if not recipe.routed]
    assert unrouted == ["static", "static-repaired"]


@pytest.mark.parametrize("name", RECIPES)
def test_load_by_name_and_as_it_is(name: str) -> None:
    assert load_recipe(name) is RECIPES[name]
    assert load_recipe(RECIPES[name]) is RECIPES[name]


@pytest.mark.parametrize("suffix", ["yaml", "yml"])
@pytest.mark.parametrize("name", RECIPES)
def test_yaml_round_trip(tmp_path: Path, name: str, suffix: str) -> None:
    recipe = replace(RECIPES[name], name="mine", activation_top_k=3)
    path = write(tmp_path, recipe_yaml(recipe), f"file.{suffix}")
    assert load_recipe(path) == load_recipe(str(path)) == recipe


def test_base_gives_what_the_file_does_not(tmp_path: Path) -> None:
    path = write(tmp_path, "base: cmoe-code\nkmeans_rounds: 5\n")
    expected = replace(RECIPES["cmoe-code"], name="mine", about="from mine.yaml", kmeans_rounds=5)
    assert load_recipe(path) == expected


def test_without_a_base_the_rest_has_defaults(tmp_path: Path) -> None:
    expected = Recipe("mine", "from mine.yaml", "rate", "random", "random")
    assert load_recipe(write(tmp_path, MINIMAL)) == expected


@pytest.mark.parametrize(
    ("name", "nearest"), [("cmeo", "cmoe"), ("cmoe_code", "cmoe-code"), ("statics", "static")]
)
def test_an_unknown_recipe_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(MoesaicError, match=f"unknown recipe '{name}': did you mean {nearest}"):
        load_recipe(name)


def test_an_unknown_recipe_lists_the_known() -> None:
    with pytest.raises(MoesaicError) as refusal:
        load_recipe("zzzzz")
    assert "did you mean" not in str(refusal.value)
    assert all(name in str(refusal.value) for name in RECIPES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: cmo", "unknown recipe 'cmo': did you mean cmoe"),
        ("base: cmoe\nkmeans_round: 3", "recipe field 'kmeans_round': did you mean kmeans_rounds"),
        ("base: cmoe\n3: 3", "unknown recipe field '3'"),
        ("base: cmoe\nimportance: rates", "unknown importance 'rates': did you mean rate"),
        ("base: cmoe\ngrouping: kmeans", "unknown grouping 'kmeans': did you mean balanced-kmeans"),
        ("base: cmoe\nrouter: representive", "'representive': did you mean representative"),
        ("base: cmoe\ngrouping: null", "unknown grouping 'None': did you mean none"),
        ("base: moesaic\ngating: treshold", "unknown gating 'treshold': did you mean threshold"),
        ("base: moesaic\nrepair: least squares", "did you mean least-squares"),
        ("base: moesaic\nrouter: linera", "unknown router 'linera': did you mean linear"),
        ("base: moesaic\nimportance: varience", "did you mean variance"),
    ],
)
def test_an_unknown_name_in_a_file_suggests_the_nearest(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(MoesaicError, match=message):
        load_recipe(write(tmp_path, text))


@pytest.mark.parametrize("text", ["base: cmoe\nrouter: none", "base: cmoe\ngrouping: none",
                                  "base: static\nrouter: random"])  # fmt: skip
def test_no_groups_and_no_router_go_together(tmp_path: Path, text: str) -> None:
    with pytest.raises(MoesaicError, match=r"'mine'.*both are none or neither"):
        load_recipe(write(tmp_path, text))


@pytest.mark.parametrize("field", ["activation_top_k", "kmeans_rounds", "features"])
@pytest.mark.parametrize("value", ["0", "-1", "2.5", "'3'", "null", "[3]", "true"])
def test_a_count_that_is_not_a_positive_whole_number(
    tmp_path: Path, field: str, value: str
) -> None:
    with pytest.raises(MoesaicError, match=f"{field} is .* must be"):
        load_recipe(write(tmp_path, f"base: cmoe\n{field}: {value}"))


@pytest.mark.parametrize("value", ["0", "-1", "2.5", "'3'", "[3]", "true"])
def test_a_cap_that_is_not_a_positive_whole_number(tmp_path: Path, value: str) -> None:
    with pytest.raises(MoesaicError, match=r"cap is .* must be"):
        load_recipe(write(tmp_path, f"base: moesaic-dynamic\ncap: {value}"))


@pytest.mark.parametrize("value", ["-1", "2.5", "null", "true"])
def test_rounds_of_re_assignment_are_whole_and_may_be_none(tmp_path: Path, value: str) -> None:
    with pytest.raises(MoesaicError, match=r"reassign_rounds is .* must be"):
        load_recipe(write(tmp_path, f"base: moesaic\nreassign_rounds: {value}"))
    assert load_recipe(write(tmp_path, "base: moesaic\nreassign_rounds: 0")).reassign_rounds == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: moesaic\ncap: 4", "a cap limits threshold gating"),
        ("base: cmoe\nintercept: true", "an intercept comes from a repair"),
        ("base: moesaic\nlayer_budgets: true", "need threshold gating: top-k has one K"),
        ("base: oracle\ngating: threshold", "threshold gating needs a router, not 'oracle'"),
        ("base: static\ngating: threshold", "threshold gating needs a router, not 'none'"),
        ("base: cmoe-code\nimportance: contribution", "of a normalised FFN means nothing"),
    ],
)
def test_choices_that_contradict_each_other(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(MoesaicError, match=message):
        load_recipe(write(tmp_path, text))


def test_what_a_recipe_needs_of_the_tokens() -> None:
    fits = [name for name, recipe in RECIPES.items() if recipe.fits]
    assert fits == [
        "moesaic", "moesaic-up", "moesaic-dynamic", "moesaic-quadratic", "moesaic-budgets",
        "moesaic-neurons", "static-repaired", "oracle",
    ]  # fmt: skip
    assert not any(RECIPES[name].marks_active for name in fits)
    assert all(RECIPES[name].marks_active for name in ("cmoe", "cmoe-code"))
    ungrouped = {"static-repaired", "moesaic-neurons"}
    assert {name for name in fits if not RECIPES[name].samples_hidden} == ungrouped


def test_the_exportable_recipe_is_top_k_with_a_linear_router_and_no_intercept() -> None:
    """What stock architectures can hold."""
    moesaic = RECIPES["moesaic"]
    assert (moesaic.router, moesaic.gating, moesaic.intercept) == ("linear", "topk", False)


@pytest.mark.parametrize("field", ["normalise", "absolute", "intercept"])
@pytest.mark.parametrize("value", ["'false'", "3", "null"])
def test_a_switch_that_is_neither_true_nor_false(tmp_path: Path, field: str, value: str) -> None:
    with pytest.raises(MoesaicError, match=field):
        load_recipe(write(tmp_path, f"base: cmoe\n{field}: {value}"))


@pytest.mark.parametrize("field", ["base", "importance", "grouping", "router"])
@pytest.mark.parametrize("value", ["[rate]", "{a: b}", "3"])
def test_an_ingredient_that_is_not_a_name(tmp_path: Path, field: str, value: str) -> None:
    with pytest.raises(MoesaicError, match="unknown"):
        load_recipe(write(tmp_path, f"{MINIMAL}{field}: {value}"))


def test_missing_ingredients_are_named(tmp_path: Path) -> None:
    with pytest.raises(MoesaicError, match=r"grouping, router not given .*'base'"):
        load_recipe(write(tmp_path, "importance: rate"))


@pytest.mark.parametrize("text", ["", "cmoe", "- base: cmoe", "3"])
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    with pytest.raises(MoesaicError, match="expected a mapping"):
        load_recipe(write(tmp_path, text))


def test_a_file_that_is_no_yaml(tmp_path: Path) -> None:
    with pytest.raises(MoesaicError, match=r"mine\.yaml") as refusal:
        load_recipe(write(tmp_path, "base: [cmoe"))
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_missing_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(MoesaicError, match=r"absent\.yaml"):
        load_recipe(tmp_path / "absent.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"base: \xff\xfe\x00")
    with pytest.raises(MoesaicError, match=r"bytes\.yaml"):
        load_recipe(tmp_path / "bytes.yaml")
