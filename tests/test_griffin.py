"""GRIFFIN: what a prompt chooses, and that the rest of a sequence runs nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import moesaic
from moesaic.errors import MoesaicError
from moesaic.evaluate.side_by_side import evaluate
from moesaic.methods.load import load_method
from moesaic.modeling import BlockConfig, MoesaicPromptNeurons, RouterConfig, Sizes
from moesaic.modeling.prompt_neurons_moesaic import flocking
from tests import reference
from tests.families import CONTEXT, HIDDEN, LAYERS, NEURONS, tiny_model, tokens
from tests.mixtures import tiny_mixture

WINDOWS = tokens(16, CONTEXT, seed=1)


def block_of(active: int, prompt: int, hidden: int = 8, neurons: int = 20) -> Any:
    router = RouterConfig("prompt", "topk", prompt=prompt)
    config = BlockConfig("prompt-neurons", hidden, True, True, "silu", True, router, neurons)
    torch.manual_seed(0)
    block = MoesaicPromptNeurons(config, Sizes(0, 1, neurons, active))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_()
    return block.eval()


def of_neurons(block: Any, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    """The FFN of these neurons alone, one after the other."""
    y = block.down_proj.bias.expand(*x.shape[:-1], -1).clone()
    for i in chosen:
        gate = nn.functional.silu(x @ block.gate_proj.weight[i] + block.gate_proj.bias[i])
        up = x @ block.up_proj.weight[i] + block.up_proj.bias[i]
        y += (gate * up)[..., None] * block.down_proj.weight[:, i]
    return y


def best(block: Any, x_LD: torch.Tensor, count: int) -> list[int]:
    h_LF = nn.functional.silu(block.gate_proj(x_LD)) * block.up_proj(x_LD)
    statistic = reference.flocking(h_LF.detach())
    return sorted(range(len(statistic)), key=lambda i: -statistic[i])[:count]


def test_the_statistic_by_hand() -> None:
    """Of lengths 5 and 1: (0.6, 0.8) and (1, 0). Scale does not count, agreement does."""
    h = torch.tensor([[[3.0, 4.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, -2.0]]])
    expected = torch.tensor([[(0.36 + 1) ** 0.5, 0.8], [0.0, 1.0]])
    torch.testing.assert_close(flocking(h), expected)
    random = torch.randn(1, 9, 7)
    twin = torch.tensor(reference.flocking(random[0]))
    torch.testing.assert_close(flocking(random)[0], twin)


@pytest.mark.parametrize("sequences", [1, 3])
@torch.no_grad()
def test_the_prompt_runs_whole_and_the_rest_what_it_chose(sequences: int) -> None:
    """For one sequence rows are gathered, for several there is a mask."""
    block = block_of(active=6, prompt=4)
    x_BLD = torch.randn(sequences, 9, 8)
    y_BLD = block(x_BLD)
    for x_LD, y_LD in zip(x_BLD, y_BLD, strict=True):
        chosen = best(block, x_LD[:4], 6)
        prompt = of_neurons(block, x_LD[:4], list(range(20)))
        torch.testing.assert_close(y_LD[:4], prompt, rtol=1e-4, atol=1e-4)
        rest = of_neurons(block, x_LD[4:], chosen)
        torch.testing.assert_close(y_LD[4:], rest, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_single_tokens_go_on_and_a_new_prompt_chooses_anew() -> None:
    block = block_of(active=6, prompt=0)
    first, second = torch.randn(2, 1, 5, 8)
    token = torch.randn(1, 1, 8)
    whole = of_neurons(block, token, list(range(20)))
    torch.testing.assert_close(block(token), whole, rtol=1e-4, atol=1e-4)
    for prompt in (first, second):
        dense = of_neurons(block, prompt, list(range(20)))
        torch.testing.assert_close(block(prompt), dense, rtol=1e-4, atol=1e-4)
        chosen = best(block, prompt[0], 6)
        for _ in range(2):
            expected = of_neurons(block, token, chosen)
            torch.testing.assert_close(block(token), expected, rtol=1e-4, atol=1e-4)
    assert best(block, first[0], 6) != best(block, second[0], 6)
    # Another number of sequences: theirs were never seen.
    two = token.expand(2, 1, 8)
    torch.testing.assert_close(block(two), whole.expand(2, 1, 8), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_rows_are_gathered_anew_where_weights_have_changed() -> None:
    """Changed in place, and put elsewhere, in the middle of a sequence."""
    block = block_of(active=6, prompt=0)
    prompt_BLD = torch.randn(1, 5, 8)
    token = torch.randn(1, 1, 8)
    block(prompt_BLD)
    chosen = best(block, prompt_BLD[0], 6)
    block(token)
    block.up_proj.weight.mul_(2)
    torch.testing.assert_close(block(token), of_neurons(block, token, chosen), rtol=1e-4, atol=1e-4)
    block.down_proj.weight.data = torch.randn(8, 20)
    torch.testing.assert_close(block(token), of_neurons(block, token, chosen), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_hooks_are_called_where_rows_would_be_gathered() -> None:
    block = block_of(active=6, prompt=0)
    x = torch.randn(1, 5, 8)
    block(x)
    expected = block(x[:, :1])
    called = []
    handle = block.up_proj.register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(block(x[:, :1]), expected)
    assert called
    handle.remove()


def test_gradients_are_those_of_the_masked_ffn() -> None:
    block = block_of(active=6, prompt=4)
    x_BLD = torch.randn(1, 9, 8)
    block(x_BLD)[:, 4:].square().sum().backward()
    found = block.up_proj.weight.grad.clone()
    chosen = best(block, x_BLD[0, :4], 6)
    block.zero_grad()
    of_neurons(block, x_BLD[:, 4:], chosen).square().sum().backward()
    torch.testing.assert_close(found, block.up_proj.weight.grad, rtol=1e-4, atol=1e-4)


def converted(prompt: int, family: str = "qwen3", **more: Any) -> Any:
    values = {"calibration": WINDOWS, "settings": {"prompt": prompt}}
    return moesaic.convert(tiny_model(family), "griffin", sparsity=0.5, **values | more)


@torch.no_grad()
def test_generate_chooses_in_prefill_and_decodes_with_the_choice() -> None:
    """Against the dense model whose other neurons are zeroed once the prompt is through."""
    family = "qwen3"
    model, _ = converted(0, family)
    prompt = tokens(1, 20, seed=3)
    dense = tiny_model(family)
    settings: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    out = model.generate(prompt, output_logits=True, return_dict_in_generate=True, **settings)
    torch.testing.assert_close(
        out.logits[0], dense(prompt, use_cache=False).logits[:, -1], rtol=1e-4, atol=1e-4
    )
    again = model.generate(prompt, **settings)
    assert torch.equal(again, out.sequences)

    past = dense(prompt, use_cache=True).past_key_values
    blocks = [m for m in model.modules() if isinstance(m, MoesaicPromptNeurons)]
    assert len(blocks) == LAYERS
    for block, layer in zip(blocks, layers_of(dense), strict=True):
        down = layer.fc2 if family == "opt" else layer.mlp.down_proj
        kept = torch.zeros(NEURONS)
        kept[block.chosen_BK[0]] = 1
        down.weight.data = down.weight.data * kept
    for step in range(1, 8):
        token = out.sequences[:, 19 + step : 20 + step]
        logits = dense(token, past_key_values=past, use_cache=True).logits[:, -1]
        torch.testing.assert_close(out.logits[step], logits, rtol=1e-3, atol=1e-3)


def layers_of(model: Any) -> Any:
    return model.get_decoder().layers


def test_perplexity_sees_what_follows_the_prompt_only() -> None:
    dense = tiny_model("qwen3")
    ids = tokens(2, 48, seed=2)
    with torch.no_grad():
        expected = dense(ids, use_cache=False).logits
        some, _ = converted(16)
        logits = some(ids, use_cache=False).logits
        torch.testing.assert_close(logits[:, :16], expected[:, :16], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(logits[:, 16:], expected[:, 16:], atol=1e-2)
        whole, _ = converted(0)
        logits = whole(ids, use_cache=False).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_work_is_that_of_a_token_after_the_prompt() -> None:
    _, report = converted(16)
    saved = LAYERS * 3 * HIDDEN * NEURONS // 2
    assert report.dense_macs - report.macs == saved
    assert report.dense_bytes - report.bytes == 4 * saved
    assert "chosen by the first 16 tokens" in report.shape


@pytest.mark.parametrize("prompt", [0, CONTEXT, 128])
def test_no_ratio_is_searched_for_where_windows_are_all_prompt(prompt: int) -> None:
    """Every budget would give the dense perplexity, and the least would be taken."""
    with pytest.raises(MoesaicError, match="perplexity would be the dense model's"):
        moesaic.convert(
            tiny_model("qwen3"), "griffin", target_ratio=1.05, calibration=WINDOWS,
            settings={"prompt": prompt}, sequence_length=CONTEXT,
        )  # fmt: skip


@pytest.mark.parametrize(("prompt", "measured"), [(0, False), (CONTEXT, False), (4, True)])
def test_no_perplexity_is_told_of_windows_that_are_all_prompt(
    prompt: int, measured: bool, tmp_path: Path
) -> None:
    """It would be the dense model's, a ratio of 1.000."""
    text = WINDOWS.flatten().repeat(4)
    model, report = converted(
        prompt, calibration=text, sequence_length=CONTEXT, output=tmp_path / "moe"
    )
    assert model.config.moesaic.router.prompt == prompt
    for value in (report.perplexity, report.dense_perplexity):
        assert (value is not None) == measured
    if not measured:
        with pytest.raises(MoesaicError, match="perplexity would be the dense model's"):
            evaluate(str(tmp_path / "moe"), sequence_length=CONTEXT)


