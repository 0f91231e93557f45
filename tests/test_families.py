"""One suite that every model family passes."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import moesaic
from moesaic import Method, load_method
from moesaic.calibration.hidden_states import Stream
from moesaic.conversion.options import make_budget
from moesaic.conversion.plan import make_plan
from moesaic.families import find_ffns
from moesaic.families.load import load_model
from tests.families import CONTEXT, FAMILIES, LAYERS, tiny_model, tokens

CPU = torch.device("cpu")
EQUAL = {"layer_budgets": "uniform"}
DYNAMIC = load_method("moesaic-dynamic", EQUAL)
QUADRATIC = load_method("moesaic-dynamic", EQUAL | {"directions": 24})
ROUTED = {"moesaic": load_method("moesaic"), "dynamic": DYNAMIC, "quadratic": QUADRATIC}
family = pytest.mark.parametrize("family", FAMILIES)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def converted(
    family: str, layout: str = "S3A3E8", method: str | Method = "cmoe", **more: Any
) -> Any:
    windows = tokens(4, CONTEXT, seed=1)
    return moesaic.convert(tiny_model(family), method, layout, windows, **more)


@family
def test_the_canonical_ffn_computes_what_the_layer_computes(family: str) -> None:
    model = tiny_model(family)
    ffns = find_ffns(model)
    assert len(ffns.layers) == LAYERS
    x = torch.randn(5, model.config.hidden_size)
    for layer in range(LAYERS):
        ffn = ffns.read(layer)
        if ffns.pattern.inline:
            owner = ffns.layers[layer]
            expected = owner.fc2(owner.activation_fn(owner.fc1(x)))
        else:
            expected = ffns.replaced(layer)(x)
        torch.testing.assert_close(ffn.output(ffn.hidden(x)), expected, rtol=1e-5, atol=1e-5)


@family
def test_the_stream_reproduces_the_models_own_forward(family: str) -> None:
    model = tiny_model(family)
    ids = tokens(3, 40)
    ffns = find_ffns(model)
    before_last = []
    handle = ffns.layers[-1].register_forward_hook(lambda *call: before_last.append(call[2]))
    expected = logits(model, ids)
    handle.remove()
    stream = Stream(ffns, ids, CPU)
    stream.block = 2  # blocks of unequal size
    for layer in range(LAYERS):
        inputs = list(stream.ffn_inputs(layer))
        assert sum(map(len, inputs)) == ids.numel()
        assert inputs[0].shape[1] == model.config.hidden_size
        stream.advance(layer, inputs)
    torch.testing.assert_close(stream.hidden_NLD, before_last[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("family", "additive"), [("llama", True), ("phi3", True), ("gemma2", False), ("opt", False)]
)
def test_attention_runs_once_where_the_ffns_output_is_added_last(
    family: str, additive: bool
) -> None:
    """Gemma-2 normalises it first, and OPT has no module that is the FFN."""
    stream = Stream(find_ffns(tiny_model(family)), tokens(3, 40), CPU)
    before_NLD = stream.hidden_NLD.clone()
    inputs = list(stream.ffn_inputs(0))
    assert torch.equal(stream.hidden_NLD, before_NLD) != additive
    calls: list[Any] = []
    stream.ffns.layers[0].register_forward_hook(lambda *call: calls.append(call))
    stream.advance(0, inputs)
    assert bool(calls) != additive


@family
@pytest.mark.parametrize("layout", ["S2A6E8", "S0A3E3"])
def test_all_routed_experts_active_is_the_dense_model(family: str, layout: str) -> None:
    ids = tokens(2, 48, seed=2)
    expected = logits(tiny_model(family), ids)
    model, report = converted(family, layout)
    assert report.active_ffn_fraction == 1
    torch.testing.assert_close(logits(model, ids), expected, rtol=1e-5, atol=1e-5)
    assert all(layer.relative_error < 1e-10 for layer in report.layers)


@family
def test_save_then_load_is_bit_equal(family: str, tmp_path: Path) -> None:
    ids = tokens(2, 48, seed=2)
    model, _ = converted(family, output=tmp_path / "out")
    loaded = load_model(tmp_path / "out")
    assert type(loaded) is type(model)
    assert config_of(loaded) == config_of(model)
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    # Equal weights at other addresses: kernels may add in another order.
    torch.testing.assert_close(logits(model, ids), logits(loaded, ids), rtol=1e-5, atol=2e-6)
    assert not torch.allclose(logits(model, ids), logits(tiny_model(family), ids), atol=1e-3)
    again = tmp_path / "again"
    loaded.save_pretrained(again)  # the way a user saves after fine-tuning
    reloaded = AutoModelForCausalLM.from_pretrained(again)
    assert all(torch.equal(reloaded.state_dict()[name], theirs[name]) for name in theirs)


@family
def test_thresholds_and_repair_save_and_load_bit_equal(family: str, tmp_path: Path) -> None:
    ids = tokens(2, 48, seed=2)
    model, report = moesaic.convert(
        tiny_model(family), DYNAMIC, "S3A3E8", tokens(32, CONTEXT, seed=1),
        output=tmp_path / "out",
    )  # fmt: skip
    assert all(layer.heldout for layer in report.layers)
    assert any(layer.repair != "none" for layer in report.layers)
    loaded = load_model(tmp_path / "out")
    assert config_of(loaded) == config_of(model)
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    torch.testing.assert_close(logits(model, ids), logits(loaded, ids), rtol=1e-5, atol=2e-6)
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(implementation)
        torch.testing.assert_close(logits(model, ids), logits(loaded, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("gathers", "unasked_kernel")
@family
def test_experts_implementations_agree(family: str) -> None:
    ids = tokens(2, 48, seed=2)
    model, _ = converted(family)
    assert model.config._experts_implementation == "moesaic"
    expected = logits(model, ids)
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(implementation)
        torch.testing.assert_close(logits(model, ids), expected, rtol=1e-5, atol=1e-5)


@family
def test_generation_with_and_without_cache_agrees(family: str) -> None:
    check_generation(family, "cmoe")


@pytest.mark.parametrize("method", ROUTED.values(), ids=ROUTED)
@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "phi3"])
def test_fitted_routers_generate_with_and_without_cache(family: str, method: Method) -> None:
    """With a cache one token at a time passes through the block."""
    check_generation(family, method)


def check_generation(family: str, method: str | Method) -> None:
    ids = tokens(2, 12, seed=2)
    model, _ = converted(family, method=method)
    ask = {
        "max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids),
        "pad_token_id": 0, "eos_token_id": None,
    }  # fmt: skip
    cached = model.generate(ids, use_cache=True, **ask)
    assert cached.shape == (2, 24)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **ask))


@pytest.mark.usefixtures("gathers")
@family
def test_every_parameter_gets_a_gradient_and_eager_agrees(family: str) -> None:
    ids = tokens(2, 48, seed=2)
    model, _ = converted(family)
    gradients = []
    for implementation in ("grouped_mm", "eager"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
    grouped, eager = gradients
    assert grouped.keys() == eager.keys()
    experts = [name for name in grouped if ".experts." in name or name.endswith("expert_scale")]
    assert len(experts) >= 3 * LAYERS
    for name in experts:
        assert grouped[name].abs().max() > 0, name
    for name in grouped:
        torch.testing.assert_close(grouped[name], eager[name], rtol=1e-4, atol=1e-6)


def test_models_load_where_moesaic_is_not_installed(tmp_path: Path) -> None:
    ids = tokens(2, 24, seed=2)
    expected = {}
    cases: list[tuple[str, str | Method]] = [(name, "cmoe") for name in FAMILIES]
    cases += [("llama", DYNAMIC), ("opt", QUADRATIC), ("phi3", "moesaic")]
    cases += [("qwen3", load_method("moesaic-neurons", EQUAL)), ("gpt2", "static")]
    for number, (family, method) in enumerate(cases):
        name = f"{family}-{number}"
        model, _ = converted(family, method=method, output=tmp_path / name)
        expected[name] = logits(model, ids)
    script = """
