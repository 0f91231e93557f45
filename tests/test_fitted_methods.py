"""Whole conversions with fitted routers and repair: what must hold, and what reports say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import moesaic
from moesaic import METHODS, Method, load_method
from moesaic.calibration.calibration_set import CalibrationSet
from moesaic.calibration.hidden_states import Stream
from moesaic.conversion.layer_error import LayerReport
from moesaic.conversion.options import make_budget
from moesaic.conversion.plan import make_plan
from moesaic.conversion.run import Run
from moesaic.errors import MoesaicError
from moesaic.families import find_ffns
from moesaic.families.load import check_converted, load_model
from moesaic.methods.base import FFNMethod
from moesaic.modeling import ConfigError, MoEConfig
from tests.families import CONTEXT, LAYERS, tiny_model, tokens

WINDOWS = tokens(8, CONTEXT, seed=1)
EQUAL = {"layer_budgets": "uniform"}
MOESAIC = load_method("moesaic")
DYNAMIC = load_method("moesaic-dynamic", EQUAL)
QUADRATIC = load_method("moesaic-dynamic", EQUAL | {"directions": 24})
STATIC_REPAIRED = load_method("static-repaired")
ROUTED: dict[str, Method] = {"moesaic": MOESAIC, "dynamic": DYNAMIC, "quadratic": QUADRATIC}
FITTED = ROUTED | {"static-repaired": STATIC_REPAIRED}
routed = pytest.mark.parametrize("method", ROUTED.values(), ids=ROUTED)
fitted = pytest.mark.parametrize("method", FITTED.values(), ids=FITTED)


def convert(model: Any, method: Any, layout: str = "S1A3E8", windows: Any = WINDOWS) -> Any:
    return moesaic.convert(model, method, layout, windows)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits.float()


def trial(method: str | Method, family: str = "llama") -> tuple[list[LayerReport], Any, Any]:
    """Under a mask: the reports, and logits while replacements are in place and afterwards."""
    model, ids = tiny_model(family), tokens(2, 48, seed=2)
    ffns = find_ffns(model)
    plan = make_plan(model.config, "tiny", load_method(method), make_budget("S1A3E8"), domains=2)
    assert isinstance(plan.method, FFNMethod)
    with ffns.restored():
        stream = Stream(ffns, WINDOWS, torch.device("cpu"))
        calibration = CalibrationSet(WINDOWS, torch.arange(len(WINDOWS)) % 2)
        run = Run(stream, plan, calibration, 0, trial=True)
        reports = plan.method.convert(model, calibration, plan, run)
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
def test_repair_never_worsens_the_error_on_held_out_tokens(method: Method, family: str) -> None:
    """Of the layer by itself: one that takes back drift meets another aim."""
    by_itself = replace(method, undo_drift=0.0)  # type: ignore[call-arg]
    _, report = convert(tiny_model(family), by_itself)
    for layer in report.layers:
        before = layer.references["static" if method == STATIC_REPAIRED else "unrepaired"]
        assert layer.heldout
        assert layer.relative_error <= before * (1 + 1e-5)
        assert layer.references["static-repaired"] <= layer.references["static"] * (1 + 1e-5)
    assert any(layer.repair != "none" for layer in report.layers)


@pytest.mark.parametrize("method", ["cmoe", "static", "random", "neuron-oracle"])
def test_the_repaired_reference_is_what_the_method_gives(method: str) -> None:
    """Of the first layer, whose inputs are the same: also where the method repairs nothing."""
    given, _, _ = trial(method)
    expected, _, _ = trial("static-repaired")
    assert expected[0].repair.startswith("least squares")
    reference = given[0].references["static-repaired"]
    assert reference == pytest.approx(expected[0].relative_error, rel=1e-3)
    assert reference < given[0].references["static"]


@pytest.mark.parametrize(
    "name", [name for name in METHODS if isinstance(load_method(name), FFNMethod)]
)
def test_references_stand_in_every_report(name: str) -> None:
    known: Any = load_method(name)
    grouped = name not in ("static", "static-repaired", "flap", "griffin", "neuron-oracle")
    expected = {"static", "static-repaired", "random", "neuron-oracle"}
    expected |= {"unrepaired", "oracle"} if grouped else set()
    for layer in trial(name)[0]:
        assert set(layer.references) == expected
        assert layer.heldout == known.fits_weights
        assert all(0 < error < 2 for error in layer.references.values())
        assert (layer.router_recall is not None) == grouped
        assert (len(layer.kept_energy) > 0) == (known.settings.get("reassign_rounds", 0) > 0)
        assert layer.references["neuron-oracle"] < layer.references["random"]
        assert layer.to_dict()["references"] == layer.references


def test_the_references_are_the_methods_of_their_name() -> None:
    """On the first layer, whose inputs no earlier layer has changed."""
    methods = ("static", "static-repaired", "oracle", "neuron-oracle", "moesaic")
    first = {method: trial(method)[0][0] for method in methods}
    for method in ("static-repaired", "neuron-oracle"):
        own, seen = first[method].relative_error, first["moesaic"].references[method]
        assert own == pytest.approx(seen, rel=1e-4)
    assert first["static"].relative_error == pytest.approx(first["static"].references["static"])
    oracle = first["oracle"].references
    assert oracle["oracle"] == pytest.approx(oracle["unrepaired"], rel=1e-6)
    assert first["oracle"].router_recall == 1


@pytest.mark.parametrize("method", ["oracle", "neuron-oracle"])
def test_references_that_save_nothing_are_no_models(method: str, tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), tokens(2, 48, seed=2)
    for output in (None, tmp_path / "out"):
        with pytest.raises(MoesaicError, match=f"'{method}' is a reference .* moesaic compare"):
            moesaic.convert(model, method, "S1A3E8", WINDOWS, output=output)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(logits(model, ids), logits(tiny_model("llama"), ids))


@pytest.mark.parametrize("family", ["llama", "opt"])
@fitted
def test_a_trial_is_the_converted_model_and_leaves_the_dense_one(
    family: str, method: Method
) -> None:
    ids = tokens(2, 48, seed=2)
    layers, during, after = trial(method, family)
    model, report = convert(tiny_model(family), method)
    torch.testing.assert_close(during, logits(model, ids), rtol=1e-4, atol=1e-4)
    assert torch.equal(after, logits(tiny_model(family), ids))
    for one, other in zip(layers, report.layers, strict=True):
        assert one.relative_error == pytest.approx(other.relative_error, rel=1e-6)


@fitted
def test_the_order_of_windows_fitted_on_does_not_matter(method: Method) -> None:
    """The last of the eight is held out; the first layer sees the same inputs either way."""
    order = torch.tensor([3, 0, 6, 5, 1, 2, 4, 7])
    one, _ = convert(tiny_model("qwen3"), method)
    two, _ = convert(tiny_model("qwen3"), method, windows=WINDOWS[order])
    theirs = two.model.layers[0].mlp.state_dict()
    for name, value in one.model.layers[0].mlp.state_dict().items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-3, atol=1e-4, msg=name)


@routed
def test_learned_routing_beats_chance_by_far(method: Method) -> None:
    _, report = convert(tiny_model("qwen3"), method, windows=tokens(64, CONTEXT, seed=1))
    for layer in report.layers:
        assert layer.router_recall > 3 / 7 + 0.1
        assert layer.mass_kept > 3 / 7 + 0.1
        assert layer.relative_error < layer.references["random"]
        assert sum(layer.expert_load) == pytest.approx(3, abs=1e-4 if method == MOESAIC else 0.4)


@routed
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(method: Method, dtype: torch.dtype, tmp_path: Path) -> None:
    model, report = moesaic.convert(
        tiny_model("llama").to(dtype), method, "S1A3E8", WINDOWS, output=tmp_path / "out"
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


def kept_of(method: Method) -> dict[str, Any]:
    """What config.json of a tiny converted model holds under "moesaic"."""
    plan = make_plan(tiny_model("llama").config, "tiny", method, make_budget("S1A3E8"))
    values = plan.moe.to_dict()
    checked(values)
    return values


def checked(values: dict[str, Any]) -> None:
    MoEConfig.from_dict(values).check(32, LAYERS)


ROUTER, BLOCK = "block.router", "block"


@pytest.mark.parametrize(
    ("where", "change", "named"),
    [
        (ROUTER, {"kind": "lineal"}, "router kind"),
        (ROUTER, {"kind": None}, "router kind"),
        (ROUTER, {"kind": "oracle"}, "router kind"),
        (ROUTER, {"kind": "gates"}, "router kind"),  # of neurons, and these are experts
        (ROUTER, {"kind": ["linear"]}, "router kind"),
        (ROUTER, {"absolute": 1}, "router absolute"),
        (ROUTER, {"chooser": "top-k"}, "router chooser"),
        (ROUTER, {"chooser": None}, "router chooser"),
        (ROUTER, {"directions": -1}, "router directions"),
        (ROUTER, {"directions": 33}, "router directions"),
        (ROUTER, {"directions": 2.0}, "router directions"),
        (ROUTER, {"directions": True}, "router directions"),
        (ROUTER, {"cap": 0}, "router cap"),
        (ROUTER, {"cap": 2.5}, "router cap"),
        (ROUTER, {"cap": True}, "router cap"),
        (ROUTER, {"gating": "topk"}, "is damaged"),
        (BLOCK, {"output_bias": None}, "output_bias"),
        (BLOCK, {"output_bias": 1}, "output_bias"),
        (BLOCK, {"router": None}, "num_routed"),  # and there are experts to route
        (BLOCK, {"router": {}}, "is damaged"),
        (BLOCK, {"router": "linear"}, "is damaged"),
        (BLOCK, {"replacement": "blocks"}, "replacement"),
        (BLOCK, {"replacement": "neurons"}, "router kind"),
        (BLOCK, {"hidden_size": 31}, "hidden_size"),
    ],
)
def test_a_damaged_block_configuration_is_refused(
    where: str, change: dict[str, Any], named: str
) -> None:
    values = kept_of(QUADRATIC)
    part = values["block"]["router"] if where == ROUTER else values["block"]
    part.update(change)
    with pytest.raises(ConfigError, match=named) as refusal:
        checked(values)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("key", ["kind", "chooser"])
def test_a_router_configuration_that_lacks_a_key_is_refused(key: str) -> None:
    values = kept_of(DYNAMIC)
    del values["block"]["router"][key]
    with pytest.raises(ConfigError, match="is damaged"):
        checked(values)


@pytest.mark.parametrize(
    "key", ["method", "layout", "block", "path", "identities", "layers", "sizes"]
)
def test_a_configuration_that_lacks_a_part_is_refused(key: str) -> None:
    values = kept_of(DYNAMIC)
    del values[key]
    with pytest.raises(ConfigError, match="is damaged"):
        checked(values)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers": [0, 1]}, "sizes"),
        ({"layers": [0, 2, 1]}, "layers"),
        ({"layers": [0, 1, 1]}, "layers"),
        ({"layers": [1, 2, 3]}, "layers"),
        ({"layers": [-1, 0, 1]}, "layers"),
        ({"layers": []}, "layers"),
        ({"layers": ["0", "1", "2"]}, "layers"),
        ({"layers": 3}, "is damaged"),
        ({"sizes": []}, "sizes"),
        ({"sizes": [{}, {}, {}]}, "is damaged"),
        ({"path": "layers.mlp"}, "path"),
        ({"path": 3}, "is damaged"),
        ({"identities": ["layers.norm"]}, "path"),
    ],
)
def test_layers_that_do_not_fit_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        checked(kept_of(DYNAMIC) | change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"shared": -1}, "shared"),
        ({"shared": 10.0}, "shared"),
        ({"expert": 0}, "expert"),
        ({"num_routed": 0}, "num_active"),
        ({"num_active": 0}, "num_active"),
        ({"num_active": 8}, "num_active"),
        ({"num_active": True}, "num_active"),
        ({"intermediate": 20}, "intermediate"),
        ({"intermediate": 53}, "intermediate"),  # which is not that of the other layers
    ],
)
def test_sizes_that_contradict_each_other_are_refused(change: dict[str, Any], named: str) -> None:
    values = kept_of(DYNAMIC)
    values["sizes"][1] |= change
    with pytest.raises(ConfigError, match=rf"contradicts itself: {named} "):
        checked(values)


@pytest.mark.parametrize("values", [None, 3, "moesaic", [], {}, {"format": 1}, {"format": "2"}])
def test_what_is_no_configuration_is_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match=r"is damaged|another version of moesaic"):
        MoEConfig.from_dict(values)


def test_an_older_form_says_how_to_convert_again() -> None:
    old = {"base_model": "demo", "recipe": {"name": "cmoe"}, "num_routed": 5}
    with pytest.raises(ConfigError, match=r"another version.* moesaic convert demo --output DIR"):
        MoEConfig.from_dict(old)


def test_a_damaged_configuration_is_said_of_its_model() -> None:
    model, _ = convert(tiny_model("llama"), QUADRATIC, windows=WINDOWS[:1])
    moe = model.config.moesaic
    check_converted(model.config, "mine")
    model.config.moesaic = replace(moe, block=replace(moe.block, output_bias=None))
    with pytest.raises(MoesaicError, match=r"the config\.json of mine contradicts itself: output"):
        check_converted(model.config, "mine")
    model.config.moesaic = {"format": 1, "base_model": "demo"}
    with pytest.raises(MoesaicError, match=r"the config\.json of mine was written by another"):
        check_converted(model.config, "mine")


@fitted
def test_the_configuration_says_what_the_blocks_are(method: Method) -> None:
    model, _ = convert(tiny_model("qwen3"), method)
    known: Any = method
    moe = model.config.moesaic
    intercept = known.settings.get("intercept", False)
    directions = known.settings.get("directions", 0)
    assert moe.method == known.to_dict()
    assert moe.layers == tuple(range(LAYERS))
    assert moe.block.output_bias == intercept
    assert MoEConfig.from_dict(json.loads(json.dumps(moe.to_dict()))) == moe
    if method == STATIC_REPAIRED:
        assert moe.router is None
    else:
        assert moe.router.kind == ("quadratic" if directions else "linear")
        assert moe.router.directions == directions
        assert moe.router.chooser == known.chooser
    for layer in model.model.layers:
        assert (layer.mlp.output_bias is not None) == intercept
        if moe.router is not None:
            assert layer.mlp.router.chooser == known.chooser


def weights_by_layer(model: Any) -> list[dict[str, torch.Tensor]]:
    layers = model.model.layers
    return [{name: p.detach() for name, p in layer.mlp.named_parameters()} for layer in layers]


@pytest.mark.parametrize("method", ["moesaic", "static-repaired"])
def test_drift_begins_after_the_first_layer(method: str) -> None:
    """Nothing has drifted before it: its repair is the same, those of the others are not."""
    kept, undone = (
        convert(tiny_model("llama"), load_method(method, {"undo_drift": share}))[0]
        for share in (0.0, 1.0)
    )
    pairs = zip(weights_by_layer(kept), weights_by_layer(undone), strict=True)
    for layer, (before, after) in enumerate(pairs):
        down = next(name for name in before if "down" in name)
        close = torch.allclose(before[down], after[down], atol=1e-4)
        assert close == (layer == 0)


@torch.no_grad()
def test_undone_drift_brings_hidden_states_nearer_to_the_dense_models() -> None:
    """On the calibration tokens, after the last layer but one: by what the repair promises."""
    dense = tiny_model("llama")
    hidden = dense.model(input_ids=WINDOWS, output_hidden_states=True).hidden_states[-2]
    distances = []
    for share in (0.0, 0.5, 1.0):
        method = load_method("static-repaired", {"undo_drift": share})
        model, _ = convert(tiny_model("llama"), method)
        own = model.model(input_ids=WINDOWS, output_hidden_states=True).hidden_states[-2]
        distances.append(float((own - hidden).norm()))
    assert distances[0] > distances[1] > distances[2]


def test_where_layers_scale_what_the_ffn_adds_no_drift_is_undone() -> None:
    """Gemma 2 normalises it first: the same model with and without."""
    (first, before), (second, report) = (
        convert(tiny_model("gemma2"), load_method("moesaic", {"undo_drift": share}))
        for share in (0.0, 1.0)
    )
    assert torch.equal(logits(first, WINDOWS), logits(second, WINDOWS))
    assert says(report, "drift is not taken back") == LAYERS
    assert says(before, "drift is not taken back") == 0
    _, report = convert(tiny_model("llama"), load_method("moesaic"))
    assert says(report, "drift is not taken back") == 0
    assert not Stream(find_ffns(tiny_model("gemma2")), WINDOWS, torch.device("cpu")).adds_ffn(0)


def says(report: Any, words: str) -> int:
    """In how many layers a note says so."""
    return sum(any(words in note for note in layer.notes) for layer in report.layers)


def test_rows_of_w_up_that_are_not_refitted_are_told() -> None:
    for family, told in (("gpt2", LAYERS), ("llama", 0)):
        _, report = convert(tiny_model(family), load_method("moesaic", {"up_steps": 2}))
        assert says(report, "up_steps refits them where FFNs have a gate") == told


def test_the_dense_model_is_followed_only_where_it_serves() -> None:
    """Not where nothing is repaired: that conversion takes no such step."""
    for settings, follows in (
        ({}, True),
        ({"undo_drift": 0.0}, False),
        ({"repair_by": "none"}, False),
    ):
        _, report = convert(tiny_model("llama"), load_method("moesaic", settings))
        assert ("follow the dense model" in report.step_seconds) == follows
