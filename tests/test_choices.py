"""What thresholds run on a text, against what every replacement says of its units.

Shape suffixes: T tokens, U units.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moesaic
from moesaic.evaluate import perplexity
from moesaic.evaluate.choices import count_choices
from moesaic.evaluate.side_by_side import evaluate
from moesaic.families.load import load_tokenizer
from moesaic.modeling import MoesaicReplacement
from tests.mixtures import tiny_mixture

OTHER_TEXT = "0123456789 " * 300


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    tokenizer = load_tokenizer("demo")
    return torch.tensor(tokenizer(OTHER_TEXT)["input_ids"])[:600]


def converted(model: Any, method: str, ids: torch.Tensor) -> Any:
    windows = ids[:512].reshape(-1, 64)
    model, _ = moesaic.convert(model, method, calibration=windows, sparsity=0.5)
    return model


@pytest.mark.parametrize("method", ["moesaic-dynamic", "moesaic-neurons", "cats", "teal"])
def test_equals_what_the_units_say(method: str, ids: torch.Tensor) -> None:
    """Of the text itself: about as planned, for thresholds were set on it."""
    check_counts("demo", method, ids)


def test_sub_experts_of_a_mixture() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 96, (600,), generator=generator)
    check_counts(tiny_mixture("qwen3_moe"), "moesaic-dynamic", ids)


def check_counts(model: Any, method: str, ids: torch.Tensor) -> None:
    model = converted(model, method, ids)
    rates = []

    def count(module: Any, inputs: Any, output: Any) -> None:
        found = module.units(*inputs)
        if found is None:
            return
        runs_TU, _ = found
        units = runs_TU.shape[1]
        if module.unit == "sub-expert":
            units = inputs[1].shape[1] * module.num_routed
        rates.append(runs_TU.float().sum(1) / units)

    handles = [
        module.register_forward_hook(count)
        for module in model.modules()
        if isinstance(module, MoesaicReplacement)
    ]
    with count_choices(model) as choices:
        perplexity(model, ids, 64)
    for handle in handles:
        handle.remove()
    share = choices.share()
    assert share is not None
    assert share.ran == pytest.approx(torch.cat(rates).mean().item(), abs=1e-6)
    assert share.ran == pytest.approx(share.planned, abs=0.05)
    before = choices.tokens
    perplexity(model, ids, 64)
    assert choices.tokens == before  # nothing is counted afterwards


def test_a_fixed_number_is_not_counted(ids: torch.Tensor) -> None:
    model = converted("demo", "moesaic", ids)
    with count_choices(model) as choices:
        perplexity(model, ids, 64)
    assert choices.share() is None


def test_eval_tells_it(tmp_path: Any) -> None:
    """Digits run other experts than the Python source that thresholds were set on."""
    folder = tmp_path / "moe"
    moesaic.convert("demo", "moesaic-dynamic", calibration="demo", samples=16, output=folder)
    text = tmp_path / "digits.txt"
    text.write_text(OTHER_TEXT)
    result = evaluate(str(folder), [str(text), "demo"], against="demo", max_tokens=4096)
    digits = result["choices"][str(text)]
    demo = result["choices"]["demo"]
    assert digits["planned"] == pytest.approx(demo["planned"])
    assert abs(demo["ran"] - demo["planned"]) < 0.05 < abs(digits["ran"] - digits["planned"])
    assert "choices" not in result["against"]
