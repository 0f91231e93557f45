"""One suite for every family that is a mixture of experts already."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import moesaic
from moesaic.calibration.hidden_states import Stream
from moesaic.families import find_ffns
from moesaic.families.load import load_model
from tests.families import CONTEXT, LAYERS, tokens
from tests.mixtures import MIXTURES, NEURONS, OUTER, tiny_mixture
from tests.processes import run_python
from tests.test_convert import files
from tests.test_families import config_of, logits

CPU = torch.device("cpu")
WINDOWS = tokens(16, CONTEXT, seed=1)
IDS = tokens(2, 48, seed=2)
mixture = pytest.mark.parametrize("family", MIXTURES)


def converted(family: str, layout: str = "S3A3E8", recipe: str = "cmoe", **more: Any) -> Any:
    return moesaic.convert(tiny_mixture(family), recipe, layout, WINDOWS, **more)


@mixture
def test_the_stream_reproduces_the_models_own_forward(family: str) -> None:
    model = tiny_mixture(family)
    ffns = find_ffns(model)
    before_last = []
    handle = ffns.layers[-1].register_forward_hook(lambda *call: before_last.append(call[2]))
    expected = logits(model, IDS)
    handle.remove()
    stream = Stream(ffns, IDS, CPU)
    stream.block = 1
    for layer in range(LAYERS):
        calls = list(stream.ffn_calls(layer)) if layer in ffns.converted else None
        assert calls is None or sum(len(call[1]) for call in calls) == IDS.numel()
        stream.advance(layer, calls)
    torch.testing.assert_close(stream.hidden_NLD, before_last[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(model, IDS), expected, rtol=0, atol=0)


@mixture
@pytest.mark.parametrize(("recipe", "layout"), [("cmoe", "S2A6E8"), ("moesaic", "S0A3E3")])
def test_all_sub_experts_active_is_the_original(family: str, recipe: str, layout: str) -> None:
    expected = logits(tiny_mixture(family), IDS)
    model, report = converted(family, layout, recipe)
    assert report.active_ffn_fraction == 1
    assert type(model).__name__ == "MoesaicForCausalLM"
    torch.testing.assert_close(logits(model, IDS), expected, rtol=1e-5, atol=1e-5)
    assert all(layer.relative_error < 1e-10 for layer in report.layers)


@mixture
@pytest.mark.parametrize("recipe", ["cmoe", "moesaic-dynamic"])
def test_save_then_load_is_bit_equal(family: str, recipe: str, tmp_path: Path) -> None:
    kept = [0, 2, 3] if recipe == "moesaic-dynamic" else None
    model, _ = converted(family, recipe=recipe, output=tmp_path / "out", experts=kept)
    loaded = load_model(tmp_path / "out")
    assert type(loaded) is type(model)
    assert config_of(loaded) == config_of(model)
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    torch.testing.assert_close(logits(model, IDS), logits(loaded, IDS), rtol=1e-5, atol=2e-6)
    assert not torch.allclose(logits(model, IDS), logits(tiny_mixture(family), IDS), atol=1e-3)
    loaded.save_pretrained(tmp_path / "again")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert all(torch.equal(reloaded.state_dict()[name], theirs[name]) for name in theirs)


@pytest.mark.usefixtures("unasked_kernel")
@mixture
def test_experts_implementations_agree_in_outputs_and_gradients(family: str) -> None:
    model, _ = converted(family)
    assert model.config._experts_implementation == "moesaic"
    found = []
    for implementation in ("grouped_mm", "eager", "batched_mm", "moesaic"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        output = model(input_ids=IDS, labels=IDS)
        output.loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((output.logits.detach(), gradients))
    experts = [name for name in found[0][1] if ".experts." in name]
    assert len(experts) >= 5 * len(model.config.moesaic.layers)
    for name in experts:
        if "gate_proj" not in name.split("router.")[-1] and "up_proj" not in name.split(".")[-2:]:
            assert found[0][1][name].abs().max() > 0, name
    for other in found[1:]:
        torch.testing.assert_close(other[0], found[0][0], rtol=1e-5, atol=1e-5)
        for name, gradient in found[0][1].items():
            torch.testing.assert_close(other[1][name], gradient, rtol=1e-4, atol=1e-6)


@mixture
@pytest.mark.parametrize("recipe", ["cmoe", "moesaic-dynamic"])
def test_generation_with_and_without_cache_agrees(family: str, recipe: str) -> None:
    ids = tokens(2, 12, seed=2)
    model, _ = converted(family, recipe=recipe)
    ask = {
        "max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids),
        "pad_token_id": 0, "eos_token_id": None,
    }  # fmt: skip
    cached = model.generate(ids, use_cache=True, **ask)
    assert cached.shape == (2, 20)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **ask))


def test_models_load_where_moesaic_is_not_installed(tmp_path: Path) -> None:
    expected = {}
    for family in MIXTURES:
        recipe = "moesaic-dynamic" if family == "mixtral" else "cmoe"
        kept = [0, 1] if family == "olmoe" else None
        model, _ = converted(family, recipe=recipe, output=tmp_path / family, experts=kept)
        expected[family] = logits(model, IDS)
    script = """
