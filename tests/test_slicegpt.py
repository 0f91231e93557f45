"""SliceGPT: a rotation changes nothing, and cut axes are those that matter least."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import moesaic
from moesaic.errors import MoesaicError
from moesaic.export.stock import common_reasons
from moesaic.methods.load import load_method
from moesaic.methods.slicegpt import FAMILIES
from moesaic.parts.rotation import rotate, stream_axes
from tests.families import CONTEXT, HIDDEN, tiny_model, tokens
from tests.mixtures import tiny_mixture

WINDOWS = tokens(8, CONTEXT, seed=1)
ONE_ROTATION = load_method("slicegpt", {"axes": "model"})
BOTH = (load_method("slicegpt"), ONE_ROTATION)


def with_gains(family: str) -> Any:
    """A model whose norms have weights to be folded."""
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = 1 + 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(2, 48, seed=2), use_cache=False).logits


def random_rotation() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(normal).Q


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rotation_alone_changes_nothing(family: str) -> None:
    model = with_gains(family)
    rotate(model, random_rotation())
    torch.testing.assert_close(logits(model), logits(with_gains(family)), rtol=1e-4, atol=1e-4)
    # And it is a rotation: the weights are others.
    dense = with_gains(family)
    assert not torch.allclose(
        model.model.embed_tokens.weight, dense.model.embed_tokens.weight, atol=0.1
    )
    turned = random_rotation()
    turned[:, 0] *= 2  # no rotation any more
    model = with_gains(family)
    rotate(model, turned)
    assert not torch.allclose(logits(model), logits(dense), atol=1e-2)


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_sliced_is_exact(family: str, method: Any) -> None:
    model, _ = moesaic.convert(with_gains(family), method, sparsity=0.0, calibration=WINDOWS)
    torch.testing.assert_close(logits(model), logits(with_gains(family)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_unused_half_of_the_stream_is_cut_without_loss(
    family: str, method: Any, tmp_path: Path
) -> None:
    """The stream lies in a plane of 16 axes, askew; norms then have nothing else to see."""
    folder = tmp_path / "dense"
    dense = with_gains(family)
    basis = random_rotation()[:, :16]
    onto = (basis @ basis.T).float()
    with torch.no_grad():
        embedding = dense.get_input_embeddings().weight
        embedding.copy_(embedding @ onto)
        for layer in dense.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.copy_(onto @ linear.weight)
                if linear.bias is not None:
                    linear.bias.copy_(onto @ linear.bias)
    dense.save_pretrained(folder)
    expected = logits(dense)
    model, report = moesaic.convert(
        folder, method, sparsity=0.5, calibration=WINDOWS, output=tmp_path / "out"
    )
    assert model.config.hidden_size == 16
    # A norm's epsilon counts for less with fewer axes: Phi-3's is ten times the others'.
    torch.testing.assert_close(logits(model), expected, rtol=1e-2, atol=1e-2)
    layers = len(model.model.layers)
    shortcuts = 0 if method == ONE_ROTATION else 2 * layers * 16**2
    assert report.macs == report.dense_macs / 2 + shortcuts
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(loaded), logits(model))
    stock = method == ONE_ROTATION
    assert type(loaded).__name__ == (type(dense).__name__ if stock else "MoesaicForCausalLM")


def test_axes_are_those_of_a_loop_over_tokens_and_norms() -> None:
    model = with_gains("qwen3")
    gram = np.zeros((HIDDEN, HIDDEN))
    for window in WINDOWS:
        seen: list[Any] = []
        norms = [model.model.norm]
        for layer in model.model.layers:
            norms += [layer.input_layernorm, layer.post_attention_layernorm]
        handles = [
            norm.register_forward_pre_hook(
                lambda module, args, seen=seen: seen.append(args[0][0].numpy())
            )
            for norm in norms
        ]
        with torch.no_grad():
            model(window[None], use_cache=False)
        for handle in handles:
            handle.remove()
        for rows in seen:
            for row in rows:
                unit = row / np.linalg.norm(row)
                gram += np.outer(unit, unit)
    axes = stream_axes(model, WINDOWS).numpy()
    spread = np.diag(axes.T @ gram @ axes)
    assert np.all(np.diff(spread) < 0)
    np.testing.assert_allclose(axes.T @ gram @ axes, np.diag(spread), atol=1e-2)
    np.testing.assert_allclose(axes.T @ axes, np.eye(HIDDEN), atol=1e-10)


def test_the_main_axes_lose_less_than_others() -> None:
    dense = logits(with_gains("llama"))
    errors = []
    axes = stream_axes(with_gains("llama"), WINDOWS)
    for chosen in (axes[:, :24], random_rotation()[:, :24], axes[:, 8:]):
        model = with_gains("llama")
        rotate(model, chosen)
        errors.append(float((logits(model) - dense).norm()))
    assert errors[0] < errors[1]
    assert errors[0] < errors[2]


def slow_twin(model: Any, kept: int) -> torch.Tensor:
    """Logits of the paper's algorithm: all of it in the dense axes, cut by projections.

    The stream is put onto the axes that are kept wherever it is read, added to and
    passed on: the same model, for which nothing is ever turned.
    """

    def axes_of(states: list[torch.Tensor]) -> torch.Tensor:
        gram = np.zeros((HIDDEN, HIDDEN))
        for window in states:
            for row in window.double().numpy():
                unit = row / np.linalg.norm(row)
                gram += np.outer(unit, unit)
        values, vectors = np.linalg.eigh(gram)
        largest = np.argsort(values)[::-1][:kept]
        return torch.tensor(vectors[:, largest])

    def onto(axes: torch.Tensor, states: list[torch.Tensor]) -> list[torch.Tensor]:
        return [(window.double() @ axes @ axes.T).float() for window in states]

    def normalised(norm: Any, window: torch.Tensor) -> torch.Tensor:
        size = (window.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        return norm.weight * window / size

    body = model.model
    asked = list(tokens(2, 48, seed=2))
    states = [body.embed_tokens(window) for window in [*WINDOWS, *asked]]
    seen = len(WINDOWS)
    states = onto(axes_of(states[:seen]), states)
    with torch.no_grad():
        for layer in body.layers:
            after = []
            for window in states:
                positions = torch.arange(len(window))[None]
                turned = body.rotary_emb(window, positions)
                mask = torch.full((len(window), len(window)), -torch.inf).triu(1)
                attended, _ = layer.self_attn(
                    normalised(layer.input_layernorm, window)[None],
                    position_embeddings=turned,
                    attention_mask=mask[None, None],
                )
                after.append(window + attended[0])
            states = onto(axes_of(after[:seen]), after)
            fed = [
                window + layer.mlp(normalised(layer.post_attention_layernorm, window)[None])[0]
                for window in states
            ]
            states = onto(axes_of(fed[:seen]), fed)
        rows = [model.lm_head(normalised(body.norm, window)) for window in states[seen:]]
    return torch.stack(rows)


@torch.no_grad()
def test_every_block_of_its_own_is_the_papers_algorithm() -> None:
    model, _ = moesaic.convert(with_gains("llama"), "slicegpt", sparsity=0.5, calibration=WINDOWS)
    expected = slow_twin(with_gains("llama"), 16)
    torch.testing.assert_close(logits(model), expected, rtol=1e-2, atol=1e-2)


def test_axes_of_every_block_lose_less_than_one_rotation() -> None:
    dense = logits(with_gains("qwen3"))
    errors = []
    for method in BOTH:
        model, _ = moesaic.convert(with_gains("qwen3"), method, sparsity=0.25, calibration=WINDOWS)
        errors.append(float((logits(model) - dense).norm()))
    assert errors[0] < errors[1]


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_shortcuts_are_saved_and_run_token_by_token(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "dense"
    with_gains(family).save_pretrained(folder)
    output = tmp_path / "out"
    model, _ = moesaic.convert(
        folder, "slicegpt", sparsity=0.25, calibration=WINDOWS, output=output
    )
    loaded = AutoModelForCausalLM.from_pretrained(output).eval()
    assert torch.equal(logits(loaded), logits(model))
    ids = tokens(1, 12, seed=3)
    cached = loaded(ids[:, :11], use_cache=True)
    last = loaded(ids[:, 11:], past_key_values=cached.past_key_values).logits[:, -1]
    torch.testing.assert_close(last, loaded(ids).logits[:, -1], rtol=1e-4, atol=1e-4)
    states = loaded(ids, output_hidden_states=True).hidden_states
    assert len(states) == len(loaded.model.layers) + 1
    with pytest.raises(MoesaicError, match="changes the whole model"):
        moesaic.finetune(output, data=WINDOWS, output=tmp_path / "tuned")
    (reason,) = common_reasons(loaded.config)
    assert "matrices on the shortcuts" in reason


def test_inputs_are_skipped_on_top_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "dense"
    with_gains("llama").save_pretrained(folder)
    sliced = tmp_path / "sliced"
    moesaic.convert(folder, "slicegpt", sparsity=0.25, calibration=WINDOWS, output=sliced)
    output = tmp_path / "out"
    model, report = moesaic.convert(
        sliced, "wina", sparsity=0.25, calibration=WINDOWS, output=output
    )
    assert report.macs < report.dense_macs
    loaded = AutoModelForCausalLM.from_pretrained(output).eval()
    assert torch.equal(logits(loaded), logits(model))


def test_it_loads_and_generates_without_moesaic(tmp_path: Path) -> None:
    folder = tmp_path / "dense"
    with_gains("qwen2").save_pretrained(folder)  # embeddings and head are one there
    moesaic.convert(
        folder, ONE_ROTATION, sparsity=0.25, calibration=WINDOWS, output=tmp_path / "out"
    )
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM as A;"
        f"m = A.from_pretrained({str(tmp_path / 'out')!r}).eval();"
        "x = torch.arange(3, 19)[None];"
        "y = [m(x, use_cache=c).logits for c in (True, False)];"
        "assert torch.allclose(*y, atol=1e-5);"
        "m.generate(x, max_new_tokens=4, do_sample=False);"
        "assert 'moesaic' not in sys.modules;"
        "print(type(m).__name__, m.config.hidden_size, m.config.head_dim)"
    )
    paths = [path for path in sys.path if path and not path.endswith("src")]
    found = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path = {paths!r}; {code}"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout.split() == ["Qwen2ForCausalLM", "24", "8"], found.stderr


@pytest.mark.parametrize("family", ["gpt2", "opt", "gemma", "gemma2", "olmo2", "cohere"])
def test_norms_that_do_not_commute_are_refused(family: str) -> None:
    with pytest.raises(MoesaicError, match="cannot be rotated") as refusal:
        moesaic.convert(tiny_model(family), "slicegpt", sparsity=0.25, calibration=WINDOWS)
    assert "\n" not in str(refusal.value)


def test_a_width_is_a_multiple_of_the_heads(tmp_path: Path) -> None:
    # 192 axes and 3 heads: 8 divides 152, which transformers does not save.
    _, report = moesaic.convert(
        "demo", "slicegpt", sparsity=0.2, calibration=torch.arange(64).view(4, 16),
        output=tmp_path / "out",
    )  # fmt: skip
    assert report.tokens == 64
    sliced = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert sliced.config.hidden_size == 144


def test_mixtures_and_all_axes_gone_are_refused() -> None:
    with pytest.raises(MoesaicError, match="cannot be rotated"):
        moesaic.convert(tiny_mixture("mixtral"), "slicegpt", sparsity=0.25, calibration=WINDOWS)
    with pytest.raises(MoesaicError, match="leaves none of"):
        moesaic.convert(tiny_model("qwen3"), "slicegpt", sparsity=0.95, calibration=WINDOWS)
    with pytest.raises(MoesaicError, match="cuts off none of"):
        moesaic.convert(tiny_model("qwen3"), "slicegpt", sparsity=0.01, calibration=WINDOWS)
