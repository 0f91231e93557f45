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
from moesaic.methods.slicegpt import FAMILIES
from moesaic.parts.rotation import rotate, stream_axes
from tests.families import CONTEXT, HIDDEN, tiny_model, tokens
from tests.mixtures import tiny_mixture

WINDOWS = tokens(8, CONTEXT, seed=1)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_sliced_is_exact(family: str) -> None:
    model, _ = moesaic.convert(with_gains(family), "slicegpt", sparsity=0.0, calibration=WINDOWS)
    torch.testing.assert_close(logits(model), logits(with_gains(family)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unused_half_of_the_stream_is_cut_without_loss(family: str, tmp_path: Path) -> None:
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
        folder, "slicegpt", sparsity=0.5, calibration=WINDOWS, output=tmp_path / "out"
    )
    assert model.config.hidden_size == 16
    # A norm's epsilon counts for less with fewer axes: Phi-3's is ten times the others'.
    torch.testing.assert_close(logits(model), expected, rtol=1e-2, atol=1e-2)
    assert report.macs < 0.51 * report.dense_macs
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(loaded), logits(model))
    assert type(loaded) is type(dense)


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


def test_it_loads_and_generates_without_moesaic(tmp_path: Path) -> None:
    folder = tmp_path / "dense"
    with_gains("qwen2").save_pretrained(folder)  # embeddings and head are one there
    moesaic.convert(folder, "slicegpt", sparsity=0.25, calibration=WINDOWS, output=tmp_path / "out")
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


def test_mixtures_and_all_axes_gone_are_refused() -> None:
    with pytest.raises(MoesaicError, match="cannot be rotated"):
        moesaic.convert(tiny_mixture("mixtral"), "slicegpt", sparsity=0.25, calibration=WINDOWS)
    with pytest.raises(MoesaicError, match="leaves none of"):
        moesaic.convert(tiny_model("qwen3"), "slicegpt", sparsity=0.95, calibration=WINDOWS)
    with pytest.raises(MoesaicError, match="cuts off none of"):
        moesaic.convert(tiny_model("qwen3"), "slicegpt", sparsity=0.01, calibration=WINDOWS)