import sys, pathlib, torch
sys.modules["moesaic"] = None  # any import of it fails
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, ids = pathlib.Path(sys.argv[1]), torch.load(sys.argv[1] + "/ids.pt")
found = {}
for path in sorted(p for p in folder.iterdir() if p.is_dir()):
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()
    with torch.no_grad():
        found[path.name] = model(input_ids=ids, use_cache=False).logits
torch.save(found, folder / "found.pt")
"""
    torch.save(IDS, tmp_path / "ids.pt")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)],
        check=True,
        env={
            "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "PATH": "",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
    )  # fmt: skip
    found = torch.load(tmp_path / "found.pt")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", ["cmoe", "moesaic-dynamic"])
def test_bfloat16_agrees_to_rounding_and_trains(recipe: str, tmp_path: Path) -> None:
    """Experts of 24 neurons: torch's grouped product wants rows of whole 16 bytes."""
    model = tiny_mixture("mixtral", intermediate_size=24).to(torch.bfloat16)
    model, _ = moesaic.convert(model, recipe, "S3A3E8", WINDOWS, output=tmp_path / "out")
    loaded = load_model(tmp_path / "out")
    for name, value in model.state_dict().items():
        assert loaded.state_dict()[name].dtype == value.dtype, name
        assert torch.equal(loaded.state_dict()[name], value), name
    found = []
    for implementation in ("grouped_mm", "eager", "batched_mm", "moesaic"):
        model.set_experts_implementation(implementation)
        found.append(logits(model, IDS).float())
        assert (found[-1] - found[0]).norm() < 0.1 * found[0].norm()
    scale = model.model.layers[0].mlp.experts.router.expert_scale
    assert scale.dtype == torch.float32
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert scale.grad.abs().max() > 0


def test_the_familys_balance_loss_still_works() -> None:
    model, _ = converted("mixtral")
    plain = model(input_ids=IDS, labels=IDS).loss
    output = model(input_ids=IDS, labels=IDS, output_router_logits=True)
    assert len(output.router_logits) == LAYERS
    assert output.loss > plain


