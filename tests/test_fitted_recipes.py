"""Whole conversions with fitted routers and repair: what must hold, and what reports say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import moesaic
from moesaic.calibration.hidden_states import Stream
from moesaic.conversion.layer_error import LayerReport
from moesaic.conversion.layers import convert_layers
from moesaic.conversion.plan import make_plan
from moesaic.errors import MoesaicError
from moesaic.families import find_ffns
from moesaic.families.load import check_converted, load_model
from tests.families import CONTEXT, LAYERS, tiny_model, tokens

WINDOWS = tokens(8, CONTEXT, seed=1)
ROUTED = ["moesaic", "moesaic-dynamic", "moesaic-quadratic"]
FITTED = [*ROUTED, "static-repaired"]
fitted = pytest.mark.parametrize("recipe", FITTED)


def convert(model: Any, recipe: str, layout: str = "S1A3E8", windows: Any = WINDOWS) -> Any:
    return moesaic.convert(model, recipe, layout, windows)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits.float()


def trial(recipe: str, family: str = "llama") -> tuple[list[LayerReport], Any, Any]:
    """As masked dense FFNs: the reports, and logits while they are in place and afterwards."""
    model, ids = tiny_model(family), tokens(2, 48, seed=2)
    ffns, plan = find_ffns(model), make_plan(model.config, "tiny", recipe, "S1A3E8")
    with ffns.restored():
        stream = Stream(ffns, WINDOWS, torch.device("cpu"))
        reports = convert_layers(stream, plan, 0, {}, trial=True)
        during = logits(model, ids)
    return reports, during, logits(model, ids)


@pytest.mark.parametrize("layout", ["S1A7E8", "S0A8E8", "S0A1E1"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_all_experts_active_is_the_dense_model(family: str, layout: str) -> None:
    """Nothing is lost, so there is nothing to repair: on any text, whatever the scores."""
    ids = tokens(2, 48, seed=2)
    model, report = convert(tiny_model(family), "moesaic", layout)
    expected = logits(tiny_model(family), ids)
    torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-4)
    assert all(layer.relative_error < 1e-8 for layer in report.layers)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@fitted
def test_repair_never_worsens_the_error_on_held_out_tokens(recipe: str, family: str) -> None:
    _, report = convert(tiny_model(family), recipe)
    for layer in report.layers:
        before = layer.references["static" if recipe == "static-repaired" else "unrepaired"]
        assert layer.heldout
        assert layer.relative_error <= before * (1 + 1e-5)
        assert layer.references["static-repaired"] <= layer.references["static"] * (1 + 1e-5)
    assert any(layer.repair != "none" for layer in report.layers)


@pytest.mark.parametrize("recipe", ["cmoe", "static", "random", "neuron-oracle"])
def test_the_repaired_reference_is_what_the_recipe_gives(recipe: str) -> None:
    """Of the first layer, whose inputs are the same: also where the recipe repairs nothing."""
    given, _, _ = trial(recipe)
    expected, _, _ = trial("static-repaired")
    assert expected[0].repair.startswith("least squares")
    reference = given[0].references["static-repaired"]
    assert reference == pytest.approx(expected[0].relative_error, rel=1e-3)
    assert reference < given[0].references["static"]


@pytest.mark.parametrize("recipe", list(moesaic.RECIPES))
def test_references_stand_in_every_report(recipe: str) -> None:
    known = moesaic.RECIPES[recipe]
    expected = {"static", "static-repaired", "random", "neuron-oracle"}
    expected |= {"unrepaired", "oracle"} if known.routed else set()
    for layer in trial(recipe)[0]:
        assert set(layer.references) == expected
        assert layer.heldout == known.fits
        assert all(0 < error < 2 for error in layer.references.values())
        assert (layer.router_recall is not None) == known.routed
        assert (len(layer.kept_energy) > 0) == (known.reassign_rounds > 0)
        assert layer.references["neuron-oracle"] < layer.references["random"]
        assert layer.to_dict()["references"] == layer.references


def test_the_references_are_the_recipes_of_their_name() -> None:
    """On the first layer, whose inputs no earlier layer has changed."""
    recipes = ("static", "static-repaired", "oracle", "neuron-oracle", "moesaic")
    first = {recipe: trial(recipe)[0][0] for recipe in recipes}
    for recipe in ("static-repaired", "neuron-oracle"):
        own, seen = first[recipe].relative_error, first["moesaic"].references[recipe]
        assert own == pytest.approx(seen, rel=1e-4)
    assert first["static"].relative_error == pytest.approx(first["static"].references["static"])
    oracle = first["oracle"].references
    assert oracle["oracle"] == pytest.approx(oracle["unrepaired"], rel=1e-6)
    assert first["oracle"].router_recall == 1


@pytest.mark.parametrize("recipe", ["oracle", "neuron-oracle"])
def test_references_that_save_nothing_are_no_models(recipe: str, tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), tokens(2, 48, seed=2)
    for output in (None, tmp_path / "out"):
        with pytest.raises(MoesaicError, match=f"'{recipe}' is a reference .* moesaic compare"):
            moesaic.convert(model, recipe, "S1A3E8", WINDOWS, output=output)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(logits(model, ids), logits(tiny_model("llama"), ids))


@pytest.mark.parametrize("family", ["llama", "opt"])
@fitted
def test_a_trial_is_the_converted_model_and_leaves_the_dense_one(family: str, recipe: str) -> None:
    ids = tokens(2, 48, seed=2)
    layers, during, after = trial(recipe, family)
    model, report = convert(tiny_model(family), recipe)
    torch.testing.assert_close(during, logits(model, ids), rtol=1e-4, atol=1e-4)
    assert torch.equal(after, logits(tiny_model(family), ids))
    for one, other in zip(layers, report.layers, strict=True):
        assert one.relative_error == pytest.approx(other.relative_error, rel=1e-6)


@fitted
def test_the_order_of_windows_fitted_on_does_not_matter(recipe: str) -> None:
    """The last of the eight is held out; the first layer sees the same inputs either way."""
    order = torch.tensor([3, 0, 6, 5, 1, 2, 4, 7])
    one, _ = convert(tiny_model("qwen3"), recipe)
    two, _ = convert(tiny_model("qwen3"), recipe, windows=WINDOWS[order])
    theirs = two.model.layers[0].mlp.state_dict()
    for name, value in one.model.layers[0].mlp.state_dict().items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("recipe", ROUTED)
def test_learned_routing_beats_chance_by_far(recipe: str) -> None:
    _, report = convert(tiny_model("qwen3"), recipe, windows=tokens(64, CONTEXT, seed=1))
    for layer in report.layers:
        assert layer.router_recall > 3 / 7 + 0.1
        assert layer.mass_kept > 3 / 7 + 0.1
        assert layer.relative_error < layer.references["random"]
        assert sum(layer.expert_load) == pytest.approx(3, abs=1e-4 if recipe == "moesaic" else 0.4)


@pytest.mark.parametrize("recipe", ROUTED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(recipe: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, report = moesaic.convert(
        tiny_model("llama").to(dtype), recipe, "S1A3E8", WINDOWS, output=tmp_path / "out"
    )
    loaded = load_model(tmp_path / "out")
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    x = torch.randn(40, 32, dtype=dtype)
    for layer, again in zip(model.model.layers, loaded.model.layers, strict=True):
        router = again.mlp.router
        assert router.score_proj.weight.dtype == dtype
        assert router.selection_bias.dtype == router.expert_scale.dtype == torch.float32
        assert router.scores(x).dtype == torch.float32
        assert again.mlp(x).dtype == dtype
        torch.testing.assert_close(again.mlp(x), layer.mlp(x))
    assert all(layer.relative_error < 1 for layer in report.layers)


# --- configurations ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"router": {"kind": "lineal"}}, "router kind"),
        ({"router": {"kind": None}}, "router kind"),
        ({"router": {"kind": "oracle"}}, "router kind"),
        ({"router": {"absolute": 1}}, "router absolute"),
        ({"router": {"gating": "top-k"}}, "router gating"),
        ({"router": {"features": -1}}, "router features"),
        ({"router": {"features": 33}}, "router features"),
        ({"router": {"features": 2.0}}, "router features"),
        ({"router": {"features": True}}, "router features"),
        ({"router": {"cap": 0}}, "router cap"),
        ({"router": {"cap": 2.5}}, "router cap"),
        ({"router": {"cap": True}}, "router cap"),
        ({"output_bias": None}, "output_bias"),
        ({"output_bias": 1}, "output_bias"),
        ({"router": None}, "is damaged"),
        ({"router": {"kind": ["linear"]}}, "router kind"),
    ],
)
def test_a_damaged_router_configuration_is_refused(change: dict[str, Any], named: str) -> None:
    model, _ = moesaic.convert(tiny_model("llama"), "moesaic-quadratic", "S1A3E8", WINDOWS[:1])
    config = model.config
    check_converted(config, "mine")
    for key, value in change.items():
        inside = isinstance(value, dict)
        config.moesaic[key] = config.moesaic[key] | value if inside else value
    with pytest.raises(MoesaicError, match=named):
        check_converted(config, "mine")


@pytest.mark.parametrize("key", ["kind", "absolute", "gating", "features", "cap"])
def test_a_router_configuration_that_lacks_a_key_is_refused(key: str) -> None:
    model, _ = moesaic.convert(tiny_model("llama"), "moesaic-dynamic", "S1A3E8", WINDOWS[:1])
    del model.config.moesaic["router"][key]
    with pytest.raises(MoesaicError, match="is damaged"):
        check_converted(model.config, "mine")


@fitted
def test_the_configuration_says_what_the_blocks_are(recipe: str) -> None:
    model, _ = convert(tiny_model("qwen3"), recipe)
    known, moe = moesaic.RECIPES[recipe], model.config.moesaic
    assert moe["layers"] == list(range(LAYERS))
    assert moe["output_bias"] == known.intercept
    assert moe["router"]["kind"] == known.router
    assert moe["router"]["features"] == (known.features if known.router == "quadratic" else 0)
    for layer in model.model.layers:
        assert (layer.mlp.output_bias is not None) == known.intercept
        if known.routed:
            assert layer.mlp.router.gating == known.gating