@pytest.mark.parametrize("most", [16, 12])
def test_no_perplexity_is_told_of_a_text_that_is_all_prompt(most: int, tmp_path: Path) -> None:
    """Windows are as long as the text, where that is shorter."""
    moesaic.convert(
        "demo", "griffin", sparsity=0.5, calibration="demo", samples=2, sequence_length=64,
        settings={"prompt": 16}, output=tmp_path / "moe",
    )  # fmt: skip
    with pytest.raises(MoesaicError, match=f"and windows have {most}"):
        evaluate(str(tmp_path / "moe"), ["demo"], max_tokens=most)
    with pytest.raises(MoesaicError, match="and windows have 100"):
        moesaic.compare(
            "demo", ["griffin"], calibration=["demo"], sparsity=[0.5], samples=2, seeds=1,
            sequence_length=256, max_tokens=100,
        )  # fmt: skip
    others = moesaic.compare(
        "demo", ["griffin", "static"], references=(), calibration=["demo"], sparsity=[0.5],
        samples=2, seeds=1, sequence_length=256, max_tokens=100,
    )  # fmt: skip
    assert [row["method"] for row in others["rows"]] == ["static"]
    assert "windows have 100" in others["missing"][0]["reason"]
    result = evaluate(str(tmp_path / "moe"), ["demo"], max_tokens=64, sequence_length=64)
    assert result["prompt"] == 16


def test_what_sees_no_sequences_is_refused() -> None:
    with pytest.raises(MoesaicError, match="is a mixture of experts"):
        moesaic.convert(tiny_mixture("mixtral"), "griffin", sparsity=0.5, calibration=WINDOWS)
    with pytest.raises(MoesaicError, match="tokens of all sequences in one row"):
        converted(4, "opt")
    with pytest.raises(MoesaicError, match="prompt is -1"):
        load_method("griffin", {"prompt": -1})