def test_peft_wraps_the_fused_sub_experts() -> None:
    from peft import LoraConfig, get_peft_model

    model, _ = converted("qwen3_moe")
    expected = logits(model, IDS)
    wrapped = get_peft_model(
        model,
        LoraConfig(
            r=2, target_modules=[], modules_to_save=["router"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        ),
    )  # fmt: skip
    torch.testing.assert_close(logits(wrapped, IDS), expected, rtol=1e-5, atol=1e-5)
    wrapped(input_ids=IDS, labels=IDS).loss.backward()
    trained = {n for n, p in wrapped.named_parameters() if p.requires_grad and p.grad is not None}
    assert any("expert_scale" in name for name in trained)
    assert any("lora_B" in name for name in trained)


@pytest.mark.parametrize("recipe", ["cmoe", "moesaic"])
def test_the_block_compiles_in_one_graph(recipe: str) -> None:
    model, _ = converted("qwen3_moe", recipe=recipe)
    block = model.base_model.get_submodule(model.config.moesaic.path.format(0))
    x, index = torch.randn(9, 32), torch.rand(9, OUTER).topk(2).indices
    weight = torch.rand(9, 2)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(x, index, weight), block(x, index, weight), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"])
def test_a_shared_expert_is_converted_as_one_more_ffn(family: str) -> None:
    model, report = converted(family)
    moe = model.config.moesaic
    layers = moe.layers
    assert [row["expert"] for row in report.layers[0].experts] == [*range(OUTER), "shared"]
    assert report.layers[0].experts[-1]["tokens"] == WINDOWS.numel()
    for layer in range(LAYERS):
        mlp = model.model.layers[layer].mlp
        names = {type(module).__name__ for module in mlp.children()}
        assert ({"MoesaicHierarchy", "MoesaicBlock"} <= names) == (layer in layers)
    width = 24 if family == "qwen2_moe" else NEURONS
    assert moe.outer.shared_path.endswith((".shared_expert", ".shared_experts"))
    active = moe.outer.shared_sizes.shared + 3 * moe.outer.shared_sizes.expert
    assert report.active_ffn_fraction == pytest.approx((2 * 16 + active) / (2 * NEURONS + width))
    model, report = converted(family, experts=[0])
    outer = model.config.moesaic.outer
    assert (outer.shared_path, outer.shared_sizes) == (None, None)
    assert len(report.layers[0].experts) == OUTER


# --- which experts -----------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["cmoe", "static", "moesaic-dynamic"])
def test_experts_not_asked_for_stay_as_they_were(recipe: str, tmp_path: Path) -> None:
    """With none of a layer's experts but those, the layer's own output is what it was."""
    model, report = converted("mixtral", recipe=recipe, experts=[1], output=tmp_path / "out")
    original = tiny_mixture("mixtral")
    whole = {str(layer): [0, 2, 3] for layer in range(LAYERS)}
    assert model.config.moesaic.outer.whole == whole
    block, experts = (m.model.layers[0].mlp.experts for m in (model, original))
    x, weight = torch.randn(9, 32), torch.ones(9, 1)
    for expert in range(OUTER):
        index = torch.full((9, 1), expert)
        same = torch.allclose(block(x, index, weight), experts(x, index, weight), atol=1e-5)
        assert same == (expert != 1)
    full = report.layers[0].experts
    assert [row.get("whole") for row in full] == ["not asked for", None, *["not asked for"] * 2]
    assert report.active_ffn_fraction == pytest.approx((3 + 16 / NEURONS) / 4)
    loaded = load_model(tmp_path / "out")
    torch.testing.assert_close(logits(loaded, IDS), logits(model, IDS), rtol=1e-5, atol=2e-6)


def test_an_expert_that_the_router_never_uses_stays_whole_and_is_named() -> None:
    model = tiny_mixture("qwen3_moe")
    gate = model.model.layers[1].mlp.gate
    real = type(gate).forward

    def without_three(hidden: torch.Tensor) -> Any:
        scores, weight, index = real(gate, hidden)
        return scores, weight, torch.where(index == 3, (index.amin(1, True) + 1) % 3, index)

    gate.forward = without_three
    _, report = moesaic.convert(model, "moesaic", "S3A3E8", WINDOWS)
    assert report.layers[1].experts[3] == {
        "expert": 3, "tokens": 0, "whole": "the router never uses it",
    }  # fmt: skip
    assert "experts 3: stay whole (the router never uses it)" in report.layers[1].notes
    assert "whole" not in report.layers[0].experts[3]


@pytest.mark.parametrize("recipe", ["moesaic", "cmoe", "static-repaired"])
def test_experts_with_too_few_tokens_stay_whole_and_never_fail_the_run(recipe: str) -> None:
    expected = logits(tiny_mixture("olmoe"), IDS)
    few = tokens(2, 20, seed=1)
    model, report = moesaic.convert(tiny_mixture("olmoe"), recipe, "S3A3E8", few, min_tokens=10**6)
    assert report.active_ffn_fraction == 1
    torch.testing.assert_close(logits(model, IDS), expected, rtol=1e-5, atol=1e-5)
    notes = " ".join(report.layers[0].notes)
    assert "tokens of the 1000000 it needs" in notes
    _, report = moesaic.convert(tiny_mixture("olmoe"), recipe, "S3A3E8", few, min_tokens=1)
    assert report.active_ffn_fraction < 1


def test_experts_are_profiled_in_batches_that_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With an expert in the middle that stays whole."""
    found = []
    for together in (10**6, 40, 1):
        monkeypatch.setattr("moesaic.conversion.mixtures.TOGETHER", together)
        model, _ = moesaic.convert(
            tiny_mixture("olmoe"), "moesaic", "S3A3E8", WINDOWS, experts=[0, 2, 3]
        )
        found.append(logits(model, IDS))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-5)


def test_a_broken_expert_is_named() -> None:
    model = tiny_mixture("olmoe")
    model.model.layers[1].mlp.experts.gate_up_proj.data[2, 0, 0] = 1e30
    model.model.layers[1].mlp.experts.down_proj.data[2] = 0
    with pytest.raises(moesaic.MoesaicError, match=r"layer 1 of .*: expert 2: .*not finite"):
        moesaic.convert(model, "moesaic", "S3A3E8", WINDOWS)


# --- the output folder -------------------------------------------------------------------------

_KILLED = """
import os, signal, sys, torch
import moesaic
from moesaic.output import draft as checkpoint
count = 0
def dying(function):
    def wrapped(*args, **kwargs):
        global count
        result = function(*args, **kwargs)
        count += 1
        if count == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return wrapped
checkpoint._save = dying(checkpoint._save)
moesaic.convert(sys.argv[1], sys.argv[3], "S3A3E8", torch.load(sys.argv[1] + "/../windows.pt"),
                output=sys.argv[2], command="x", min_tokens=460)
"""


@pytest.mark.parametrize(
    ("family", "recipe"), [("qwen3_moe", "moesaic-dynamic"), ("deepseek_v3", "cmoe")]
)
def test_resume_after_kill_gives_the_same_bytes(family: str, recipe: str, tmp_path: Path) -> None:
    tiny_mixture(family).save_pretrained(tmp_path / "dense")
    torch.save(WINDOWS, tmp_path / "windows.pt")
    calm, output = tmp_path / "calm", tmp_path / "killed"
    more: dict[str, Any] = {"command": "x", "min_tokens": 460}
    model, _ = moesaic.convert(tmp_path / "dense", recipe, "S3A3E8", WINDOWS, output=calm, **more)
    assert model.config.moesaic.outer.whole
    done = run_python(_KILLED, tmp_path / "dense", output, recipe)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with pytest.raises(moesaic.MoesaicError, match="experts = "):
        moesaic.convert(
            tmp_path / "dense", recipe, "S3A3E8", WINDOWS, output=output, resume=True,
            command="x", experts=[0],
        )  # fmt: skip
    moesaic.convert(
        tmp_path / "dense", recipe, "S3A3E8", WINDOWS, output=output, resume=True, **more
    )
    assert files(output) == files(calm)
    assert "of its 4 experts a layer" in (output / "README.md").read_text()


# --- bad input ---------------------------------------------------------------------------------


def test_other_experts_are_refused_with_what_is_supported() -> None:
    from transformers import GptOssConfig

    config = GptOssConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    with pytest.raises(moesaic.MoesaicError, match=r"clamped.*supported mixtures are Mixtral"):
        find_ffns(AutoModelForCausalLM.from_config(config))


def test_experts_that_compute_something_else_are_refused() -> None:
    model = tiny_mixture("mixtral")
    model.model.layers[1].mlp.experts.act_fn = torch.nn.Tanh()
    with pytest.raises(moesaic.MoesaicError, match=r"experts of layer 1 .*something else"):
        find_ffns(model)


def test_quantised_experts_are_refused() -> None:
    model = tiny_mixture("olmoe")
    for layer in model.model.layers:
        layer.mlp.experts.to(torch.float8_e4m3fn)
    with pytest.raises(moesaic.MoesaicError, match=r"quantised \(torch.float8_e4m3fn\); convert"):
        find_ffns(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "S3A3E24"}, "24 experts cannot share the 20 neurons"),
        ({"experts": [4]}, "experts 4: .* has experts 0 to 3"),
        ({"experts": []}, "experts none: "),
        ({"min_tokens": 0}, "min tokens 0 must be"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"layout": "S3A3E8"} | change
    with pytest.raises(moesaic.MoesaicError, match=message):
        moesaic.convert(tiny_mixture("mixtral"), "cmoe", calibration=WINDOWS, **arguments)


def test_a_dense_model_has_no_experts_to_choose_from() -> None:
    from tests.families import tiny_model

    with pytest.raises(moesaic.MoesaicError, match="no experts to choose from: it is dense"):
        moesaic.convert(tiny_model("llama"), "cmoe", "S3A3E8", WINDOWS, experts=[0])


def test_a_converted_mixture_is_neither_converted_again_nor_exported(tmp_path: Path) -> None:
    model, _ = converted("mixtral", output=tmp_path / "out")
    with pytest.raises(moesaic.MoesaicError, match=r"not split again.*convert that one"):
        moesaic.convert(model, "cmoe", "S3A3E8", WINDOWS)
    from moesaic.export.stock import common_reasons

    assert common_reasons(model.config) == [
        "it routes twice, inside the experts that its own router chose; stock layers route once "
        "(docs/deviations.md)"
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [("outer num_experts", 0), ("outer num_active", 5), ("layers", (0, 7)),
     ("outer whole", {"0": [9]})],
)  # fmt: skip
def test_a_damaged_configuration_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    from moesaic.families.load import check_converted

    model, _ = converted("mixtral")
    check_converted(model.config, "it")
    moe = model.config.moesaic
    if key.startswith("outer "):
        outer: Any = {key.removeprefix("outer "): value}
        model.config.moesaic = replace(moe, outer=replace(moe.outer, **outer))
    else:
        model.config.moesaic = replace(moe, layers=value)
    with pytest.raises(moesaic.MoesaicError, match=f"contradicts itself: {key}"):
        check_converted(model.config, "it")


# --- the command line --------------------------------------------------------------------------


def test_the_command_line_converts_and_compares_a_mixture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moesaic.cli.main import main
    from moesaic.demo import demo_path

    folder = tmp_path / "mixture"
    tiny_mixture("mixtral", vocab_size=4096).save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo_path()).save_pretrained(folder)

    def run(*words: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moesaic", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    short = ["--calibration", "demo", "--samples", 8, "--sequence-length", 64]
    ask = ["convert", folder, "--output", tmp_path / "out", "--layout", "S3A3E8", *short]
    code, out, _ = run(*ask, "--experts", "0,2", "--dry-run")
    assert code == 0
    assert "in each of 4 experts" in out
    assert not (tmp_path / "out").exists()
    code, out, _ = run(*ask, "--experts", "0,2", "--method", "cmoe")
    assert code == 0
    assert "experts 1, 3: stay whole (not asked for)" in out
    assert "active FFN neurons 90.0%" in out
    assert "no expert was converted" not in out
    code, out, _ = run(*ask, "--overwrite", "--min-tokens", 10**6, "--method", "cmoe")
    assert code == 0
    assert "no expert was converted" in out
    assert "active FFN neurons 100.0%" in out
    code, _, _ = run(*ask, "--overwrite", "--experts", "0,2", "--method", "cmoe")
    assert code == 0
    code, _, error = run(*ask, "--overwrite", "--experts", "0,x")
    assert (code, error.count("\n")) == (2, 1)
    assert "--experts '0,x': give whole numbers such as 0,3,7" in error
    code, out, _ = run("flops", tmp_path / "out")
    assert code == 0
    assert "routers of experts" in out
    result = moesaic.compare(
        str(folder), ["cmoe", "moesaic"], layout="S3A3E8", calibration="demo", text=["demo"],
        seeds=1, samples=8, sequence_length=64, max_tokens=512,
        references=("static", "oracle", "neuron-oracle"),
    )  # fmt: skip
    names = {row["method"] for row in result["rows"]}
    assert names == {"cmoe", "moesaic", "static", "oracle", "neuron-oracle"}