import sys, pathlib, torch
sys.modules["moesaic"] = None  # any import of it fails
from transformers import AutoModel, AutoModelForCausalLM
folder, ids = pathlib.Path(sys.argv[1]), torch.load(sys.argv[1] + "/ids.pt")
found = {}
for path in sorted(p for p in folder.iterdir() if p.is_dir()):
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()
    with torch.no_grad():
        found[path.name] = model(input_ids=ids, use_cache=False).logits
    assert type(AutoModel.from_pretrained(path, trust_remote_code=True)).__name__ == "MoesaicModel"
torch.save(found, folder / "found.pt")
"""
    torch.save(ids, tmp_path / "ids.pt")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)],
        check=True,
        env={
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(tmp_path / "cache"),
            "PATH": "",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
    )
    found = torch.load(tmp_path / "found.pt")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "phi3", "opt", "gemma2"])
def test_offload_to_disk_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    ids = tokens(2, 24, seed=2)
    model, _ = converted(family, output=tmp_path / "out")
    kept = sum(p.nbytes for p in model.parameters()) * 2 // 3
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        device_map="auto",
        max_memory={"cpu": kept},
        offload_folder=tmp_path / "offload",
    )
    assert "disk" in loaded.hf_device_map.values()
    torch.testing.assert_close(logits(loaded, ids), logits(model, ids), rtol=1e-4, atol=1e-5)
    automatic = AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map="auto")
    torch.testing.assert_close(logits(automatic, ids), logits(model, ids), rtol=1e-4, atol=1e-5)


def config_of(model: Any) -> dict[str, Any]:
    return {k: v for k, v in model.config.to_dict().items() if k != "_name_or_path"}


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_peft_wraps_the_fused_experts(family: str) -> None:
    from peft import LoraConfig, get_peft_model

    ids = tokens(2, 24, seed=2)
    model, _ = converted(family)
    expected = logits(model, ids)
    name = "gate_up_proj" if model.config.moesaic.block.gated else "up_proj"
    wrapped = get_peft_model(
        model,
        LoraConfig(
            r=2,
            target_modules=[],
            target_parameters=[f"experts.{name}", "experts.down_proj"],
            modules_to_save=["router"],
        ),
    )
    torch.testing.assert_close(logits(wrapped, ids), expected, rtol=1e-5, atol=1e-5)
    wrapped(input_ids=ids, labels=ids).loss.backward()
    trained = {n for n, p in wrapped.named_parameters() if p.requires_grad and p.grad is not None}
    assert any("expert_scale" in name for name in trained)
    assert any("lora_B" in name for name in trained)


@pytest.mark.parametrize("method", ["cmoe", "moesaic"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_the_block_compiles_in_one_graph(family: str, method: str) -> None:
    model, _ = converted(family, method=method)
    block = model.base_model.get_submodule(model.config.moesaic.replacement_path(0))
    x = torch.randn(2, 9, model.config.hidden_size)
    expected = block(x)
    compiled = torch.compile(copy.deepcopy(block), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)


def test_a_family_with_other_ffns_is_refused_with_what_is_supported() -> None:
    from transformers import BloomConfig

    model = AutoModelForCausalLM.from_config(BloomConfig(hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(moesaic.MoesaicError, match=r"Llama.*GPT-2"):
        find_ffns(model)


def test_layers_that_return_tuples_are_refused() -> None:
    from transformers import FalconConfig

    config = FalconConfig(
        vocab_size=96, hidden_size=32, ffn_hidden_size=52, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, activation="gelu",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(moesaic.MoesaicError, match=r"cannot be run one by one"):
        moesaic.convert(model, "cmoe", "S3A3E8", tokens(4, CONTEXT))


def test_layers_with_inputs_that_depend_on_the_tokens_are_refused() -> None:
    """Gemma-4 hands every layer an embedding of its own; here a Llama does."""
    model = tiny_model("llama")
    table = torch.randn(96, 32)
    real = type(model.model).forward

    def forward(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return real(model.model, input_ids=input_ids, extra=table[input_ids], **kwargs)

    def layer_forward(layer: Any, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return type(layer).forward(layer, hidden + kwargs.pop("extra"), **kwargs)

    model.model.forward = forward
    for layer in model.model.layers:
        layer.forward = partial(layer_forward, layer)
    with pytest.raises(moesaic.MoesaicError, match=r"give something else"):
        moesaic.convert(model, "cmoe", "S3A3E8", tokens(4, CONTEXT))


def test_encoder_decoders_are_refused() -> None:
    from transformers import BartConfig

    with pytest.raises(moesaic.MoesaicError, match="only decoders"):
        make_plan(BartConfig(), "bart", load_method("cmoe"), make_budget("S3A3E8"))


def test_an_ffn_without_neurons_is_refused() -> None:
    model = tiny_model("llama")
    mlp = model.model.layers[1].mlp
    for name in ("gate_proj", "up_proj"):
        weight = getattr(mlp, name).weight
        weight.data = weight.data[:0]
    with pytest.raises(moesaic.MoesaicError, match=r"the FFN of layer 1 holds no neurons"):
        find_ffns(model)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_familiar_names_with_another_formula_are_refused(layer: int) -> None:
    model = tiny_model("llama")
    model.model.layers[layer].mlp.act_fn = torch.nn.Tanh()
    with pytest.raises(moesaic.MoesaicError, match=rf"layer {layer} .*computes something else"):
        find_ffns(model)
